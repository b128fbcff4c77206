"""Settings of a NCCL communicator, and what it says of its memory."""

from dataclasses import dataclass, fields
from typing import Any, Final

from pyparallel._core import nccl as core

__all__ = ["DEFAULTS", "NcclConfig", "NcclMemoryStats", "options_of"]


@dataclass(frozen=True)
class NcclConfig:
    """Tuning of a communicator, by NCCL's own names. None leaves a field to NCCL.

    A field that the library found is too old for is an error (`Unsupported`), never ignored.
    """

    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: int | None = None
    traffic_class: int | None = None
    comm_name: str | None = None
    collnet_enable: int | None = None
    cta_policy: int | None = None
    shrink_share: int | None = None
    nvls_ctas: int | None = None
    channels_per_net_peer: int | None = None
    nvlink_centric_sched: int | None = None
    graph_usage_mode: int | None = None
    num_rma_ctx: int | None = None
    max_p2p_peers: int | None = None
    graph_stream_ordering: int | None = None

    def _to_core(self) -> Any:
        config = core.Config()
        for field in fields(self):
            setattr(config, field.name, getattr(self, field.name))
        return config


DEFAULTS: Final = NcclConfig()


@dataclass(frozen=True)
class NcclMemoryStats:
    """What NCCL holds on the device for one communicator, in bytes."""

    suspendable: int
    persistent: int
    total: int
    suspended: bool


def options_of(
    name: str,
    timeout: float,
    blocking: bool | None,
    watch: bool,
    abort_on_error: bool,
    config: NcclConfig,
) -> Any:
    """As the core takes them."""
    return core.Options(
        name=name,
        timeout=timeout,
        blocking=blocking,
        watch=watch,
        abort_on_error=abort_on_error,
        config=config._to_core(),
    )

"""What a cluster is to the planner: devices, and the links inside and between nodes.

Every efficiency is data with a source, in presets of hardware.py; `doctor.py` makes a cluster of a
real machine and `calibration.py` replaces efficiencies by what our benchmark measured there.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import ceil, inf
from typing import Any

from pyparallel.planner.errors import PlanError, named, shown

__all__ = ["GIB", "ClusterSpec", "Gpu", "Link"]

GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """One device.

    Attributes:
        name: as `--gpu` takes it.
        memory_gib: what its driver shows, in GiB.
        peak_tflops: by dtype, dense.
        gemm_share: by dtype, of the peak, reached by long GEMMs whose waves are full.
        attention_share: of the bf16 peak, reached by a flash-attention kernel's forward and
            backward, counting only the products that a causal mask leaves.
        memory_gbps, memory_share: rate of the memory, and what a kernel that only moves bytes
            reaches of it.
        sms: multiprocessors: the tiles that run at once (0: no waves).
        kernel_us: what a kernel costs beside its work.
        sources: where each figure comes from.
    """

    name: str
    memory_gib: float
    peak_tflops: Mapping[str, float]
    gemm_share: Mapping[str, float]
    attention_share: tuple[float, float]
    memory_gbps: float
    memory_share: float
    sms: int
    kernel_us: float = 5.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype.

        Raises:
            PlanError: this device has no rate for it.
        """
        if dtype not in self.peak_tflops:
            raise PlanError(
                f"{self.name} has no {dtype} GEMM; it has {', '.join(sorted(self.peak_tflops))}"
            )
        return self.peak_tflops[dtype] * 1e12

    def share(self, dtype: str) -> float:
        return self.gemm_share.get(dtype, self.gemm_share["bf16"])

    @property
    def memory_rate(self) -> float:
        """Bytes per second that a kernel reaches."""
        return self.memory_gbps * 1e9 * self.memory_share


@dataclass(frozen=True)
class Link:
    """What carries collectives between some devices.

    Attributes:
        gbps: GB/s of one device, one direction.
        share: of it, reached by large collectives.
        latency_us: of one step of a ring (the alpha of alpha-beta).
        call_us: of a collective, however small.
        sm_share: of the device's compute, taken while a collective runs beside it.
        source: where the figures come from.
    """

    name: str
    gbps: float
    share: float
    latency_us: float
    call_us: float
    sm_share: float
    source: str = ""

    @property
    def rate(self) -> float:
        """Bytes per second that a collective reaches."""
        return self.gbps * 1e9 * self.share


@dataclass(frozen=True)
class ClusterSpec:
    """Nodes of equal devices.

    Attributes:
        node_size: devices of a node.
        intra, inter: links inside a node and between nodes, both per device.
        host_gib: memory of the host, per device, for offloading.
        host_gbps: from a device to its host, one direction.
        devices: how many there are; 0: as many as a plan asks for.
    """

    name: str
    gpu: Gpu
    node_size: int
    intra: Link
    inter: Link
    host_gib: float = 128.0
    host_gbps: float = 25.0
    devices: int = 0

    def __post_init__(self) -> None:
        if self.node_size < 1 or self.devices < 0:
            raise PlanError(
                f"cluster {self.name}: node_size={self.node_size}, devices={self.devices}: a node "
                "has 1 device or more"
            )

    @property
    def capacity(self) -> float:
        """Bytes of a device's memory."""
        return self.gpu.memory_gib * GIB

    def nodes(self, devices: int) -> int:
        return ceil(devices / self.node_size)

    def slower_links(self, intra: float = 1.0, inter: float = 1.0) -> "ClusterSpec":
        """The same with the bandwidth of its links multiplied: "if links were half as fast"."""
        return replace(
            self,
            intra=replace(self.intra, gbps=self.intra.gbps * intra),
            inter=replace(self.inter, gbps=self.inter.gbps * inter),
        )

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        for name in ("peak_tflops", "gemm_share", "sources"):
            document["gpu"][name] = dict(document["gpu"][name])
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "ClusterSpec":
        """Of the form that `to_json` gives.

        Raises:
            PlanError: unknown or missing keys.
        """
        _check_keys(cls, document, "cluster")
        given = dict(document)
        for name in ("intra", "inter"):
            given[name] = _checked(Link, given[name], name)
        given["gpu"] = _checked(Gpu, given["gpu"], "gpu")
        made = _checked(cls, given, "cluster")
        assert isinstance(made, cls)
        return made


def _check_keys(kind: Any, given: Any, where: str) -> None:
    if not isinstance(given, Mapping):
        raise PlanError(f"key {where}: {shown(given)}: keys with values are expected")
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise PlanError(
            f"{where}: unknown keys {', '.join(map(named, unknown))}; known: {', '.join(known)}"
        )
    missing = [
        name for name, f in known.items()
        if name not in given and f.default is MISSING and f.default_factory is MISSING
    ]  # fmt: skip
    if missing:
        raise PlanError(f"{where}: keys missing: {', '.join(missing)}")


def _checked(kind: Any, given: Any, where: str) -> Any:
    _check_keys(kind, given, where)
    for f in fields(kind):
        if f.name in given:
            _check_figures(f"{where}: key {f.name}", f.name, f.type, given[f.name])
    values = {k: tuple(v) if k == "attention_share" else v for k, v in given.items()}
    return kind(**values)


_MAY_BE_ZERO = {"devices", "host_gib", "sms", "kernel_us", "latency_us", "call_us", "sm_share"}


def _check_figures(where: str, name: str, kind: Any, value: Any) -> None:
    """Figures of a file: numbers that a plan can divide by."""
    if name == "attention_share":
        fits = isinstance(value, list | tuple) and len(value) == 2
        figures = list(value) if fits else []
    elif name in ("peak_tflops", "gemm_share"):
        fits = isinstance(value, Mapping) and "bf16" in value
        figures = list(value.values()) if fits else []
    elif kind in (int, float):
        figures, fits = [value], kind is float or isinstance(value, int)
    else:
        return
    low = "0 or more" if name in _MAY_BE_ZERO else "more than 0"
    for figure in figures:
        fits = fits and isinstance(figure, int | float) and not isinstance(figure, bool)
        fits = fits and 0 <= figure < inf and (figure > 0 or name in _MAY_BE_ZERO)
    if not fits:
        what = "a whole number" if kind is int else "a number"
        if name in ("peak_tflops", "gemm_share"):
            what = "numbers by dtype, bf16 among them"
        elif name == "attention_share":
            what = "two numbers"
        raise PlanError(f"{where}: {shown(value)}: {what}, {low}, expected")

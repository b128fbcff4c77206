"""What torch's own Python does for its own backends only, or not at all, mended for groups of this
backend. Installed by the first of them; every other group gets torch's function unchanged.

- `dist.monitored_barrier` refuses every backend but gloo by name.
- `_coalescing_manager` (and with it `batch_isend_irecv`) has no `finally`: when something raises
  inside, the group stays in the coalescing state, in which `all_reduce` and others collect their
  arguments and do nothing (torch 2.9 to 2.14).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pyparallel import _torch
from pyparallel.errors import CommError, InvalidArgument

__all__ = ["install"]


@functools.cache
def install() -> None:
    """Puts the mended functions into torch.distributed, once per process."""
    _mend_monitored_barrier()
    _mend_coalescing()


def _mend_monitored_barrier() -> None:
    of_torch = c10d.monitored_barrier

    @functools.wraps(of_torch)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        pg = None if c10d._rank_not_in_group(group) else (group or c10d._get_default_group())
        if pg is None or "cpu:pyparallel" not in c10d.get_backend_config(pg).lower():
            of_torch(group, timeout, wait_all_ranks)
        else:
            given: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
            call: Any = pg  # torch's own stubs do not have this method
            call.monitored_barrier(wait_all_ranks=wait_all_ranks, **given)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def _mend_coalescing() -> None:
    of_torch = c10d._coalescing_manager

    @functools.wraps(of_torch)
    @contextmanager
    def coalescing_manager(
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Iterator[Any]:
        pg = group or c10d._get_default_group()
        inside_another = pg in c10d._world.pg_coalesce_state
        try:
            with of_torch(group, device, async_ops) as manager:
                yield manager
        except BaseException as error:
            if not inside_another:
                _abandon(pg, error)
            raise

    for module in (c10d, dist):  # the second has the first's names
        module._coalescing_manager = coalescing_manager  # type: ignore[attr-defined]


def _abandon(group: dist.ProcessGroup, error: BaseException) -> None:
    """Ends the coalescing state of a group in which `error` was raised.

    What the backend has begun goes on. What torch had only collected is one call that this rank
    cannot make any more: the other ranks hear of it, and raise.
    """
    collected = c10d._world.pg_coalesce_state.pop(group, [])
    op = collected[0].op.__name__ if collected else ""
    why = f"{type(error).__name__} was raised inside a coalescing block: {error}"
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, _torch.Backend):
            # A batch that is no longer open, or a group that is closed, needs no more.
            with suppress(CommError, InvalidArgument):
                backend._abandon_coalescing(op, why)
            return

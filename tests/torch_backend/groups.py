"""Process groups for the tests: the backend under test, and gloo beside it for comparison."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

import pyparallel.comm  # noqa: F401 (registers the backend)
from tests.launch import Rank


@contextmanager
def process_group(
    rank: Rank, backend: str = "pyparallel", timeout: float = 40.0
) -> Iterator[dist.ProcessGroup]:
    """The default group; destroyed at the end, whatever happened."""
    dist.init_process_group(
        backend,
        store=rank.store(),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gloo_beside() -> dist.ProcessGroup:
    """The same ranks on gloo. Collective."""
    return dist.new_group(backend="gloo")

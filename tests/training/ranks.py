"""What the tests of this folder share: several functions in one set of started processes."""

import torch.distributed as dist

import pyparallel.comm  # noqa: F401  (registers the backend)


def several(rank, *jobs):
    """fn(rank, *args) one after another, all in one world of the backend "pyparallel"."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    return [fn(rank, *args) for fn, *args in jobs]

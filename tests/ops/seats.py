"""The kinds of groups that ops run on, as ranks of a test make them."""

from typing import Any

import torch.distributed as dist

KINDS = ("communicator", "pyparallel", "gloo")


def make_groups(rank: Any, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """One group of all ranks for each kind; the launcher destroys torch's."""
    from pyparallel.comm import Communicator

    groups: dict[str, Any] = {}
    if set(kinds) & {"pyparallel", "gloo"}:
        store = dist.PrefixStore("world", rank.store())
        dist.init_process_group(
            "pyparallel", store=store, rank=rank.rank, world_size=rank.world_size
        )
    for kind in kinds:
        if kind == "communicator":
            store = dist.PrefixStore("communicator", rank.store())
            groups[kind] = Communicator.from_store(store, rank.rank, rank.world_size)
        elif kind == "pyparallel":
            groups[kind] = dist.group.WORLD
        else:
            groups[kind] = dist.new_group(backend="gloo")
    return groups

"""Ops on the groups that programs have: parts of a world, overlapping ones, on several hosts.

Layers of proof: N processes on a CPU, hosts by PYPARALLEL_HOST_ID. Every rank checks its result.
Public faults of this kind: workspaces that default to the world (vllm-project/vllm PR 45917), a
group's calls counted with another's (pytorch/pytorch 196082), groups that are not the node
(NVIDIA/TransformerEngine 966), no way to decline shared memory (deepspeedai/DeepSpeed 7625), a
workspace with one M for all calls (NVIDIA/TransformerEngine 1303, 3564).
"""

import gc
import os

import numpy as np
import pytest
import torch

from tests.launch import run_ranks
from tests.ops.reference import draw

ALGORITHMS = ("plain", "symmetric", "chunked")


def check(group, members, me, seed, m=6, algorithm=None):
    """All three ops on `group`, whose ranks are `members` of the world."""
    from pyparallel import ops

    xs = draw(seed, [(m, 4)] * 8, torch.float64)
    ws = draw(seed + 1, [(5, 4)] * 8, torch.float64)
    total = sum(xs[r] @ ws[r].t() for r in members)
    y = ops.matmul_all_reduce(xs[me], ws[me], group, algorithm=algorithm)
    torch.testing.assert_close(y, total)
    n = len(members)
    sizes = [m - (n - 1) * (m // n)] + [m // n] * (n - 1)
    start = sum(sizes[: members.index(me)])
    own = slice(start, start + sizes[members.index(me)])
    shard = ops.matmul_reduce_scatter(xs[me], ws[me], group, shard_sizes=sizes, algorithm=algorithm)
    torch.testing.assert_close(shard, total[own])
    z = ops.all_gather_matmul(xs[0][own], ws[me], group, shard_sizes=sizes, algorithm=algorithm)
    torch.testing.assert_close(z, xs[0] @ ws[me].t())


def parts_of_a_world(rank, kind):
    import torch.distributed as dist

    import pyparallel.comm  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    me = rank.rank
    dist.init_process_group(kind, store=rank.store(), rank=me, world_size=4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    most = dist.new_group([3, 1, 0])
    pair, pair_members = pairs[me // 2], [me // 2 * 2, me // 2 * 2 + 1]
    algorithms = ALGORITHMS if kind == "pyparallel" else ("plain",)
    for call, algorithm in enumerate(algorithms):
        # A part first, then the world, then parts that overlap; some ranks are busier than others.
        check(pair, pair_members, me, 10 * call, algorithm=algorithm)
        check(dist.group.WORLD, [0, 1, 2, 3], me, 10 * call + 1, algorithm=algorithm)
        for repeat in range(1 + me):
            if me != 2 and repeat == 0:
                members = dist.get_process_group_ranks(most)
                check(most, members, me, 10 * call + 2, algorithm=algorithm)
        check(pair, pair_members, me, 10 * call + 3, m=7, algorithm=algorithm)
    if kind == "gloo":
        with pytest.raises(ValueError, match="data go through its own backend, gloo"):
            check(pair, pair_members, me, 0, algorithm="symmetric")


@pytest.mark.parametrize("kind", ["pyparallel", "gloo"])
def test_parts_of_a_world(kind):
    run_ranks(parts_of_a_world, 4, kind)


def on_hosts(rank, kind):
    os.environ["PYPARALLEL_HOST_ID"] = f"host-{rank.rank // 2}"
    try:
        import torch.distributed as dist

        from pyparallel import ops
        from pyparallel.comm import Communicator

        torch.set_num_threads(1)
        me, world = rank.rank, rank.world_size
        members = list(range(world))
        if kind == "communicator":
            group = Communicator.from_store(rank.store(), me, world)
        else:
            dist.init_process_group(kind, store=rank.store(), rank=me, world_size=world)
            group = dist.group.WORLD
        for call in range(3):
            check(group, members, me, call)
        with pytest.raises(ValueError, match=r"which cannot run: .*(several hosts|backend, gloo)"):
            check(group, members, me, 0, algorithm="symmetric")
        with pytest.raises(ValueError, match=r"result \[6, 5\].*result \[5, 6\]"):
            ops.matmul_all_reduce(torch.ones(6 - (me > 0), 4), torch.ones(5 + (me > 0), 4), group)
        with pytest.raises(ValueError, match=r"weight has shape \[5, 3\]"):
            ops.matmul_all_reduce(torch.ones(2, 4), torch.ones(5, 4 if me else 3), group)
        check(group, members, me, 4)
        if kind == "communicator":
            group.close()
    finally:
        del os.environ["PYPARALLEL_HOST_ID"]


@pytest.mark.parametrize("kind", ["communicator", "pyparallel", "gloo"])
def test_several_hosts(kind):
    run_ranks(on_hosts, 3, kind)


def lives(rank):
    """Workspaces go with their group, names of lost groups are told; M goes up and down."""
    import torch.distributed as dist

    from pyparallel import ops
    from pyparallel.comm import Communicator
    from pyparallel.ops import groups

    torch.set_num_threads(1)
    me, world = rank.rank, rank.world_size
    known = len(groups._by_name)
    for life in range(3):
        store = dist.PrefixStore(f"life {life}", rank.store())
        dist.init_process_group("pyparallel", store=store, rank=me, world_size=world)
        group = dist.group.WORLD
        name = ops.group_name(group)
        for m in (7, 64, 13, 3000, 1):
            for algorithm in ALGORITHMS:
                check(group, list(range(world)), me, life, m, algorithm)
        workspace = groups.seat_of(group).engine.host_path
        assert workspace.nbytes == 2 << 20, "3000 rows of 5 doubles fit what it begins with"
        wide = torch.ones((1 << 20) // 8 + 1, 1, dtype=torch.float64)  # one row more than fits
        y = torch.empty_like(wide) if life else None  # in the caller's memory as in its own
        y = ops.matmul_all_reduce(wide, wide[:1], group, out=y, algorithm="symmetric")
        assert bool((y == world).all())
        assert workspace.nbytes == 4 << 20
        dist.destroy_process_group()
        del group, workspace
        gc.collect()
        with pytest.raises(ValueError, match=rf"group '{name}' names no group of this process"):
            ops.matmul_all_reduce(wide, wide[:1], name)
    store = dist.PrefixStore("last", rank.store())
    comm = Communicator.from_store(store, me, world)
    name = ops.group_name(comm)
    assert ops.all_reduce(torch.ones(1), name).item() == world
    comm.close()
    del comm
    gc.collect()
    assert len(groups._by_name) <= known


def test_lives_of_groups():
    run_ranks(lives, 2)


def without_a_group(rank):
    """A compiled graph's first run is the first that a process hears of the group.

    Then as another framework calls (docs/ops.md): arrays by DLPack, an id by its own transport.
    """
    import torch.distributed as dist
    from torch.utils.dlpack import from_dlpack

    from pyparallel import ops
    from pyparallel.comm import Communicator

    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    name = dist.group.WORLD.group_name
    x, w = draw(3, [(4, 4), (5, 4)], torch.float32)
    y = torch.ops.pyparallel.matmul_all_reduce(x, w, None, name, None)
    torch.testing.assert_close(y, rank.world_size * (x @ w.t()))

    store = rank.store()
    if rank.rank == 0:
        store.set("id", Communicator.unique_id())
    with Communicator.from_id(store.get("id"), rank.rank, rank.world_size) as group:
        for array in (x.numpy(), x.numpy().T.copy().T):
            z = ops.matmul_all_reduce(from_dlpack(array), from_dlpack(w.numpy()), group)
            torch.testing.assert_close(z, y)
            assert np.from_dlpack(z).ctypes.data == z.data_ptr()


def test_a_group_is_found_by_name_or_id():
    run_ranks(without_a_group, 2)

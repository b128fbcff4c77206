"""Making, splitting and losing process groups.

Layers: one process; processes as ranks; ranks that stay away, stop or die. All of it runs in CI.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pyparallel.comm import Aborted, Closed, CommError, InvalidArgument, Timeout, Unsupported
from tests.launch import Rank, run_ranks, spawn_ranks
from tests.torch_backend.groups import process_group

CPU = torch.device("cpu")


def test_one_process():
    dist.init_process_group("pyparallel", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == "pyparallel"
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match="output"):  # alone, and still checked
            dist.all_gather_into_tensor(torch.empty(4), torch.ones(3))
        backend = dist.group.WORLD._get_backend(CPU)
        with pytest.raises(NotImplementedError, match="meta"):
            backend.allreduce([torch.ones(3, device="meta")], dist.AllreduceOptions())
    finally:
        dist.destroy_process_group()


def test_backend_options_are_refused():
    with pytest.raises(InvalidArgument, match="takes none"):
        dist.init_process_group(
            "pyparallel", store=dist.HashStore(), rank=0, world_size=1, pg_options=object()
        )
    assert not dist.is_initialized()


def test_torch_knows_the_backend_where_the_wheel_is_installed():
    """The entry point is a name only: what it calls must work in a fresh interpreter."""
    code = (
        "import torch.distributed as dist, sys; from pyparallel._autoload import register; "
        "register(); register(); assert dist.Backend('pyparallel') in dist.Backend.backend_list; "
        "assert 'pyparallel._torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def mixed(rank: Rank) -> None:
    """By device; the name of a group made twice; groups of some ranks, overlapping."""
    me, world = rank.rank, rank.world_size
    for _ in range(2):  # again after destroy, on the same kind of store
        store = dist.PrefixStore("again", rank.store())
        dist.init_process_group(
            "cpu:pyparallel,cuda:pyparallel", store=store, rank=me, world_size=world
        )
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == world
        dist.destroy_process_group()
    with process_group(rank):
        # Pairs first, then all: ranks have made different numbers of calls by then.
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 0])]
        members = [(0, 1), (1, 2), (0, 2)]
        for pair, ranks in zip(pairs, members, strict=True):
            if me in ranks:
                x = torch.tensor([float(me)])
                dist.all_reduce(x, group=pair)
                assert x.item() == sum(ranks)
        x = torch.tensor([float(me)])
        dist.all_reduce(x)
        assert x.item() == 3
        alone, _ = dist.new_subgroups(1)
        dist.all_reduce(x, group=alone)
        assert x.item() == 3
        parts = dist.group.WORLD.split_group([0, 2] if me != 1 else [1], timedelta(seconds=20))
        x = torch.tensor([1.0])
        parts.allreduce([x]).wait()
        assert x.item() == (1 if me == 1 else 2)
        parts.shutdown()


def test_groups():
    run_ranks(mixed, 3)


def threads(rank: Rank) -> None:
    """One group per thread, used at the same time."""
    with process_group(rank):
        groups = [dist.new_group() for _ in range(3)]
        failures: list[BaseException] = []

        def work(i: int) -> None:
            try:
                for step in range(50):
                    x = torch.full((100,), float(i + step))
                    dist.all_reduce(x, group=groups[i])
                    assert bool((x == 2 * (i + step)).all())
            except BaseException as error:
                failures.append(error)

        running = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert not failures


def test_groups_in_threads():
    run_ranks(threads, 2)


def missing(rank: Rank) -> str:
    if rank.rank == 2:
        time.sleep(3)
        return ""
    with pytest.raises(Timeout) as caught, process_group(rank, timeout=1.0):
        pass
    c10d._world.group_count = 0  # torch counts the failed group too; rank 2 has not
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    first, second, _ = run_ranks(missing, 3)
    for text in (first, second):
        assert "1 of 3 ranks absent after 1 s: rank 2" in text


def late_for_barrier(rank: Rank) -> str:
    with process_group(rank) as group:
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=10), wait_all_ranks=True)
        if rank.rank == 1:
            time.sleep(2)
            return ""
        with pytest.raises(Timeout) as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=1))
        text = str(caught.value)
        with pytest.raises(CommError):  # that broke the group, with the same reason
            dist.all_reduce(torch.ones(1))
        assert group._get_backend(CPU).options._timeout == timedelta(seconds=40)
        return text


def test_monitored_barrier_names_the_absent():
    for rank, text in enumerate(run_ranks(late_for_barrier, 3)):
        assert rank == 1 or "rank 1" in text


def monitored_gloo(rank: Rank) -> None:
    with process_group(rank):
        gloo = dist.new_group(backend="gloo")
        dist.monitored_barrier(gloo)  # torch's own goes on working


def test_monitored_barrier_of_gloo_is_left_alone():
    run_ranks(monitored_gloo, 2)


def timeouts(rank: Rank) -> str:
    with process_group(rank, timeout=30) as group:
        group._get_backend(CPU).set_timeout(timedelta(seconds=1))
        if rank.rank == 1:
            time.sleep(2.5)
            return ""
        start = time.monotonic()
        with pytest.raises(Timeout) as caught:
            dist.all_reduce(torch.ones(1))
        assert 0.9 < time.monotonic() - start < 3
        return str(caught.value)


def test_timeouts_name_the_absent():
    text, _ = run_ranks(timeouts, 2)
    assert "all_reduce" in text
    assert "rank 1" in text


def aborted(rank: Rank) -> None:
    with process_group(rank) as group:
        dist.barrier()
        backend = group._get_backend(CPU)
        if rank.rank == 1:
            time.sleep(0.2)
            backend.abort()
        with pytest.raises(Aborted, match=r"abort\(\) of group world was called on rank 1"):
            dist.all_reduce(torch.ones(1))
        queued = pytest.raises(CommError)
        with queued:
            dist.all_reduce(torch.ones(1), async_op=True).wait()


def test_abort_wakes_the_others():
    run_ranks(aborted, 2)


def after_destroy(rank: Rank) -> None:
    with process_group(rank) as group:
        dist.barrier()
    with pytest.raises(Closed):
        group.allreduce([torch.ones(1)]).wait()


def test_use_after_destroy():
    run_ranks(after_destroy, 2)


def victim(rank: Rank) -> str:
    with process_group(rank):
        dist.all_reduce(torch.ones(1))
        rank.report(os.getpid())
        try:
            while True:
                dist.all_reduce(torch.ones(100_000), async_op=rank.rank == 0)
                dist.barrier()
        except CommError as error:
            return str(error)


@pytest.mark.parametrize("kind", [signal.SIGKILL])
def test_a_killed_rank_is_named(kind):
    with spawn_ranks(victim, 3, timeout=110) as ranks:
        pids = [ranks.next_report(r, timeout=100) for r in range(3)]
        ranks.kill(1, kind)
        outcomes = ranks.wait([0, 2])
    for outcome in outcomes:
        if outcome.rank != 1:
            assert outcome.ok, outcome.traceback
            assert "rank 1" in outcome.value
            assert str(pids[1]) in outcome.value


def test_a_cuda_tensor_without_the_cuda_half_says_what_is_needed():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    from pyparallel import _torch

    assert _torch.has_cuda() is (torch.version.cuda is not None)
    assert issubclass(Unsupported, NotImplementedError)

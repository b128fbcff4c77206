"""The CUDA half of the torch backend, on host memory over the stand-in for NCCL.

Layers: (1) every collective against a float64 reference, dtypes, strided tensors, uneven sizes;
(2) coalesced calls, misfits, abort, calls that do not end as a peer is late, or dead; (3) small
all-reduces by the real low-latency kernels, run as host threads by their stand-in. Streams and
events are torch's own and need a device: those, and CUDA graphs, are not shown here. That the code
compiles against a CUDA build of torch is shown by tests/build/compile_cuda_backend.sh.
"""

import ctypes
import datetime
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from pyparallel import _torch
from pyparallel._core import nccl as core
from pyparallel.errors import CommError, InvalidArgument
from tests.cuda import programs
from tests.launch import Rank, run_ranks, spawn_ranks
from tests.nccl.libraries import Libraries

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
KERNELS = ["stand_in.cpp", "emulated_kernels.cpp"]


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, str]":
    folder = tmp_path_factory.mktemp("nccl")
    made = Libraries(folder)
    (folder / "worlds").mkdir()
    return {
        "PYPARALLEL_NCCL_LIB": str(made.build()),
        "STANDIN_DIR": str(folder / "worlds"),
        "STANDIN_CUDA": str(made.cuda),
        "PYPARALLEL_CUDA_LIB": str(folder / "no_kernels.so"),
    }


# How streams of the stand-ins are waited for: handle, milliseconds -> whether they ran dry.
Settle = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_kept: list[Any] = []  # callbacks that the backends of this process may still call


def settle_function(cuda: str) -> Any:
    nccl = ctypes.CDLL(cuda).standinSynchronize
    nccl.argtypes = [ctypes.c_void_p, ctypes.c_int]
    waits = []
    if Path(os.environ["PYPARALLEL_CUDA_LIB"]).exists():
        waits.append(ctypes.CDLL(os.environ["PYPARALLEL_CUDA_LIB"]).stand_in_synchronize)
        waits[0].argtypes = [ctypes.c_void_p]

    def settle(handle: "int | None", milliseconds: int) -> int:
        for kernels in waits:
            kernels(handle)
        return int(nccl(handle, milliseconds))

    _kept.append(Settle(settle))
    return _kept[-1]


def backend(rank: Rank, cuda: str, timeout: float = 30) -> Any:
    core.use_driver(cuda)  # streams and events of the stand-in: what is launched can be watched
    return _torch._nccl_backend_on_host(
        rank.store(),
        rank.rank,
        rank.world_size,
        "tp",
        datetime.timedelta(seconds=timeout),
        ctypes.cast(settle_function(cuda), ctypes.c_void_p).value,
    )


def data(rank: int, shape: "tuple[int, ...]", dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def close(got: torch.Tensor, everyone: "list[torch.Tensor]", expected: torch.Tensor) -> None:
    """|got - sum| <= ws * eps * sum of |x|: one rounding per addition, in any order."""
    if not got.dtype.is_floating_point:
        assert torch.equal(got.double(), expected)
        return
    size = sum(x.double().abs() for x in everyone)
    limit = len(everyone) * EPS[got.dtype] * size
    assert ((got.double() - expected).abs() <= limit).all()


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def wait(work: Any) -> None:
    if work is not None:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()


def collectives(rank: Rank, cuda: str) -> None:
    pg = backend(rank, cuda)
    me, world = rank.rank, rank.world_size
    for asynchronous in (False, True):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            shape = (4, 6)
            every = [data(r, shape, dtype) for r in range(world)]
            total = sum(x.double() for x in every)

            x = every[me].clone()
            wait(pg.allreduce([x], options(c10d.AllreduceOptions, asyncOp=asynchronous)))
            close(x, every, total)

            x = every[me].clone().t()  # strided, in place
            wait(pg.allreduce([x], options(c10d.AllreduceOptions, asyncOp=asynchronous)))
            close(x.t(), every, total)

            x = every[me].clone()
            opts = options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
            wait(pg.allreduce([x], opts))
            assert torch.equal(x, torch.stack(every).amax(0))

            x = every[me].clone()
            wait(pg.reduce([x], options(c10d.ReduceOptions, rootRank=world - 1)))
            if me == world - 1:
                close(x, every, total)

            x = every[0].clone() if me == 0 else torch.full(shape, 7).to(dtype)
            wait(pg.broadcast([x], options(c10d.BroadcastOptions, rootRank=0)))
            assert torch.equal(x, every[0])

            out = torch.zeros((world, *shape), dtype=dtype)
            wait(pg._allgather_base(out, every[me], c10d.AllgatherOptions()))
            assert torch.equal(out, torch.stack(every))

            uneven = [data(r, (r + 1, 3), dtype) for r in range(world)]
            lists = [torch.zeros_like(u) for u in uneven]
            wait(pg.allgather([lists], [uneven[me]], c10d.AllgatherOptions()))
            assert all(torch.equal(a, b) for a, b in zip(lists, uneven, strict=True))

            whole = [data(r, (world * 2, 3), dtype, 1) for r in range(world)]
            out = torch.zeros((2, 3), dtype=dtype)
            wait(pg._reduce_scatter_base(out, whole[me], c10d.ReduceScatterOptions()))
            mine = [w[2 * me : 2 * me + 2] for w in whole]
            close(out, mine, sum(m.double() for m in mine))

            parts = [
                [data(r, (p + 1, 2), dtype, 2 + p) for p in range(world)] for r in range(world)
            ]
            out = torch.zeros((me + 1, 2), dtype=dtype)
            wait(pg.reduce_scatter([out], [parts[me]], c10d.ReduceScatterOptions()))
            mine = [parts[r][me] for r in range(world)]
            close(out, mine, sum(m.double() for m in mine))

            out = torch.zeros((world, 3), dtype=dtype)
            rows = [data(r, (world, 3), dtype, 3) for r in range(world)]
            wait(pg.alltoall_base(out, rows[me], [], [], c10d.AllToAllOptions()))
            assert torch.equal(out, torch.stack([r[me] for r in rows]))

            sends = [[(r + p) % 3 for p in range(world)] for r in range(world)]
            full = [data(r, (sum(sends[r]), 2), dtype, 4) for r in range(world)]
            takes = [sends[r][me] for r in range(world)]
            out = torch.zeros((sum(takes), 2), dtype=dtype)
            wait(pg.alltoall_base(out, full[me], takes, sends[me], c10d.AllToAllOptions()))
            pieces = [full[r].split(sends[r])[me] for r in range(world)]
            assert torch.equal(out, torch.cat(pieces))

            ins = [data(me, (p + 1,), dtype, 5 + p + me) for p in range(world)]
            outs = [torch.zeros(me + 1, dtype=dtype) for _ in range(world)]
            wait(pg.alltoall(outs, ins, c10d.AllToAllOptions()))
            for r in range(world):
                assert torch.equal(outs[r], data(r, (me + 1,), dtype, 5 + me + r))

            lists = [[torch.zeros(shape, dtype=dtype) for _ in range(world)]] if me == 0 else []
            wait(pg.gather(lists, [every[me]], options(c10d.GatherOptions, rootRank=0)))
            if me == 0:
                assert all(torch.equal(a, b) for a, b in zip(lists[0], every, strict=True))

            out = torch.zeros(shape, dtype=dtype)
            ins2 = [[e.clone() for e in every]] if me == 0 else []
            wait(pg.scatter([out], ins2, options(c10d.ScatterOptions, rootRank=0)))
            assert torch.equal(out, every[me])

            empty = torch.zeros(0, dtype=dtype)
            wait(pg.allreduce([empty], c10d.AllreduceOptions()))

    mean = data(me, (5,))
    wait(pg.allreduce([mean], options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.AVG)))
    every = [data(r, (5,)) for r in range(world)]
    close(mean, every, sum(x.double() for x in every) / world)
    scaled = data(me, (5,))
    factor = dist._make_nccl_premul_sum(float(me + 2))
    wait(pg.allreduce([scaled], options(c10d.AllreduceOptions, reduceOp=factor)))
    every = [data(r, (5,)) * (r + 2) for r in range(world)]
    close(scaled, every, sum(x.double() for x in every))

    right, left = (me + 1) % world, (me - 1) % world
    if world > 1:
        pg._start_coalescing()
        out = torch.zeros(9)
        pg.send([data(me, (9,), seed=8)], right, 0)
        pg.recv([out], left, 0)
        wait(pg._end_coalescing())
        assert torch.equal(out, data(left, (9,), seed=8))

        pg._start_coalescing()  # strided outputs get their values when the batch is over
        many = [data(me, (3, 4), seed=s).t() for s in range(4)]
        for x in many:
            pg.allreduce([x], c10d.AllreduceOptions())
        wait(pg._end_coalescing())
        for s, x in enumerate(many):
            every = [data(r, (3, 4), seed=s).t() for r in range(world)]
            close(x, every, sum(e.double() for e in every))

        lists = [[torch.zeros(n) for n in (3, 8)] for _ in range(world)]
        mine = [data(me, (n,), seed=7) for n in (3, 8)]
        wait(pg.allgather_coalesced(lists, mine, c10d.AllgatherOptions()))
        for r in range(world):
            assert torch.equal(lists[r][0], data(r, (3,), seed=7))
            assert torch.equal(lists[r][1], data(r, (8,), seed=7))
        pairs = [data(me, (n,), seed=9) for n in (3, 8)]
        wait(pg.allreduce_coalesced(pairs, c10d.AllreduceCoalescedOptions()))
        for x in pairs:
            every = [data(r, x.shape, seed=9) for r in range(world)]
            close(x, every, sum(e.double() for e in every))
    work = pg.barrier(c10d.BarrierOptions())
    assert work.wait()

    work = pg.allreduce([torch.ones(3)], options(c10d.AllreduceOptions, asyncOp=True))
    future = work.get_future()
    future.wait()
    assert torch.equal(future.value()[0], torch.full((3,), float(world)))
    assert pg.low_latency_notes.startswith("rank 0: ")  # no kernels on this machine
    assert "no_kernels.so" in pg.low_latency_notes or world == 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_collectives(env: "dict[str, str]", world_size: int) -> None:
    run_ranks(collectives, world_size, env["STANDIN_CUDA"], env=env, timeout=100)


def reduce_until_aborted(pg: Any, x: torch.Tensor) -> None:
    for _ in range(1000):
        time.sleep(0.01)
        wait(pg.allreduce([x], options(c10d.AllreduceOptions, asyncOp=True)))


def misfits(rank: Rank, cuda: str) -> None:
    pg = backend(rank, cuda, timeout=90)  # nobody waits that long: the abort is told
    me, world = rank.rank, rank.world_size
    with pytest.raises(InvalidArgument, match=r"root is rank 7; expected 0 to 1"):
        pg.broadcast([torch.ones(2)], options(c10d.BroadcastOptions, rootRank=7))
    with pytest.raises(InvalidArgument, match="has no tags"):
        pg.send([torch.ones(2)], 1 - me, 3)
    with pytest.raises(InvalidArgument, match="expected the share x 2"):
        pg._allgather_base(torch.ones(3), torch.ones(2), c10d.AllgatherOptions())
    with pytest.raises(InvalidArgument, match="dtype"):
        pg._allgather_base(torch.ones(4, dtype=torch.int32), torch.ones(2), c10d.AllgatherOptions())
    with pytest.raises(InvalidArgument, match="meta"):
        pg.allreduce([torch.ones(2, device="meta")], c10d.AllreduceOptions())
    with pytest.raises(InvalidArgument, match="only dense"):
        pg.allreduce([torch.eye(2).to_sparse()], c10d.AllreduceOptions())
    with pytest.raises(InvalidArgument, match="expected one per rank: 2"):
        pg.allgather([[torch.ones(1)]], [torch.ones(1)], c10d.AllgatherOptions())
    pg._start_coalescing()
    with pytest.raises(InvalidArgument, match="twice"):
        pg._start_coalescing()
    pg._end_coalescing()
    x = torch.ones(2)  # still usable
    wait(pg.allreduce([x], c10d.AllreduceOptions()))
    assert x.tolist() == [world, world]
    start = time.monotonic()
    if me == 0:
        time.sleep(0.3)
        pg.abort()
    with pytest.raises(CommError, match=r"abort\(\) of group tp was called on rank 0"):
        reduce_until_aborted(pg, x)
    assert time.monotonic() - start < 45  # 0.3 s and the second between two looks, with load


def test_misfits_and_abort(env: "dict[str, str]") -> None:
    run_ranks(misfits, 2, env["STANDIN_CUDA"], env=env)


def impatient(rank: Rank, cuda: str) -> None:
    """The timeout that is set holds for the next call, the first; rank 1 does not come to it."""
    pg = backend(rank, cuda)
    pg.set_timeout(datetime.timedelta(seconds=0.7))
    if rank.rank == 1:
        time.sleep(3)
        return
    start = time.monotonic()
    with pytest.raises(CommError, match=r"all_reduce #1, .* absent after 0\.7 s: rank 1$"):
        pg.allreduce([torch.ones(2)], c10d.AllreduceOptions())
    assert time.monotonic() - start < 20  # and not the 30 s that the group was made with


def test_a_timeout_that_is_set(env: "dict[str, str]") -> None:
    run_ranks(impatient, 2, env["STANDIN_CUDA"], env=env)


def one_does_not_come(rank: Rank, cuda: str) -> str:
    """Rank 1 leaves out the third call, for which the others have a timeout of its own."""
    pg = backend(rank, cuda, timeout=60)
    x = torch.ones(2)
    wait(pg.allreduce([x], c10d.AllreduceOptions()))
    wait(pg.broadcast([x], c10d.BroadcastOptions()))
    store = rank.store()
    if rank.rank == 1:
        store.wait(["told 0", "told 2"], datetime.timedelta(seconds=60))
        pg.abort()
        return str(os.getpid())
    start = time.monotonic()
    limit = options(c10d.AllreduceOptions, timeout=datetime.timedelta(seconds=2.5), asyncOp=True)
    with pytest.raises(CommError) as caught:
        wait(pg.allreduce([x], limit))
    assert 2.4 < time.monotonic() - start < 30
    with pytest.raises(CommError, match="is at #2 broadcast"):  # the group is broken, and says why
        pg.broadcast([x], c10d.BroadcastOptions())
    store.set(f"told {rank.rank}", "")
    return str(caught.value)


def test_a_launched_call_ends_with_its_timeout(env: "dict[str, str]") -> None:
    """By events in the stream: op, number, group and who is missing are named, all are let go."""
    first, pid, third = run_ranks(one_does_not_come, 3, env["STANDIN_CUDA"], env=env)
    for rank, text in ((0, first), (2, third)):
        assert text.startswith(f"all_reduce #3, group tp, rank {rank}: ")
        assert "ncclAllReduce(count 2, float32, sum) #3 was launched" in text
        assert "not done after 2.5 s" in text
        assert text.endswith(
            f"this rank is at #3 all_reduce; rank 1 (pid {pid}, process alive) is at #2 broadcast"
        )


def one_dies(rank: Rank, cuda: str) -> float:
    pg = backend(rank, cuda, timeout=60)
    x = torch.ones(2)
    wait(pg.allreduce([x], c10d.AllreduceOptions()))
    wait(pg.barrier(c10d.BarrierOptions()))
    rank.report(os.getpid())
    if rank.rank == 1:
        time.sleep(60)
    with pytest.raises(CommError, match=r"rank 1 \(pid \d+\) died; its last call was "):
        wait(pg.allreduce([x], options(c10d.AllreduceOptions, asyncOp=True)))
    return time.monotonic()


def test_a_launched_call_ends_when_a_peer_dies(env: "dict[str, str]") -> None:
    with spawn_ranks(one_dies, 2, env["STANDIN_CUDA"], env=env) as ranks:
        for rank in range(2):
            ranks.next_report(rank, timeout=60)
        time.sleep(1.0)  # rank 0 is in its call by now
        ranks.kill(1)
        killed = time.monotonic()
        (ended,) = ranks.wait([0])
    assert ended.ok, ended.traceback
    assert ended.value - killed < 2.0 + 2.0  # two seconds, and two for a loaded machine


def small_sums(rank: Rank, cuda: str) -> "list[bytes]":
    pg = backend(rank, cuda)
    me, world = rank.rank, rank.world_size
    bits = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (1, 7, 1000, 5000):
            every = [data(r, (count,), dtype, count) for r in range(world)]
            x = every[me].clone()
            wait(pg.allreduce([x], c10d.AllreduceOptions()))
            expected = torch.zeros(count)
            for one in every:  # fp32, rank order, one rounding: the kernels' own definition
                expected += one.float()
            assert torch.equal(x, expected.to(dtype)), (dtype, count)
            bits.append(x.view(torch.uint8).numpy().tobytes())
    assert pg.low_latency_notes == ""
    y = torch.ones(3, dtype=torch.int64)  # no kernel for these: NCCL
    wait(pg.allreduce([y], c10d.AllreduceOptions()))
    assert y.tolist() == [world] * 3
    return bits


@pytest.mark.parametrize("world_size", [2, 3])
def test_small_sums_use_the_kernels(env: "dict[str, str]", world_size: int) -> None:
    kernels = str(programs.shared_object(KERNELS))
    with_kernels = {**env, "PYPARALLEL_CUDA_LIB": kernels}
    results = run_ranks(small_sums, world_size, env["STANDIN_CUDA"], env=with_kernels, timeout=100)
    assert all(result == results[0] for result in results)


def test_path_of_the_script() -> None:
    """The compile check that needs a CUDA build of torch is at least a script that sh can read."""
    script = Path(__file__).parents[1] / "build" / "compile_cuda_backend.sh"
    assert script.read_text().startswith("#!/bin/sh")
    assert script.stat().st_mode & 0o100

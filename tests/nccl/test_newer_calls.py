"""Functions that few libraries have: one-sided puts, pauses, estimates; and two very old ones.

Layers: ranks as threads over the stand-in, every rank's memory checked, what the library was asked
read from its log; then libraries that lack each function. What NCCL itself does is NCCL's.
"""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pyparallel.comm import nccl
from pyparallel.errors import Aborted, InvalidArgument, Timeout, Unsupported
from tests.nccl.harness import Array, Seat, Standin, run_ranks, run_threads
from tests.nccl.libraries import Libraries
from tests.nccl.test_making import total, wait_for

WORLDS = [1, 2, 3]


def floats(memory: nccl.NcclMemory, count: int) -> np.ndarray:
    address = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_float * count).from_address(memory.pointer)
    )
    return address


def data(turn: int, rank: int) -> np.ndarray:
    return np.random.default_rng([turn, rank]).standard_normal(7).astype(np.float32)


# --- one-sided


@pytest.mark.parametrize("world", WORLDS)
def test_puts_and_signals(standin: Standin, world: int) -> None:
    """Everybody puts into everybody's window, each at its own offset, twice: counts bite."""

    def body(seat: Seat) -> None:
        with nccl.NcclMemory(4096, library=standin.library) as memory:
            window = seat.comm.window(memory)
            mine = floats(memory, 1024)
            mine[:] = -1
            sent = [data(turn, seat.rank) for turn in range(2)]  # kept until the work is done
            for turn, x in enumerate(sent):
                for peer in range(world):
                    seat.comm.put_signal(
                        Array(x), peer, window, 128 * seat.rank + 64 * turn, stream=seat.stream
                    )
            seat.comm.wait_signals(
                [nccl.SignalWait(peer, count=2) for peer in range(world)], stream=seat.stream
            )
            seat.wait()
            for turn in range(2):
                for peer in range(world):
                    x = data(turn, peer)
                    at = 32 * peer + 16 * turn
                    assert np.array_equal(mine[at : at + 7], x)
                    assert (mine[at + 7 : at + 16] == -1).all()
            seat.comm.signal((seat.rank + 1) % world, signal=3, context=1, stream=seat.stream)
            seat.comm.wait_signals(
                [nccl.SignalWait((seat.rank - 1) % world, signal=3, context=1)], stream=seat.stream
            )
            seat.wait()

    run_ranks(standin, world, body)


def test_puts_that_cannot_be(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        comm, x = seat.comm, Array(np.ones(8, np.float32))
        with nccl.NcclMemory(4096, library=standin.library) as memory:
            window = comm.window(memory)
            with pytest.raises(InvalidArgument, match=r"32 bytes at offset 4080 of .* 4096 bytes"):
                comm.put_signal(x, 0, window, 4080, stream=seat.stream)
            with pytest.raises(InvalidArgument, match="offset is -4"):
                comm.put_signal(x, 0, window, -4, stream=seat.stream)
            with pytest.raises(InvalidArgument, match=r"peer 5 is not in 0\.\.0"):
                comm.put_signal(x, 5, window, stream=seat.stream)
            with pytest.raises(InvalidArgument, match="signal -1, context 0"):
                comm.signal(0, signal=-1, stream=seat.stream)
            with pytest.raises(InvalidArgument, match="for nothing"):
                comm.wait_signals([], stream=seat.stream)
            with pytest.raises(InvalidArgument, match="0 signals from rank 0"):
                comm.wait_signals([nccl.SignalWait(0, count=0)], stream=seat.stream)
            with pytest.raises(InvalidArgument, match="no array names a stream"):
                comm.signal(0)
            window.close()
            with pytest.raises(InvalidArgument, match="window is closed"):
                comm.put_signal(x, 0, window, stream=seat.stream)
        assert "PutSignal" not in standin.log()

    standin.log()
    run_ranks(standin, 1, body)


# --- pauses


@pytest.mark.parametrize("blocking", [False, True])
def test_revoked(standin: Standin, blocking: bool) -> None:
    """Rank 1 never comes to the second call: both revoke, and go on in a new group."""
    gate = threading.Barrier(2, timeout=30)

    def body(seat: Seat) -> None:
        assert total(seat, seat.comm, 1.0) == 2
        x = Array(np.ones(4))
        if seat.rank == 0:
            seat.comm.all_reduce(x, stream=seat.stream)
        gate.wait()
        start = time.monotonic()
        seat.comm.revoke()
        assert time.monotonic() - start < 5
        assert seat.comm.revoked
        assert seat.comm.failure == ""
        with pytest.raises(nccl.NcclInvalidUsage, match=r"revoked; split\(\) or shrink\(\) it"):
            seat.comm.all_reduce(x, stream=seat.stream)
        with pytest.raises(nccl.NcclInvalidUsage, match="revoked"):
            seat.comm.revoke()
        seat.wait()
        child = seat.comm.split(0)
        assert child is not None
        assert total(seat, child, seat.rank + 1.0) == 3
        child.close()

    standin.log()
    run_ranks(standin, 2, body, blocking=blocking)
    log = standin.log()
    assert log.count("CommRevoke") == 2
    assert log.count("CommFinalize") == 2  # the child's: what was revoked is not finalized
    assert log.count("CommDestroy") == 4
    assert standin.alive() == 0


def test_suspended(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        comm, x = seat.comm, Array(np.ones(4))
        assert comm.memory_stats() == nccl.NcclMemoryStats(3000, 70, 3070, False)
        with pytest.raises(InvalidArgument, match=r"resume\(\) without suspend"):
            comm.resume()
        comm.suspend()
        assert comm.memory_stats() == nccl.NcclMemoryStats(0, 70, 70, True)
        for call in (
            lambda: comm.all_reduce(x, stream=seat.stream),
            comm.suspend,
        ):
            with pytest.raises(nccl.NcclInvalidUsage, match=r"suspended; call resume\(\) first"):
                call()
        with pytest.raises(InvalidArgument, match=r"suspended; call resume\(\) first"):
            comm.split(0)
        comm.resume()
        assert total(seat, comm, 1.0) == seat.size

    run_ranks(standin, 2, body)


# --- estimates


def test_a_group_is_estimated_and_not_launched(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        x = np.full(6, 3.0)
        with nccl.group(simulate=True) as estimate:
            seat.comm.all_reduce(Array(x), stream=seat.stream)
            seat.comm.broadcast(Array(x[:2]), 0, stream=seat.stream)
        assert estimate.estimated_us == 2 * 1.5 + 0.25 * 8
        seat.wait()
        assert (x == 3).all()
        assert seat.comm.sequence == 0
        with pytest.raises(InvalidArgument, match="group without calls"), nccl.group(simulate=True):
            pass
        inner = nccl.group(simulate=True)
        with pytest.raises(InvalidArgument, match="inside another"), nccl.group(), inner:
            seat.comm.all_reduce(Array(x), stream=seat.stream)
        assert total(seat, seat.comm, 1.0) == seat.size

    run_ranks(standin, 2, body)


# --- old calls


def test_bcast(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        x = np.full(5, float(seat.rank))
        seat.comm.bcast(Array(x), 1, stream=seat.stream)
        seat.wait()
        assert (x == 1).all()

    standin.log()
    run_ranks(standin, 2, body)
    log = standin.log()
    assert log.count("Bcast") == 2
    assert "Broadcast" not in log


@pytest.mark.parametrize("world", WORLDS)
def test_a_whole_group_in_one_process(standin: Standin, world: int) -> None:
    devices = [3 * r + 1 for r in range(world)]
    comms = nccl.NcclCommunicator.init_all(devices, name="all", library=standin.library)
    assert [comm.rank for comm in comms] == list(range(world))
    assert [comm.device for comm in comms] == devices
    arrays = [np.full(3, r + 1.0) for r in range(world)]
    with nccl.group():
        for comm, x in zip(comms, arrays, strict=True):
            comm.all_reduce(Array(x), stream=16 * (comm.rank + 1000))
    for rank, x in enumerate(arrays):
        standin.synchronize(16 * (rank + 1000))
        assert (x == world * (world + 1) / 2).all()
    run_threads(world, lambda rank: comms[rank].close())
    assert standin.alive() == 0


def test_a_whole_group_that_does_not_come(libraries: Libraries) -> None:
    stuck = Standin(libraries.build(fault="hang_init_all"), libraries.cuda)
    with pytest.raises(
        Timeout, match=r"ncclCommInitAll\(2 devices\) of .* not returned after 0\.3"
    ):
        nccl.NcclCommunicator.init_all([0, 1], timeout=0.3, library=stuck.library)
    stuck.let_go()
    wait_for(lambda: stuck.log().count("CommAbort") == 2)
    with pytest.raises(InvalidArgument, match="no devices"):
        nccl.NcclCommunicator.init_all([], library=stuck.library)


# --- libraries without them


def test_what_the_library_lacks_is_named(libraries: Libraries, world_folder: Path) -> None:
    """One release before each function came, with the release that has it."""
    old = Standin(libraries.build(22100, without=["ncclBcast", "ncclCommInitAll"]), libraries.cuda)
    x = Array(np.ones(4))

    def body(seat: Seat) -> None:
        comm = seat.comm
        missing = {
            "ncclBcast": lambda: comm.bcast(x, 0, stream=seat.stream),
            r"ncclSignal.*2\.29\.2": lambda: comm.signal(0, stream=seat.stream),
            r"ncclWaitSignal.*2\.29\.2": lambda: comm.wait_signals(
                [nccl.SignalWait(0)], stream=seat.stream
            ),
            r"ncclCommRevoke.*2\.28\.7": comm.revoke,
            r"ncclCommSuspend.*2\.29\.7": comm.suspend,
            r"ncclCommResume.*2\.29\.7": comm.resume,
            r"ncclCommMemStats.*2\.29\.7": comm.memory_stats,
            "ncclCommInitAll": lambda: nccl.NcclCommunicator.init_all([0], library=old.library),
        }
        for name, call in missing.items():
            with pytest.raises(Unsupported, match=name):
                call()
        lacks = r"ncclGroupSimulateEnd.*2\.22\.3"
        with pytest.raises(Unsupported, match=lacks), nccl.group(simulate=True):
            comm.all_reduce(x, stream=seat.stream)
        assert total(seat, comm, 1.0) == 1

    run_ranks(old, 1, body)
    features = nccl.nccl_info()["features"]
    assert {"ncclPutSignal", "ncclCommRevoke", "ncclGroupSimulateEnd"} <= features.keys()


def test_calls_of_a_closed_communicator(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        seat.comm.abort("enough")
        for call in (seat.comm.revoke, seat.comm.suspend, seat.comm.memory_stats):
            with pytest.raises(Aborted, match="enough"):
                call()

    run_ranks(standin, 1, body, close=False)

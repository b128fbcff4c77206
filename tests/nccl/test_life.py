"""Ends of communicators: no wait is without a deadline, no destructor waits, whatever peers do.

Ranks as threads; what needs a process that dies is in test_processes.py.
"""

import gc
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pyparallel.comm import nccl
from pyparallel.errors import Aborted, Closed, InvalidArgument, Timeout
from tests.nccl.harness import Array, Seat, Standin, run_ranks, run_threads
from tests.nccl.libraries import Libraries
from tests.nccl.test_making import wait_for

AT_ONCE = 6.0  # seconds; below the timeouts of these tests, above a busy machine's delays


def array() -> Array:
    return Array(np.ones(4))


def lone(standin: Standin, **options) -> nccl.NcclCommunicator:
    options = {"timeout": 20.0, "library": standin.library} | options
    return nccl.NcclCommunicator(nccl.unique_id(standin.library), 0, 1, **options)


@pytest.mark.parametrize("blocking", [False, True])
def test_dropped_on_one_rank_only(standin: Standin, blocking: bool) -> None:
    """Row 90: destroying is collective, forgetting is not."""
    dropped = threading.Event()
    id = nccl.unique_id(standin.library)

    def body(rank: int) -> None:
        comm = nccl.NcclCommunicator(
            id, rank, 2, timeout=20, blocking=blocking, library=standin.library
        )
        if rank == 0:
            start = time.monotonic()
            del comm
            gc.collect()
            assert time.monotonic() - start < AT_ONCE
            dropped.set()
        else:
            assert dropped.wait(20)
            assert comm.failure == ""
            with pytest.raises(Timeout, match="peers have not finished what was started"):
                comm.close(timeout=0.5)

    run_threads(2, body)
    wait_for(lambda: standin.alive() == 0)
    assert "CommDestroy" not in standin.log()


def test_dropped_with_work_under_way(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        if seat.rank == 0:
            seat.comm.all_reduce(array(), stream=seat.stream)  # rank 1 never launches its part

    start = time.monotonic()
    run_ranks(standin, 2, body, close=False)
    gc.collect()
    assert time.monotonic() - start < 10
    wait_for(lambda: standin.alive() == 0)


@pytest.mark.parametrize("version", [23203, 21003])
def test_close_waits_for_the_work(libraries: Libraries, version: int) -> None:
    """Also where there is no ncclCommFinalize: destroying then waits."""
    standin = Standin(libraries.build(version), libraries.cuda)

    def body(seat: Seat) -> float:
        x = array()
        if seat.rank == 1:
            time.sleep(0.3)
        seat.comm.all_reduce(x, stream=seat.stream)
        seat.comm.close()
        return float(x.values[0])

    assert run_ranks(standin, 2, body, close=False) == [2.0, 2.0]
    assert standin.alive() == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_close_with_a_stuck_peer(standin: Standin, blocking: bool) -> None:
    """Row 92: the peer is there and does nothing."""
    done = threading.Event()

    def body(seat: Seat) -> None:
        if seat.rank == 1:
            done.wait(20)
            seat.comm.abort()
            return
        seat.comm.all_reduce(array(), stream=seat.stream)
        start = time.monotonic()
        with pytest.raises(Timeout, match="the communicator was aborted instead"):
            seat.comm.close(timeout=0.5)
        assert 0.4 < time.monotonic() - start < 0.5 + 2 + AT_ONCE
        seat.comm.close()
        with pytest.raises(Aborted, match=r"close\(\) after 0.5 s"):
            seat.comm.all_reduce(array(), stream=seat.stream)
        done.set()

    run_ranks(standin, 2, body, close=False, blocking=blocking)
    wait_for(lambda: standin.alive() == 0)


def test_destroy_that_does_not_return(libraries: Libraries) -> None:
    """An old library's destroy waits for a peer that never destroys."""
    standin = Standin(libraries.build(21003), libraries.cuda)
    done = threading.Event()

    def body(seat: Seat) -> None:
        if seat.rank == 1:
            done.wait(20)
            seat.comm.close()
            return
        with pytest.raises(Timeout, match="ncclCommDestroy has not returned after 0.5 s"):
            seat.comm.close(timeout=0.5)
        done.set()

    run_ranks(standin, 2, body, close=False)
    wait_for(lambda: standin.alive() == 0)


@pytest.mark.parametrize("blocking", [False, True])
def test_abort_with_a_stuck_peer(standin: Standin, blocking: bool) -> None:
    """Ends the work that is under way, at once, without the peer."""
    done = threading.Event()

    def body(seat: Seat) -> None:
        if seat.rank == 1:
            done.wait(20)
            seat.comm.abort()
            return
        seat.comm.all_reduce(array(), stream=seat.stream)
        start = time.monotonic()
        seat.comm.abort()
        assert time.monotonic() - start < AT_ONCE
        seat.wait()
        done.set()

    run_ranks(standin, 2, body, close=False, blocking=blocking)


def test_abort_that_does_not_return(libraries: Libraries) -> None:
    """Left behind at the deadline, which is said; a destructor does not even look."""
    standin = Standin(libraries.build(fault="hang_abort"), libraries.cuda)
    comm, dropped = lone(standin), lone(standin)
    start = time.monotonic()
    with pytest.raises(Timeout, match=r"ncclCommAbort has not returned after 0.3 s"):
        comm.abort(timeout=0.3)
    comm.abort()
    comm.close()
    del dropped
    gc.collect()
    assert time.monotonic() - start < AT_ONCE
    standin.let_go()
    wait_for(lambda: standin.alive() == 0)


def test_abort_while_another_thread_waits(standin: Standin) -> None:
    """The waiting thread gets the reason, not a freed handle."""
    inside = threading.Event()

    def body(seat: Seat) -> None:
        if seat.rank == 1:
            inside.wait(20)
            return

        def split() -> None:
            with pytest.raises(Aborted, match="no more"):
                seat.comm.split(0)

        waiter = threading.Thread(target=split)
        waiter.start()
        time.sleep(0.2)
        start = time.monotonic()
        seat.comm.abort("no more")
        waiter.join(20)
        assert time.monotonic() - start < AT_ONCE
        inside.set()

    run_ranks(standin, 2, body, close=False)


def test_library_without_abort(libraries: Libraries) -> None:
    """Before 2.4 a handle can be destroyed together or left; leaving it does not wait."""
    standin = Standin(libraries.build(2305), libraries.cuda)
    run_ranks(standin, 2, lambda seat: None)
    assert standin.alive() == 0
    comm = lone(standin)
    comm.abort()
    del comm
    gc.collect()
    assert standin.alive() == 1


# --- signals, forks, threads


class Alarm(Exception):
    pass


@pytest.mark.parametrize("blocking", [False, True])
def test_signal_ends_a_wait(standin: Standin, blocking: bool) -> None:
    """As Ctrl-C does: the handler's exception comes out of the call.

    Also with the torch backend in the process: the last module that was loaded looks for signals.
    """
    import pyparallel.comm.torch_backend  # noqa: F401

    def ring(*_) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        start = time.monotonic()
        with pytest.raises(Alarm):
            nccl.NcclCommunicator(
                *(nccl.unique_id(standin.library), 0, 2),
                timeout=30,
                blocking=blocking,
                library=standin.library,
            )
        assert time.monotonic() - start < 0.3 + AT_ONCE
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_forked_child_is_refused(standin: Standin) -> None:
    comm = lone(standin)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(array(), stream=5)
            text = "done"
        except Closed as error:
            text = str(error)
        comm.close()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 1000).decode()
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert "made before fork()" in text
    comm.all_reduce(array(), stream=5)
    standin.synchronize(5)
    comm.close()


def test_calls_from_several_threads(standin: Standin) -> None:
    """One at a time, and all of them."""

    def body(seat: Seat) -> None:
        xs = [array() for _ in range(8)]
        run_threads(8, lambda i: seat.comm.all_reduce(xs[i], stream=seat.stream))
        assert seat.comm.sequence == 8

    run_ranks(standin, 1, body)


def test_a_group_is_used_once(standin: Standin) -> None:
    group = nccl.group()
    with group, pytest.raises(InvalidArgument, match="this group is in use"):
        group.__enter__()


def test_many_lives_leave_nothing(standin: Standin) -> None:
    """Descriptors, threads and communicators after a hundred of them."""

    def state() -> tuple[int, int]:
        own = Path("/proc/self")
        return len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))

    def cycle(count: int) -> None:
        for i in range(count):
            comm = lone(standin, blocking=bool(i % 2))
            comm.all_reduce(array(), stream=9)
            standin.synchronize(9)
            child = comm.split(0)
            child.close()
            if i % 3:
                comm.close()
            else:
                comm.abort()

    cycle(4)
    wait_for(lambda: standin.alive() == 0)
    descriptors, threads = state()
    cycle(100)
    wait_for(lambda: standin.alive() == 0)
    wait_for(lambda: state()[1] <= threads)
    assert state()[0] == descriptors

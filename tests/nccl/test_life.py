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


# --- the watchdog


@pytest.mark.parametrize("blocking", [False, True])
def test_work_that_does_not_end(standin: Standin, blocking: bool) -> None:
    """The call, its number and the time are named; the stream is free again."""

    def body(seat: Seat) -> None:
        other = Array(np.ones(7))
        with nccl.group():
            seat.comm.send(other, seat.rank, stream=seat.stream)
            seat.comm.recv(Array(np.ones(7)), seat.rank, stream=seat.stream)
        seat.wait()
        if seat.rank == 1:
            wait_for(lambda: peer_failed.is_set())
            seat.comm.abort()
            return
        seat.comm.timeout = 0.5
        x = array()
        start = time.monotonic()
        seat.comm.all_reduce(x, stream=seat.stream)
        wait_for(lambda: seat.comm.failure != "")
        assert time.monotonic() - start > 0.4
        text = "ncclAllReduce(count 4, float64, sum) #3 was launched and is not done after 0.5 s"
        assert text in seat.comm.failure
        seat.wait()
        with pytest.raises(Aborted, match=r"ncclAllReduce.*#3"):
            seat.comm.all_reduce(x, stream=seat.stream)
        peer_failed.set()

    peer_failed = threading.Event()
    run_ranks(standin, 2, body, close=False, blocking=blocking)
    wait_for(lambda: standin.alive() == 0)


@pytest.mark.parametrize("current", [0, -1])
def test_work_on_another_device_than_the_thread_s(standin: Standin, current: int) -> None:
    """An event belongs to a device: the communicator's, whatever is current (-1: nothing)."""

    def body(index: int) -> None:
        standin.set_device(3)
        comm = lone(standin, device=3)
        stream = 0x900 + 16 * (current + 1)
        standin.set_stream_device(stream, 3)
        standin.set_device(current)
        comm.all_reduce(array(), stream=stream)
        comm.all_reduce(array(), stream=stream)
        standin.synchronize(stream)
        comm.close()

    run_threads(1, body)


def test_thread_stuck_inside_the_library(libraries: Libraries) -> None:
    """A blocking call that does not return is ended by aborting, at the deadline."""
    standin = Standin(libraries.build(fault="hang_launch"), libraries.cuda)
    comm = lone(standin, blocking=True, timeout=0.5)
    start = time.monotonic()
    with pytest.raises(Timeout, match=r"ncclAllReduce.* has not returned after 0.5 s"):
        comm.all_reduce(array(), stream=3)
    assert 0.4 < time.monotonic() - start < 0.5 + 2 * AT_ONCE
    wait_for(lambda: standin.alive() == 0)


def test_unwatched_work_is_left_alone(standin: Standin) -> None:
    done = threading.Event()

    def body(seat: Seat) -> None:
        x = array()
        if seat.rank == 0:
            seat.comm.timeout = 0.3
            seat.comm.all_reduce(x, stream=seat.stream)
            time.sleep(0.8)
            assert seat.comm.failure == ""
            seat.comm.timeout = 20
            done.set()
        else:
            done.wait(20)
            seat.comm.all_reduce(x, stream=seat.stream)
        seat.wait()
        assert x.values[0] == 2

    run_ranks(standin, 2, body, watch=False)


def test_captured_work_is_not_watched(standin: Standin) -> None:
    """Row 70: what is captured has not run, and an event on that stream would be captured too."""

    def body(seat: Seat) -> None:
        seat.comm.timeout = 0.3
        standin.set_capturing(seat.stream, True)
        x = array()
        if seat.rank == 0:
            seat.comm.all_reduce(x, stream=seat.stream)
            time.sleep(0.8)
            assert seat.comm.failure == ""
        else:
            time.sleep(0.8)
            seat.comm.all_reduce(x, stream=seat.stream)
        standin.set_capturing(seat.stream, False)
        seat.wait()
        seat.comm.timeout = 20

    run_ranks(standin, 2, body)


def test_many_calls_keep_few_events(standin: Standin) -> None:
    """Watching costs no memory that grows: finished calls are retired by later ones."""

    def body(seat: Seat) -> None:
        x = array()
        for _ in range(400):
            seat.comm.broadcast(x, 0, stream=seat.stream)
        seat.wait()

    run_ranks(standin, 1, body)


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

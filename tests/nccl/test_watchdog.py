"""Work that does not end, and who notices: the watchdog of communicators.

Ranks as threads over the stand-in, whose streams can be held up.
"""

import threading
import time

import numpy as np
import pytest

from pyparallel.comm import nccl
from pyparallel.errors import Aborted, Timeout
from tests.nccl.harness import Array, Seat, Standin, run_ranks, run_threads
from tests.nccl.libraries import Libraries
from tests.nccl.test_life import AT_ONCE, array, lone
from tests.nccl.test_making import wait_for

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

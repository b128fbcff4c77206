"""Calls when the system has no memory or threads left, or another thread is in the way.

Layers: processes with a limit on their address space (RLIMIT_AS), so that the very calls that would
fail on a full machine fail here: each error must be named, and the process must live on.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from pyparallel.comm import Communicator, NoMemory, SystemCallError, Timeout
from tests.launch import Rank, run_ranks, spawn_ranks


def joined(rank: Rank, timeout: float = 20) -> Communicator:
    return Communicator.from_file(
        rank.rendezvous, rank.rank, rank.world_size, name="scarce", timeout=timeout
    )


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """At most `more` bytes can be mapped in addition to what is."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        now = int(statm.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# --- memory


def unexpected(rank: Rank, waits: bool) -> str:
    """Rank 1 wants the second message; the first, 256 MB, must be put aside and cannot be."""
    comm = joined(rank)
    if rank.rank == 0:
        first = comm.isend(torch.zeros(64 << 20), 1, tag=1)
        with pytest.raises(NoMemory) as caught:
            comm.isend(torch.ones(1), 1, tag=2).wait()
        with pytest.raises(NoMemory):
            first.wait()
        return str(caught.value)
    with address_space(64 << 20):
        wanted = comm.irecv(torch.zeros(1), 0, tag=2)
        if not waits:  # then a thread of the core meets it, which must not end the process
            for _ in range(400):
                if comm.failure:
                    break
                time.sleep(0.01)
            assert comm.failure
        with pytest.raises(NoMemory) as caught:
            wanted.wait()
    return str(caught.value)


@pytest.mark.parametrize("waits", [True, False])
def test_an_unexpected_message_too_large_for_memory(waits: bool) -> None:
    texts = run_ranks(unexpected, 2, waits)
    assert texts[0] == texts[1]
    assert "recv on rank 1, group scarce (ranks 0-1): a message of 268435456 bytes" in texts[0]
    assert "tag 1) from rank 0 came before it was asked for" in texts[0]
    assert "post its receive before" in texts[0]


# --- threads


def without_threads(rank: Rank) -> None:
    with joined(rank) as comm:
        x = torch.ones(3)
        with (
            address_space(1 << 20),
            pytest.raises(SystemCallError, match="calls cannot be started"),
        ):
            comm.all_reduce(x, async_op=True)
        assert comm.all_reduce(x, async_op=True).wait().tolist() == [1, 1, 1]  # nothing was queued
        big = torch.zeros(8 << 20)
        with address_space(1 << 20), pytest.raises(SystemCallError, match="moves messages cannot"):
            comm.isend(big, 0)
        with pytest.raises(SystemCallError, match="moves messages cannot"):
            comm.all_reduce(x)


def test_a_thread_that_cannot_be_started() -> None:
    with spawn_ranks(without_threads, 1) as ranks:
        (outcome,) = ranks.wait()
    assert outcome.ok, outcome.traceback


# --- turns


def another_thread_calls(rank: Rank, ends_by: str) -> float:
    """Rank 0's other thread waits in a call for rank 1, which comes late; this one will not."""
    comm = joined(rank)
    if rank.rank == 1:
        time.sleep(1.5)
        with pytest.raises(Exception, match="scarce"):
            comm.barrier()
        return 0.0
    failures: list[BaseException] = []

    def call() -> None:
        try:
            comm.all_reduce(torch.ones(3))
        except BaseException as error:
            failures.append(error)

    other = threading.Thread(target=call)
    other.start()
    time.sleep(0.2)
    start = time.monotonic()
    if ends_by == "deadline":
        with pytest.raises(Timeout, match=r"another thread .* still in a call after 0\.3 s"):
            comm.barrier(timeout=0.3)
    else:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
    seconds = time.monotonic() - start
    other.join(10)
    assert len(failures) == 1
    return seconds


@pytest.mark.parametrize("ends_by", ["deadline", "signal"])
def test_waiting_for_another_threads_call_has_an_end(ends_by: str) -> None:
    seconds = run_ranks(another_thread_calls, 2, ends_by)[0]
    assert 0.25 < seconds < 1.2

"""Ranks that die, stop or never come, in every op: the others raise soon, and say who, where, why.

Layers: bare processes (bare_rank.py), harmed from here at random moments of a loop of calls, so
that many runs of this file meet many phases. Needs no GPU; all of it runs in CI.
"""

import random
import re
import signal
import time

import pytest
import torch

from pyparallel import _core
from pyparallel.comm import Aborted, Communicator, PeerLost
from tests.comm.bare_rank import COLLECTIVES, OPS
from tests.comm.faults import bare_group, shared_files

# Issue: within two seconds. Detection takes about one; the rest is a busy machine's scheduling.
NOTICED = 2.0
SIZES = {"small": 256, "large": 400_000}


def check_lost(end, op: str, victim: int, pid: int, killed: float, rank: int) -> None:
    assert end.error == "PeerLost", end
    assert end.at - killed < NOTICED, f"noticed after {end.at - killed:.2f} s: {end.text}"
    assert f"rank {victim} (pid {pid}) died" in end.text, end.text
    if op == "send_recv":
        # Who waits for a neighbour of the dead may be told of the group's failure by another rank.
        assert re.search(r"(send|recv|rank \d)", end.text), end.text
    else:
        assert re.search(rf"{op} #\d+, group faults \(ranks 0-\d\)", end.text), end.text


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_a_killed_rank_is_named_by_all_others(op, size, victim):
    before = shared_files()
    with bare_group(3, op, SIZES[size]) as group:
        group.wait_ready()
        time.sleep(random.uniform(0.0, 0.08))
        killed = group.signal(victim)
        for rank in range(3):
            if rank != victim:
                check_lost(group.end(rank), op, victim, group.pid(victim), killed, rank)
    assert shared_files() <= before


@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "send_recv"])
def test_two_deaths_at_once(op):
    with bare_group(4, op) as group:
        group.wait_ready()
        killed = group.signal(1)
        group.signal(2)
        for rank in (0, 3):
            end = group.end(rank)
            assert end.error == "PeerLost"
            assert end.at - killed < NOTICED
            assert re.search(
                rf"rank 1 \(pid {group.pid(1)}\)|rank 2 \(pid {group.pid(2)}\)", end.text
            )


@pytest.mark.parametrize("op", [*COLLECTIVES, "send_recv"])
def test_a_stopped_rank_is_a_timeout_that_names_it(op):
    with bare_group(3, op, call_ms=1500) as group:
        group.wait_ready()
        stopped = group.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            end = group.end(rank)
            assert end.error == "Timeout", end
            assert 1.0 < end.at - stopped < 1.5 + NOTICED, end
            assert f"rank 1 (pid {group.pid(1)}) absent" in end.text or op == "send_recv", end.text
            assert "stopped" in end.text or op == "send_recv", end.text


def test_a_stopped_rank_that_goes_on_learns_of_the_failure():
    with bare_group(2, "all_reduce", call_ms=500) as group:
        group.wait_ready()
        group.signal(1, signal.SIGSTOP)
        assert group.end(0).error == "Timeout"
        group.signal(1, signal.SIGCONT)
        end = group.end(1)
        assert end.error in ("Timeout", "Aborted", "PeerLost"), end
        assert "rank 1" in end.text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_while_splitting(victim):
    """In the exchange of colors, or while the new group joins: both tell the others at once."""
    with bare_group(3, "split") as group:
        group.wait_ready()
        time.sleep(random.uniform(0.0, 0.05))
        killed = group.signal(victim)
        for rank in {0, 1, 2} - {victim}:
            end = group.end(rank)
            assert end.error == "PeerLost", end
            assert end.at - killed < NOTICED, end
            assert re.search(rf"rank {victim}\b.* died", end.text), end


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_starts(missing):
    present = [rank for rank in range(3) if rank != missing]
    with bare_group(3, "barrier", join_ms=1500, started=present) as group:
        for rank in present:
            end = group.end(rank)
            assert end.error == "Timeout", end
            assert re.search(
                rf"rank {missing} absent|absent after .* s: rank {missing}\b", end.text
            ), end


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_while_joining(victim):
    """Ranks 0 and 1 of 3 wait for the third when one of them dies."""
    with bare_group(3, "barrier", join_ms=6000, started=[0, 1]) as group:
        time.sleep(1.0)
        killed = group.signal(victim)
        end = group.end(1 - victim)
        assert end.error == "PeerLost", end
        assert end.at - killed < NOTICED
        assert f"rank {victim} died or gave up while joining" in end.text, end


@pytest.mark.parametrize("victim", [0, 1])
def test_started_calls_report_a_killed_rank(victim):
    """A queue of started calls, contiguous and not, and a receive: every work raises, soon."""
    survivor = 1 - victim
    with bare_group(2, "send_recv", started=[victim]) as group:
        core = _core.Communicator.join(bytes.fromhex(group.id), survivor, 2, "faults", 30_000)
        core.barrier(30_000, False)
        with Communicator(core) as comm:
            works = [comm.all_reduce(torch.ones(3, 2).t(), async_op=True) for _ in range(3)]
            works += [comm.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
            works.append(comm.irecv(torch.ones(3), victim, tag=77))
            time.sleep(0.2)
            assert not any(work.done() for work in works)
            killed = group.signal(victim)
            for work in works:
                error = work.exception()
                assert isinstance(error, (PeerLost, Aborted)), error
                assert f"rank {victim} (pid {group.pid(victim)}) died" in str(error)
            assert time.monotonic() - killed < NOTICED


def test_crashes_leave_nothing_and_the_next_group_starts():
    """Groups that die whole, ten times: no file stays, and a new group works at once."""
    before = shared_files()
    for _ in range(10):
        with bare_group(2, "all_reduce", SIZES["large"]) as group:
            group.wait_ready()
            for rank in range(2):
                group.signal(rank)
    assert shared_files() <= before
    with bare_group(2, "all_reduce") as group:
        group.wait_ready()


def test_interrupt_ends_a_wait():
    """Ctrl-C in a rank whose peer is stopped: Python's KeyboardInterrupt, at once."""
    with bare_group(2, "all_reduce") as group:
        group.wait_ready()
        group.signal(1, signal.SIGSTOP)
        time.sleep(0.3)
        sent = group.signal(0, signal.SIGINT)
        assert group.processes[0].wait(20) == -signal.SIGINT
        assert time.monotonic() - sent < 5

"""Flags between processes, and what happens when one does not come.

Layers of proof: 2 and 3 interpreted processes over symmetric memory (here), host pieces alone
(here), the order of memory operations in the compiled kernels (test_compiled_gemm.py). No GPU.
"""

import time

import pytest
import torch

from pyparallel.comm import Communicator, SymmetricMemory
from pyparallel.triton_kernels import signals
from tests.launch import run_ranks
from tests.triton_kernels.bounds import INTERPRETED

LONG = 60_000_000
SHORT = 150_000


class _Seat:
    """A rank's place: its memory, its status page, and the two kernels as calls."""

    def __init__(self, group):
        from tests.triton_kernels import signal_kernels

        self.kernels = signal_kernels
        self.memory = SymmetricMemory(group, 1 << 16)
        self.words = self.memory.empty(4096, dtype=torch.int64)
        self.words.zero_()
        self.memory.barrier()
        self.table = self.memory.pointers(self.words)
        self.status = signals.new_status()
        self.me, self.world = group.rank, group.world_size

    def put(self, call, signature=11, values=None):
        values = _values(call, self.me) if values is None else values
        self.kernels.put[(1,)](self.table, values, self.me, self.world, call, signature)

    def take(self, call, signature=11, timeout_us=LONG):
        out = torch.full((self.world, 64), -1)
        self.kernels.take[(1,)](
            *(self.table, out, self.status, self.me, self.world, call, signature, timeout_us)
        )
        return out


def _values(call, rank):
    return torch.arange(64) + 1000 * rank + 1_000_000 * (call & 0xFFFF)


def _right(out, call):
    return all(torch.equal(row, _values(call, source)) for source, row in enumerate(out))


def _calls(rank):
    """Data comes with its flag, call after call with stragglers, over the wrap of the number."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        seat = _Seat(group)
        for number, call in enumerate([1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1]):
            if number % rank.world_size == rank.rank:
                time.sleep(0.02)
            seat.put(call)
            assert _right(seat.take(call), call), call
            seat.memory.barrier()
        assert signals.read_failure(seat.status) is None
        assert seat.words[rank.world_size * signals.LINE] == 8 * rank.world_size


def _faults(rank):
    """A deadline, another signature, an abort: each names what it saw, and stops later launches."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        seat = _Seat(group)
        seat.put(1)
        assert _right(seat.take(1), 1)
        seat.memory.barrier()
        texts = []
        if rank.rank == 0:  # rank 1 puts nothing in call 2
            seat.put(2)
            started = time.monotonic()
            out = seat.take(2, timeout_us=SHORT)
            waited = time.monotonic() - started
            assert torch.equal(out[0], _values(2, 0))
            assert (out[1:] == -1).all()
            failure = signals.read_failure(seat.status)
            assert (failure.state, failure.step, failure.peer) == ("timed out", 7, 1)
            assert (failure.call, failure.expected >> 32, failure.seen >> 32) == (2, 2, 1)
            assert 0.15 <= failure.waited_s <= waited < LONG / 1e6
            with pytest.raises(signals.DeviceWaitError) as caught:
                signals.raise_failure(seat.status, "op", "tp", ("",) * 7 + ("wait for rows",))
            texts.append(str(caught.value))
            assert (seat.take(1) == -1).all()  # a later launch does nothing, although all has come
            assert signals.read_failure(seat.status) == failure

        seat = _Seat(group)
        seat.put(1, signature=11 + rank.rank)
        assert (seat.take(1, signature=11 + rank.rank)[1 - rank.rank] == -1).all()
        texts.append(signals.read_failure(seat.status).text("op", "tp"))

        seat = _Seat(group)
        seat.status[signals.ABORT.value] = 1
        started = time.monotonic()
        seat.take(1)
        assert time.monotonic() - started < LONG / 1e6
        texts.append(signals.read_failure(seat.status).text("op", "tp"))
        seat.memory.barrier()
        return texts


def _one_record(rank):
    """All programs of one rank fail: one record, and only the first waits for its deadline."""
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        seat = _Seat(group)
        out = torch.full((1, 64), -1)
        started = time.monotonic()
        seat.kernels.take[(15,)](seat.table, out, seat.status, 0, 1, 1, 11, 1_000_000)
        assert time.monotonic() - started < 12  # 15 if each waited for itself
        assert (out == -1).all()
        assert signals.read_failure(seat.status).peer == 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_data_comes_with_its_flag(world):
    run_ranks(_calls, world, env=INTERPRETED)


def test_a_wait_that_fails_says_why():
    of_zero, of_one = run_ranks(_faults, 2, env=INTERPRETED)
    assert of_zero[0].startswith("op #2, group tp: wait for rows: rank 1 absent after 0.")
    assert of_zero[0].endswith("(expected call 2, seen 1)")
    for texts, peer in ((of_zero[1:], 1), (of_one, 0)):
        assert f"rank {peer} runs call 1 with other sizes" in texts[0]
        assert f"signature {11 + peer:#x}, ours {12 - peer:#x}" in texts[0]
        assert "aborted while waiting for rank 0" in texts[1]


def test_the_first_failure_stops_all_programs():
    run_ranks(_one_record, 1, env=INTERPRETED)


def test_signatures():
    facts = [(1, "x"), (1, "y"), (2, "x"), ((1,), "x")]
    values = [signals.signature_of(*fact) for fact in facts]
    assert len(set(values)) == len(facts)
    assert all(0 < value < 2**31 for value in values)
    assert values == [signals.signature_of(*fact) for fact in facts]

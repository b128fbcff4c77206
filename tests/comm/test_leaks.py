"""Communicators that come and go by the thousand, and joins that fail: nothing may be left.

Layers: threads as ranks in one process, whose descriptors, mappings and threads are counted.
"""

import gc

import pytest

from pyparallel import _core
from tests.comm.faults import holdings, shared_files
from tests.comm.threads import in_threads

# --- leaks


def cycle(times: int) -> None:
    """Groups of two ranks, by threads of one process, each used once."""
    for _ in range(times):
        id = _core.Communicator.random_id()

        def rank(number: int, id: bytes = id) -> None:
            core = _core.Communicator.join(id, number, 2, "cycle", 20_000)
            core.barrier(20_000, False)
            core.close()

        in_threads([lambda: rank(0), lambda: rank(1)])


def test_ten_thousand_cycles_leak_nothing():
    """Alone, and in pairs: descriptors, maps and threads come back, memory stays where it was."""

    def alone(times: int) -> None:
        for _ in range(times):
            core = _core.Communicator.join(_core.Communicator.random_id(), 0, 1, "alone", 20_000)
            core.barrier(20_000, False)

    before_files = shared_files()
    alone(300)
    cycle(30)
    gc.collect()
    before = holdings()
    alone(9_500)
    cycle(500)
    gc.collect()
    after = holdings()
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    assert after.maps <= before.maps + 8  # the allocator's arenas
    assert after.kilobytes <= before.kilobytes + 12_000  # 1 KB a cycle would show
    assert shared_files() <= before_files


def test_failed_joins_leak_nothing():
    def fail() -> None:
        with pytest.raises(TimeoutError):
            _core.Communicator.join(_core.Communicator.random_id(), 0, 2, "absent", 5)
        with pytest.raises(TimeoutError):
            _core.Communicator.join(_core.Communicator.random_id(), 1, 2, "absent", 5)

    for _ in range(20):
        fail()
    gc.collect()
    before = holdings()
    for _ in range(200):
        fail()
    gc.collect()
    after = holdings()
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    assert after.maps <= before.maps + 4

"""Memory from NCCL, registered ranges and windows: who owns them, and what is refused."""

import ctypes
import gc

import numpy as np
import pytest

from pyparallel.comm import nccl
from pyparallel.errors import Closed, InvalidArgument, Unsupported
from tests.nccl.harness import Array, Seat, Standin, run_ranks
from tests.nccl.libraries import Libraries
from tests.nccl.test_making import wait_for


def test_memory_is_an_array(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        with nccl.NcclMemory(64, library=standin.library) as memory:
            ctypes.memset(memory.pointer, 1, 64)
            seat.comm.all_reduce(memory, stream=seat.stream)
            seat.comm.all_reduce(memory.array("int8", 8, offset=56), stream=seat.stream)
            seat.wait()
            assert ctypes.string_at(memory.pointer, 64) == b"\2" * 56 + b"\4" * 8
            with pytest.raises(InvalidArgument, match="bytes 60 to 68 of a NcclMemory of 64 bytes"):
                memory.array("float32", 2, offset=60)
        memory.close()
        with pytest.raises(Closed, match="has been freed"):
            seat.comm.all_reduce(memory, stream=seat.stream)

    run_ranks(standin, 2, body)
    log = standin.log()
    assert log.count("MemAlloc") == log.count("MemFree") == 2


def test_dropped_memory_is_freed(standin: Standin) -> None:
    memory = nccl.NcclMemory(64, library=standin.library)
    del memory
    gc.collect()
    freed: list[str] = []

    def seen() -> bool:
        freed.extend(standin.log())
        return "MemFree" in freed

    wait_for(seen)


def test_memory_of_nothing(standin: Standin, libraries: Libraries) -> None:
    with pytest.raises(InvalidArgument, match="ncclMemAlloc of 0 bytes"):
        nccl.NcclMemory(0, library=standin.library)
    old = nccl.open_library(libraries.build(21805))
    with pytest.raises(Unsupported, match=r"ncclMemAlloc is needed.*2\.19\.1"):
        nccl.NcclMemory(64, library=old)


@pytest.mark.parametrize("kind", ["register", "window"])
@pytest.mark.parametrize("blocking", [False, True])
def test_registration_ends_once(standin: Standin, kind: str, blocking: bool) -> None:
    """By close(), by being dropped, or with the communicator; never after it."""
    enter, leave = {
        "register": ("CommRegister", "CommDeregister"),
        "window": ("CommWindowRegister", "CommWindowDeregister"),
    }[kind]

    def body(seat: Seat) -> None:
        memories = [nccl.NcclMemory(4096, library=standin.library) for _ in range(3)]
        closed, dropped, kept = (getattr(seat.comm, kind)(memory) for memory in memories)
        assert closed.open
        closed.close()
        closed.close()
        assert not closed.open
        del dropped
        gc.collect()
        seat.comm.all_reduce(memories[0], stream=seat.stream)  # releases what was dropped
        log = standin.log()
        assert (log.count(enter), log.count(leave)) == (3, 2)
        seat.wait()
        seat.comm.close()
        assert not kept.open
        kept.close()
        log = standin.log()
        assert log.count(leave) == 1
        assert log.index(leave) < log.index("CommDestroy")

    run_ranks(standin, 1, body, close=False, blocking=blocking)


@pytest.mark.parametrize("kind", ["register", "window"])
def test_overlap(standin: Standin, kind: str) -> None:
    """Row 89: what the library does with sub-ranges is not defined, so there are none."""

    def body(seat: Seat) -> None:
        memory = nccl.NcclMemory(4 * 4096, library=standin.library)
        make = getattr(seat.comm, kind)

        def part(first: int, count: int) -> nccl.RawArray:
            return memory.array("uint8", count, offset=4096 * first)

        middle = make(part(1, 8192))
        for first, count in ((1, 8192), (1, 10), (2, 10), (0, 4097), (0, 4 * 4096), (2, 8192)):
            with pytest.raises(InvalidArgument, match="overlaps 8192 bytes at 0x.*close that"):
                make(part(first, count))
        before, after = make(part(0, 4096)), make(part(3, 4096))
        middle.close()
        again = make(part(1, 8192))
        other = seat.comm.split(0)
        assert getattr(other, kind)(part(1, 8192)).open  # another communicator, another matter
        other.close()
        for registration in (before, after, again):
            registration.close()

    run_ranks(standin, 1, body)


def test_null_window(libraries: Libraries) -> None:
    """Row 87: success and no window."""
    standin = Standin(libraries.build(fault="null_window"), libraries.cuda)

    def body(seat: Seat) -> None:
        memory = nccl.NcclMemory(4096, library=standin.library)
        for _ in range(2):  # the range is not taken by the failure
            with pytest.raises(Unsupported, match="reports success but makes no window"):
                seat.comm.window(memory)

    run_ranks(standin, 1, body)
    assert "CommWindowDeregister" not in standin.log()


def test_failed_registration_leaves_the_range_free(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        memory = nccl.NcclMemory(4096, library=standin.library)
        for function, make in (
            ("ncclCommRegister", seat.comm.register),
            ("ncclCommWindowRegister", seat.comm.window),
        ):
            with standin.failing(function, 5), pytest.raises(nccl.NcclInvalidUsage, match=function):
                make(memory)
            make(memory).close()

    run_ranks(standin, 1, body)


def test_refusals(standin: Standin, libraries: Libraries) -> None:
    def body(seat: Seat) -> None:
        memory = nccl.NcclMemory(2 * 4096, library=standin.library)
        with pytest.raises(InvalidArgument, match="a window starts on 4096 bytes"):
            seat.comm.window(memory.array("uint8", 64, offset=64))
        with pytest.raises(InvalidArgument, match="there is nothing to register"):
            seat.comm.register(memory.array("uint8", 0))
        with pytest.raises(InvalidArgument, match="inside a group"), nccl.group():
            seat.comm.register(memory)
        strided = Array(np.zeros((4, 4))[:, ::2])
        with pytest.raises(InvalidArgument, match="not contiguous"):
            seat.comm.register(strided)

    run_ranks(standin, 1, body)

    old = Standin(libraries.build(22005), libraries.cuda)

    def lacking(seat: Seat) -> None:
        with pytest.raises(Unsupported, match=r"ncclCommWindowRegister is needed.*2\.27\.3"):
            seat.comm.window(nccl.NcclMemory(4096, library=old.library))

    run_ranks(old, 1, lacking)
    assert nccl.nccl_info(old.library)["features"]["ncclCommWindowRegister"] is False  # row 85

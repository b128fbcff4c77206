"""NCCL's failures as exceptions: one class per code, NCCL's own words, groups, what comes after."""

import time

import numpy as np
import pytest

from pyparallel.comm import nccl, premul_sum
from pyparallel.errors import Aborted, Closed, InvalidArgument, NcclError, Timeout, Unsupported
from tests.nccl.harness import Array, Seat, Standin, run_ranks
from tests.nccl.libraries import Libraries

CLASSES = {
    1: nccl.NcclUnhandledCudaError,
    2: nccl.NcclSystemError,
    3: nccl.NcclInternalError,
    4: nccl.NcclInvalidArgument,
    5: nccl.NcclInvalidUsage,
    6: nccl.NcclRemoteError,
    8: nccl.NcclTimeout,
    42: nccl.NcclResultError,  # of a later release
}
FATAL = {1, 2, 3, 6, 8, 42}
NAMES = {5: "ncclInvalidUsage", 6: "ncclRemoteError", 42: "unknown result 42"}


def array(count: int = 4) -> Array:
    return Array(np.zeros(count, np.float32))


@pytest.mark.parametrize("code", CLASSES)
@pytest.mark.parametrize("blocking", [False, True])
def test_code_becomes_class(standin: Standin, code: int, blocking: bool) -> None:
    def body(seat: Seat) -> None:
        x = array()
        with standin.failing("ncclAllReduce", code), pytest.raises(NcclError) as raised:
            seat.comm.all_reduce(x, stream=seat.stream)
        assert type(raised.value) is CLASSES[code]
        assert raised.value.code == code
        text = str(raised.value)
        for part in (
            "communicator tp (rank 0 of 1, device 0): ncclAllReduce(count 4, float32, sum)",
            NAMES.get(code, f"code {code}"),
            "words of the stand-in",
            "NCCL's last error: injected into ncclAllReduce",
            "NCCL 2.32.3 (",
        ):
            assert part in text
        if code in FATAL:
            assert seat.comm.failure == text
            with pytest.raises(Aborted, match="is broken: .*ncclAllReduce"):
                seat.comm.all_reduce(x, stream=seat.stream)
            seat.comm.close()
        else:  # the caller's mistake: the communicator is as good as before
            seat.comm.all_reduce(x, stream=seat.stream)

    run_ranks(standin, 1, body, name="tp", blocking=blocking)


def test_library_without_last_error(libraries: Libraries) -> None:
    old = Standin(libraries.build(21003), libraries.cuda)

    def body(seat: Seat) -> None:
        with old.failing("ncclAllReduce", 5), pytest.raises(nccl.NcclInvalidUsage) as raised:
            seat.comm.all_reduce(array(), stream=seat.stream)
        assert "last error" not in str(raised.value)

    run_ranks(old, 1, body)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6])
def test_failed_init(standin: Standin, code: int) -> None:
    with standin.failing("ncclCommInitRankConfig", code), pytest.raises(CLASSES[code]) as raised:
        run_ranks(standin, 1, lambda seat: None, name="tp")
    assert "creating communicator tp (rank 0 of 1) failed" in str(raised.value)
    assert standin.alive() == 0
    assert "CommAbort" not in standin.log()  # the library has freed it already


@pytest.mark.parametrize("function", ["ncclGetUniqueId", "ncclMemAlloc"])
def test_failures_without_a_communicator(standin: Standin, function: str) -> None:
    calls = {
        "ncclGetUniqueId": lambda: nccl.unique_id(standin.library),
        "ncclMemAlloc": lambda: nccl.NcclMemory(64, library=standin.library),
    }
    with standin.failing(function, 2), pytest.raises(nccl.NcclSystemError, match=function):
        calls[function]()


# --- in the background


@pytest.mark.parametrize("code", [2, 6, 42])
def test_watchdog_finds_background_errors(standin: Standin, code: int) -> None:
    """Nobody calls anything: the communicator is aborted all the same, and says why."""

    def body(seat: Seat) -> None:
        standin.fail_async(code)
        end = time.monotonic() + 10
        while not seat.comm.failure:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert "background work failed" in seat.comm.failure
        assert "injected in the background" in seat.comm.failure
        with pytest.raises(Aborted, match="background work"):
            seat.comm.all_reduce(array(), stream=seat.stream)
        while standin.alive():
            assert time.monotonic() < end
            time.sleep(0.01)
        seat.comm.close()

    run_ranks(standin, 1, body, close=False)
    assert "CommAbort" in standin.log()


def test_check_raises_the_background_error(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        seat.comm.check()
        standin.fail_async(5)  # a usage error: not one that the watchdog acts on
        with pytest.raises(nccl.NcclInvalidUsage, match="background work failed"):
            seat.comm.check()
        standin.fail_async(0)
        seat.comm.check()

    run_ranks(standin, 1, body)


def test_ranks_that_call_different_things(standin: Standin) -> None:
    """The library notices while the work runs; both ranks hear of it, in order and count."""

    def body(seat: Seat) -> None:
        def call() -> None:
            seat.comm.all_reduce(array(4 + seat.rank), stream=seat.stream)
            seat.wait()
            seat.comm.check()

        with pytest.raises(nccl.NcclInvalidUsage):
            call()
        seat.comm.abort()

    run_ranks(standin, 2, body, close=False)


# --- groups


def test_group_is_one_launch(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        xs = [Array(np.full(3, 1.0 + seat.rank)) for _ in range(3)]
        with nccl.group():
            for x in xs:
                seat.comm.all_reduce(x, stream=seat.stream)
            assert seat.comm.sequence == 0  # not launched yet
        assert seat.comm.sequence == 3
        seat.wait()
        assert all((x.values == 3).all() for x in xs)

    run_ranks(standin, 2, body)
    log = standin.log()
    assert log.count("GroupStart") == log.count("GroupEnd") == 2


def test_groups_nest(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        x, y = array(), array()
        with nccl.group():
            with nccl.group():
                seat.comm.all_reduce(x, stream=seat.stream)
            assert seat.comm.sequence == 0
            seat.comm.all_gather(x, array(4), sizes=[4], stream=seat.stream)
            seat.comm.all_reduce(y, stream=seat.stream)
        assert seat.comm.sequence == 3

    run_ranks(standin, 1, body)
    assert standin.log().count("GroupStart") == 1


def test_group_left_by_an_exception_launches_nothing(standin: Standin) -> None:
    """Neither half of an exchange; and the thread's next call is not caught in a stale group."""

    def body(seat: Seat) -> None:
        def broken(error: Exception | None, peer: int) -> None:
            with nccl.group():
                seat.comm.send(array(), peer, stream=seat.stream)
                if error:
                    raise error

        with pytest.raises(KeyError):
            broken(KeyError("in between"), 0)
        with pytest.raises(InvalidArgument, match=r"peer 5 is not in 0\.\.0"):
            broken(None, 5)
        assert seat.comm.sequence == 0
        with nccl.group():
            with pytest.raises(KeyError):
                broken(KeyError("inner only"), 0)
            seat.comm.all_reduce(array(), stream=seat.stream)
        assert seat.comm.sequence == 1

    run_ranks(standin, 1, body)
    log = standin.log()
    assert "Send" not in log
    assert "GroupStart" not in log


@pytest.mark.parametrize("blocking", [False, True])
def test_failure_inside_a_group(standin: Standin, blocking: bool) -> None:
    """The failed call is named; the group is ended, so that the thread can go on."""

    def body(seat: Seat) -> None:
        x = array()

        def grouped() -> None:
            with nccl.group():
                seat.comm.all_reduce(x, stream=seat.stream)
                seat.comm.broadcast(x, 0, stream=seat.stream)

        with standin.failing("ncclBroadcast", 5), pytest.raises(nccl.NcclInvalidUsage) as raised:
            grouped()
        assert "ncclBroadcast(count 4, float32, root 0) failed" in str(raised.value)
        with standin.failing("ncclGroupEnd", 5), pytest.raises(nccl.NcclInvalidUsage) as raised:
            grouped()
        assert "group of 2 calls from ncclAllReduce" in str(raised.value)
        assert seat.comm.sequence == 0
        seat.comm.all_reduce(x, stream=seat.stream)

    run_ranks(standin, 1, body, blocking=blocking)
    log = standin.log()
    assert log.count("GroupStart") == log.count("GroupEnd") == 2


def test_group_over_two_communicators(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        other = seat.comm.split(0, name="second")
        x, y = Array(np.ones(3)), Array(np.ones(3))
        with nccl.group():
            seat.comm.all_reduce(x, stream=seat.stream)
            other.all_reduce(y, stream=seat.stream)
        seat.wait()
        assert (x.values == 2).all()
        assert (y.values == 2).all()
        other.close()

    run_ranks(standin, 2, body)


def test_groups_belong_to_their_thread(standin: Standin) -> None:
    """Another rank's thread is not inside this one's group."""

    def body(seat: Seat) -> None:
        if seat.rank == 0:
            with nccl.group():
                seat.comm.all_reduce(array(), stream=seat.stream)
        else:
            seat.comm.all_reduce(array(), stream=seat.stream)
            assert seat.comm.sequence == 1

    run_ranks(standin, 2, body)


def test_group_keeps_what_it_needs(standin: Standin) -> None:
    """Premultiplied sums and arrays that nobody else holds live until the group is launched."""

    def body(seat: Seat) -> None:
        out = np.zeros(3)
        with nccl.group():
            seat.comm.all_reduce(
                Array(np.ones(3)), premul_sum(2.0), out=Array(out), stream=seat.stream
            )
            seat.comm.broadcast(Array(out), 0, stream=seat.stream)
        seat.wait()
        assert (out == 2).all()

    run_ranks(standin, 1, body)


# --- features


def test_what_the_library_lacks_is_named(libraries: Libraries) -> None:
    old = Standin(libraries.build(2608), libraries.cuda)

    def body(seat: Seat) -> None:
        x = array()
        with pytest.raises(Unsupported, match=r"ncclSend is needed.*came with NCCL 2\.7\.3; found"):
            seat.comm.send(x, 0, stream=seat.stream)
        with pytest.raises(Unsupported, match=r"avg of float32 came with NCCL 2\.10\.3"):
            seat.comm.all_reduce(x, "avg", stream=seat.stream)
        with pytest.raises(Unsupported, match=r"ncclCommShrink is needed"):
            seat.comm.shrink([0])
        with pytest.raises(Unsupported, match=r"ncclCommRegister is needed"):
            seat.comm.register(x)
        half = nccl.RawArray(x.values.ctypes.data, 2, "bfloat16")
        with pytest.raises(Unsupported, match=r"sum of bfloat16 came with NCCL 2\.10\.3"):
            seat.comm.all_reduce(half, stream=seat.stream)
        seat.comm.broadcast(half, 0, stream=seat.stream)  # moved as bytes

    run_ranks(old, 1, body)


# --- use after the end


def test_use_after_close(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        comm = seat.comm
        comm.close()
        comm.close()
        comm.abort()
        for call in (
            lambda: comm.all_reduce(array(), stream=seat.stream),
            lambda: comm.split(0),
            lambda: comm.register(array()),
            lambda: comm.handle,
            comm.check,
        ):
            with pytest.raises(Closed, match="is closed"):
                call()
        assert (comm.closed, comm.rank, comm.size) == (True, 0, 1)
        assert "closed" in repr(comm)

    run_ranks(standin, 1, body, close=False)
    assert standin.log().count("CommDestroy") == 1


def test_use_after_abort(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        seat.comm.abort("enough")
        seat.comm.abort("again")
        with pytest.raises(Aborted, match="is broken: enough"):
            seat.comm.all_reduce(array(), stream=seat.stream)
        seat.comm.close()

    run_ranks(standin, 1, body, close=False)
    assert standin.log().count("CommAbort") == 1


def test_block_left_by_an_exception_aborts(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        with pytest.raises(KeyError), seat.comm:
            raise KeyError("inside")
        assert "left by KeyError" in seat.comm.failure

    run_ranks(standin, 1, body, close=False)
    log = standin.log()
    assert "CommAbort" in log
    assert "CommDestroy" not in log


def test_timeout_class_is_python_s() -> None:
    assert issubclass(Timeout, TimeoutError)
    assert issubclass(nccl.NcclTimeout, TimeoutError)
    assert issubclass(nccl.NcclInvalidArgument, ValueError)

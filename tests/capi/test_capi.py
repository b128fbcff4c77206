"""Every function of the C interface, called through the built library; ranks are threads."""

import ctypes
import re

import numpy as np
import pytest

from pyparallel._version import __version__
from tests.capi.library import (
    DEFAULT_TIMEOUT,
    HEADER,
    VALUES,
    CError,
    Seat,
    call,
    counts,
    lib,
    pointers,
    prototypes,
    unique_id,
)
from tests.comm.threads import in_threads

F32, F64, I64 = VALUES["FLOAT32"], VALUES["FLOAT64"], VALUES["INT64"]
SUM, AVG, MAX, PREMUL = (VALUES[name] for name in ("SUM", "AVG", "MAX", "PREMUL_SUM"))
LATER = DEFAULT_TIMEOUT


def ranks(size: int, body) -> list:
    id = unique_id()

    def rank(number: int):
        seat = Seat(id, number, size)
        try:
            return body(seat)
        finally:
            call("destroy", ctypes.byref(seat.handle))
            assert seat.handle.value is None

    return in_threads([lambda r=r: rank(r) for r in range(size)])


def values(count: int, rank: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(count)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


# --- the library


def test_every_function_of_the_header_is_exported_and_tested_here():
    names = set(prototypes())
    assert len(names) > 40
    assert all(hasattr(lib, name) for name in names)
    with open(__file__) as file:  # noqa: PTH123
        source = file.read()
    with open(__file__.replace("test_capi", "library")) as file:  # noqa: PTH123
        source += file.read()
    unused = [n for n in names if f'"{n.removeprefix("pyparallel_")}"' not in source
              and f"lib.{n}" not in source]  # fmt: skip
    assert not unused


def test_versions_names_and_sizes():
    assert lib.pyparallel_version().decode() == __version__
    major, minor = ctypes.c_int32(), ctypes.c_int32()
    lib.pyparallel_abi_version(ctypes.byref(major), ctypes.byref(minor))
    assert f"#define PYPARALLEL_ABI_MAJOR {major.value}" in HEADER
    assert f"#define PYPARALLEL_ABI_MINOR {minor.value}" in HEADER
    assert lib.pyparallel_status_name(3) == b"timeout"
    assert lib.pyparallel_status_name(-1) == lib.pyparallel_status_name(99) == b"unknown status"
    sizes = [lib.pyparallel_dtype_size(code) for code in range(-1, 11)]
    assert sizes == [0, 8, 4, 2, 2, 1, 2, 4, 8, 1, 1, 0]


def test_every_status_has_a_name():
    names = [lib.pyparallel_status_name(code).decode() for code in range(14)]
    assert "unknown status" not in names
    assert len(set(names)) == 14


# --- collectives


def reductions(seat: Seat) -> None:
    inputs = [values(1000, r) for r in range(seat.size)]
    total = sum(inputs[1:], inputs[0])
    out = np.full(1000, np.nan)
    seat("all_reduce", address(inputs[seat.rank]), address(out), 1000, F64, SUM, 1.0, LATER)
    assert np.array_equal(out, total)
    x = inputs[seat.rank].copy()
    seat("all_reduce", address(x), address(x), 1000, F64, PREMUL, 2.0, LATER)
    assert np.array_equal(x, 2 * total)
    seat("all_reduce", None, None, 0, F64, SUM, 1.0, LATER)
    out[:] = np.nan
    seat("reduce", address(inputs[seat.rank]), address(out), 1000, F64, MAX, 1.0, 1, LATER)
    if seat.rank == 1:
        assert np.array_equal(out, np.max(inputs, axis=0))
    else:
        assert np.isnan(out).all()
    wide = [values(4 * seat.size, 10 + r) for r in range(seat.size)]
    total = sum(wide[1:], wide[0])
    mine = np.full(4, np.nan)
    seat("reduce_scatter", address(wide[seat.rank]), address(mine), 4, F64, SUM, 1.0, LATER)
    assert np.array_equal(mine, total.reshape(-1, 4)[seat.rank])
    sizes = [2 * r for r in range(seat.size)]
    pieces = [values(n, 20 + seat.rank) for n in sizes]
    mine = np.full(sizes[seat.rank], np.nan)
    seat("reduce_scatter_v", pointers(*pieces), counts(*sizes), address(mine), F64, SUM, 1.0, LATER)
    theirs = [values(sizes[seat.rank], 20 + r) for r in range(seat.size)]
    assert np.array_equal(mine, sum(theirs[1:], theirs[0]))


def moves(seat: Seat) -> None:
    me, size = seat.rank, seat.size
    x = values(5, me)
    everything = np.concatenate([values(5, r) for r in range(size)])
    out = np.full(5 * size, np.nan)
    seat("all_gather", address(x), address(out), 5, F64, LATER)
    assert np.array_equal(out, everything)
    sizes = list(range(size))
    outs = [np.full(n, np.nan) for n in sizes]
    mine = values(me, me)
    seat("all_gather_v", address(mine), pointers(*outs), counts(*sizes), F64, LATER)
    for r in range(size):
        assert np.array_equal(outs[r], values(r, r))

    sent = np.arange(3.0 * size) + 100 * me
    got = np.full(3 * size, np.nan)
    seat("all_to_all", address(sent), address(got), 3, F64, LATER)
    expected = [np.arange(3.0 * size)[3 * me : 3 * me + 3] + 100 * r for r in range(size)]
    assert np.array_equal(got, np.concatenate(expected))
    pieces = [values(me + r, 50 + me) for r in range(size)]
    outs = [np.full(me + r, np.nan) for r in range(size)]
    both = counts(*(me + r for r in range(size)))
    seat("all_to_all_v", pointers(*pieces), both, pointers(*outs), both, F64, LATER)
    for r in range(size):
        assert np.array_equal(outs[r], values(me + r, 50 + r))

    x = values(7, 1) if me == 1 else np.full(7, np.nan)
    seat("broadcast", address(x), 7, F64, 1, LATER)
    assert np.array_equal(x, values(7, 1))
    whole = values(5 * size, 3)
    mine = np.full(5, np.nan)
    seat("scatter", address(whole) if me == 0 else None, address(mine), 5, F64, 0, LATER)
    assert np.array_equal(mine, whole.reshape(-1, 5)[me])
    back = np.full(5 * size, np.nan)
    seat("gather", address(mine), address(back) if me == 2 else None, 5, F64, 2, LATER)
    assert me != 2 or np.array_equal(back, whole)
    pieces = [values(n, 4) for n in sizes]
    mine = np.full(me, np.nan)
    args = (pointers(*pieces), counts(*sizes)) if me == 0 else (None, None)
    seat("scatter_v", *args, address(mine), me, F64, 0, LATER)
    assert np.array_equal(mine, values(me, 4))
    outs = [np.full(n, np.nan) for n in sizes]
    args = (pointers(*outs), counts(*sizes)) if me == 0 else (None, None)
    seat("gather_v", address(mine), me, *args, F64, 0, LATER)
    assert me != 0 or all(np.array_equal(outs[r], values(r, 4)) for r in range(size))
    seat("barrier", LATER)


@pytest.mark.parametrize("body", [reductions, moves])
def test_collectives(body):
    ranks(3, body)


# --- messages


def messages(seat: Seat) -> None:
    peer, request = 1 - seat.rank, ctypes.c_void_p()
    x, y = values(500, seat.rank), np.full(500, np.nan)
    source, done = ctypes.c_int32(-7), ctypes.c_int32()
    seat("send", address(x), 500, F64, peer, 4, LATER)
    seat("recv", address(y), 500, F64, -1, 4, LATER, ctypes.byref(source))
    assert source.value == peer
    assert np.array_equal(y, values(500, peer))
    y[:] = np.nan
    seat("irecv", address(y), 500, F64, peer, 9, ctypes.byref(request))
    sending = ctypes.c_void_p()
    seat("isend", address(x), 500, F64, peer, 9, ctypes.byref(sending))
    call("wait", request, LATER, ctypes.byref(source))
    call("wait", sending, LATER, None)
    call("test", request, ctypes.byref(done))
    assert (done.value, source.value) == (1, peer)
    assert np.array_equal(y, values(500, peer))
    for handle in (request, sending):
        call("request_free", ctypes.byref(handle))
        call("request_free", ctypes.byref(handle))
        assert handle.value is None
    seat("irecv", address(y), 500, F64, peer, 10, ctypes.byref(request))
    call("test", request, ctypes.byref(done))
    assert done.value == 0
    with pytest.raises(CError, match=r"timeout: recv from rank \d \(tag 10, 500 float64\)"):
        call("wait", request, 100, None)
    call("test", request, ctypes.byref(done))
    assert done.value == 1
    call("request_free", ctypes.byref(request))


def test_messages():
    ranks(2, messages)


# --- life


def facts(seat: Seat) -> None:
    number, big = ctypes.c_int32(), ctypes.c_uint64()
    seat("rank", ctypes.byref(number))
    assert number.value == seat.rank
    seat("size", ctypes.byref(number))
    assert number.value == 2
    seat("pid", 1, ctypes.byref(number))
    import os

    assert number.value == os.getpid()
    before = ctypes.c_uint64()
    seat("sequence", ctypes.byref(before))
    seat("barrier", LATER)
    seat("sequence", ctypes.byref(big))
    assert big.value == before.value + 1
    ms = ctypes.c_int64()
    seat("get_timeout", ctypes.byref(ms))
    assert ms.value == 20_000
    seat("set_timeout", 15_000)
    seat("get_timeout", ctypes.byref(ms))
    assert ms.value == 15_000
    text, needed = ctypes.create_string_buffer(8), ctypes.c_size_t()
    seat("failure", text, 8, ctypes.byref(needed))
    assert (text.value, needed.value) == (b"", 1)

    part = ctypes.c_void_p()
    seat("split", 0, -seat.rank, None, ctypes.byref(part))
    call("rank", part, ctypes.byref(number))
    assert number.value == 1 - seat.rank
    call("barrier", part, LATER)
    call("destroy", ctypes.byref(part))
    part = ctypes.c_void_p(1)
    seat("split", -1, 0, b"none", ctypes.byref(part))
    assert part.value is None

    seat("barrier", LATER)
    seat("abort", b"no more")
    with pytest.raises(CError, match="aborted: .*no more"):
        seat("barrier", LATER)
    seat("failure", text, 8, ctypes.byref(needed))
    assert len(text.value) == 7  # cut, and ended
    whole = ctypes.create_string_buffer(needed.value)
    seat("failure", whole, needed.value, None)
    assert b"no more" in whole.value
    seat("close")
    seat("close")
    with pytest.raises(CError, match="closed"):
        seat("all_reduce", None, None, 0, F32, SUM, 1.0, LATER)


def test_life():
    ranks(2, facts)


# --- errors


def refusals(seat: Seat) -> list[str]:
    """Rank 0 passes what cannot work; rank 1 hears the reason."""
    x = np.ones(4)
    p = address(x)
    good = ("all_reduce", p, p, 4, F64, SUM, 1.0, LATER)
    said = []
    for bad in (
        ("all_reduce", None, p, 4, F64, SUM, 1.0, LATER),
        ("all_reduce", p, None, 4, F64, SUM, 1.0, LATER),
        ("all_reduce", p, p, 4, 99, SUM, 1.0, LATER),
        ("all_reduce", p, p, 4, F64, -5, 1.0, LATER),
        ("all_reduce", p, p, 4, F64, SUM, 1.0, -2),
        ("all_reduce", p, p, 4, F64, VALUES["BXOR"], 1.0, LATER),
        ("reduce_scatter_v", None, counts(4, 4), p, F64, SUM, 1.0, LATER),
        ("all_gather_v", p, pointers(x, x), None, F64, LATER),
        ("broadcast", p, 4, F64, 7, LATER),
        ("split", 0, 0, None, None),
    ):
        with pytest.raises(CError) as caught:
            seat(*(bad if seat.rank == 0 else good))
        expected = "INVALID_ARGUMENT" if seat.rank == 0 else "MISMATCH"
        assert caught.value.status == VALUES[expected], (bad, caught.value)
        said.append(caught.value.text)
    seat("refuse", b"all_reduce", b"not today") if seat.rank == 0 else None
    if seat.rank == 1:
        with pytest.raises(CError, match="mismatch: .*not today"):
            seat(*good)
    seat(*good)
    return said


def test_a_bad_argument_fails_all_ranks_at_once():
    mine, theirs = ranks(2, refusals)
    for part, text in zip(
        [
            "in is NULL, but 4 elements",
            "out is NULL, but 4 elements",
            "unknown dtype 99; known are 0 to 9",
            "unknown operation -5; known are 0 to 8",
            "timeout of -2 ms",
            "bxor is not defined on float64",
            "in is NULL",
            "the array of counts is NULL",
            "root 7",
            "part is NULL",
        ],
        mine,
        strict=True,
    ):
        assert part in text
    for text, other in zip(mine, theirs, strict=True):
        assert "rank 0" in other
        assert re.sub(r".*: ", "", text) in other


def test_handles_that_are_none():
    for name, args in (
        ("barrier", (None, LATER)),
        ("rank", (None, None)),
        ("wait", (None, LATER, None)),
        ("destroy", (None,)),
        ("get_unique_id", (None,)),
        ("join", (None, 0, 1, None, LATER, None)),
        ("symmetric_barrier", (None, LATER)),
    ):
        with pytest.raises(CError, match=r"invalid argument: .*NULL"):
            call(name, *args)
    nothing = ctypes.c_void_p()
    call("destroy", ctypes.byref(nothing))
    call("request_free", ctypes.byref(nothing))
    call("symmetric_destroy", ctypes.byref(nothing))


def test_a_failed_join_changes_no_handle():
    handle = ctypes.c_void_p(123)
    with pytest.raises(CError, match="timeout: .*absent after 0.1 s: rank 1"):
        call("join", unique_id(), 0, 2, b"alone", 100, ctypes.byref(handle))
    assert handle.value == 123


def test_the_last_error_belongs_to_the_thread():
    def fail(text: str) -> str:
        with pytest.raises(CError):
            call("join", unique_id(), int(text), 1, None, LATER, ctypes.byref(ctypes.c_void_p()))
        return lib.pyparallel_last_error().decode()

    texts = in_threads([lambda n=n: fail(str(n)) for n in range(1, 9)])
    for n, text in enumerate(texts, 1):
        assert f"rank {n} " in text


# --- symmetric memory


def symmetric(seat: Seat) -> None:
    me, peer = seat.rank, 1 - seat.rank
    memory, offset, data = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    seat("symmetric_create", 1 << 16, -1, b"heap", LATER, ctypes.byref(memory))
    call("symmetric_allocate", memory, 800, 256, LATER, ctypes.byref(offset))
    assert offset.value % 256 == 0
    views = []
    for rank in range(2):
        call("symmetric_data", memory, rank, ctypes.byref(data))
        array = (ctypes.c_double * 100).from_address(data.value + offset.value)
        views.append(np.frombuffer(array))
    views[peer][:] = values(100, me)  # written straight into the other rank's memory
    call("symmetric_put_signal", memory, peer, 0)
    call("symmetric_wait_signal", memory, peer, 0, LATER)
    assert np.array_equal(views[me], values(100, peer))
    call("symmetric_barrier", memory, LATER)
    p = address(views[me])
    seat("all_reduce", p, p, 100, F64, SUM, 1.0, LATER)
    assert np.array_equal(views[me], values(100, peer) + values(100, me))
    with pytest.raises(CError, match="rank is 2; expected 0 to 1"):
        call("symmetric_data", memory, 2, ctypes.byref(data))
    with pytest.raises(CError, match="invalid argument|mismatch"):
        call("symmetric_allocate", memory, 8, 8, LATER, None if me == 0 else ctypes.byref(offset))
    call("symmetric_release", memory, offset, LATER)
    with pytest.raises(CError, match="timeout"):
        call("symmetric_wait_signal", memory, peer, 1, 20)
    seat("barrier", LATER)
    call("symmetric_destroy", ctypes.byref(memory))
    assert memory.value is None


def test_symmetric_memory():
    ranks(2, symmetric)

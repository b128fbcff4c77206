"""Set, wait and peer pointer: the only place of the Triton kernels where memory order is spelled.

A flag is one 64-bit word on a line of its own: call number << 32 | signature. The call number grows
by one per call on a workspace and is never cleared; it is compared by signed difference, so it may
wrap. The signature (31 bits, `signature_of`) stands for all that ranks must agree on: a reader that
meets another one stops instead of reading with the wrong sizes.

    publish    what the whole program stored before it is visible to whoever consumes the flag
    consume    waits for the flag; then the whole program may load what was published

A wait ends at its deadline (time, not polls), when the host sets `ABORT` on the status page, and
when another program of this rank has failed. The first that fails writes the status page; `failed`
then stops all waits, and later launches on the workspace. The host reads the page with
`read_failure` or `raise_failure`.
"""

import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

LINE_BYTES = 128
LINE = LINE_BYTES // 8  # int64 words between words that different ranks poll
_LINE = tl.constexpr(LINE)


@triton.jit
def _probe():
    pass


# True in Triton's interpreter (TRITON_INTERPRET=1 when this module was imported).
INTERPRETED = tl.constexpr(not isinstance(_probe, triton.runtime.JITFunction))

# Words of the status page (int64). The kernels write all but ABORT; STATE is written last.
STATE = tl.constexpr(0)
ABORT = tl.constexpr(1)
STEP = tl.constexpr(2)
PEER = tl.constexpr(3)
EXPECTED = tl.constexpr(4)
SEEN = tl.constexpr(5)
WAITED_NS = tl.constexpr(6)
STATUS_WORDS = 16

TIMED_OUT = tl.constexpr(1)
MISMATCHED = tl.constexpr(2)
ABORTED = tl.constexpr(3)

POLLS_PER_LOOK = tl.constexpr(16)  # a look at clock, failure and abort costs as much as polls


# --- device helpers with inline assembly, and what the interpreter runs instead

if INTERPRETED.value:

    def clock_ns():
        return tl.full((), time.monotonic_ns(), tl.int64)

    def _pause(polls):
        time.sleep(0 if polls < 4 else 0.003)  # the peers may need this core

    def fence_descriptor_reads():
        pass

else:

    @triton.jit
    def clock_ns():
        """Nanoseconds of a clock that all multiprocessors share. Differs between threads!"""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def _pause(polls):
        tl.inline_asm_elementwise(
            "nanosleep.u32 40; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def fence_descriptor_reads():
        """Between a consume and loads by descriptor of what it let us see.

        Descriptors read through the async proxy; what ordinary stores of another program or rank
        wrote is ordered before such reads only by this fence.
        """
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# --- addresses


@triton.jit
def peer_pointer(table, peer, offset, dtype: tl.constexpr):
    """The address `offset` bytes into the workspace of `peer`; table: int64 [world] of addresses.

    Offsets are multiples of 16, as all of a layout's are, and workspaces are aligned to lines. The
    hint must follow the cast: one on the integer is lost (triton 3.8), and each element is then
    stored alone, by an address of its own.
    """
    address = tl.load(table + peer) + offset
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def flag_word(call, signature):
    """The word that says: call number `call`, of this signature."""
    return (call.to(tl.int64) << 32) + signature


# --- set


@triton.jit
def publish(flag, word):
    """Sets a flag that this program alone writes, after all that the whole program stored."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, word, sem="release", scope="sys")


@triton.jit
def publish_add(counter):
    """Adds 1 to a counter that several programs raise, after all that the program stored."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def take_ticket(counter):
    """How many programs of this launch took a ticket before: orders programs of one rank only."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


# --- wait


@triton.jit
def add_unordered(pointers, values, mask):
    """A sum that several programs add to, in any order; it is whole when the launch has ended."""
    tl.atomic_add(pointers, values, mask, sem="relaxed")


@triton.jit
def load_anew(pointer):
    """What lies there, loaded again wherever this is called; it orders nothing."""
    return tl.load(pointer, volatile=True)


@triton.jit
def load_acquire(word):
    """One look at a word that peers set: what was published before it may be read after."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def calls_ahead(seen, word):
    """How many calls the flag is ahead of the word's call; negative: not there yet."""
    return (seen - (word & -4294967296)) >> 32


@triton.jit
def has_failed(failed):
    """Whether a wait of this rank has failed, now or in an earlier launch."""
    return tl.atomic_add(failed, 0, sem="relaxed", scope="gpu") != 0


@triton.jit
def consume(flag, word, failed, status, step, peer, timeout_us):
    """Waits until `flag` says the call of `word` or a later one. True: go on; False: stop at once.

    flag: int64, set by `peer`. failed: int64 of this rank's workspace. status: the page.
    step: a number that names this wait to the host (the caller's list of waits).

    Trap: the clock and the abort word are read by every thread, with different results, and
    a loop that threads leave at different polls hangs in the barriers inside. Only results of
    scalar atomics are alike in all threads (one thread does them and hands the result round), so
    what a thread finds goes into an atomic's operand, and only what atomics return decides.
    """
    me = tl.program_id(0) + 1
    started = clock_ns()
    limit_ns = tl.cast(timeout_us, tl.int64) * 1000
    seen = load_acquire(flag)
    stopped = (seen * 0).to(tl.int32)
    polls = 0
    while (calls_ahead(seen, word) < 0) & (stopped == 0):
        polls += 1
        _pause(polls)
        if polls % POLLS_PER_LOOK == 0:
            late = clock_ns() - started > limit_ns
            late = late | (tl.load(status + ABORT, volatile=True) != 0)
            stopped = _claim(failed, tl.where(late, me, 0))
        seen = load_acquire(flag)
    if polls >= POLLS_PER_LOOK:  # what the last look put in may not have been handed round yet
        stopped = _claim(failed, me * 0)
    if stopped == me:
        aborted = tl.load(status + ABORT, volatile=True) != 0
        state = tl.where(aborted, ABORTED, TIMED_OUT)
        _record(status, state, step, peer, word, seen, clock_ns() - started)
    ahead = calls_ahead(seen, word)
    differs = (ahead == 0) & (seen != word)
    if differs & (stopped == 0):  # noqa: SIM102  (`and` of tensors takes no short cut)
        if _claim(failed, me) == 0:
            _record(status, MISMATCHED, step, peer, word, seen, clock_ns() - started)
    return (ahead >= 0) & (stopped == 0) & (differs == 0)


@triton.jit
def consume_all(
    flags,
    peers,
    peer_words,
    each,
    word,
    failed,
    status,
    step,
    first_peer,
    timeout_us,
    LANES: tl.constexpr,
):
    """`consume` of peers * each flags at once: one latency, not one after another.

    Flag j of peer first_peer + i lies i * peer_words + j * LINE words behind `flags`. LANES: the
    threads of the program, so that each polls a flag of its own. Only minima over all lanes decide,
    and those are alike in all threads (the trap of `consume`).
    """
    me = tl.program_id(0) + 1
    # tl.to_tensor is newer than triton 3.5.
    count = tl.core.to_tensor(peers * each).to(tl.int32)
    started = clock_ns()
    limit_ns = tl.cast(timeout_us, tl.int64) * 1000
    go_on = count >= 0
    for first in range(0, count, LANES):
        if go_on:
            lane = first + tl.arange(0, LANES)
            mine = lane < count
            pointers = flags + (lane // each).to(tl.int64) * peer_words + (lane % each) * _LINE
            nothing = tl.zeros((LANES,), tl.int64)
            seen = tl.atomic_add(pointers, nothing, mask=mine, sem="acquire", scope="sys")
            ahead = tl.where(mine, calls_ahead(seen, word), 0)
            least = tl.min(ahead, axis=0)
            stopped = (least * 0).to(tl.int32)
            polls = 0
            while (least < 0) & (stopped == 0):
                polls += 1
                _pause(polls)
                if polls % POLLS_PER_LOOK == 0:
                    late = clock_ns() - started > limit_ns
                    late = late | (tl.load(status + ABORT, volatile=True) != 0)
                    stopped = _claim(failed, tl.where(late, me, 0))
                seen = tl.atomic_add(pointers, nothing, mask=mine, sem="acquire", scope="sys")
                ahead = tl.where(mine, calls_ahead(seen, word), 0)
                least = tl.min(ahead, axis=0)
            if polls >= POLLS_PER_LOOK:  # as in `consume`
                stopped = _claim(failed, me * 0)
            differs = mine & (ahead == 0) & (seen != word)
            differ = tl.max(differs.to(tl.int32), axis=0)
            go_on = (least >= 0) & (differ == 0) & (stopped == 0)
            if stopped == me:
                at = tl.argmin(ahead, axis=0)
                told = tl.sum(tl.where(lane == first + at, seen, 0), axis=0)
                aborted = tl.load(status + ABORT, volatile=True) != 0
                state = tl.where(aborted, ABORTED, TIMED_OUT)
                peer = first_peer + (first + at) // each
                _record(status, state, step, peer, word, told, clock_ns() - started)
            elif (differ != 0) & (stopped == 0):  # noqa: SIM102
                if _claim(failed, me) == 0:
                    at = tl.argmax(differs.to(tl.int32), axis=0)
                    told = tl.sum(tl.where(lane == first + at, seen, 0), axis=0)
                    peer = first_peer + (first + at) // each
                    _record(status, MISMATCHED, step, peer, word, told, clock_ns() - started)
    tl.debug_barrier()  # every thread's acquire comes before any thread's loads
    return go_on


@triton.jit
def _claim(failed, claim):
    """What `failed` was, alike in all threads; it becomes the first claim that is not 0.

    In 32 bits: of a scalar 64-bit compare-and-swap triton 3.4 hands half of the result round.
    """
    word = failed.to(tl.pointer_type(tl.int32))
    return tl.atomic_cas(word, tl.full((), 0, tl.int32), claim, sem="relaxed", scope="gpu")


@triton.jit
def _record(status, state, step, peer, expected, seen, waited):
    tl.store(status + STEP, step)
    tl.store(status + PEER, peer)
    tl.store(status + EXPECTED, expected)
    tl.store(status + SEEN, seen)
    tl.store(status + WAITED_NS, waited)
    tl.debug_barrier()
    tl.atomic_xchg(status + STATE, state, sem="release", scope="sys")


# --- host


def signature_of(*facts: Any) -> int:
    """31 bits that stand for what ranks must agree on (sizes, dtypes, chunks), never 0."""
    return (zlib.crc32(repr(facts).encode()) & 0x7FFFFFFF) or 1


def new_status(device: "torch.device | str" = "cpu") -> torch.Tensor:
    """A status page, all zero; pinned host memory where kernels run on CUDA (readable at once)."""
    pinned = torch.device(device).type == "cuda"
    return torch.zeros(STATUS_WORDS, dtype=torch.int64, pin_memory=pinned)


@dataclass(frozen=True)
class Failure:
    """Why the kernels of a rank stopped."""

    state: str  # "timed out", "mismatched", "aborted"
    step: int  # which wait, in the kernel's own numbering
    peer: int
    call: int  # number of the call on the workspace, from 1
    expected: int  # flag words
    seen: int
    waited_s: float

    def text(self, op: str, group: str, steps: "tuple[str, ...]" = ()) -> str:
        """The sentence for an error. steps: the kernel's names of its waits."""
        step = steps[self.step] if self.step < len(steps) else f"wait {self.step}"
        where = f"{op} #{self.call}, group {group}: {step}"
        calls = f"expected call {self.call}, seen {_call_of(self.seen)}"
        if self.state == "mismatched":
            return (
                f"{where}: rank {self.peer} runs call {_call_of(self.seen)} with other sizes, "
                f"dtype or chunks (signature {self.seen & 0xFFFFFFFF:#x}, ours "
                f"{self.expected & 0xFFFFFFFF:#x}); all ranks must pass the same"
            )
        if self.state == "aborted":
            return f"{where}: aborted while waiting for rank {self.peer} ({calls})"
        return f"{where}: rank {self.peer} absent after {self.waited_s:.1f} s ({calls})"


class DeviceWaitError(RuntimeError):
    """A wait inside a kernel failed; `failure` has the record."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure


def read_failure(status: torch.Tensor) -> "Failure | None":
    """What the kernels wrote on the status page; None while all is well.

    On CUDA the page tells about kernels that have ended: synchronise first.
    """
    page = status.tolist()
    if page[STATE.value] == 0:
        return None
    names = {TIMED_OUT.value: "timed out", MISMATCHED.value: "mismatched"}
    return Failure(
        state=names.get(page[STATE.value], "aborted"),
        step=page[STEP.value],
        peer=page[PEER.value],
        call=_call_of(page[EXPECTED.value]),
        expected=page[EXPECTED.value],
        seen=page[SEEN.value],
        waited_s=page[WAITED_NS.value] / 1e9,
    )


def raise_failure(status: torch.Tensor, op: str, group: str, steps: "tuple[str, ...]" = ()) -> None:
    """Raises DeviceWaitError if a wait of this rank's kernels has failed."""
    failure = read_failure(status)
    if failure is not None:
        raise DeviceWaitError(failure.text(op, group, steps), failure)


def _call_of(word: int) -> int:
    return (word >> 32) & 0xFFFFFFFF

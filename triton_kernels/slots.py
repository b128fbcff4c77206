"""Partial sums in slots: the memory that GEMM + reduce-scatter and GEMM + all-reduce share.

What lies in the workspace of a rank, alike on all ranks (`SlotLayout`):

    words     failed, call of the push, call of the sum: this rank's own, a line each
    started   [world]: set by each source when it begins a call
    pushed    [world, tiles]: set by source s when a tile of the result lies in its slot here
    ready     [world, tiles]: set by owner o when a tile of its part of the result lies here
    slots     [2, world, rows, n]: partial sums, by source; read by this rank
    results   [2, result_rows, n]: finished tiles of all owners, where those send them round

A call is one launch that multiplies and pushes, then one or two that sum and collect. Calls are
counted in the words by the kernels themselves, so that a captured graph can be replayed: the push
reads one word, which the last launch sets, and the others read the other, which the push sets.
"""

# Protocol "slots": 64-bit flags, call << 32 | signature, only grow, never cleared; p = this call
#   writer    source s stores a tile into slot s of buffer p % 2, then sets pushed[s][tile] to p; an
#             owner stores a finished tile into all results p % 2, then sets ready[owner][tile]
#   reader    a sum waits for pushed[s][tile] of all s to be p, then reads; a collect for ready
#   reuse     a push waits until the reader's started is p - 1: launches of a rank follow each
#             other, so whoever began call p - 1 has read all of call p - 2, the last in the buffer.
#             An owner that sends round has seen tiles of call p from all, who have begun it
#   progress  a push waits for calls before p only; a sum for pushes of p, a collect for sums of p:
#             launches before them on every rank. No launch waits for a program of its own grid

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from .signals import LINE, LINE_BYTES, consume_all, peer_pointer

FAILED = tl.constexpr(0)  # words of a rank's own, in lines
PUSH_CALL = tl.constexpr(1)
SUM_CALL = tl.constexpr(2)
OWN_WORDS = 4

# What the kernels wait for, by the number in the status page.
STEPS = ("begin of the call before", "partial sums", "finished tiles")
WAIT_STARTED = tl.constexpr(0)
WAIT_PUSHED = tl.constexpr(1)
WAIT_READY = tl.constexpr(2)

LINE_STEP = tl.constexpr(LINE_BYTES)
LINE_WORDS = tl.constexpr(LINE)

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class SlotLayout:
    """Sizes and offsets in bytes of one workspace; all of it the same on all ranks.

    Args:
        world: ranks.
        rows: the most rows of a slot: of one owner's part, or of the whole result if all ranks
            sum all of it.
        n: columns, exactly.
        tiles: the most tiles that `rows` are cut into (`tiles_of`), for the smallest tile in use.
        slot_dtype: of partial sums. fp32 rounds once, in the end; 16 bits halve the traffic.
        result_rows: rows of finished results that are sent round; 0 if none are.
        result_dtype: of those.
    """

    world: int
    rows: int
    n: int
    tiles: int
    slot_dtype: torch.dtype = torch.float32
    result_rows: int = 0
    result_dtype: torch.dtype = torch.float32

    @cached_property
    def started(self) -> int:
        return OWN_WORDS * LINE_BYTES

    @cached_property
    def pushed(self) -> int:
        return self.started + self.world * LINE_BYTES

    @cached_property
    def ready(self) -> int:
        return self.pushed + self.world * self.tiles * LINE_BYTES

    @cached_property
    def slots(self) -> int:
        ready = self.world * self.tiles * LINE_BYTES if self.result_rows else 0
        return self.ready + ready

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one source's slot."""
        return _lines(self.rows * self.n * self.slot_dtype.itemsize)

    @cached_property
    def results(self) -> int:
        return self.slots + 2 * self.world * self.slot_bytes

    @cached_property
    def result_bytes(self) -> int:
        """Bytes of one of the two results."""
        return _lines(self.result_rows * self.n * self.result_dtype.itemsize)

    @cached_property
    def nbytes(self) -> int:
        return self.results + 2 * self.result_bytes

    def constants(self, *names: str) -> dict[str, int]:
        """What kernels take of it as constexpr: as arguments they cost registers all along."""
        return {name.upper(): getattr(self, name) for name in names}

    def check(self, op: str, rows: int, n: int, tiles: int, result_rows: int = 0) -> None:
        """Raises ValueError if a call does not fit; alike on all ranks, before any launch."""
        asked = {"rows": rows, "tiles": tiles, "result_rows": result_rows}
        wrong = [
            f"{name} {value}, the workspace has {getattr(self, name)}"
            for name, value in asked.items()
            if value > getattr(self, name)
        ]
        if n != self.n:
            wrong.insert(0, f"n {n}, the workspace is for {self.n}")
        if wrong:
            raise ValueError(f"{op}: {'; '.join(wrong)}: make a larger workspace on all ranks")


def tiles_of(rows: int, n: int, block_m: int, block_n: int) -> int:
    """How many tiles (and flags per source) a part of the result takes."""
    return -(-rows // block_m) * -(-n // block_n)


def even_sizes(rows: int, world: int, block_m: int = 1) -> list[int]:
    """`rows` in as many parts as ranks, whole tiles as far as they go."""
    tiles = -(-rows // block_m)
    ends = [min(rows, block_m * (tiles * (r + 1) // world)) for r in range(world)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES


# --- device


@triton.jit
def own_word(table, rank, word):
    """The address of one of this rank's own words."""
    return peer_pointer(table, rank, word * LINE_STEP, tl.int64)


@triton.jit
def flag_of(table, peer, start, source, tile, tiles):
    """On `peer`: the flag of (source, tile) in the table of flags that begins at byte `start`."""
    offset = (source.to(tl.int64) * tiles + tile) * LINE_STEP
    return peer_pointer(table, peer, start + offset, tl.int64)


@triton.jit
def consume_tiles(
    table,
    rank,
    world,
    PUSHED: tl.constexpr,
    tile,  # the first of `count` neighbours
    count,
    TILES: tl.constexpr,
    word,
    failed,
    status,
    timeout_us,
    THREADS: tl.constexpr,
):
    """Waits until every source has pushed these tiles of our part; whether all did."""
    flags = flag_of(table, rank, PUSHED, tl.core.to_tensor(0), tile, TILES)
    return consume_all(
        *(flags, world, TILES * LINE_WORDS, count, word, failed, status),
        *(WAIT_PUSHED, 0, timeout_us, THREADS),
    )

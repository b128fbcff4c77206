"""What lies where in the workspace of all_gather_gemm.py, and how a call is cut.

Pure functions of values that all ranks share: sizes of shards, bytes of a row, the layout.
"""

from dataclasses import dataclass, replace

import torch
import triton.language as tl

from .gemm import TileConfig
from .signals import LINE_BYTES, signature_of
from .tile_order import chunk_count, on_host

ALIGNMENT = 256  # of data, in bytes: descriptors want 16, copies like more

# Words of the first line, which only this rank's programs touch.
CALL = tl.constexpr(0)  # number of the last call that began
WORD = tl.constexpr(1)  # its flag word
USED = tl.constexpr(2)  # [buffers]: the last call that wrote each buffer


@dataclass(frozen=True)
class AllGatherLayout:
    """Offsets in bytes.

    field      written by                    read by                  what
    control    own opening                   own kernels and copies   CALL, WORD, USED
    failed     own kernels                   own kernels              not 0: a wait has failed
    pushed     source                        own tiles                [source][chunk]: rows are here
    pulled     own pullers                   own tiles                [source][chunk]: rows are here
    ready      source                        own pullers              [source]: its rows may be read
    done       reader                        own opening              [reader]: its calls that ended
    scales     as the rows they belong to                             [buffer][row] fp32
    rows       own launcher, source (push),  own tiles, and pullers   [buffer][row][K]
               own pullers                   of peers

    Each flag has one writer. (One array for both ways of moving lost flags where they took turns:
    a source may push for call p + 1 before our own puller has set the flag of call p.)
    """

    world: int
    row_bytes: int  # bytes of rows that one buffer holds: rows of all shards * K * itemsize
    max_rows: int  # of all shards together
    max_chunks: int = 16  # of one shard
    buffers: int = 2

    def __post_init__(self) -> None:
        smallest = {"world": 1, "row_bytes": 0, "max_rows": 0, "max_chunks": 1, "buffers": 1}
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if self.buffers > LINE_BYTES // 8 - USED.value:
            raise ValueError(f"{self.buffers} buffers; 1 to {LINE_BYTES // 8 - USED.value} fit")

    control = 0
    failed = LINE_BYTES

    def pushed(self, source: int, chunk: int) -> int:
        return 2 * LINE_BYTES + (source * self.max_chunks + chunk) * LINE_BYTES

    def pulled(self, source: int, chunk: int) -> int:
        return self.pushed(self.world, 0) + (source * self.max_chunks + chunk) * LINE_BYTES

    @property
    def ready(self) -> int:
        return self.pulled(self.world, 0)

    @property
    def done(self) -> int:
        return self.ready + self.world * LINE_BYTES

    def scales(self, buffer: int) -> int:
        first = _aligned(self.done + self.world * LINE_BYTES)
        return first + buffer * _aligned(self.max_rows * 4)

    def rows(self, buffer: int) -> int:
        return self.scales(self.buffers) + buffer * _aligned(self.row_bytes)

    @property
    def nbytes(self) -> int:
        return self.rows(self.buffers)

    def constants(self, mode: str) -> dict[str, int]:
        """What the multiplying kernel takes of it as constexpr; mode: of the plan."""
        return {
            "MAX_CHUNKS": self.max_chunks,
            "FAILED": self.failed,
            "FLAGS": self.pulled(0, 0) if mode == "pull" else self.pushed(0, 0),
            "READY": self.ready,
        }

    def why_not(self, sizes: "tuple[int, ...]", bytes_of_row: int, chunk_rows: int) -> str:
        """Why a call does not fit this workspace; empty if it does."""
        rows, largest = sum(sizes), max(sizes, default=0)
        if len(sizes) != self.world:
            return f"{len(sizes)} shards for {self.world} ranks"
        if rows > self.max_rows or rows * bytes_of_row > self.row_bytes:
            return (
                f"{rows} rows of {bytes_of_row} bytes; the workspace holds {self.max_rows} rows "
                f"and {self.row_bytes} bytes: make a larger one"
            )
        if chunk_rows < 1 or _chunks(largest, chunk_rows) > self.max_chunks:
            least = max(1, -(-largest // self.max_chunks))
            return (
                f"chunks of {chunk_rows} rows; the workspace has flags for {self.max_chunks} of a "
                f"shard, so chunks of {least} rows or more fit a shard of {largest}"
            )
        return ""


class Shards:
    """How many rows each rank has. Made before a capture: the table is copied to the device."""

    def __init__(self, sizes: "tuple[int, ...] | list[int]", device: "torch.device | str") -> None:
        self.sizes = tuple(int(size) for size in sizes)
        starts = [sum(self.sizes[:rank]) for rank in range(len(self.sizes) + 1)]
        if min(self.sizes, default=0) < 0 or starts[-1] >= 2**31:
            raise ValueError(f"shards of {self.sizes} rows; expected 0 to 2^31 - 1 together")
        self.starts = tuple(starts)
        self.rows = starts[-1]
        self.table = torch.tensor(starts, dtype=torch.int32, device=device)

    def chunks(self, rank: int, chunk_rows: int) -> "list[tuple[int, int]]":
        """(first row, row after the last) of each chunk of a shard, in the gathered rows."""
        first, end = self.starts[rank], self.starts[rank + 1]
        return [
            (first + chunk * chunk_rows, min(first + (chunk + 1) * chunk_rows, end))
            for chunk in range(_chunks(end - first, chunk_rows))
        ]


@dataclass(frozen=True)
class AllGatherPlan:
    """How a call is cut. `tiles` may differ between ranks, the others may not."""

    tiles: TileConfig
    chunk_rows: int  # rows that arrive together, under one flag
    pullers: int = 0  # programs that fetch chunks from peers; 0: the copy engine pushes them

    @property
    def mode(self) -> str:
        return "pull" if self.pullers else "push"

    def signature(self, sizes: "tuple[int, ...]", *facts: object) -> int:
        """What ranks compare: a rank that cuts otherwise is found by the first flag."""
        return signature_of("all gather", self.mode, self.chunk_rows, sizes, *facts)


@dataclass(frozen=True)
class Candidate:
    """A plan, or the reason for leaving it out."""

    plan: AllGatherPlan
    excluded: str = ""


# Not measured on a GPU; candidates() gives what a measurement would try.
SMALLEST_CHUNK = 512 * 1024  # bytes: a copy engine needs microseconds to start
SMALL_SHARD = 1024 * 1024  # bytes up to which pulling saves those starts
PULLERS = 16


def candidates(
    tiles: TileConfig, sizes: "tuple[int, ...]", bytes_of_row: int, layout: AllGatherLayout
) -> "list[Candidate]":
    """Every plan there is: both ways of moving, chunks of whole tiles, 1 to all that have flags."""
    largest = max(sizes, default=0)
    found = []
    for pullers in (0, PULLERS):
        for parts in (1, 2, 4, 8, 16):
            whole_tiles = -(-_chunks(largest, tiles.block_m) // parts)
            chunk_rows = max(1, whole_tiles) * tiles.block_m
            plan = AllGatherPlan(tiles, chunk_rows, pullers)
            reason = layout.why_not(sizes, bytes_of_row, chunk_rows)
            if not reason and any(plan == other.plan for other in found):
                reason = "chunks as large as those of an earlier candidate"
            elif not reason and parts > 1 and chunk_rows * bytes_of_row < SMALLEST_CHUNK:
                reason = f"chunks of less than {SMALLEST_CHUNK} bytes are all latency"
            found.append(Candidate(plan, reason))
    return found


def choose(
    tiles: TileConfig, sizes: "tuple[int, ...]", bytes_of_row: int, layout: AllGatherLayout
) -> AllGatherPlan:
    """The smallest chunks that are worth a flag; small shards are pulled, large ones pushed.

    `tiles.block_m` sets the chunk, so it must be one that all ranks share.

    Raises:
        ValueError: the call does not fit the workspace; the text says what does.
    """
    pulled = max(sizes, default=0) * bytes_of_row <= SMALL_SHARD and len(sizes) > 1
    fitting = [
        candidate.plan
        for candidate in candidates(tiles, sizes, bytes_of_row, layout)
        if not candidate.excluded and (candidate.plan.pullers > 0) == pulled
    ]
    if not fitting:
        rows = max(1, max(sizes, default=0))
        raise ValueError(f"all_gather_gemm: {layout.why_not(sizes, bytes_of_row, rows)}")
    return min(fitting, key=lambda plan: plan.chunk_rows)


def with_tiles(plan: AllGatherPlan, tiles: TileConfig) -> AllGatherPlan:
    """The same cut between ranks with other tiles inside this one."""
    return replace(plan, tiles=tiles)


def _chunks(rows: int, chunk_rows: int) -> int:
    count: int = on_host(chunk_count)(rows, chunk_rows)
    return count


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

"""Which blocks a tile of attention meets, and which of them need a mask: pure integers.

Rows of a shard are described by pieces (begin, length, position, stride, document): rows begin ..
begin + length - 1 belong to `document`, at positions position, position + stride, ... A query at
position p sees the keys of its document at positions p - before .. p + after.

    tile       up to `block` rows of one piece: what one program owns
    segment    a run of rows of the other operand that the tile meets: up to `full_end` in whole
               blocks that every row of the tile sees and that need no mask, up to `end` in blocks
               of `edge` rows that need one; what no row of the tile sees is in no segment

Forward and dq own queries and meet keys; dk and dv own keys and meet queries: the same plan with
`before` and `after` exchanged.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = ["NO_LIMIT", "Plan", "device_plan", "pieces_of", "plan", "reach", "rows_outside"]

NO_LIMIT = 1 << 29  # positions and reaches stay below, so that 32 bits hold the sum of three
TILE_FIELDS = 8
SEGMENT_FIELDS = 5
Piece = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Plan:
    """tiles: (begin, rows, position, stride, document, first segment, last segment + 1, 0), those
    with most blocks first. segments: (begin, full_end, end, position of begin, stride).
    """

    tiles: tuple[tuple[int, ...], ...]
    segments: tuple[tuple[int, ...], ...]
    full_blocks: int  # of all tiles
    masked_blocks: int


def pieces_of(pieces: "torch.Tensor | Iterable[Sequence[int]]") -> tuple[Piece, ...]:
    """The table [n, 5] as tuples of integers, without empty pieces.

    Raises:
        ValueError: a row is in two pieces, positions do not go up, or do not fit 29 bits.
    """
    rows = pieces.tolist() if isinstance(pieces, torch.Tensor) else pieces
    found = tuple(tuple(int(field) for field in piece) for piece in rows)
    return _checked(tuple(piece for piece in found if piece[1]))


@lru_cache(maxsize=256)
def _checked(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    end = 0
    for begin, length, position, stride, document in sorted(pieces):
        if begin < end or length < 0 or stride < 1:
            raise ValueError(
                f"piece {begin, length, position, stride, document}: its rows begin before {end}, "
                "where the piece before it ends, or its length or stride is not positive"
            )
        last = position + (length - 1) * stride
        if max(abs(position), abs(last)) >= NO_LIMIT:
            raise ValueError(
                f"piece {begin, length, position, stride, document}: positions {position} .. "
                f"{last}; the kernels take those below 2^29 in size"
            )
        end = begin + length
    return pieces


def rows_outside(pieces: Iterable[Piece], rows: int) -> list[Piece]:
    """The runs of rows 0 .. rows - 1 that are in no piece, as pieces of document -1."""
    found, end = [], 0
    for begin, length, *_ in sorted(pieces):
        if begin > end:
            found.append((end, begin - end, 0, 1, -1))
        end = begin + length
    if end > rows:
        raise ValueError(f"pieces reach row {end}, the operand has {rows} rows")
    if end < rows:
        found.append((end, rows - end, 0, 1, -1))
    return found


def reach(causal: bool, window_left: int, window_right: int) -> tuple[int, int]:
    """(before, after): how far from its own position a query sees."""
    before = NO_LIMIT if window_left < 0 else min(window_left, NO_LIMIT)
    after = NO_LIMIT if window_right < 0 else min(window_right, NO_LIMIT)
    return before, min(after, 0) if causal else after


def plan(
    own: Sequence[Piece],
    other: Sequence[Piece],
    before: int,
    after: int,
    own_block: int,
    other_block: int,
    edge: int,
    mask_short_tiles: bool = False,
) -> Plan:
    """The tiles of `own` with the segments of `other` that they meet.

    mask_short_tiles: a tile of fewer rows than own_block has masked blocks only (its missing rows
    must not be seen either). Tiles that meet nothing are in the plan, with no segment.
    """
    by_document: dict[int, list[Piece]] = {}
    for piece in other:
        by_document.setdefault(piece[4], []).append(piece)
    work: list[tuple[int, int, tuple[int, ...], list[tuple[int, ...]]]] = []
    for begin, length, position, stride, document in own:
        met = by_document.get(document, [])
        for offset in range(0, length, own_block):
            rows = min(own_block, length - offset)
            first = position + offset * stride
            last = first + (rows - 1) * stride
            whole = rows == own_block or not mask_short_tiles
            segments: list[tuple[int, ...]] = []
            full = masked = 0
            for piece in met:
                some = _between(piece, first - before, last + after)
                every = _between(piece, last - before, first + after) if whole else (0, 0)
                for segment in _segments(piece, some, every, other_block, edge):
                    segments.append(segment)
                    full += (segment[1] - segment[0]) // other_block
                    masked += -(-(segment[2] - segment[1]) // edge)
            tile = (begin + offset, rows, first, stride, document)
            work.append((full, masked, tile, segments))
    work.sort(
        key=lambda one: -(one[0] * other_block + one[1] * edge)
    )  # stable: equal work stays in the rows' order
    tiles, flat = [], []
    for _, _, tile, segments in work:
        tiles.append((*tile, len(flat), len(flat) + len(segments), 0))
        flat += segments
    return Plan(tuple(tiles), tuple(flat), sum(one[0] for one in work), sum(one[1] for one in work))


def _between(piece: Piece, low: int, high: int) -> tuple[int, int]:
    """The rows of a piece, counted in it, whose positions are low .. high: (first, last + 1)."""
    _, length, position, stride, _ = piece
    first = min(max(-((position - low) // stride), 0), length)
    last = min(max((high - position) // stride + 1, 0), length)
    return first, max(first, last)


def _segments(
    piece: Piece, some: tuple[int, int], every: tuple[int, int], block: int, edge: int
) -> Iterable[tuple[int, ...]]:
    """Of the rows `some` that the tile sees: a masked left edge if needed, then whole blocks of the
    rows that `every` row of the tile sees, then a masked rest."""
    begin, end = some
    if begin >= end:
        return
    full_begin = min(max(every[0], begin), end)
    full_begin = begin + -(-(full_begin - begin) // edge) * edge
    full_end = full_begin + max(0, min(every[1], end) - full_begin) // block * block
    cuts = [(begin, begin, end)]
    if full_end > full_begin:
        left = [(begin, begin, full_begin)] if full_begin > begin else []
        cuts = [*left, (full_begin, full_end, end)]
    for cut in cuts:
        rows = (piece[0] + row for row in cut)
        yield (*rows, piece[2] + cut[0] * piece[3], piece[3])


@lru_cache(maxsize=256)
def device_plan(
    own: tuple[Piece, ...],
    other: tuple[Piece, ...],
    before: int,
    after: int,
    own_block: int,
    other_block: int,
    edge: int,
    mask_short_tiles: bool,
    device: torch.device,
) -> tuple[Plan, torch.Tensor, torch.Tensor]:
    """The plan, its tiles [n, 8] and segments [n, 5] as int32 on `device`; kept for next time."""
    found = plan(own, other, before, after, own_block, other_block, edge, mask_short_tiles)
    tiles = torch.tensor(found.tiles or ((0,) * TILE_FIELDS,), dtype=torch.int32)
    segments = torch.tensor(found.segments or ((0,) * SEGMENT_FIELDS,), dtype=torch.int32)
    return found, tiles.to(device), segments.to(device)

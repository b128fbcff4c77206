"""Where every element goes: the ops of the suite as pure integer functions, no tensors.

A rank's result is a list of pieces: out[start : start + count] is the sum over `sources` of
(rank r, offset o): in_r[o : o + count]. One source means the bytes are moved, several that they are
added. Providers, references and tests all read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

ROOT = 0


@dataclass(frozen=True)
class Piece:
    start: int
    count: int
    sources: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """One rank's part of an op: element counts in and out, their splits by rank, the result."""

    in_count: int
    out_count: int
    in_place: bool  # in and out are one array
    in_splits: tuple[int, ...]
    out_splits: tuple[int, ...]
    pieces: tuple[Piece, ...]  # empty: this rank's output is not defined by the op
    same_everywhere: bool  # all ranks hold the same result

    @property
    def adds(self) -> int:
        return sum(piece.count * (len(piece.sources) - 1) for piece in self.pieces)


def even(count: int, world: int) -> tuple[int, ...]:
    return (count // world,) * world


def uneven(count: int, world: int) -> tuple[int, ...]:
    """Rank r's share is in proportion to r + 1; the last takes what is left over."""
    parts = world * (world + 1) // 2
    shares = [count * (r + 1) // parts for r in range(world - 1)]
    return (*shares, count - sum(shares))


def starts(splits: tuple[int, ...]) -> list[int]:
    return [0, *accumulate(splits)][:-1]


def _whole(count: int, sources: tuple[int, ...], in_place: bool) -> Layout:
    pieces = (Piece(0, count, tuple((r, 0) for r in sources)),) if sources else ()
    return Layout(count, count, in_place, (), (), pieces, same_everywhere=False)


def _all_reduce(count: int, world: int, rank: int) -> Layout:
    layout = _whole(count, tuple(range(world)), in_place=True)
    return replace(layout, same_everywhere=True)


def _reduce(count: int, world: int, rank: int) -> Layout:
    return _whole(count, tuple(range(world)) if rank == ROOT else (), in_place=True)


def _broadcast(count: int, world: int, rank: int) -> Layout:
    layout = _whole(count, (ROOT,), in_place=True)
    return replace(layout, same_everywhere=True)


def _ring_trip(count: int, world: int, rank: int) -> Layout:
    return _whole(count, (0,), in_place=False)


def _exchange(count: int, world: int, rank: int) -> Layout:
    return _whole(count, ((rank - 1) % world,), in_place=False)


def _reduce_scatter(shares: tuple[int, ...], rank: int) -> Layout:
    offset = starts(shares)[rank]
    piece = Piece(0, shares[rank], tuple((r, offset) for r in range(len(shares))))
    return Layout(sum(shares), shares[rank], False, shares, (), (piece,), same_everywhere=False)


def _all_gather(shares: tuple[int, ...], rank: int) -> Layout:
    pieces = tuple(
        Piece(start, share, ((r, 0),))
        for r, (start, share) in enumerate(zip(starts(shares), shares, strict=True))
    )
    return Layout(shares[rank], sum(shares), False, (), shares, pieces, same_everywhere=True)


def _all_to_all(shares: tuple[int, ...], rank: int) -> Layout:
    """Every rank sends shares[s] elements to rank s, so receives shares[rank] from each."""
    world, mine, offset = len(shares), shares[rank], starts(shares)[rank]
    pieces = tuple(Piece(r * mine, mine, ((r, offset),)) for r in range(world))
    return Layout(sum(shares), world * mine, False, shares, (mine,) * world, pieces, False)


def _scatter(shares: tuple[int, ...], rank: int) -> Layout:
    piece = Piece(0, shares[rank], ((ROOT, starts(shares)[rank]),))
    in_count = sum(shares) if rank == ROOT else 0
    return Layout(in_count, shares[rank], False, shares, (), (piece,), same_everywhere=False)


def _gather(shares: tuple[int, ...], rank: int) -> Layout:
    gathered = _all_gather(shares, rank)
    if rank == ROOT:
        return replace(gathered, same_everywhere=False)
    return Layout(shares[rank], 0, False, (), shares, (), same_everywhere=False)


def _barrier(count: int, world: int, rank: int) -> Layout:
    return Layout(0, 0, False, (), (), (), same_everywhere=False)


def _split(
    op: Callable[[tuple[int, ...], int], Layout], split: Callable[[int, int], tuple[int, ...]]
) -> Callable[[int, int, int], Layout]:
    return lambda count, world, rank: op(split(count, world), rank)


OPS: dict[str, Callable[[int, int, int], Layout]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _split(_reduce_scatter, even),
    "reduce_scatter_uneven": _split(_reduce_scatter, uneven),
    "all_gather": _split(_all_gather, even),
    "all_gather_uneven": _split(_all_gather, uneven),
    "all_to_all": _split(_all_to_all, even),
    "all_to_all_uneven": _split(_all_to_all, uneven),
    "broadcast": _broadcast,
    "scatter": _split(_scatter, even),
    "gather": _split(_gather, even),
    "send_recv": _ring_trip,
    "exchange": _exchange,
    "barrier": _barrier,
}

DESCRIPTIONS = {
    "all_reduce": "sum, in place",
    "reduce": f"sum to rank {ROOT}",
    "reduce_scatter": "sum, equal shares",
    "reduce_scatter_uneven": "sum, shares in proportion 1:2:..",
    "all_gather": "equal shares",
    "all_gather_uneven": "shares in proportion 1:2:..",
    "all_to_all": "equal shares",
    "all_to_all_uneven": "shares in proportion 1:2:..",
    "broadcast": f"from rank {ROOT}",
    "scatter": f"from rank {ROOT}, equal shares",
    "gather": f"to rank {ROOT}, equal shares",
    "send_recv": "one message once round the ring of ranks (two ranks: there and back)",
    "exchange": "every rank sends to the next and receives from the previous, at once",
    "barrier": "no data",
}


def layout(op: str, count: int, world: int, rank: int) -> Layout:
    return OPS[op](count, world, rank)

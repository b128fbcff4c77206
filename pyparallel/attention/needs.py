"""Which keys some query of a rank sees: all that is ever sent to it. And how many pairs there are.

Pure integers, by pieces: of a key piece, a query piece sees those from `before` positions before
its first to `after` positions after its last. (Between the queries of a striped shard a narrow
window may leave keys that none sees; they are sent all the same.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyparallel.attention.pieces import Piece, Pieces

__all__ = ["Part", "add_rows", "needed", "pairs", "select_rows"]


@dataclass(frozen=True)
class Part:
    """Some rows of a shard: which, and where they lie in their sequence once they are packed."""

    rows: tuple[tuple[int, int], ...]  # (first, last + 1) in the shard, ascending
    pieces: Pieces  # of the rows laid one after another

    @cached_property
    def count(self) -> int:
        return sum(end - begin for begin, end in self.rows)


def needed(queries: Pieces, keys: Pieces, before: float, after: float) -> Part:
    """The keys that some query sees."""
    by_document: dict[int, list[Piece]] = {}
    for piece in queries:
        by_document.setdefault(piece.document, []).append(piece)
    found: list[Piece] = []
    for key in sorted(keys):
        spans: list[tuple[int, int]] = []
        for query in by_document.get(key.document, ()):
            span = _seen(query, key, before, after)
            if span is not None:
                spans.append(span)
        found += [key.rows(begin, end) for begin, end in _merged(spans)]
    rows = _merged([(piece.begin, piece.begin + piece.length) for piece in found])
    packed: list[tuple[Pieces, int]] = [
        (Pieces([piece._replace(begin=0)]), piece.length) for piece in found
    ]
    return Part(tuple(rows), Pieces.joined(packed))


def _seen(query: Piece, key: Piece, before: float, after: float) -> tuple[int, int] | None:
    """The rows of `key`, counted in it, between the first and the last that `query` sees."""
    low, high = query.position - before, query.last + after
    begin, end = 0, key.length
    if low > key.position:
        begin = -int((key.position - low) // key.stride)
    if high < key.last:
        end = int((high - key.position) // key.stride) + 1
    return (begin, end) if begin < end else None


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def pairs(queries: Pieces, keys: Pieces, before: float, after: float) -> int:
    """How many (query, key) pairs see each other."""
    by_document: dict[int, list[Piece]] = {}
    for piece in keys:
        by_document.setdefault(piece.document, []).append(piece)
    total = 0
    for query in queries:
        for key in by_document.get(query.document, ()):
            if _seen(query, key, before, after) is not None:
                total += _count(query, key, after) - _count(query, key, -before - 1)
    return total


def _count(query: Piece, key: Piece, ahead: float) -> int:
    """Over all rows of `query`, how many rows of `key` are not further than `ahead` after each."""
    if math.isinf(ahead):
        return query.length * key.length if ahead > 0 else 0
    distance = query.position + int(ahead) - key.position
    if key.stride == 1:
        return _clamped(distance + 1, query.stride, query.length, key.length)
    if key.stride == query.stride:
        return _clamped(distance // key.stride + 1, 1, query.length, key.length)
    return sum(
        min(max((distance + i * query.stride) // key.stride + 1, 0), key.length)
        for i in range(query.length)
    )


def _clamped(first: int, step: int, terms: int, most: int) -> int:
    """The sum of min(max(first + i * step, 0), most) over i = 0 .. terms - 1."""
    low = min(max(0, -(first // step)), terms)  # terms before this one are not positive
    high = min(max(low, -((first - most) // step)), terms)  # from this one on they are `most`
    middle = high - low
    return middle * first + step * (low + high - 1) * middle // 2 + (terms - high) * most


def select_rows(x: Tensor, part: Part) -> Tensor:
    """The part's rows of `x` [batch, rows, ...], packed; a view where they lie together."""
    if len(part.rows) == 1:
        begin, end = part.rows[0]
        return x[:, begin:end]
    if not part.rows:
        return x[:, :0]
    return torch.cat([x[:, begin:end] for begin, end in part.rows], 1)


def add_rows(x: Tensor, part: Part, packed: Tensor) -> None:
    """Adds packed rows to the part's rows of `x`, in place."""
    at = 0
    for begin, end in part.rows:
        x[:, begin:end] += packed[:, at : at + end - begin]
        at += end - begin

"""Where the rows of a shard lie in their sequence: a short table, which every engine reads.

A row has a document and a position in it. `Pieces` describes runs of rows whose positions go up in
equal strides, so that contiguous, zigzag, striped and packed shards are the same thing to a kernel.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyparallel.errors import InvalidArgument

__all__ = ["Piece", "Pieces"]


class Piece(NamedTuple):
    """Rows begin .. begin + length - 1 of a shard: positions position, position + stride, ..."""

    begin: int
    length: int
    position: int
    stride: int
    document: int

    @property
    def last(self) -> int:
        """The position of the last row."""
        return self.position + (self.length - 1) * self.stride

    def rows(self, begin: int, end: int) -> "Piece":
        """Rows begin .. end - 1 of this piece, counted in it; they stay where they lie."""
        start = self.position + begin * self.stride
        return Piece(self.begin + begin, end - begin, start, self.stride, self.document)


class Pieces(Sequence[Piece]):
    """All pieces of a shard, none empty, no row in two of them. Rows in no piece are padding.

    Query positions carry the bottom-right shift of their document (its number of keys less its
    number of queries), so that a query sees, causally, the keys whose position is not greater.
    """

    def __init__(self, pieces: Iterable[Sequence[int]] = ()) -> None:
        self._pieces = tuple(Piece(*piece) for piece in pieces if piece[1] > 0)
        taken = sorted((piece.begin, piece.begin + piece.length) for piece in self._pieces)
        for (_, end), (begin, _) in pairwise(taken):
            if begin < end:
                raise InvalidArgument(f"row {begin} is in two pieces: {list(self._pieces)}")
        if any(piece.stride < 1 or piece.begin < 0 for piece in self._pieces):
            raise InvalidArgument(f"a piece begins before row 0 or goes back: {list(self._pieces)}")

    @classmethod
    def whole(cls, rows: int, position: int = 0, document: int = 0) -> "Pieces":
        """One run of consecutive positions."""
        return cls([(0, rows, position, 1, document)])

    @classmethod
    def joined(cls, shards: "Iterable[tuple[Pieces, int]]") -> "Pieces":
        """Of shards laid one after another, each given with its number of rows.

        Pieces that go on where the one before ends become one.
        """
        pieces: list[Piece] = []
        at = 0
        for shard, rows in shards:
            for piece in shard:
                piece = piece._replace(begin=piece.begin + at)
                before = pieces[-1] if pieces else None
                if before is not None and piece == before._replace(
                    begin=before.begin + before.length,
                    position=before.last + before.stride,
                    length=piece.length,
                ):
                    pieces[-1] = before._replace(length=before.length + piece.length)
                else:
                    pieces.append(piece)
            at += rows
        return cls(pieces)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._pieces[index]

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and self._pieces == other._pieces

    def __hash__(self) -> int:
        return hash(self._pieces)

    def __repr__(self) -> str:
        return f"Pieces({[tuple(piece) for piece in self._pieces]})"

    @cached_property
    def rows(self) -> int:
        """How many rows are in a piece."""
        return sum(piece.length for piece in self._pieces)

    @cached_property
    def end(self) -> int:
        """The row after the last one that is in a piece."""
        return max((piece.begin + piece.length for piece in self._pieces), default=0)

    @cached_property
    def is_dense(self) -> bool:
        """Whether rows 0 .. end - 1 are all in pieces, in the order of the table."""
        begin = 0
        for piece in self._pieces:
            if piece.begin != begin:
                return False
            begin += piece.length
        return True

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    def table(self, device: "torch.device | str" = "cpu") -> Tensor:
        """int64 [n, 5] on `device`: begin, length, position, stride, document. Kept; read only."""
        device = torch.device(device)
        found = self._tables.get(device)
        if found is None:
            table = torch.tensor(self._pieces, dtype=torch.int64).reshape(-1, 5)
            found = self._tables[device] = table.to(device)
        return found

    def covered(self) -> Tensor:
        """int64 [rows]: the numbers of the rows that are in pieces, in the order of the table."""
        return _joined(torch.arange(p.begin, p.begin + p.length) for p in self._pieces)

    def positions(self) -> Tensor:
        """int64 [rows]: the position of each of these."""
        return _joined(
            torch.arange(p.position, p.last + 1, p.stride, dtype=torch.int64) for p in self._pieces
        )

    def documents(self) -> Tensor:
        """int64 [rows]: the document of each of these."""
        return _joined(torch.full((p.length,), p.document) for p in self._pieces)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    parts = list(parts)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

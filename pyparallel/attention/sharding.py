"""Which rows of a sequence each rank holds: contiguous, zigzag, striped. Pure integers.

    contiguous   rank r holds the r-th of P parts
    zigzag       of 2P parts, rank r holds the r-th and the r-th from the end: under a causal mask
                 all ranks have the same work
    striped      rank r holds rows r, r + P, r + 2P, ...: balanced too, a diagonal in each block

Parts are as even as they go, the larger first, and some may be empty: any length can be cut for any
number of ranks. A packed sequence is cut as one, wherever its documents end; or, `per_document`,
each document is cut by itself, and a rank holds its parts one after another.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from pyparallel.attention.pieces import Piece, Pieces
from pyparallel.errors import InvalidArgument

__all__ = ["SHARDINGS", "Run", "Sharding", "even_sizes"]

SHARDINGS = ("contiguous", "zigzag", "striped")

Run = tuple[int, int, int]  # (first row of the whole, how many, stride)


def even_sizes(total: int, parts: int) -> list[int]:
    """The sizes of `parts` parts of `total`, as even as they go, the larger first."""
    n, extra = divmod(total, parts)
    return [n + (i < extra) for i in range(parts)]


@dataclass(frozen=True)
class Sharding:
    """How `total` rows lie on `world_size` ranks. Make it with `of`, which checks."""

    name: str
    total: int
    world_size: int
    # Of packed documents: where each begins, and where the last ends; rows behind it are padding.
    cu_seqlens: tuple[int, ...] | None = None
    per_document: bool = False
    sizes: tuple[int, ...] | None = None  # of contiguous parts that are not even, see `balanced`

    @classmethod
    def of(
        cls,
        name: str,
        total: int,
        world_size: int,
        *,
        cu_seqlens: Sequence[int] | None = None,
        per_document: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> "Sharding":
        """Checked.

        Raises:
            ValueError: `name` is no sharding; documents that go back or past `total`; sizes that
                are no parts of `total`.
        """
        if name not in SHARDINGS:
            raise InvalidArgument(f"sharding is {name!r}; expected one of {', '.join(SHARDINGS)}")
        if world_size < 1 or total < 0:
            raise InvalidArgument(f"{total} rows on {world_size} ranks; expected >= 0 on >= 1")
        borders = None
        if cu_seqlens is not None:
            borders = tuple(cu_seqlens)
            if not borders or borders[0] != 0 or any(
                end < begin for begin, end in pairwise(borders)
            ):  # fmt: skip
                raise InvalidArgument(
                    f"cu_seqlens is {_short(borders)}; expected 0, then lengths summed up, not "
                    "going back"
                )
            if borders[-1] > total:
                raise InvalidArgument(
                    f"cu_seqlens ends at {borders[-1]}, but the ranks hold {total} rows together"
                )
        if per_document and borders is None:
            raise InvalidArgument("per_document cuts each document by itself: it needs cu_seqlens")
        if sizes is not None:
            if name != "contiguous" or per_document:
                raise InvalidArgument("sizes are for the contiguous sharding of the whole sequence")
            if len(sizes) != world_size or min(sizes) < 0 or sum(sizes) != total:
                raise InvalidArgument(
                    f"sizes {list(sizes)} are not those of {world_size} parts of {total} rows"
                )
            sizes = None if list(sizes) == even_sizes(total, world_size) else tuple(sizes)
        return cls(name, total, world_size, borders, per_document, sizes)

    @classmethod
    def balanced(
        cls,
        total: int,
        world_size: int,
        *,
        cu_seqlens: Sequence[int] | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> "Sharding":
        """Contiguous parts whose queries see as many keys each, as near as whole rows come.

        For packed documents, whose lengths leave even parts with uneven work, and for windows: keys
        cross borders only, as between even parts. Other layers' work is by rows, and is uneven.

        Args:
            cu_seqlens: of documents; rows behind the last are padding, without work.
            causal, window_size: as for the attention.

        Raises:
            ValueError: as for `of`.
        """
        plain = cls.of("contiguous", total, world_size, cu_seqlens=cu_seqlens)
        left, right = (total if n < 0 else n for n in window_size)
        borders = torch.tensor(plain.borders, dtype=torch.int64)
        rows = torch.arange(plain.borders[-1])
        document = torch.searchsorted(borders, rows, right=True) - 1
        before = (rows - borders[document]).clamp(max=left)
        after = (borders[document + 1] - 1 - rows).clamp(max=0 if causal else right)
        work = (before + after + 1).cumsum(0)
        all_work = int(work[-1]) if rows.numel() else 0
        cuts = [0]
        for part in range(1, world_size):
            # The row border nearest to the share, from below or above.
            share = all_work * part / world_size
            at = int(torch.searchsorted(work, share)) if all_work else 0
            below = int(work[at - 1]) if at else 0
            if at < rows.numel() and int(work[at]) - share < share - below:
                at += 1
            cuts.append(max(cuts[-1], at))
        cuts.append(total)
        return cls.of(
            "contiguous", total, world_size, cu_seqlens=cu_seqlens,
            sizes=[b - a for a, b in pairwise(cuts)],
        )  # fmt: skip

    # --- rows

    def runs(self, rank: int) -> list[Run]:
        """The rows of a rank, in the order in which it holds them."""
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"rank {rank} of {self.world_size} ranks")
        if not self.per_document:
            return self._cut(0, self.total, rank)
        borders = [*(self.cu_seqlens or ()), self.total]  # what pads is cut like one more document
        return [run for begin, end in pairwise(borders) for run in self._cut(begin, end, rank)]

    def _cut(self, begin: int, end: int, rank: int) -> list[Run]:
        total, world = end - begin, self.world_size
        if self.name == "striped":
            return [(begin + rank, len(range(rank, total, world)), world)] if total > rank else []
        if self.name == "contiguous":
            sizes = list(self.sizes) if self.sizes is not None else even_sizes(total, world)
            numbers = [rank]
        else:
            sizes, numbers = even_sizes(total, 2 * world), [rank, 2 * world - 1 - rank]
        runs = [(begin + sum(sizes[:i]), sizes[i], 1) for i in numbers if sizes[i]]
        if len(runs) == 2 and runs[0][0] + runs[0][1] == runs[1][0]:  # the last rank's meet
            runs = [(runs[0][0], runs[0][1] + runs[1][1], 1)]
        return runs

    @cached_property
    def local_sizes(self) -> tuple[int, ...]:
        """How many rows each rank holds."""
        return tuple(
            sum(length for _, length, _ in self.runs(rank)) for rank in range(self.world_size)
        )

    def rows(self, rank: int) -> Tensor:
        """int64: the numbers, in the whole sequence, of the rows that a rank holds."""
        runs = [torch.arange(b, b + n * stride, stride) for b, n, stride in self.runs(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)

    def order(self) -> Tensor:
        """int64 [total]: where each row of the whole is, in all ranks' shards joined in order."""
        joined = torch.cat([self.rows(rank) for rank in range(self.world_size)])
        order = torch.empty_like(joined)
        order[joined] = torch.arange(self.total)
        return order

    # --- documents

    @property
    def borders(self) -> tuple[int, ...]:
        """Where each document begins, and where the last ends."""
        return (0, self.total) if self.cu_seqlens is None else self.cu_seqlens

    def pieces(self, rank: int, keys: "Sharding | None" = None) -> Pieces:
        """The table of a rank's rows. With `keys`, as queries of those: shifted bottom-right."""
        return _pieces(self, rank, keys)


@lru_cache(maxsize=4096)
def _pieces(sharding: Sharding, rank: int, keys: Sharding | None) -> Pieces:
    borders = sharding.borders
    pieces: list[Piece] = []
    at = 0
    for begin, length, stride in sharding.runs(rank):
        row = 0
        while row < length:
            place = begin + row * stride
            document = _document_of(borders, place)
            if document is None:
                break
            count = min(length - row, -(-(borders[document + 1] - place) // stride))
            position = place - borders[document]
            if keys is not None:
                position += _length(keys.borders, document) - _length(borders, document)
            pieces.append(Piece(at + row, count, position, stride, document))
            row += count
        at += length
    return Pieces(pieces)


def _document_of(borders: tuple[int, ...], place: int) -> int | None:
    """The document that row `place` is in; None: it is padding."""
    if place >= borders[-1]:
        return None
    return bisect_right(borders, place) - 1


def _length(borders: tuple[int, ...], document: int) -> int:
    return borders[document + 1] - borders[document]


def _short(values: Sequence[int]) -> str:
    text = ", ".join(map(str, values[:12]))
    return f"[{text}, ... {len(values)} in all]" if len(values) > 12 else f"[{text}]"

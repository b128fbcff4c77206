"""Ulysses: between all heads of some rows and some heads of all rows, for any number of heads.

U ranks share the query heads as evenly as they go, the first ranks more; a rank without any is
idle. A key head goes to every rank that has a query head of its group, so that there may be fewer
key heads than ranks; gradients of one that was sent to several ranks are summed, in rank order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pyparallel.attention.engines import AttentionEngine
from pyparallel.attention.mask import Mask
from pyparallel.attention.pieces import Pieces
from pyparallel.attention.sharding import even_sizes
from pyparallel.attention.state import State
from pyparallel.attention.transport import Message, Transport

__all__ = ["HeadSplit", "Heads", "from_heads", "to_heads"]

Span = tuple[int, int]


@dataclass(frozen=True)
class HeadSplit:
    """Who has which heads: of queries, and of keys and values."""

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]

    @classmethod
    def of(cls, heads: int, kv_heads: int, ranks: int) -> "HeadSplit":
        sizes = even_sizes(heads, ranks)
        queries = tuple((sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(ranks))
        group = heads // kv_heads
        keys = tuple((a // group, (b - 1) // group + 1) if a < b else (0, 0) for a, b in queries)
        return cls(queries, keys)

    @property
    def replicates(self) -> bool:
        """Whether a key head is on several ranks."""
        held = [span for span in self.keys if span[0] < span[1]]
        return any(a[1] > b[0] for a, b in pairwise(held))


class Heads:
    """The steps of an engine on one rank's heads, whose groups may be cut at both ends."""

    def __init__(
        self, engine: AttentionEngine, mask: Mask, split: HeadSplit, rank: int, heads: int,
        kv_heads: int,
    ) -> None:  # fmt: skip
        self._engine = engine
        begin, end = split.queries[rank]
        first = split.keys[rank][0]
        group = heads // kv_heads
        # Runs of (query heads, key heads), counted among this rank's, with a whole ratio.
        runs: list[tuple[Span, Span]] = []
        at = begin
        while at < end:
            whole = (end - at) // group if at % group == 0 else 0
            stop = at + whole * group if whole else min(end, (at // group + 1) * group)
            key = at // group - first
            runs.append(((at - begin, stop - begin), (key, key + max(1, whole))))
            at = stop
        self._runs = [
            (q, kv, mask if (begin, end, len(runs)) == (0, heads, 1) else
             mask.of_heads(begin + q[0], begin + q[1], heads))
            for q, kv in runs
        ]  # fmt: skip

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_pieces: Pieces, k_pieces: Pieces, state: State
    ) -> None:
        if not q_pieces.rows or not k_pieces.rows:
            return
        for (a, b), (c, d), mask in self._runs:
            keys = k[:, :, c:d], v[:, :, c:d]
            part = state if b - a == q.shape[2] else state.heads(a, b)
            self._engine.forward_step(q[:, :, a:b], *keys, q_pieces, k_pieces, mask, part)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        q_pieces: Pieces,
        k_pieces: Pieces,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        deterministic: bool,
    ) -> None:
        if not q_pieces.rows or not k_pieces.rows:
            return
        for (a, b), (c, d), mask in self._runs:
            self._engine.backward_step(
                dout[:, :, a:b],
                q[:, :, a:b],
                k[:, :, c:d],
                v[:, :, c:d],
                lse[:, a:b],
                delta[:, a:b],
                q_pieces,
                k_pieces,
                mask,
                dq[:, :, a:b],
                dk[:, :, c:d],
                dv[:, :, c:d],
                deterministic,
            )


def to_heads(
    transport: Transport,
    x: Tensor,
    spans: Sequence[Span],
    rows: Sequence[int],
    peers: Sequence[int],
    tag: int,
) -> Tensor:
    """[batch, own rows, all heads, d] -> [batch, all rows in rank order, own heads, d].

    `spans[i]` are the heads of peers[i], `rows[i]` the rows that it has.
    """
    me = peers.index(transport.rank)
    begin, end = spans[me]
    whole = x.new_empty((x.shape[0], sum(rows), end - begin, x.shape[3]))
    parts = whole.split(list(rows), 1)
    others = [i for i in range(len(peers)) if i != me]
    wait = transport.exchange(
        [Message(peers[i], x[:, :, spans[i][0] : spans[i][1]]) for i in others],
        [Message(peers[i], parts[i]) for i in others],
        tag,
    )
    parts[me].copy_(x[:, :, begin:end])
    wait()
    return whole


def from_heads(
    transport: Transport,
    x: Tensor,
    spans: Sequence[Span],
    rows: Sequence[int],
    peers: Sequence[int],
    heads: int,
    tag: int,
) -> Tensor:
    """The way back: [batch, all rows, own heads, d] -> [batch, own rows, all heads, d].

    What several ranks have of one head is added, in rank order.
    """
    me = peers.index(transport.rank)
    parts = x.split(list(rows), 1)
    batch, d = x.shape[0], x.shape[3]
    overlap = any(a[1] > b[0] for a, b in pairwise(spans) if b[0] < b[1])
    whole = x.new_zeros if overlap else x.new_empty
    result = whole((batch, rows[me], heads, d))
    places = [result[:, :, begin:end] for begin, end in spans]
    arrived = [torch.empty_like(p) for p in places] if overlap else places
    others = [i for i in range(len(peers)) if i != me]
    wait = transport.exchange(
        [Message(peers[i], parts[i]) for i in others],
        [Message(peers[i], arrived[i]) for i in others],
        tag,
    )
    if not overlap:
        places[me].copy_(parts[me])
        wait()
        return result
    wait()
    arrived[me] = parts[me]
    for place, part in zip(places, arrived, strict=True):
        place += part
    return result

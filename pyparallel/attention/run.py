"""One attention from a rank's shards to its rows of the result, and back: what strategies share.

forward    [heads for rows]   keys pass between ranks   [rows for heads]
           (heads.py)         (ring.py, decode.py)      (heads.py)
backward   the same way round, with dout and delta in place of q
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyparallel.attention.decode import decode_backward, decode_forward
from pyparallel.attention.engines import AttentionEngine
from pyparallel.attention.heads import Heads, from_heads, to_heads
from pyparallel.attention.mask import Mask
from pyparallel.attention.pieces import Pieces
from pyparallel.attention.plan import Plan
from pyparallel.attention.ring import Column
from pyparallel.attention.state import accumulator_dtype, finish
from pyparallel.attention.transport import Transport

__all__ = ["Attention", "Kept"]

# Tags of the messages of heads.py.
_Q, _K, _V, _OUT, _LSE, _DOUT, _DELTA, _DQ, _DK, _DV = range(0x5B01, 0x5B0B)


@dataclass
class Kept:
    """What backward works on: operands and log-sum-exp of this rank's heads, over its row."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor


@dataclass(frozen=True, eq=False)
class Attention:
    """One call, agreed on by all ranks."""

    plan: Plan
    transport: Transport
    engine: AttentionEngine
    mask: Mask
    deterministic: bool

    @property
    def _heads(self) -> Heads:
        plan, facts = self.plan, self.plan.facts
        place = self.transport.rank % plan.ulysses
        return Heads(self.engine, self.mask, plan.split, place, facts.heads, facts.kv_heads)

    @property
    def _own_queries(self) -> Pieces:
        facts = self.plan.facts
        rank = 0 if self.plan.strategy == "decode" else self.transport.rank
        return facts.q.pieces(rank, facts.k)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Kept]:
        """(out, lse) of this rank's rows, and what backward wants to keep."""
        plan = self.plan
        if plan.strategy == "decode":
            state = decode_forward(plan, self.transport, self._heads, q, k, v)
            out, lse = finish(state, sinks, q.dtype)
            lse = self._without_padding(lse, sinks)
            return out, lse, Kept(q, k, v, lse)
        q, k, v = self._to_heads(q, k, v)
        state = Column(plan, self.transport, self._heads).forward(q, k, v)
        place = self.transport.rank % plan.ulysses
        begin, end = plan.split.queries[place]
        out, head_lse = finish(state, None if sinks is None else sinks[begin:end], q.dtype)
        kept = Kept(q, k, v, head_lse)
        out = self._from_heads(out, _OUT)
        lse = head_lse
        if plan.ulysses > 1:
            lse = self._from_heads(head_lse.transpose(1, 2).unsqueeze(-1), _LSE)
            lse = lse.squeeze(-1).transpose(1, 2).contiguous()
        return out, self._without_padding(lse, sinks), kept

    def _without_padding(self, lse: Tensor, sinks: Tensor | None) -> Tensor:
        """Rows in no document have no log-sum-exp, not even their sink's."""
        queries = self._own_queries
        if sinks is None or queries.rows == lse.shape[2]:
            return lse
        real = torch.zeros(lse.shape[2], dtype=torch.bool)
        real[queries.covered()] = True
        return torch.where(real.to(lse.device), lse, -math.inf)

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
        kept: Kept,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv and dsinks, in the dtypes of q, k, v and sinks."""
        dtype = accumulator_dtype(dout.dtype)
        # d out/d lse needs no step of its own: it goes the way of -delta. Rows that saw nothing
        # have an out of zeros, and whatever their dout is, no gradient.
        empty = lse == -math.inf
        # In one memory order: a sum's bits depend on it, and dout comes in any.
        weighed = (dout.to(dtype) * out.to(dtype)).contiguous()
        delta = weighed.sum(-1).transpose(1, 2).contiguous()
        if dlse is not None:
            delta = delta - dlse
        delta = torch.where(empty, 0.0, delta)
        dsinks = None
        if sinks is not None:
            share = torch.exp(sinks.to(dtype).view(1, -1, 1) - torch.where(empty, math.inf, lse))
            dsinks = -(share * delta).contiguous().sum((0, 2))
            if self.plan.strategy != "decode":
                dsinks = self.transport.all_reduce(dsinks)
            dsinks = dsinks.to(sinks.dtype)
        q, k, v = kept.q, kept.k, kept.v
        if self.plan.strategy == "decode":
            grads = decode_backward(
                self.plan, self.transport, self._heads, dout, q, k, v, lse, delta,
                self.deterministic,
            )  # fmt: skip
        else:
            grads = self._backward_of_rows(dout, delta, kept)
        dq, dk, dv = grads
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks

    def _backward_of_rows(
        self, dout: Tensor, delta: Tensor, kept: Kept
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan, q = self.plan, kept.q
        if plan.ulysses > 1:
            dout = self._rows_to_heads(dout, _DOUT)
            delta = self._rows_to_heads(delta.transpose(1, 2).unsqueeze(-1), _DELTA)
            delta = delta.squeeze(-1).transpose(1, 2).contiguous()
        column = Column(plan, self.transport, self._heads)
        dq, dk, dv = column.backward(dout, q, kept.k, kept.v, kept.lse, delta, self.deterministic)
        if plan.ulysses == 1:
            return dq, dk, dv
        if not plan.split.replicates:  # nothing is added any more: 16 bits lose nothing now
            dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        keys, rows = plan.split.keys, self._rows_of(plan.facts.k.local_sizes)
        facts, peers = plan.facts, plan.row(self.transport.rank)
        dk, dv = (
            from_heads(self.transport, x, keys, rows, peers, facts.kv_heads, tag)
            for x, tag in ((dk, _DK), (dv, _DV))
        )
        return self._from_heads(dq.to(q.dtype), _DQ), dk, dv

    # --- between rows and heads

    def _rows_of(self, sizes: tuple[int, ...]) -> list[int]:
        return [sizes[rank] for rank in self.plan.row(self.transport.rank)]

    def _to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        plan = self.plan
        if plan.ulysses == 1:
            return q, k, v
        rows = self._rows_of(plan.facts.k.local_sizes)
        peers = plan.row(self.transport.rank)
        k, v = (
            to_heads(self.transport, x, plan.split.keys, rows, peers, tag)
            for x, tag in ((k, _K), (v, _V))
        )
        return self._rows_to_heads(q, _Q), k, v

    def _rows_to_heads(self, x: Tensor, tag: int) -> Tensor:
        plan = self.plan
        rows = self._rows_of(plan.facts.q.local_sizes)
        peers = plan.row(self.transport.rank)
        return to_heads(self.transport, x, plan.split.queries, rows, peers, tag)

    def _from_heads(self, x: Tensor, tag: int) -> Tensor:
        plan = self.plan
        if plan.ulysses == 1:
            return x
        rows, facts = self._rows_of(plan.facts.q.local_sizes), plan.facts
        peers = plan.row(self.transport.rank)
        return from_heads(self.transport, x, plan.split.queries, rows, peers, facts.heads, tag)

    def keep(self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> Kept:
        """`Kept` made again from a rank's own shards and rows, where it was not kept."""
        if self.plan.ulysses == 1 or self.plan.strategy == "decode":
            return Kept(q, k, v, lse)
        head_lse = self._rows_to_heads(lse.transpose(1, 2).unsqueeze(-1), _LSE)
        head_lse = head_lse.squeeze(-1).transpose(1, 2).contiguous()
        return Kept(*self._to_heads(q, k, v), head_lse)

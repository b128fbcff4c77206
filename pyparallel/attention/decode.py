"""Decode: the same queries on every rank, keys and values sharded, partial states merged.

Each rank runs over its own keys. One collective carries all states (row max, row sum and sums of
values in one flat tensor); every rank merges them as a tree over ranks, so all have the same bits.

Backward: dk and dv are local; dq is the sum over ranks.
"""

import torch
from torch import Tensor

from pyparallel.attention.heads import Heads
from pyparallel.attention.plan import Plan
from pyparallel.attention.state import State, accumulator_dtype
from pyparallel.attention.transport import Transport

__all__ = ["decode_backward", "decode_forward"]


def decode_forward(
    plan: Plan, transport: Transport, heads: Heads, q: Tensor, k: Tensor, v: Tensor
) -> State:
    """The state over all ranks' keys, alike on all ranks."""
    facts = plan.facts
    state = State.empty(q, v.shape[3])
    queries, keys = facts.q.pieces(0, facts.k), facts.k.pieces(transport.rank)
    heads.forward(q, k, v, queries, keys, state)
    if transport.world_size == 1:
        return state
    flat = torch.cat([x.reshape(-1) for x in (state.row_max, state.row_sum, state.acc)])
    every = transport.gather(flat.unsqueeze(0), 0, [1] * transport.world_size)
    states = [_unpacked(row, state) for row in every]
    step = 1
    while step < len(states):
        for i in range(0, len(states) - step, 2 * step):
            states[i].merge(states[i + step])
        step *= 2
    return states[0]


def _unpacked(row: Tensor, like: State) -> State:
    fields = (like.row_max, like.row_sum, like.acc)
    parts = row.split([x.numel() for x in fields])
    return State(*(part.view(x.shape) for part, x in zip(parts, fields, strict=True)))


def decode_backward(
    plan: Plan,
    transport: Transport,
    heads: Heads,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, alike on all ranks, and this rank's dk and dv, in float32 (float64)."""
    facts = plan.facts
    dtype = accumulator_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    queries, keys = facts.q.pieces(0, facts.k), facts.k.pieces(transport.rank)
    heads.backward(dout, q, k, v, lse, delta, queries, keys, dq, dk, dv, deterministic)
    return transport.all_reduce(dq), dk, dv

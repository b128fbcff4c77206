"""The attention steps in plain torch: any dtype and device, float64 too; the reference of the rest.

Scores are computed in float32 (float64 for float64 operands), a slice of query rows at a time, over
no more keys than that slice sees.

    forward    s = scores;  m' = max(m, max s);  p = exp(s - m')
               l = exp(m - m') l + sum p;  acc = exp(m - m') acc + drop(p) v
    backward   p = exp(s - lse);  dp = undrop(dout v^T);  ds = p (dp - delta) (1 - (s/softcap)^2)
               dv += drop(p)^T dout;  dq += scale ds k;  dk += scale ds^T q
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyparallel.attention.dropout import keep, keep_planes
from pyparallel.attention.mask import Mask
from pyparallel.attention.pieces import Pieces
from pyparallel.attention.state import State, accumulator_dtype

__all__ = ["backward_step", "forward_step"]

_SLICE_SCORES = 1 << 22  # the most scores computed at a time


def forward_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pieces: Pieces,
    k_pieces: Pieces,
    mask: Mask,
    state: State,
) -> None:
    """Takes these keys into `state`, in place.

    q [batch, seq_q, heads, d], k [batch, seq_k, kv_heads, d], v [batch, seq_k, kv_heads, d_v], any
    strides; heads is a multiple of kv_heads, and query head h meets kv head h // (heads/kv_heads).
    """
    for part in _slices(q, k, v, q_pieces, k_pieces, mask):
        scores, _ = part.scores()
        rows = part.q_rows
        old = state.row_max[:, :, rows]
        highest = torch.maximum(old, scores.amax(-1))
        base = torch.where(highest == -math.inf, 0.0, highest)
        weights = torch.exp(scores - base.unsqueeze(-1))
        scale = torch.exp(old - base)
        state.row_max[:, :, rows] = highest
        state.row_sum[:, :, rows] = state.row_sum[:, :, rows] * scale + weights.sum(-1)
        added = part.ungrouped(part.grouped(part.dropped(weights)) @ part.v)
        scale = scale.transpose(1, 2).unsqueeze(-1)
        state.acc[:, rows] = state.acc[:, rows] * scale + added.transpose(1, 2)


def backward_step(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    q_pieces: Pieces,
    k_pieces: Pieces,
    mask: Mask,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    deterministic: bool = False,
) -> None:
    """Adds the gradients that pass through these keys to dq, dk and dv, in place.

    lse and delta = rowsum(dout * out) are [batch, heads, seq_q] of the whole attention, in float32
    (float64), as are dq, dk and dv, of the shapes of q, k and v. Always deterministic.
    """
    del deterministic  # nothing here adds in an order that could change
    for part in _slices(q, k, v, q_pieces, k_pieces, mask):
        scores, slope = part.scores()
        rows, columns = part.q_rows, part.k_rows
        base = lse[:, :, rows]
        # A row that saw nothing has lse -inf; its weights are masked after the exponential.
        base = torch.where(base == -math.inf, 0.0, base).unsqueeze(-1)
        weights = torch.where(scores == -math.inf, 0.0, torch.exp(scores - base))
        dy = part.grouped(dout[:, rows].transpose(1, 2).to(part.q.dtype))
        dv[:, columns] += (part.grouped(part.dropped(weights)).mT @ dy).transpose(1, 2)
        dp = part.dropped(part.ungrouped(dy @ part.v.mT))
        ds = weights * (dp - delta[:, :, rows].unsqueeze(-1))
        if slope is not None:
            ds = ds * slope
        ds = part.grouped(ds * mask.softmax_scale)
        dq[:, rows] += part.ungrouped(ds @ part.k).transpose(1, 2)
        dk[:, columns] += (ds.mT @ part.grouped(part.q)).transpose(1, 2)


@dataclass
class _Slice:
    """Some query rows, and the keys between the first and the last that any of them sees.

    Operands are [batch, heads, rows, d] in the dtype of sums. Grouped: the query heads that share a
    kv head are one tall matrix, [batch, kv_heads, heads/kv_heads * rows, ...].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor  # [rows, keys]
    q_pos: Tensor
    k_pos: Tensor
    documents: Tensor  # [rows]
    q_rows: "Tensor | slice"
    k_rows: "Tensor | slice"
    mask: Mask

    def grouped(self, x: Tensor) -> Tensor:
        batch, heads, rows, d = x.shape
        kv_heads = self.k.shape[1]
        return x.reshape(batch, kv_heads, heads // kv_heads * rows, d)

    def ungrouped(self, x: Tensor) -> Tensor:
        batch, _, _, d = x.shape
        return x.reshape(batch, self.q.shape[1], self.q.shape[2], d)

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """Masked scores [batch, heads, rows, keys], and d(score)/d(uncapped score) if not 1."""
        mask = self.mask
        scores = self.ungrouped(self.grouped(self.q) @ self.k.mT) * mask.softmax_scale
        slope = None
        if mask.softcap:
            capped = torch.tanh(scores / mask.softcap)
            scores, slope = capped * mask.softcap, 1 - capped * capped
        if mask.alibi_slopes is not None:
            slopes = mask.alibi_slopes.to(scores.dtype)
            slopes = slopes.reshape(-1, slopes.shape[-1], 1, 1)
            distance = (self.q_pos.unsqueeze(1) - self.k_pos).abs().to(scores.dtype)
            scores = scores - slopes * distance
        return scores.masked_fill(~self.visible, -math.inf), slope

    def dropped(self, x: Tensor) -> Tensor:
        mask = self.mask
        if not mask.dropout_p:
            return x
        batch, heads = self.q.shape[:2]
        planes = keep_planes(batch, heads, mask.first_head, mask.all_heads).to(x.device)
        kept = keep(
            mask.dropout_p,
            mask.seed,
            planes.view(batch, heads, 1, 1),
            self.documents.view(-1, 1),
            self.q_pos.view(-1, 1),
            self.k_pos,
        )
        return x * kept / (1 - mask.dropout_p)


def _slices(
    q: Tensor, k: Tensor, v: Tensor, q_pieces: Pieces, k_pieces: Pieces, mask: Mask
) -> Iterator[_Slice]:
    if not q_pieces.rows or not k_pieces.rows or not q.shape[0] or not q.shape[2]:
        return
    dtype = accumulator_dtype(q.dtype)
    q_rows, q_pos, q_doc = _rows_of(q_pieces, q.device)
    k_rows, k_pos, k_doc = _rows_of(k_pieces, k.device)
    keys = k_pos.numel()
    step = max(1, _SLICE_SCORES // max(1, q.shape[0] * q.shape[2] * keys))
    for begin in range(0, q_pos.numel(), step):
        end = min(begin + step, q_pos.numel())
        at, document = q_pos[begin:end], q_doc[begin:end]
        visible = document.unsqueeze(1) == k_doc
        if mask.before != math.inf:
            visible &= k_pos >= at.unsqueeze(1) - int(mask.before)
        if mask.after != math.inf:
            visible &= k_pos <= at.unsqueeze(1) + int(mask.after)
        seen = visible.any(0).nonzero()
        if not seen.numel():
            continue
        first, last = int(seen[0]), int(seen[-1]) + 1
        rows, columns = _part(q_rows, begin, end), _part(k_rows, first, last)
        yield _Slice(
            q[:, rows].transpose(1, 2).to(dtype),
            k[:, columns].transpose(1, 2).to(dtype),
            v[:, columns].transpose(1, 2).to(dtype),
            visible[:, first:last],
            at,
            k_pos[first:last],
            document,
            rows,
            columns,
            mask,
        )


def _rows_of(pieces: Pieces, device: torch.device) -> "tuple[Tensor | None, Tensor, Tensor]":
    """Row numbers (None: 0, 1, ...), positions and documents."""
    rows = None if pieces.is_dense else pieces.covered().to(device)
    return rows, pieces.positions().to(device), pieces.documents().to(device)


def _part(rows: Tensor | None, begin: int, end: int) -> "Tensor | slice":
    return slice(begin, end) if rows is None else rows[begin:end]

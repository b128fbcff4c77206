"""Attention by the book, in float64 with torch's autograd: what every engine must give."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyparallel.attention import Mask, Pieces
from pyparallel.attention.dropout import keep


@dataclass
class Rows:
    """Position and document of each row of a whole sequence; document -1 is padding."""

    position: Tensor
    document: Tensor

    @classmethod
    def of(cls, pieces: Pieces, rows: int) -> "Rows":
        position, document = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -1)
        for begin, length, start, stride, number in pieces:
            position[begin : begin + length] = start + stride * torch.arange(length)
            document[begin : begin + length] = number
        return cls(position, document)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_rows: Rows,
    k_rows: Rows,
    mask: Mask,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [batch, seq_q, heads, d_v], lse [batch, heads, seq_q]), differentiable, float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    real = (k_rows.document >= 0).to(q.device)
    k, v = (torch.where(real.view(1, 1, -1, 1), x, 0.0) for x in (k, v))
    q = torch.where((q_rows.document >= 0).view(1, 1, -1, 1), q, 0.0)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = mask.softmax_scale * (q @ k.mT)
    if mask.softcap:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    offset = k_rows.position - q_rows.position.unsqueeze(1)
    if mask.alibi_slopes is not None:
        slopes = mask.alibi_slopes.double()
        scores = scores - slopes.reshape(-1, slopes.shape[-1], 1, 1) * offset.abs()
    visible = (q_rows.document.unsqueeze(1) == k_rows.document) & (k_rows.document >= 0)
    if mask.causal:
        visible &= offset <= 0
    if mask.window_left >= 0:
        visible &= offset >= -mask.window_left
    if mask.window_right >= 0:
        visible &= offset <= mask.window_right
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        column = column.masked_fill(q_rows.document.view(-1, 1) < 0, -math.inf)
        scores = torch.cat([scores, column], -1)
    some = (scores > -math.inf).any(-1)
    safe = torch.where(some.unsqueeze(-1), scores, 0.0)
    weights = torch.where(some.unsqueeze(-1), torch.softmax(safe, -1), 0.0)
    lse = torch.where(some, torch.logsumexp(safe, -1), -math.inf)
    if sinks is not None:
        weights = weights[..., :-1]
    if mask.dropout_p:
        batch, heads = q.shape[:2]
        planes = torch.arange(batch).view(-1, 1) * (mask.all_heads or heads)
        planes = planes + torch.arange(heads) + mask.first_head
        kept = keep(
            mask.dropout_p,
            mask.seed,
            planes.view(batch, heads, 1, 1),
            q_rows.document.view(-1, 1),
            q_rows.position.view(-1, 1),
            k_rows.position,
        )
        weights = weights * kept / (1 - mask.dropout_p)
    return (weights @ v).transpose(1, 2), lse

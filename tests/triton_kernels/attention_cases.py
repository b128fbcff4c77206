"""Attention by its definition, in float64, one matrix of scores per head; and random operands."""

import math
from dataclasses import dataclass

import torch

EPS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Case:
    """A mask, with the layout of its queries and keys as rows (document, position) or None."""

    softmax_scale: float = 0.25
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: "torch.Tensor | None" = None
    dropout_p: float = 0.0
    seed: int = 0
    first_head: int = 0
    all_heads: int = 0


def rows_of(pieces, rows):
    """(document, position) of each row; document -1: in no piece."""
    documents = torch.full((rows,), -1)
    positions = torch.zeros(rows, dtype=torch.int64)
    for begin, length, position, stride, document in pieces:
        documents[begin : begin + length] = document
        positions[begin : begin + length] = position + stride * torch.arange(length)
    return documents, positions


def visible(q_pieces, k_pieces, seq_q, seq_k, case):
    """bool [seq_q, seq_k], pair by pair."""
    q_doc, q_pos = rows_of(q_pieces, seq_q)
    k_doc, k_pos = rows_of(k_pieces, seq_k)
    q_pos, k_pos = q_pos[:, None], k_pos[None, :]
    seen = (q_doc[:, None] == k_doc) & (q_doc[:, None] >= 0)
    if case.causal:
        seen &= k_pos <= q_pos
    if case.window_left >= 0:
        seen &= k_pos >= q_pos - case.window_left
    if case.window_right >= 0:
        seen &= k_pos <= q_pos + case.window_right
    return seen


def kept(case, q_pieces, k_pieces, batch, heads, seq_q, seq_k):
    """bool [batch, heads, seq_q, seq_k]: Philox4x32-10 in Python's integers, weight by weight."""
    out = torch.ones(batch, heads, seq_q, seq_k, dtype=torch.bool)
    q_doc, q_pos = rows_of(q_pieces, seq_q)
    _, k_pos = rows_of(k_pieces, seq_k)
    limit = round(case.dropout_p * 2**32)
    for b in range(batch):
        for h in range(heads):
            plane = b * (case.all_heads or heads) + case.first_head + h
            for i in range(seq_q):
                for j in range(seq_k):
                    counter = (int(k_pos[j]), int(q_pos[i]), int(q_doc[i]), plane)
                    out[b, h, i, j] = _philox(counter, case.seed) >= limit
    return out


def _philox(counter, seed):
    """Salmon et al. 2011, table 2: multipliers, and Weyl increments of the key."""
    word = 0xFFFFFFFF
    c = [value & word for value in counter]
    key = [seed & word, seed >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (second >> 32) ^ c[1] ^ key[0],
            second & word,
            (first >> 32) ^ c[3] ^ key[1],
            first & word,
        ]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return c[0]


def reference(q, k, v, q_pieces, k_pieces, case, sinks=None, keep=None):
    """(out, lse) in float64; differentiable. Rows that see nothing: 0 and -inf."""
    q, k, v = q.double(), k.double(), v.double()
    heads, group = q.size(2), q.size(2) // k.size(2)
    seen = visible(q_pieces, k_pieces, q.size(1), k.size(1), case)
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * case.softmax_scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.alibi_slopes is not None:
        distance = rows_of(q_pieces, q.size(1))[1][:, None] - rows_of(k_pieces, k.size(1))[1]
        slopes = case.alibi_slopes.double().reshape(-1, heads, 1, 1)
        scores = scores - slopes * distance.abs()
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:  # one more key without a value
        column = sinks.double().view(1, heads, 1, 1).expand(q.size(0), -1, q.size(1), 1)
        scores = torch.cat([scores, column], 3)
    some = (scores > -math.inf).any(3, keepdim=True)
    lse = torch.where(some, scores, 0.0).logsumexp(3)
    weights = torch.where(some, scores - lse.unsqueeze(3), -math.inf).exp()[..., : k.size(1)]
    if keep is not None:
        weights = weights * keep / (1 - case.dropout_p)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return out, lse.masked_fill(~some.squeeze(3), -math.inf)


def operands(batch, seq_q, seq_k, heads, kv_heads, size, size_v, dtype=torch.float32, seed=0):
    """Random q, k, v."""
    generator = torch.Generator().manual_seed(seed * 7919 + seq_q * 31 + seq_k)
    shapes = ((seq_q, heads, size), (seq_k, kv_heads, size), (seq_k, kv_heads, size_v))
    return tuple(torch.randn(batch, *shape, generator=generator).to(dtype) for shape in shapes)


def rms(x):
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def stock(q, k, v, q_pieces, k_pieces, case):
    """torch's scaled_dot_product_attention in the dtype of q, for masks that it can express."""
    seen = visible(q_pieces, k_pieces, q.size(1), k.size(1), case)
    group = q.size(2) // k.size(2)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.repeat_interleave(group, 2).transpose(1, 2),
        v.repeat_interleave(group, 2).transpose(1, 2),
        attn_mask=seen,
        scale=case.softmax_scale,
    )
    return out.transpose(1, 2)

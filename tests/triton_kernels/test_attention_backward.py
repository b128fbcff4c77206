"""The attention backward: every feature, interpreted, against autograd in float64.

Layers: one interpreted process (here); the compiled kernels, read (test_attention_compiled.py). No
GPU has run it.

Bounds: fp32 1e-5 of the largest gradient, and what rounding the largest score moves a weight by. 16
bits: three times the error of torch's own attention in that dtype, in the largest element and in
RMS, and one ulp in bf16 (the interpreter's rounding). Both forms; gradients are added to what is
there; rows in no piece hold NaN and stay as they are.
"""

import math

import pytest
import torch

from pyparallel.triton_kernels import flash_attention as flash
from pyparallel.triton_kernels.flash_attention_backward import backward_step
from pyparallel.triton_kernels.flash_attention_configurations import OPS, AttentionConfig
from pyparallel.triton_kernels.flash_attention_delta import row_delta
from tests.launch import run_ranks
from tests.triton_kernels.attention_cases import (
    EPS,
    Case,
    kept,
    operands,
    reference,
    rms,
    rows_of,
    stock,
)
from tests.triton_kernels.bounds import INTERPRETED

pytestmark = pytest.mark.timeout(300)  # the interpreter on a busy machine

SMALL = AttentionConfig(32, 16, 4, 2, edge=16)
BY_DESCRIPTOR = AttentionConfig(16, 32, 4, 2, descriptors=True, edge=16)


def _whole(rows, position=0, document=0):
    return [(0, rows, position, 1, document)]


def _wanted(q, k, v, q_pieces, k_pieces, case, dout, sinks=None, keep=None):
    """Gradients of (q, k, v[, sinks]) in float64."""
    leaves = [x.double().nan_to_num().requires_grad_() for x in (q, k, v)]
    if sinks is not None:
        leaves.append(sinks.double().requires_grad_())
    out, lse = reference(*leaves[:3], q_pieces, k_pieces, case, *leaves[3:], keep=keep)
    return torch.autograd.grad(out, leaves, dout.double().nan_to_num()), out, lse


def _ours(q, k, v, q_pieces, k_pieces, case, dout, config, deterministic, sinks=None, steps=1):
    """(dq, dk, dv) on top of what was there, 1.5, less it."""
    out, lse = flash.forward(q, k, v, q_pieces, k_pieces, case, sinks=sinks, config=config)
    delta = row_delta(dout, out)
    grads = [torch.full_like(x, 1.5, dtype=torch.float32) for x in (q, k, v)]
    configs = dict.fromkeys(OPS, config)
    for step in range(steps):
        backward_step(
            dout, q, k, v, lse, delta, q_pieces, k_pieces[step::steps], case, *grads,
            deterministic, form="split" if deterministic else "fused", configs=configs,
        )  # fmt: skip
    return [grad - 1.5 for grad in grads], lse, delta


def _check(case, q, k, v, q_pieces, k_pieces, config, deterministic, sinks=None, keep=None):
    dout = torch.randn(q.shape[:3] + v.shape[3:])
    for x, pieces in ((q, q_pieces), (dout, q_pieces), (k, k_pieces), (v, k_pieces)):
        x[:, rows_of(pieces, x.size(1))[0] < 0] = math.nan
    want, _, _ = _wanted(q, k, v, q_pieces, k_pieces, case, dout, sinks, keep)
    steps = min(2, len(k_pieces))
    grads, lse, delta = _ours(
        q, k, v, q_pieces, k_pieces, case, dout, config, deterministic, sinks, steps
    )
    longest = [float(x.nan_to_num().norm(dim=3).max()) if x.numel() else 0.0 for x in (q, k)]
    score = abs(case.softmax_scale) * longest[0] * longest[1]
    for name, ours, ref in zip(("dq", "dk", "dv"), grads, want, strict=False):
        if not ours.numel():
            continue
        error = (ours.double() - ref).abs().max()
        limit = (1e-5 + 4 * EPS[torch.float32] * score) * max(1.0, float(ref.abs().max()))
        assert error <= limit, f"{name} {case} {q_pieces} {config}: {error}"
    if sinks is not None:  # the caller's part, from what these kernels give
        inside = rows_of(q_pieces, q.size(1))[0] >= 0
        share = torch.exp(sinks.view(1, -1, 1) - lse.masked_fill(lse == -math.inf, math.inf))
        found = -(share * delta)[:, :, inside].sum((0, 2))
        assert torch.allclose(found.double(), want[3], rtol=1e-4, atol=1e-5)


def _features(rank):
    """Each feature on a layout that a ring makes, in one form; GQA, d_qk != d_v."""
    torch.manual_seed(3)
    slopes = torch.tensor([0.5, 0.125])
    ring = ([(0, 20, 20, 1, 0), (20, 17, 60, 1, 0)], [(0, 20, 0, 1, 0), (20, 30, 60, 1, 0)])
    striped = ([(0, 37, 1, 2, 0)], [(0, 50, 0, 2, 0)])
    packed = (
        [(2, 9, 3, 1, 0), (11, 20, 0, 1, 1), (33, 3, 0, 1, 7)],
        [(0, 12, 0, 1, 0), (15, 21, 0, 1, 1), (40, 5, 0, 1, 3)],
    )
    everything = Case(0.3, True, 25, -1, 2.0, torch.rand(2, 2))
    for case, (q_pieces, k_pieces), config, deterministic, sinks in [
        (Case(), (_whole(37), _whole(50)), SMALL, True, None),
        (Case(causal=True), ring, BY_DESCRIPTOR, True, torch.tensor([0.3, -1.0])),
        (Case(causal=True), ring, SMALL, False, None),
        (Case(causal=True), packed, BY_DESCRIPTOR, False, torch.tensor([0.5, -math.inf])),
        (Case(window_left=9, window_right=4), striped, SMALL, True, None),
        (Case(softcap=1.5), striped, SMALL, False, None),
        (Case(causal=True, alibi_slopes=slopes), packed, SMALL, True, None),
        (Case(softmax_scale=-0.3, causal=True), ring, SMALL, False, None),
        (everything, packed, SMALL, False, None),
        (everything, packed, SMALL, True, None),
    ]:
        batch = 2 if case is everything else 1
        q, k, v = operands(batch, 37, 50, 2, 1, 24, 16)
        _check(case, q, k, v, q_pieces, k_pieces, config, deterministic, sinks)


def _lengths_and_heads(rank):
    """Lengths and head sizes that are no tile's, grouped heads, rows without a key, nothing."""
    for seq, size, size_v, heads, kv_heads in [
        (1, 16, 16, 1, 1), (17, 40, 40, 6, 2), (17, 59, 59, 3, 1), (33, 80, 96, 1, 1),
        (17, 192, 128, 1, 1), (17, 256, 256, 1, 1),
    ]:  # fmt: skip
        case = Case(causal=True, softmax_scale=size**-0.5)
        q, k, v = operands(1, seq, seq + 7, heads, kv_heads, size, size_v)
        _check(case, q, k, v, _whole(seq, 7), _whole(seq + 7), SMALL, size % 3 == 1)
    q, k, v = operands(1, 33, 12, 2, 1, 16, 16)  # the first 21 rows see nothing
    for deterministic in (False, True):
        _check(Case(7.5, True), q, k, v, _whole(33, -21), _whole(12), SMALL, deterministic)
    for batch, seq_q, seq_k in ((0, 4, 4), (1, 0, 4), (1, 4, 0)):
        q, k, v = operands(batch, seq_q, seq_k, 2, 2, 16, 16)
        for deterministic in (False, True):
            _check(Case(), q, k, v, _whole(seq_q), _whole(seq_k), SMALL, deterministic)


def _dropout(rank):
    """The weights that the forward dropped, whatever the tiles."""
    case = Case(causal=True, dropout_p=0.3, seed=(1 << 63) + 12345, first_head=1, all_heads=5)
    q_pieces, k_pieces = [(0, 9, 5, 3, 2), (9, 4, 0, 1, 1)], [(0, 20, 2, 1, 2), (20, 5, 0, 1, 1)]
    keep = kept(case, q_pieces, k_pieces, 1, 2, 13, 25)
    for config, deterministic in ((SMALL, True), (AttentionConfig(16, 32, 4, 2, edge=16), False)):
        q, k, v = operands(1, 13, 25, 2, 1, 16, 16)
        _check(case, q, k, v, q_pieces, k_pieces, config, deterministic, None, keep)


def _sixteen_bits(rank):
    pieces, case = _whole(33), Case(0.125, causal=True)
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = operands(1, 33, 33, 2, 1, 64, 64, dtype)
        dout = torch.randn(1, 33, 2, 64).to(dtype)
        want, _, _ = _wanted(q, k, v, pieces, pieces, case, dout)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        theirs = torch.autograd.grad(stock(*leaves, pieces, pieces, case), leaves, dout)
        for deterministic in (dtype is torch.bfloat16,):
            grads, _, _ = _ours(q, k, v, pieces, pieces, case, dout, SMALL, deterministic)
            for ours, its, ref in zip(grads, theirs, want, strict=True):
                error, limit = (ours.double() - ref).abs(), (its.double() - ref).abs()
                ulp = EPS[dtype] if dtype is torch.bfloat16 else 0.0
                assert error.max() <= 3 * limit.max() + 2 * ulp * ref.abs().max()
                assert rms(error) <= 3 * rms(limit) + ulp * rms(ref)


def _strides_and_repeats(rank):
    """Any strides of operands, dout and gradients; the split form has equal bits in every run."""
    pieces, case = _whole(20), Case(causal=True)
    q, k, v = operands(1, 20, 20, 2, 1, 32, 16)
    dout = torch.randn(1, 2, 20, 16).transpose(1, 2)
    want = _ours(q, k, v, pieces, pieces, case, dout, SMALL, True)[0]
    for deterministic in (True, False):
        turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
        grads = _ours(*turned, pieces, pieces, case, dout, SMALL, deterministic)[0]
        for ours, ref in zip(grads, want, strict=True):
            assert ours.stride() != ref.stride()
            assert torch.equal(ours, ref) if deterministic else torch.allclose(ours, ref, atol=1e-5)


CHECKS = (_features, _lengths_and_heads, _dropout, _sixteen_bits, _strides_and_repeats)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[1:])
def test_backward(check):
    run_ranks(check, 1, env=INTERPRETED, timeout=280)

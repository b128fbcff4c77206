"""The attention forward: every feature, interpreted, against its definition in float64.

Layers: one interpreted process (here); plans as integers (test_attention_plan.py); the compiled
kernels, read (test_attention_compiled.py). No GPU has run it.

Bounds: fp32 1e-5 of the largest value a result can have, on out and lse. 16 bits: the error of
torch's own attention in that dtype, twice, in the largest element and in RMS; the interpreter
rounds bf16 stores otherwise than torch, so one ulp is added there. What lies in no piece is NaN.
"""

import math

import pytest
import torch

from pyparallel.attention import Mask, Pieces, State, choose_engine, plain
from pyparallel.triton_kernels import flash_attention as flash
from pyparallel.triton_kernels.flash_attention_arguments import (
    fits_descriptor,
    reaches_far,
)
from pyparallel.triton_kernels.flash_attention_configurations import AttentionConfig
from tests.launch import run_ranks
from tests.triton_kernels.attention_cases import (
    EPS,
    Case,
    kept,
    operands,
    reference,
    rms,
    stock,
    visible,
)
from tests.triton_kernels.bounds import INTERPRETED

pytestmark = pytest.mark.timeout(300)  # the interpreter on a busy machine

SMALL = AttentionConfig(32, 16, 4, 2, edge=16)
BY_DESCRIPTOR = AttentionConfig(16, 32, 4, 2, descriptors=True, edge=16)
NAN = float("nan")


def _whole(rows, position=0, document=0):
    return [(0, rows, position, 1, document)]


def _poison(x, pieces):
    """NaN in rows that are in no piece."""
    inside = torch.zeros(x.size(1), dtype=torch.bool)
    for begin, length, *_ in pieces:
        inside[begin : begin + length] = True
    x[:, ~inside] = NAN
    return x


def _check(case, q, k, v, q_pieces, k_pieces, what, config=SMALL, sinks=None, keep=None):
    """One launch, and the same keys in two steps of a state; both against the definition."""
    clean = [x.nan_to_num() for x in (q, k, v)]
    out, lse = reference(*clean, q_pieces, k_pieces, case, sinks, keep)
    limit = 1e-5 * max(1.0, float(clean[2].abs().max()))
    found = [flash.forward(q, k, v, q_pieces, k_pieces, case, sinks=sinks, config=config)]
    state = State.empty(q, v.size(3))
    for half in (k_pieces[::2], k_pieces[1::2]):
        flash.forward_step(q, k, v, q_pieces, half, case, state, config=config)
    found.append(flash.finish(state, sinks, q.dtype))
    for ours, its in found:
        assert ours.dtype == q.dtype
        assert its.dtype == torch.float32
        error = (ours.double() - out).abs().max() if ours.numel() else 0.0
        assert error <= limit, f"{what}: out {error}"
        empty = lse == -math.inf
        assert torch.equal(its == -math.inf, empty), f"{what}: empty rows"
        error = (its.double() - lse)[~empty].abs()
        assert not error.numel() or error.max() <= 1e-5 * max(1, lse[~empty].abs().max()), what
        assert not ours.isnan().any(), what
    return found[0]


def _features(rank):
    """Each feature alone and all together, on layouts that a ring makes; GQA, d_qk != d_v."""
    slopes = torch.tensor([0.5, 0.125])
    sinks = torch.tensor([0.3, -math.inf])
    masks = [
        Case(),
        Case(causal=True),
        Case(window_left=9, window_right=4),
        Case(causal=True, window_left=20),
        Case(causal=True, window_right=7),
        Case(softcap=1.5),
        Case(causal=True, alibi_slopes=slopes),
        Case(softmax_scale=-0.3, causal=True),
        Case(0.3, True, 25, -1, 2.0, torch.rand(2, 2)),
    ]
    layouts = [
        (_whole(37), _whole(50)),
        ([(0, 20, 20, 1, 0), (20, 17, 60, 1, 0)], [(0, 20, 0, 1, 0), (20, 30, 60, 1, 0)]),
        ([(0, 37, 1, 2, 0)], [(0, 50, 0, 2, 0)]),
        (
            [(2, 9, 3, 1, 0), (11, 20, 0, 1, 1), (33, 3, 0, 1, 7)],
            [(0, 12, 0, 1, 0), (15, 21, 0, 1, 1), (40, 5, 0, 1, 3)],
        ),
    ]
    for number, case in enumerate(masks):
        for q_pieces, k_pieces in layouts if number == 1 else layouts[number % 4 : number % 4 + 1]:
            for config in (SMALL, BY_DESCRIPTOR) if number == 2 else (SMALL,):
                batch = 2 if number == 8 else 1
                q, k, v = operands(batch, 37, 50, 2, 1, 24, 16, seed=number)
                q, k, v = _poison(q, q_pieces), _poison(k, k_pieces), _poison(v, k_pieces)
                for sink in (None, sinks) if number == 1 else (None,):
                    _check(case, q, k, v, q_pieces, k_pieces, f"{case} {q_pieces}", config, sink)


def _lengths_and_heads(rank):
    """Lengths and head sizes that are no tile's; MQA, odd groups; empty operands."""
    for seq, size, size_v, heads, kv_heads in [
        (1, 16, 16, 1, 1), (17, 40, 40, 6, 2), (17, 59, 59, 3, 1), (33, 80, 80, 1, 1),
        (20, 96, 96, 1, 1), (19, 128, 72, 1, 1), (17, 192, 128, 1, 1), (17, 256, 256, 1, 1),
        (33, 8, 24, 1, 1),
    ]:  # fmt: skip
        case = Case(causal=True, softmax_scale=size**-0.5)
        q, k, v = operands(1, seq, seq + 7, heads, kv_heads, size, size_v)
        for config in (SMALL, BY_DESCRIPTOR) if size in (80, 96) else (SMALL,):
            _check(case, q, k, v, _whole(seq, 7), _whole(seq + 7), f"{seq, size}", config)
    for batch, seq_q, seq_k in ((0, 4, 4), (1, 0, 4), (1, 4, 0)):
        q, k, v = operands(batch, seq_q, seq_k, 2, 2, 16, 16)
        out, lse = flash.forward(q, k, v, _whole(seq_q), _whole(seq_k), Case(), config=SMALL)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def _sixteen_bits(rank):
    """Errors of torch's own attention in that dtype, twice; large logits too."""
    for dtype in (torch.float16, torch.bfloat16):
        for scale in (0.125, 2.0):
            q, k, v = operands(1, 65, 65, 2, 1, 64, 64, dtype)
            case, pieces = Case(scale, causal=True), _whole(65)
            ref, _ = reference(q, k, v, pieces, pieces, case)
            theirs = (stock(q, k, v, pieces, pieces, case).double() - ref).abs()
            out, _ = flash.forward(q, k, v, pieces, pieces, case, config=SMALL)
            ours = (out.double() - ref).abs()
            ulp = EPS[dtype] * 2 * ref.abs().max() if dtype is torch.bfloat16 else 0.0
            assert ours.max() <= 2 * theirs.max() + ulp
            assert rms(ours) <= 2 * rms(theirs) + (ulp > 0) * EPS[dtype] * rms(ref)


def _dropout(rank):
    """The same weights dropped as the definition says, whatever tiles, shards and heads."""
    case = Case(causal=True, dropout_p=0.3, seed=(1 << 63) + 12345, first_head=1, all_heads=5)
    q_pieces, k_pieces = [(0, 9, 5, 3, 2), (9, 4, 0, 1, 1)], [(0, 20, 2, 1, 2), (20, 5, 0, 1, 1)]
    q, k, v = operands(2, 13, 25, 2, 1, 16, 16)
    keep = kept(case, q_pieces, k_pieces, 2, 2, 13, 25)
    assert 0.25 < 1 - keep.double().mean() < 0.35
    for config in (SMALL, AttentionConfig(32, 32, 4, 2, True, 32)):
        _check(case, q, k, v, q_pieces, k_pieces, "dropout", config, None, keep)


def _strides(rank):
    """Transposed, expanded and offset operands, and those whose blocks reach past 2^31."""
    case, pieces = Case(causal=True), _whole(20)
    q, k, v = operands(1, 20, 20, 2, 2, 32, 32)
    want, want_lse = flash.forward(q, k, v, pieces, pieces, case, config=SMALL)
    ways = [
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)],
        [torch.cat([x, x], 3)[..., :32] for x in (q, k, v)],
    ]
    for way in ways:
        out, lse = flash.forward(*way, pieces, pieces, case, config=SMALL)
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)
    same = k[:, :, :1].expand(-1, -1, 2, -1)
    _check(case, q, same, v, pieces, pieces, "expanded")
    _check(case, ways[0][0], k, v, pieces, pieces, "by descriptor", BY_DESCRIPTOR)
    assert fits_descriptor(ways[0][0])
    assert not fits_descriptor(ways[1][0])
    assert not fits_descriptor(same)


def _far(rank):
    """Rows 2^30 + 8 elements apart, in memory never touched but for these rows."""
    import mmap
    import warnings

    rows, stride = 5, 2**30 + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # NORESERVE
    memory = mmap.mmap(-1, (rows * stride + 64) * 2, flags=flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = torch.frombuffer(memory, dtype=torch.float16)
    q, k, v = operands(1, rows, rows, 1, 1, 16, 16, torch.float16)
    far = flat.as_strided((1, rows, 1, 16), (0, stride, 0, 1))
    far.copy_(k)
    assert reaches_far(SMALL, far)
    assert not reaches_far(SMALL, k)
    pieces = _whole(rows)
    out, _ = flash.forward(q, far, v, pieces, pieces, Case(causal=True), config=SMALL)
    assert torch.equal(
        out, flash.forward(q, k, v, pieces, pieces, Case(causal=True), config=SMALL)[0]
    )


def _beside_plain(rank):
    """The shared interface: a ring's steps by this engine and by plain torch leave equal states."""
    q, k, v = operands(2, 24, 24, 2, 1, 32, 16)
    slopes = torch.rand(2, 2)
    mask = Mask(
        0.2, causal=True, window_left=30, softcap=3.0, alibi_slopes=slopes, dropout_p=0.2, seed=9
    )
    mine, theirs = State.empty(q, 16), State.empty(q, 16)
    queries = Pieces([(0, 12, 0, 1, 0), (12, 12, 36, 1, 0)])
    for keys in (Pieces([(0, 12, 12, 1, 0), (12, 12, 24, 1, 0)]), queries):
        engine, why = choose_engine(q, k, v, mask, "triton")
        assert why == "triton: asked for"
        engine.forward_step(q, k, v, queries, keys, mask, mine)
        plain.forward_step(q, k, v, queries, keys, mask, theirs)
        seen = theirs.row_max > -math.inf
        assert torch.equal(mine.row_max > -math.inf, seen)
        assert torch.allclose(mine.row_max[seen], theirs.row_max[seen], rtol=1e-5, atol=1e-6)
        assert torch.allclose(mine.row_sum, theirs.row_sum, rtol=1e-5)
        assert torch.allclose(mine.acc, theirs.acc, rtol=1e-4, atol=1e-5)


CHECKS = (_features, _lengths_and_heads, _sixteen_bits, _dropout, _strides, _far, _beside_plain)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__[1:])
def test_forward(check):
    run_ranks(check, 1, env=INTERPRETED, timeout=280)


def test_the_reference_sees_what_the_mask_says():
    """Controls: a pair too many, or the left edge one off, moves the result past the bound."""
    q, k, v = operands(1, 9, 9, 1, 1, 16, 16)
    pieces = _whole(9)
    right, _ = reference(q, k, v, pieces, pieces, Case(window_left=3, window_right=0))
    for wrong in (Case(window_left=2, window_right=0), Case(window_left=3, window_right=1), Case()):
        assert (reference(q, k, v, pieces, pieces, wrong)[0] - right).abs().max() > 1e-3
    seen = visible([(0, 5, -3, 1, 0)], _whole(2), 5, 2, Case(causal=True))
    assert seen.sum(1).tolist() == [0, 0, 0, 1, 2]

"""The native CPU engine (csrc/torch/attention.h) against attention by the book, in float64.

Layers of proof: one process, every feature, dtype and tile edge; then much of it again in processes
that are held to the other instruction sets, and whose memory is poisoned.

Bounds. float32: relative RMS error 1e-5 and log-sum-exp 1e-5. 16 bit: beside that at most 2x
(gradients 3x) the RMS error of torch's scaled_dot_product_attention in that dtype, or of plain
torch operations in it where that has no such feature.
"""

import math
import mmap
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pyparallel import _torch
from pyparallel.attention import Mask, Pieces, State, choose_engine, finish
from pyparallel.attention.native import backward_step, forward_step
from pyparallel.errors import InvalidArgument
from tests.attention.reference import Rows, attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMIT = 1e-5  # float32
# Documents of 77 and 130 positions of which a shard has some, with padding between and behind.
PACKED = Pieces([(0, 40, 0, 1, 0), (43, 25, 40, 1, 0), (70, 110, 1, 1, 1), (185, 12, 65, 1, 0)])
STRIPED = Pieces([(0, 60, 1, 2, 0), (60, 100, 3, 3, 5), (163, 7, 0, 4, 0)])
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 19},
    "both sides": {"window_left": 40, "window_right": 3},
    "its own key alone": {"window_left": 0, "window_right": 0},
    "softcap": {"causal": True, "softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.0, 0.01, 0.2])},
    "alibi of each": {"causal": True, "alibi_slopes": torch.linspace(0.01, 1, 8).view(2, 4)},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": 2**63 + 77, "first_head": 3,
                "all_heads": 20},
    "all of it": {"causal": True, "window_left": 50, "softcap": 2.0, "dropout_p": 0.1, "seed": 5,
                  "alibi_slopes": torch.tensor([0.1, 0.02, 0.3, 0.0])},
}  # fmt: skip


def rms(x):
    return float(x.double().square().mean().sqrt())


def relative(got, want):
    """RMS error by what is right, or by 0.1 where that is next to nothing (operands are near 1)."""
    return rms(got.double() - want) / max(rms(want), 0.1)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(seed, batch, rows, keys, heads, kv_heads, d, d_v, dtype):
    make = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(shape, generator=make).to(dtype)

    return (
        some(batch, rows, heads, d),
        some(batch, keys, kv_heads, d),
        some(batch, keys, kv_heads, d_v),
        some(batch, rows, heads, d_v),
    )


def book(q, k, v, dout, q_rows, k_rows, mask, sinks=None):
    """Float64: out, lse, and the gradients of q, k and v."""
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, q_rows, k_rows, mask, sinks)
    dout = torch.where((q_rows.document >= 0).view(1, -1, 1, 1), dout.double(), 0.0)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout))


def ours(q, k, v, dout, q_pieces, k_pieces, mask, steps=1, sinks=None):
    """The same by the native engine, the table of keys in `steps` parts."""
    state = State.empty(q, v.shape[-1])
    state.acc.zero_()
    parts = [Pieces(list(k_pieces)[i::steps]) for i in range(steps)]
    for part in parts:
        forward_step(q, k, v, q_pieces, part, mask, state)
    out, lse = finish(state, sinks, torch.float32)
    delta = torch.where(
        lse.isneginf(), 0.0, (dout.float().contiguous() * out).sum(-1).transpose(1, 2)
    )
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    for part in parts:
        backward_step(dout, q, k, v, lse, delta, q_pieces, part, mask, *grads)
    return (out.to(q.dtype), lse, *(grad.to(q.dtype) for grad in grads))


def stock(q, k, v, dout, q_rows, k_rows, mask):
    """The same by torch alone, in the operands' dtype."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    heads, (k_, v_) = q.shape[2], inputs[1:]
    mine = [x.transpose(1, 2) for x in (inputs[0], *(y.repeat_interleave(heads // y.shape[2], 2)
                                                     for y in (k_, v_)))]  # fmt: skip
    offset = k_rows.position - q_rows.position.unsqueeze(1)
    seen = (offset <= mask.after) & (offset >= -mask.before)
    seen &= (q_rows.document.unsqueeze(1) == k_rows.document) & (k_rows.document >= 0)
    bias = torch.where(seen, 0.0, -math.inf).expand(q.shape[0], heads, *seen.shape)
    if mask.alibi_slopes is not None:
        slopes = mask.alibi_slopes
        bias = bias - slopes.reshape(-1, slopes.shape[-1], 1, 1) * offset.abs()
    some = seen.any(-1)
    bias = torch.where(some.unsqueeze(-1), bias, 0.0).to(q.dtype)
    if mask.softcap or mask.dropout_p:
        scores = (mine[0] @ mine[1].mT) * mask.softmax_scale
        if mask.softcap:
            scores = torch.tanh(scores / mask.softcap) * mask.softcap
        out = torch.softmax(scores + bias, -1) @ mine[2]
    else:
        out = scaled_dot_product_attention(*mine, attn_mask=bias, scale=mask.softmax_scale)
    out = torch.where(some.unsqueeze(-1), out, 0.0).transpose(1, 2)
    return (out.detach(), None, *torch.autograd.grad(out, inputs, dout))


def limits(q, k, v, dout, q_rows, k_rows, mask):
    """Of the RMS errors of out, dq, dk and dv, relative to what is right."""
    if q.dtype is torch.float32:
        return [LIMIT] * 4
    # Dropout changes which weights count, not how they round: the book without it is what plain
    # torch is held against.
    mask = replace(mask, dropout_p=0.0)
    want = book(q, k, v, dout, q_rows, k_rows, mask)
    got = stock(q, k, v, dout, q_rows, k_rows, mask)
    errors = [relative(x, y) for x, y in zip(got, want, strict=True) if x is not None]
    return [LIMIT + 2 * errors[0], *(LIMIT + 3 * error for error in errors[1:])]


def assert_right(got, want, bounds, real):
    """`real` are the rows of q that are in pieces."""
    out, lse, *grads = got
    assert torch.equal(lse.isneginf(), want[1].isneginf())
    finite = ~want[1].isneginf()
    assert float((lse.double() - want[1])[finite].abs().max()) <= LIMIT * (
        1 + float(want[1][finite].abs().max())
    )
    assert not out[:, ~real].any()
    for name, x, y, bound in zip(("out", "dq", "dk", "dv"), (out, *grads),
                                 (want[0], *want[2:]), bounds, strict=True):  # fmt: skip
        assert x.isfinite().all(), name
        error = relative(x, y)
        assert error <= bound, f"{name}: {error:.2e}, limit {bound:.2e}"


def poisoned(x, pieces):
    bad = torch.ones(x.shape[1], dtype=torch.bool)
    bad[pieces.covered()] = False
    return torch.where(bad.view(1, -1, 1, 1), torch.full((), math.nan, dtype=x.dtype), x), ~bad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_every_feature(name, dtype):
    mask = Mask(0.3, **MASKS[name])
    for seed, q_pieces, k_pieces, steps in ((1, PACKED, PACKED, 1), (2, STRIPED, PACKED, 2)):
        rows = 200 if q_pieces is PACKED else 171
        q, k, v, dout = draw(seed, 2, rows, 199, 4, 2, 24, 40, dtype)
        q_rows, k_rows = Rows.of(q_pieces, rows), Rows.of(k_pieces, 199)
        want = book(q, k, v, dout, q_rows, k_rows, mask)
        bounds = limits(q, k, v, dout, q_rows, k_rows, mask)
        q, real = poisoned(q, q_pieces)
        dout, k, v = (poisoned(x, y)[0] for x, y in ((dout, q_pieces), (k, k_pieces),
                                                     (v, k_pieces)))  # fmt: skip
        got = ours(q, k, v, dout, q_pieces, k_pieces, mask, steps)
        assert_right(got, want, bounds, real)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bounds_bite(dtype):
    """One key more in the window, one step of the scale, one seed on: none of them passes."""
    q, k, v, dout = draw(3, 1, 200, 199, 4, 2, 24, 40, dtype)
    rows = Rows.of(PACKED, 200), Rows.of(PACKED, 199)
    real = rows[0].document >= 0
    for right, change in (
        (Mask(0.3, causal=True, window_left=19), {"window_left": 20}),
        (Mask(0.3, causal=True), {"softmax_scale": 0.32}),
        (Mask(0.3, softcap=1.5), {"softcap": 1.6}),
        (Mask(0.3, dropout_p=0.3, seed=7), {"seed": 8}),
    ):
        want = book(q, k, v, dout, *rows, right)
        bounds = limits(q, k, v, dout, *rows, right)
        assert_right(ours(q, k, v, dout, PACKED, PACKED, right), want, bounds, real)
        wrong = ours(q, k, v, dout, PACKED, PACKED, replace(right, **change))
        without_lse = (wrong[0], want[1].float(), *wrong[2:])
        with pytest.raises(AssertionError, match="limit"):
            assert_right(without_lse, want, bounds, real)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",  # batch, rows, keys, heads, kv_heads, d, d_v
    [
        (1, 1, 1, 1, 1, 16, 16),
        (2, 1, 700, 8, 2, 128, 128),
        (1, 17, 113, 6, 2, 40, 96),
        (1, 97, 97, 6, 1, 59, 80),
        (1, 113, 17, 3, 3, 80, 59),
        (1, 193, 531, 2, 1, 192, 256),
        (1, 300, 257, 1, 1, 256, 17),
        (3, 5, 2, 2, 2, 8, 4),
        (1, 2, 5, 2, 2, 1, 1),
    ],
)
def test_shapes_other_than_the_tile(shape, dtype):
    _, rows, keys, _, _, d, _ = shape
    q, k, v, dout = draw(rows, *shape, dtype)
    q_pieces, k_pieces = Pieces.whole(rows, position=keys - rows), Pieces.whole(keys)
    q_rows, k_rows = Rows.of(q_pieces, rows), Rows.of(k_pieces, keys)
    for causal in (False, True):
        mask = Mask(d**-0.5, causal=causal)
        want = book(q, k, v, dout, q_rows, k_rows, mask)
        bounds = limits(q, k, v, dout, q_rows, k_rows, mask)
        real = torch.ones(rows, dtype=torch.bool)
        got = ours(q, k, v, dout, q_pieces, k_pieces, mask)
        assert_right(got, want, bounds, real)
        if causal and rows == 5:
            assert got[1][:, :, :3].isneginf().all()
            assert not any(x[:, :3].any() for x in (got[0], got[2]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_give_the_same_bits(dtype):
    q, k, v, dout = draw(4, 2, 130, 140, 4, 2, 32, 24, dtype)
    pieces, mask = (Pieces.whole(130, 10), Pieces.whole(140)), Mask(0.2, causal=True)
    want = ours(q, k, v, dout, *pieces, mask)
    for order in ((0, 2, 1, 3), (3, 1, 2, 0), (0, 3, 2, 1)):
        back = [order.index(i) for i in range(4)]
        turned = [x.permute(order).contiguous().permute(back) for x in (q, k, v, dout)]
        assert all(map(torch.equal, ours(*turned, *pieces, mask), want))
    wide = [torch.stack([x, x], -1).flatten(3)[..., ::2] for x in (q, k, v, dout)]
    assert all(map(torch.equal, ours(*wide, *pieces, mask), want))
    one = [x[:, :1].expand(-1, x.shape[1], -1, -1) for x in (q, k, v, dout)]
    same = ours(*(x.contiguous() for x in one), *pieces, mask)
    assert all(map(torch.equal, ours(*one, *pieces, mask), same))


def test_strides_past_32_bits():
    """Case: int32 offsets. Rows of k and v are 2^31 elements apart, in memory hardly touched."""
    apart, keys = 2**31 + 64, 3
    no_reserve = 0x4000  # of Linux; not in Python's mmap
    memory = mmap.mmap(-1, 2 * apart * keys, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    q, k, v, dout = draw(14, 1, 5, keys, 2, 1, 16, 16, torch.bfloat16)
    far_k, far_v = (flat[at:].as_strided(k.shape, (1, apart, 16, 1)) for at in (0, 16))
    far_k.copy_(k)
    far_v.copy_(v)
    mask = Mask(0.25, causal=True)
    for rows in (1, 5):  # one reads k and v as they lie, five pack them
        table = Pieces.whole(rows, keys - rows), Pieces.whole(keys)
        mine = q[:, :rows], dout[:, :rows]
        want = ours(mine[0], k, v, mine[1], *table, mask)
        assert all(map(torch.equal, ours(mine[0], far_k, far_v, mine[1], *table, mask), want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing_and_calls_repeat(dtype):
    q, k, v, dout = draw(5, 1, 420, 420, 6, 3, 32, 32, dtype)
    pieces, mask = Pieces.whole(420), Mask(0.2, causal=True, window_left=300)
    results = []
    for threads in (1, 2, 4, 7):
        torch.set_num_threads(threads)
        assert _torch.attention_threads() == threads
        once = ours(q, k, v, dout, pieces, pieces, mask)
        again = ours(q, k, v, dout, pieces, pieces, mask)
        assert all(map(torch.equal, once, again))
        results.append(once)
    for other in results[1:]:
        assert torch.equal(other[0], results[0][0])
        assert torch.equal(other[1], results[0][1])
        for x, y in zip(other[2:], results[0][2:], strict=True):
            assert relative(x, y.double()) <= (1e-6 if dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_threads_than_rows_of_q_share_the_keys(dtype):
    """Decoding: few rows, read as they lie; states of several threads, merged."""
    for rows, kv_heads, seed in ((1, 8, 1), (1, 2, 2), (2, 4, 3), (3, 1, 4)):
        q, k, v, dout = draw(seed, 1, rows, 900, 8, kv_heads, 40, 72, dtype)
        wide = torch.stack([k, k], -1).flatten(3)[..., ::2]
        pieces = Pieces([(i, 1, (5, 850, 880)[i], 1, 0) for i in range(rows)]), Pieces.whole(900)
        of_rows = Rows.of(pieces[0], rows), Rows.of(pieces[1], 900)
        for mask in (Mask(0.2), Mask(0.2, causal=True, window_left=700, softcap=5.0)):
            want = book(q, k, v, dout, *of_rows, mask)
            bounds = limits(q, k, v, dout, *of_rows, mask)
            for threads in (1, 5):
                torch.set_num_threads(threads)
                for keys in (k, wide):
                    got = ours(q, keys, v, dout, *pieces, mask)
                    assert_right(got, want, bounds, torch.ones(rows, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_does_not_grow_with_the_steps(dtype):
    """Steps in reverse order, so that every one of them raises some rows' maximum."""
    q, k, v, dout = draw(6, 1, 128, 256, 4, 2, 64, 64, dtype)
    rows, mask = Rows.of(Pieces.whole(256), 256), Mask(0.6, causal=True)
    q_pieces = Pieces.whole(128, 128)
    want = book(q, k, v, dout, Rows.of(q_pieces, 128), rows, mask)
    errors = []
    for parts in (1, 8):
        n = 256 // parts
        table = Pieces([(i * n, n, i * n, 1, 0) for i in reversed(range(parts))])
        got = ours(q, k, v, dout, q_pieces, table, mask, parts)
        errors.append([rms(x.double() - y) for x, y in zip(got, want, strict=True)])
    for one, eight in zip(*errors, strict=True):
        assert eight <= 1.05 * one + 1e-8


def test_scores_that_are_large_or_far_apart():
    """Case: large logits (x30) and lengths past a tile; and two blocks 200 apart."""
    q, k, v, dout = draw(7, 1, 33, 33, 2, 2, 64, 64, torch.float32)
    pieces, rows, mask = Pieces.whole(33), Rows.of(Pieces.whole(33), 33), Mask(30 / 8, causal=True)
    got, want = ours(q, k, v, dout, pieces, pieces, mask), book(q, k, v, dout, rows, rows, mask)
    torch_s = stock(q, k, v, dout, rows, rows, mask)
    for i in (0, 2, 3, 4):
        assert relative(got[i], want[i]) <= (2 if i == 0 else 3) * relative(torch_s[i], want[i])
    q, k = torch.ones(1, 1, 1, 4), torch.full((1, 600, 1, 4), -25.0)
    k[0, 300:] = 25.0
    v = torch.cat([torch.ones(1, 300, 1, 4), torch.full((1, 300, 1, 4), 2.0)], 1)
    for order in ([(0, 300), (300, 600)], [(300, 600), (0, 300)]):
        table = Pieces([(a, b - a, a, 1, 0) for a, b in order])
        out, lse, *_ = ours(q, k, v, v[:, :1], Pieces.whole(1), table, Mask(1.0), 2)
        torch.testing.assert_close(out, torch.full_like(out, 2.0))
        assert float(lse) == pytest.approx(100 + math.log(300), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_enter_in_finish(dtype):
    q, k, v, dout = draw(8, 1, 50, 50, 4, 2, 16, 16, dtype)
    pieces, rows, mask = Pieces.whole(50), Rows.of(Pieces.whole(50), 50), Mask(0.25, causal=True)
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.0])
    want = book(q, k, v, dout, rows, rows, mask, sinks)
    bounds = limits(q, k, v, dout, rows, rows, mask)
    got = ours(q, k, v, dout, pieces, pieces, mask, sinks=sinks)
    assert_right(got, want, bounds, torch.ones(50, dtype=torch.bool))


def test_what_is_not_finite_stays_so():
    q, k, v, _ = draw(9, 1, 40, 40, 1, 1, 16, 16, torch.float32)
    q[0, 3], v[0, 5, 0, 2] = math.nan, math.inf
    state = State.empty(q, 16)
    pieces = Pieces.whole(40)
    forward_step(q, k, v, pieces, pieces, Mask(0.25, causal=True), state)
    out, _ = finish(state, None, torch.float32)
    assert out[0, 3].isnan().all()
    assert out[0, 5:, 0, 2].isinf().all()
    out[0, 3], out[0, :, :, 2] = 0, 0
    assert out.isfinite().all()


def test_nothing_to_do_leaves_the_state_alone():
    q, k, v, dout = draw(10, 1, 6, 6, 2, 1, 8, 8, torch.float32)
    none, some = Pieces(), Pieces.whole(6)
    for q_pieces, k_pieces in ((none, some), (some, none), (some, Pieces.whole(6, document=3))):
        out, lse, *grads = ours(q, k, v, dout, q_pieces, k_pieces, Mask(1.0))
        assert lse.isneginf().all()
        assert not any(x.any() for x in (out, *grads))
    for shape in ((0, 6, 6, 2, 1, 8, 8), (1, 0, 6, 2, 1, 8, 8), (1, 6, 0, 2, 1, 8, 8)):
        q, k, v, dout = draw(10, *shape, torch.float32)
        pieces = Pieces.whole(shape[1]), Pieces.whole(shape[2])
        got = ours(q, k, v, dout, *pieces, Mask(1.0, causal=True))
        assert not any(x.any() for x in (got[0], *got[2:]))


def test_operands_that_do_not_fit_are_named():
    q, k, v, dout = draw(11, 1, 6, 6, 4, 2, 8, 8, torch.float32)
    one, mask = Pieces.whole(6), Mask(1.0)
    state, far = State.empty(q, 8), Pieces.whole(6, position=2**31 - 3)
    wide = torch.zeros(1, 6, 4, 264)
    for args, message in (
        ((q, k.bfloat16(), v, one, one, mask, state), r"k is BFloat16 .*expected Float \[1, 6, 2"),
        ((q, k[:, :, :, :4], v, one, one, mask, state), r"k is Float \[1, 6, 2, 4\]"),
        ((q[:, :, :3], k, v, one, one, mask, state), "3 query heads and 2 kv heads"),
        ((q.double(), k, v, one, one, mask, state), "operands are Double"),
        ((wide, wide, wide, one, one, mask, state), "head_dim is 264"),
        ((q, k, v, Pieces.whole(7), one, mask, state), "piece of q has begin 0, length 7"),
        ((q, k, v, one, far, mask, state), "below 2.31"),
        ((q, k, v, one, one, mask, State.empty(q, 7)), r"acc is Float \[1, 6, 4, 7\]"),
        ((q, k, v, one, one, replace(mask, alibi_slopes=torch.ones(3)), state), "alibi_slopes"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            forward_step(*args)
    assert not state.acc.any()
    lse = torch.zeros(1, 4, 6)
    turned = torch.zeros(1, 6, 8, 4).transpose(2, 3)
    with pytest.raises(InvalidArgument, match="dq has strides"):
        backward_step(dout, q, k, v, lse, lse, one, one, mask, turned, k, v)


def test_the_chooser_takes_it_where_it_fits():
    q, k, v, _ = draw(12, 1, 4, 4, 2, 1, 8, 8, torch.bfloat16)
    assert choose_engine(q, k, v, Mask(1.0))[0].name == "native"
    engine, why = choose_engine(q.double(), k.double(), v.double(), Mask(1.0))
    assert engine.name == "plain"
    assert "not native: dtype is torch.float64" in why


@pytest.mark.skipif("PYPARALLEL_SIMD" in os.environ, reason="is such a process itself")
@pytest.mark.parametrize("simd", ["avx2", "portable"])
def test_other_instruction_sets(simd):
    if _torch.attention_kernels(torch.float32) in ("portable", simd):
        pytest.skip("what this machine has was tested above")
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k",
         "(feature and dtype0) or (shapes and not dtype0)"],
        # What malloc gives is huge numbers then (0x7F bytes), NaN in float16.
        env={**os.environ, "PYPARALLEL_SIMD": simd, "MALLOC_PERTURB_": "128"},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout[-3000:]

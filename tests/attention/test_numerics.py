"""The numerics contract: as near to float64 as torch's own attention, and no drift with ranks.

Errors against float64, of random operands: root mean square, and largest. Torch's own kernel in the
same dtype (scaled_dot_product_attention) has the errors that ours may have twice (gradients three
times); at P ranks the first may be 1.05 times that of one rank. float32: 1e-5, relative;
log-sum-exp: 1e-5.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pyparallel.attention import sequence_parallel_attention, simulate
from tests.attention.whole import Case, check, largest_error, rms_error

GRADS = ("dq", "dk", "dv")


def of_torch(case):
    """What torch's kernel makes of a case without lse gradient, in the case's dtype."""
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads, is_causal=case.options["causal"], enable_gqa=True)
    out = out.transpose(1, 2)
    out.backward(case.dout)
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_error_is_that_of_torch_and_does_not_grow_with_ranks(dtype, causal):
    torch.manual_seed(5)
    case = Case.random(rows=256, heads=4, kv_heads=2, d=32, dtype=dtype, causal=causal)
    case.dlse = torch.zeros_like(case.dlse)
    want, stock = case.reference(), of_torch(case)
    alone = case.simulated(1)
    for name in ("out", *GRADS):
        for error in (rms_error, largest_error):
            allowed = (3 if name in GRADS else 2) * error(stock[name], want[name])
            assert error(alone[name], want[name]) <= allowed, (name, error)
    assert rms_error(alone["lse"], want["lse"]) <= 1e-5
    for world in (2, 4, 8):
        for strategy in ("ring", "all_gather", "ulysses" if world < 8 else "hybrid", "decode"):
            found = case.simulated(world, strategy=strategy)
            assert rms_error(found["lse"], want["lse"]) <= 1e-5
            for name in ("out", *GRADS):
                ratio = rms_error(found[name], want[name]) / rms_error(alone[name], want[name])
                assert ratio <= 1.05, (world, strategy, name, ratio)


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
def test_float32_is_within_1e_5(sharding):
    torch.manual_seed(6)
    case = Case.random(rows=200, heads=4, kv_heads=1, d=64, causal=True, sharding=sharding)
    check(case.simulated(4, strategy="ring"), case.reference(), 1e-5, sharding)


@pytest.mark.parametrize("world", [1, 3])
def test_float32_does_not_lose_digits_with_the_length(world):
    """Sums over 8192 keys, and over 4 heads of 2048 rows: as near as those of torch."""
    torch.manual_seed(16)
    for rows, keys, heads in ((64, 8192, 1), (2048, 64, 4)):
        case = Case.random(rows=rows, keys=keys, heads=heads, kv_heads=1, d=16, causal=False)
        case.dlse = torch.zeros_like(case.dlse)
        want, stock, found = case.reference(), of_torch(case), case.simulated(world)
        for name in ("out", *GRADS):
            allowed = (3 if name in GRADS else 2) * rms_error(stock[name], want[name])
            assert rms_error(found[name], want[name]) <= allowed, (rows, name)


class Whole(torch.autograd.Function):
    """The attention of the whole sequence over simulated ranks, as one function, for gradcheck."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, world, options):
        def rank(group):
            rows = slice(group.rank, None, world)
            leaves = [x[:, rows].detach().clone().requires_grad_() for x in (q, k, v)]
            sink = sinks.detach().clone().requires_grad_()
            with torch.enable_grad():
                out = sequence_parallel_attention(
                    *leaves, group=group, sinks=sink, sharding="striped", return_lse=True, **options
                )
            return [*leaves, sink], out, group

        ctx.ranks, ctx.world = simulate(world, rank), world
        outs = [[x.detach() for x in out] for _, out, _ in ctx.ranks]
        whole = torch.empty(q.shape[:3] + v.shape[3:], dtype=q.dtype)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=q.dtype)
        for r, (out, part) in enumerate(outs):
            whole[:, r::world], lse[:, :, r::world] = out, part
        return whole, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        world = ctx.world

        def rank(leaves, out, r):
            given = [dout[:, r::world], dlse[:, :, r::world]]
            return torch.autograd.grad(out, leaves, given, retain_graph=True)

        # The ranks' graphs meet over the transports of their own simulation: threads again.
        with ThreadPoolExecutor(world) as pool:
            jobs = [pool.submit(rank, *ctx.ranks[r][:2], r) for r in range(world)]
            grads = [job.result(timeout=60) for job in jobs]
        joined = []
        for i in range(3):
            shape = list(grads[0][i].shape)
            shape[1] = sum(g[i].shape[1] for g in grads)
            whole = torch.empty(shape, dtype=dout.dtype)
            for r in range(world):
                whole[:, r::world] = grads[r][i]
            joined.append(whole)
        return *joined, grads[0][3], None, None


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_gradcheck_in_float64(strategy):
    torch.manual_seed(7)
    q = torch.randn(1, 5, 3, 2, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 6, 1, 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 6, 1, 3, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True)
    options = {"strategy": strategy, "causal": True, "softcap": 1.5, "window_size": (3, 0)}
    torch.autograd.gradcheck(
        lambda *x: Whole.apply(*x, 2, options), (q, k, v, sinks), fast_mode=strategy != "ring"
    )


def test_large_logits_and_far_apart_blocks_stay_finite():
    """Logits times 30; blocks whose log-sum-exps differ by 200."""
    torch.manual_seed(8)
    case = Case.random(rows=33, causal=True, d=16)
    case.q *= 30
    check(case.simulated(4, strategy="ring"), case.reference(), 1e-5, "times 30")
    case = Case.random(rows=8, d=4, heads=1, kv_heads=1, sharding="contiguous")
    case.q[:] = 1.0
    case.k[:, :4], case.k[:, 4:] = 25.0, -25.0  # scores 50 and -50
    for strategy in ("ring", "decode"):
        check(case.simulated(2, strategy=strategy), case.reference(), 1e-5, strategy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_an_additive_mask_of_1e4_on_some_keys(dtype, offset):
    """As one more column of q and k: 200 * 200 / sqrt(16), exact in 16 bits. As torch's, on the
    columns beside; what it takes off some keys, none of the others shows."""
    torch.manual_seed(17)
    case = Case.random(rows=32, d=16, heads=2, kv_heads=1, dtype=dtype, causal=False)
    masked = torch.arange(32) % 5 < 2
    case.q[..., 0], case.k[..., 0] = (
        200,
        torch.where(masked, math.copysign(200, offset), 0).view(1, -1, 1),
    )
    case.dlse = torch.zeros_like(case.dlse)
    want, stock = case.reference(), of_torch(case)
    for world, strategy in ((1, "ring"), (4, "ring"), (2, "ulysses"), (3, "decode")):
        found = case.simulated(world, strategy=strategy)
        assert rms_error(found["lse"], want["lse"]) <= 1e-5
        for name in ("out", *GRADS):
            mine, theirs, right = (x[name][..., 1:] for x in (found, stock, want))
            if name in ("dk", "dv"):
                hidden = masked if offset < 0 else ~masked
                assert (found[name][:, hidden] == 0).all(), (name, strategy)
            allowed = (3 if name in GRADS else 2) * rms_error(theirs, right)
            assert rms_error(mine, right) <= allowed, (name, strategy)


def test_deterministic_repeats_bit_for_bit():
    torch.manual_seed(9)
    case = Case.random(rows=40, heads=6, kv_heads=2, dtype=torch.bfloat16, causal=True,
                       dropout_p=0.1, dropout_seed=1, deterministic=True, sinks=True)  # fmt: skip
    for strategy in ("ring", "all_gather", "ulysses", "decode"):
        first, second = (case.simulated(3, strategy=strategy) for _ in range(2))
        for name in ("out", "lse", "dq", "dk", "dv", "dsinks"):
            assert torch.equal(first[name], second[name]), (strategy, name)


def test_dropout_does_not_depend_on_ranks_sharding_or_strategy():
    torch.manual_seed(10)
    case = Case.random(rows=24, d=4, dropout_p=0.5, dropout_seed=77)
    want = case.simulated(1)
    for world, strategy, sharding in (
        (2, "ring", "zigzag"),
        (3, "all_gather", "striped"),
        (4, "ulysses", "contiguous"),
        (4, "hybrid", "zigzag"),
        (4, "decode", "zigzag"),
    ):
        found = case.simulated(world, strategy=strategy, sharding=sharding)
        check(found, want, 1e-6, (world, strategy))
    other = Case(case.q, case.k, case.v, {**case.options, "dropout_seed": 78}).simulated(1)
    assert rms_error(other["out"], want["out"]) > 0.1


def test_drawn_seeds_come_from_rank_0_s_generator():
    q = torch.randn(1, 8, 2, 4)
    results = []
    for _ in range(2):
        torch.manual_seed(11)
        results.append(simulate(1, lambda group: sequence_parallel_attention(
            q, q, q, group=group, dropout_p=0.5))[0])  # fmt: skip
    assert torch.equal(*results)
    assert not torch.equal(results[0], simulate(1, lambda group: sequence_parallel_attention(
        q, q, q, group=group, dropout_p=0.5))[0])  # fmt: skip


def test_strides_and_layouts():
    """Transposed, expanded and permuted operands and dout; bhsd and thd."""
    torch.manual_seed(12)
    case = Case.random(batch=1, rows=14, heads=4, kv_heads=4, d=8, causal=True)
    want = case.reference()
    strided = Case(
        case.q.transpose(2, 3).contiguous().transpose(2, 3),
        case.k,
        case.v.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        case.options,
    )
    strided.dout = case.dout.transpose(1, 2).contiguous().transpose(1, 2)
    strided.dlse = case.dlse
    assert strided.q.stride(-1) != 1
    for strategy in ("ring", "ulysses"):
        check(strided.simulated(2, strategy=strategy), want, 1e-6, strategy)
    ones = torch.ones(()).expand(1, 7, 4, 8)
    rows = case.shardings(2)[0]

    def rank(group, layout):
        x = [t[:, rows.rows(group.rank)] for t in (case.q, case.k, case.v)]
        x = [t.transpose(1, 2) if layout == "bhsd" else t[0] for t in x]
        out, lse = sequence_parallel_attention(*x, group=group, layout=layout, causal=True,
                                               return_lse=True)  # fmt: skip
        return out, lse

    for layout, dim in (("bhsd", 2), ("thd", 0)):
        found = simulate(2, lambda group, layout=layout: rank(group, layout))
        out = torch.cat([o for o, _ in found], dim).index_select(dim, rows.order())
        lse = torch.cat([s for _, s in found], -1).index_select(-1, rows.order())
        assert tuple(lse.shape) == ((1, 4, 14) if layout == "bhsd" else (4, 14))
        out = out.transpose(1, 2) if layout == "bhsd" else out[None]
        assert rms_error(out, want["out"]) <= 1e-6
        assert rms_error(lse.view(1, 4, 14), want["lse"]) <= 1e-6

    def expanded(group):
        x = [t[:, rows.rows(group.rank)].clone().requires_grad_()
             for t in (case.q, case.k, case.v)]  # fmt: skip
        sequence_parallel_attention(*x, group=group, causal=True).backward(ones)
        return [t.grad for t in x]

    case.dout, case.dlse = torch.ones_like(case.dout), torch.zeros_like(case.dlse)
    want = case.reference()
    found = simulate(2, expanded)
    for i, name in enumerate(("dq", "dk", "dv")):
        got = torch.cat([grads[i] for grads in found], 1).index_select(1, rows.order())
        assert rms_error(got, want[name]) <= 1e-6


@pytest.mark.parametrize("d", [16, 40, 59, 80, 96, 128, 192, 256])
def test_head_dims(d):
    torch.manual_seed(d)
    for rows in (1, 17, 97, 113):
        case = Case.random(rows=rows, heads=2, kv_heads=1, d=d, causal=True)
        # Of one row, dp - delta cancels but for the rounding of d products of size 1, and dq is
        # that beside dlse, which therefore is 1.
        case.dlse.fill_(1.0)
        bound = max(2e-6, d * 2**-24) if rows == 1 else 2e-6
        check(case.simulated(2), case.reference(), bound, (d, rows))


def test_autocast_casts_operands_alike():
    case = Case.random(rows=8, causal=True)

    def rank(group):
        rows = case.shardings(2)[0].rows(group.rank)
        q, k, v = (x[:, rows] for x in (case.q, case.k, case.v))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = sequence_parallel_attention(q, k, v.bfloat16(), group=group, causal=True)
        again = sequence_parallel_attention(
            *(x.bfloat16() for x in (q, k, v)), group=group, causal=True
        )
        assert out.dtype == torch.bfloat16
        return torch.equal(out, again)

    assert simulate(2, rank) == [True, True]


def test_queries_that_outnumber_keys_see_nothing_at_first():
    """(5, 2) and (2, 5), causal: the bottom-right rule, where rows of zeros come from."""
    torch.manual_seed(13)
    for rows, keys in ((5, 2), (2, 5)):
        for sharding in ("contiguous", "zigzag"):
            case = Case.random(rows=rows, keys=keys, causal=True, sharding=sharding)
            want = case.reference()
            empty = max(0, rows - keys)
            assert (want["lse"][:, :, :empty] == -math.inf).all()
            for strategy in ("ring", "all_gather", "ulysses", "decode"):
                found = case.simulated(2, strategy=strategy)
                check(found, want, 1e-6, (rows, strategy))
                assert (found["out"][:, :empty] == 0).all()
                assert (found["dq"][:, :empty] == 0).all()

"""From an op to the fused kernel that it names, and back: dispatch, workspace, launch, result.

Layers of proof: N processes in Triton's interpreter, the very code that CUDA tensors take, on CPU
tensors; each result against float64 within the bound of reference.py, and the same bits on all
ranks where they hold the same value. The kernels themselves are tested in tests/triton_kernels. No
GPU has run this.
"""

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.reference import assert_within, draw, limit_of, sum_of

# rows, columns, inner size, dtype: one group for all, so workspaces grow and are used again
SHAPES = {
    2: [(7, 20, 17, torch.float32), (0, 8, 8, torch.float32)],
    3: [(5, 20, 16, torch.bfloat16)],
}


def one_ulp(limit, ref, dtype):
    """The interpreter rounds stores to 16 bits otherwise than torch: one ulp more."""
    return limit if dtype is torch.float32 else limit + 2 * torch.finfo(dtype).eps * ref.abs()


def check(rank, group, number, m, n, k, dtype):
    from pyparallel import ops

    world, me = rank.world_size, rank.rank
    xs = draw(number, [(m, k)] * world, dtype)
    ws = draw(number + 100, [(n, k)] * world, dtype)
    bias, residual, norm = draw(number + 200, [(n,), (m, n), (n,)], dtype)
    a, b = torch.cat(xs, 1), torch.cat(ws, 1)
    ref = a.double() @ b.double().t() + bias.double()
    stock = sum_of([x @ w.t() for x, w in zip(xs, ws, strict=True)]) + bias
    limit = one_ulp(limit_of(stock, ref, a, b), ref, dtype)
    sizes = [m - m // 3] + [0] * (world - 2) + [m // 3]
    own = slice(sum(sizes[:me]), sum(sizes[: me + 1]))
    found = []

    for algorithm in ("one_shot", "two_shot", "multimem"):
        y = ops.matmul_all_reduce(xs[me], ws[me], group, bias, algorithm=algorithm)
        assert_within(y, ref, limit, algorithm)
        normed, h = ops.matmul_all_reduce_rms_norm(
            xs[me], ws[me], residual, norm, 1e-5, group, bias, algorithm=algorithm
        )
        h_ref = ref + residual.double()
        h_stock = stock + residual
        # Two shots round the sum before the residual is added: an error as large as that of y.
        h_limit = one_ulp(limit_of(h_stock, h_ref, a, b), h_ref, dtype) + limit
        assert_within(h, h_ref, h_limit, algorithm)
        n_ref = torch.nn.functional.rms_norm(h_ref, (n,), norm.double(), 1e-5)
        scale = 4 * torch.finfo(dtype).eps * (n_ref.abs() + norm.double().abs())
        scale += 4 * h_limit.amax(-1, keepdim=True) * norm.double().abs() if m else 0
        assert_within(normed, n_ref, scale, f"norm by {algorithm}")
        found += [y, normed, h]

    # Signal rounds each part, rank 0's with the bias in it: half an ulp of each, and the store's.
    rounded = sum((x @ w.t()).double().abs() for x, w in zip(xs, ws, strict=True))
    by_parts = limit + one_ulp(0 * limit, ref.abs() + rounded + bias.double().abs(), dtype)
    for algorithm in ("push", "signal"):
        most = by_parts if algorithm == "signal" else limit
        y = ops.matmul_reduce_scatter(xs[me], ws[me], group, 0, bias, sizes, algorithm=algorithm)
        assert_within(y, ref[own], most[own], algorithm)
    y = ops.matmul_all_reduce(xs[me], ws[me], group, bias, algorithm="signal")
    assert_within(y, ref, by_parts, "signal")
    found.append(y)

    whole, w = xs[0], ws[me]
    v = w[: n // 2]
    for algorithm in ("pull", "copies"):
        (y, z), gathered = ops.all_gather_matmul(
            whole[own], [w, v], group, 0, [bias, None], sizes, True, algorithm=algorithm
        )
        assert torch.equal(gathered, whole), algorithm
        for got, weight, extra in ((y, w, bias), (z, v, bias[: n // 2] * 0)):
            y_ref = whole.double() @ weight.double().t() + extra.double()
            y_stock = whole @ weight.t() + extra
            y_limit = one_ulp(limit_of(y_stock, y_ref, whole, weight), y_ref, dtype)
            assert_within(got, y_ref, y_limit, algorithm)
        found.append(gathered)
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in found]


def check_scaled_dims(ops, group, xs, ws, bias, scales, columns, p):
    """`p` is all_gather_matmul of xs[0], cut by rows, with the first bias."""
    from pyparallel.ops.groups import seat_of

    world, me = seat_of(group).world_size, seat_of(group).rank
    own, n, k = slice(3 * me, 3 * me + 3), ws[0].shape[0], ws[0].shape[1]
    mine = {"x_scale": scales[me], "weight_scale": columns[me], "out_dtype": torch.float32}

    # Another dim is brought to the front and back, the scales of rows with it: bit for bit.
    def turned(t):
        return t.view(3, world, -1).transpose(0, 1)

    rows = mine | {"x_scale": turned(scales[me])}
    turned_z = ops.matmul_reduce_scatter(
        turned(xs[me]), ws[me], group, -2, bias, [3] + [0] * (world - 1), algorithm="push", **rows
    )
    flat = ops.matmul_reduce_scatter(
        xs[me], ws[me], group, 0, bias, [3 * world] + [0] * (world - 1), algorithm="push", **mine
    )
    assert turned_z.shape == (world, 3 if me == 0 else 0, n)
    if me == 0:
        assert torch.equal(turned_z, turned(flat))
    whole_p = ops.all_gather_matmul(
        xs[0][own].view(1, 3, k),
        ws[me],
        group,
        1,
        algorithm="pull",
        x_scale=scales[0][own].view(1, 3, 1),
        weight_scale=columns[me],
        out_dtype=torch.float32,
    )
    assert torch.equal(whole_p[0] + bias, p)
    with pytest.raises(ValueError, match=r"dim is 1 of x .* share rows: expected 0 to 0"):
        ops.matmul_reduce_scatter(xs[me], ws[me], group, 1, **mine)


def check_scaled(rank, group, by_row):
    """float8_e4m3fn with scales, of the whole or by row; a rank's rows have scales of their own."""
    from pyparallel import ops

    world, me = rank.world_size, rank.rank
    m, n, k = 3 * world, 20, 32
    xs, ws = (
        [t.to(torch.float8_e4m3fn) for t in draw(seed, [shape] * world, torch.float32)]
        for seed, shape in ((60, (m, k)), (61, (n, k)))
    )
    (bias,) = draw(62, [(n,)], torch.float32)
    scales = [t.abs() + 0.1 for t in draw(63, [(m, 1) if by_row else (1,)] * world, torch.float32)]
    columns = [t.abs() + 0.1 for t in draw(64, [(1, n) if by_row else (1,)] * world, torch.float32)]
    eps = torch.finfo(torch.float32).eps

    def product(x, w, s, c):
        a, b = x.double() * s.double(), w.double() * c.double().reshape(-1, 1)
        return a @ b.t(), k**0.5 * eps * (a.abs() @ b.abs().t())

    parts = [product(*operands) for operands in zip(xs, ws, scales, columns, strict=True)]
    ref = sum(p for p, _ in parts) + bias.double()
    limit = sum(b for _, b in parts) + 4 * eps * (ref.abs() + bias.abs().double())
    mine = {"x_scale": scales[me], "weight_scale": columns[me], "out_dtype": torch.float32}
    y = ops.matmul_all_reduce(xs[me], ws[me], group, bias, algorithm="one_shot", **mine)
    assert_within(y, ref, limit, "one_shot of fp8")
    own = slice(3 * me, 3 * me + 3)
    z = ops.matmul_reduce_scatter(xs[me], ws[me], group, 0, bias, algorithm="push", **mine)
    assert_within(z, ref[own], limit[own], "push of fp8")
    half = ops.matmul_all_reduce(
        xs[me], ws[me], group, algorithm="two_shot", x_scale=scales[me], weight_scale=columns[me]
    )
    assert half.dtype == torch.bfloat16

    x_scale = scales[0][own] if by_row else scales[0]
    (p,) = ops.all_gather_matmul(
        xs[0][own],
        [ws[me]],
        group,
        bias=[bias],
        algorithm="pull",
        x_scale=x_scale,
        weight_scale=[columns[me]],
        out_dtype=torch.float32,
    )
    p_ref, p_limit = product(xs[0], ws[me], scales[0], columns[me])
    p_ref = p_ref + bias.double()
    assert_within(p, p_ref, p_limit + 4 * eps * (p_ref.abs() + bias.abs().double()), "fp8 pull")

    if by_row:
        check_scaled_dims(ops, group, xs, ws, bias, scales, columns, p)
    name = ops.group_name(group)
    torch.library.opcheck(
        torch.ops.pyparallel.matmul_all_reduce_scaled.default,
        (xs[me], ws[me], None, scales[me], columns[me], name, torch.float32, "one_shot"),
        test_utils="test_faketensor",  # its schema check cannot compare fp8
    )


def interpreted(rank):
    from pyparallel import ops
    from tests.ops.seats import make_groups

    torch.set_num_threads(1)
    groups = make_groups(rank, ("communicator", "gloo"))
    bits = []
    for number, shape in enumerate(SHAPES[rank.world_size]):
        bits.append(check(rank, groups["communicator"], number, *shape))
    if rank.world_size == 2:
        bits.append(check(rank, groups["gloo"], 9, 3, 8, 5, torch.float32))

    check_scaled(rank, groups["communicator"], by_row=rank.world_size == 3)

    # A derivative of a fused forward, and what no kernel takes.
    group = groups["communicator"]
    x, w = (t.requires_grad_() for t in draw(50 + rank.rank, [(4, 8), (6, 8)], torch.float32))
    ops.matmul_all_reduce(x, w, group, algorithm="one_shot").sum().backward()
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(4, 8))
    for bad, pattern in (
        (lambda: ops.matmul_all_reduce(x.double(), w.double(), group, algorithm="one_shot"),
         r"algorithm is 'one_shot', which cannot run: no kernel takes torch.float64"),
        (lambda: ops.matmul_reduce_scatter(x, w, group, 1, algorithm="push"),
         r"which cannot run: scatter_dim is 1, not the first"),
        (lambda: ops.matmul_all_reduce(x, w[:5], group, algorithm="multimem"),
         r"algorithm is 'multimem', which cannot run: N is 5, no multiple of 4"),
        (lambda: ops.matmul_all_reduce(x, w, group, algorithm="pull"),
         r"algorithm is 'pull'; matmul_all_reduce on cpu has plain"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=pattern):
            bad()
    return bits


def captured(rank):
    """Under graph capture (a stand-in says so) a workspace is used, never made or made larger."""
    from pyparallel import ops
    from pyparallel.ops import device_path
    from tests.ops.seats import make_groups

    (group,) = make_groups(rank, ("communicator",)).values()
    (x,) = draw(rank.rank, [(600, 8)], torch.float32)
    (w,) = draw(5 + rank.rank, [(8, 8)], torch.float32)
    calls = {
        "matmul_all_reduce": lambda x: ops.matmul_all_reduce(x, w, group, algorithm="one_shot"),
        "matmul_reduce_scatter": lambda x: ops.matmul_reduce_scatter(x, w, group, algorithm="push"),
        "all_gather_matmul": lambda x: ops.all_gather_matmul(x, w, group, algorithm="pull"),
    }
    really = device_path.is_capturing
    for name, call in calls.items():
        refused = rf"{name} #\d+.*no workspace can be made: this call needs \d+ bytes, there are "
        for rows, before in ((2, "0;"), (600, r"[1-9]\d*;")):
            # Rank 1 alone captures; the others hear of it, and wait for nobody.
            device_path.is_capturing = (lambda device: True) if rank.rank == 1 else really
            text = refused + before + ".*before the capture" if rank.rank == 1 else "no workspace"
            try:
                with pytest.raises(ValueError, match=text):
                    call(x[:rows])
            finally:
                device_path.is_capturing = really
            if rows == 2:
                expected = call(x[:rows])
                device_path.is_capturing = lambda device: True
                try:
                    assert torch.equal(call(x[:rows]), expected)
                finally:
                    device_path.is_capturing = really


def test_no_workspace_is_made_under_capture():
    run_ranks(captured, 2, env={"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("world", [2, 3])
def test_ops_by_kernels(world):
    bits = run_ranks(interpreted, world, env={"TRITON_INTERPRET": "1"}, timeout=115)
    assert all(of_rank == bits[0] for of_rank in bits[1:]), "ranks differ in some bit"


def by_environment(rank):
    from pyparallel import ops
    from pyparallel.ops import groups
    from tests.ops.seats import make_groups

    (group,) = make_groups(rank, ("communicator",)).values()
    x, w = draw(1, [(4, 8), (6, 8)], torch.float32)
    if groups._INTERPRETED:
        y = ops.matmul_all_reduce(x, w, group)
        torch.testing.assert_close(y, rank.world_size * (x @ w.t()))
        (key,) = groups.seat_of(group).device_path(x.device)._spaces
        assert key[:2] == ("all_reduce", "two_shot")
    else:
        with pytest.raises(ValueError, match=r"PYPARALLEL_ALGORITHM is 'two_shot'; .* on cpu has"):
            ops.matmul_all_reduce(x, w, group)


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_environment_names_a_kernel(interpret):
    names = "matmul_all_reduce=two_shot"
    run_ranks(by_environment, 2, env={"TRITON_INTERPRET": interpret, "PYPARALLEL_ALGORITHM": names})

"""Column- and row-parallel linear layers by themselves, each tensor element by element.

Layers of proof: N processes on a CPU, world sizes 1 to 4. In fp32 and bf16, outputs and all
gradients keep the bound of tests/ops/reference.py (as accurate as stock matmul and sum in that
dtype, plus the order of additions); what every rank holds is equal bit for bit. Controls show that
a bias added by each rank, and a bias gradient of own rows only, would be seen. Variants (gathered
output, split input, padding, strides, kinds of groups) in float64 to 1e-12. All of it runs in CI.
"""

import pytest
import torch
from torch import nn

from tests.launch import run_ranks
from tests.ops.reference import assert_close64, assert_within, draw, limit_of, sum_of

WORLDS = [1, 2, 3, 4]
ROWS, BATCH, K, N = 10, 2, 21, 26  # neither divides by 3 or 4
DTYPES = [torch.float32, torch.bfloat16]
MODES = [(dtype, parallel) for dtype in DTYPES for parallel in (False, True)]


def whole_of(seed, k, n, dtype):
    """A whole layer, an input [ROWS, BATCH, k] and the gradient of the output."""
    w, b, x, dy = draw(seed, [(n, k), (n,), (ROWS, BATCH, k), (ROWS, BATCH, n)], dtype)
    linear = nn.Linear(k, n, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(w)
        linear.bias.copy_(b)
    return linear, x, dy


def own(x, rank, world, dim=0):
    from pyparallel.layers.partition import even_sizes

    return x.split(even_sizes(x.shape[dim], world), dim)[rank]


def leaf(x):
    return x.detach().clone().requires_grad_()


def run_layers(rank):
    """y, dx, dw, db of both layers on this rank, for each mode."""
    from pyparallel.comm import Communicator
    from pyparallel.layers import ColumnParallelLinear, RowParallelLinear, SequenceSharding

    me, world = rank.rank, rank.world_size
    found = []
    with Communicator.from_file(rank.rendezvous, me, world) as group:
        for seed, (dtype, parallel) in enumerate(MODES):
            sequence = SequenceSharding(dim=0, length=ROWS) if parallel else False
            linear, x, dy = whole_of(seed, K, N, dtype)
            column = ColumnParallelLinear.from_linear(linear, group, sequence_parallel=sequence)
            x = leaf(own(x, me, world) if parallel else x)
            y = column(x)
            y.backward(own(dy, me, world, -1))
            mine = [y.detach(), x.grad, column.weight.grad, column.bias.grad]

            linear, x, dy = whole_of(seed + 100, N, K, dtype)
            row = RowParallelLinear.from_linear(linear, group, sequence_parallel=sequence)
            x = leaf(own(x, me, world, -1))
            y = row(x)
            y.backward(own(dy, me, world) if parallel else dy)
            found.append([*mine, y.detach(), x.grad, row.weight.grad, row.bias.grad])
    return found


def flat(x):
    return x.reshape(-1, x.shape[-1])


def product(a, b, parts=None):
    """float64 a @ b.T and the bound on its error; parts are the factors of each rank, if summed."""
    stock = a @ b.t() if parts is None else sum_of([x @ w.t() for x, w in parts])
    ref = a.double() @ b.double().t()
    return ref, limit_of(stock, ref, a, b)


@pytest.mark.parametrize("world", WORLDS)
def test_each_tensor_is_within_the_bound(world):
    ranks = run_ranks(run_layers, world)
    for mode, (dtype, parallel) in enumerate(MODES):
        (linear, x, dy), (linear2, x2, dy2) = (
            whole_of(mode, K, N, dtype),
            whole_of(mode + 100, N, K, dtype),
        )
        w, b, w2, b2 = (p.detach() for m in (linear, linear2) for p in (m.weight, m.bias))
        for me in range(world):
            y, dx, dw, db, y2, dx2, dw2, db2 = ranks[me][mode]

            def within(ours, ref_and_limit, what, me=me, parallel=parallel, dtype=dtype):
                assert_within(flat(ours), *ref_and_limit, f"{what}, rank {me}, {dtype}, {parallel}")

            # column-parallel
            mine = own(flat(dy), me, world, -1)
            ref, _ = product(flat(x), own(w, me, world))
            ref = ref + own(b, me, world).double()
            stock = nn.functional.linear(flat(x), own(w, me, world), own(b, me, world))
            within(y, (ref, limit_of(stock, ref, flat(x), own(w, me, world))), "y")
            within(dw, product(mine.t(), flat(x).t()), "dw")
            within(
                db[None],
                product(torch.ones_like(mine[:1, :1]).expand(1, len(mine)), mine.t()),
                "db",
            )
            parts = [(own(flat(dy), r, world, -1), own(w, r, world).t()) for r in range(world)]
            ref, limit = product(flat(dy), w.t(), parts)
            if parallel:
                ref, limit = (flat(own(t.view(x.shape), me, world)) for t in (ref, limit))
            within(dx, (ref, limit), "dx")

            # row-parallel
            columns = own(flat(x2), me, world, -1)
            parts = [(own(flat(x2), r, world, -1), own(w2, r, world, -1)) for r in range(world)]
            stock = sum_of([a @ c.t() for a, c in parts]) + b2
            ref = flat(x2).double() @ w2.double().t() + b2.double()
            limit = limit_of(stock, ref, flat(x2), w2)
            if parallel:
                ref, limit = (flat(own(t.view(dy2.shape), me, world)) for t in (ref, limit))
            within(y2, (ref, limit), "y of rows")
            if world > 1:
                wrong = ref + (world - 1) * b2.double()  # a bias that each rank adds
                assert ((wrong - ref).abs() > limit).double().mean() > 0.9
            within(dx2, product(flat(dy2), own(w2, me, world, -1).t()), "dx of rows")
            within(dw2, product(flat(dy2).t(), columns.t()), "dw of rows")
            ones = torch.ones_like(flat(dy2)[:1, :1]).expand(1, len(flat(dy2)))
            ref, limit = product(ones, flat(dy2).t())
            within(db2[None], (ref, limit), "db of rows")
            if world > 1:
                wrong = flat(own(dy2, me, world)).double().sum(0)  # own rows only
                assert ((wrong - ref).abs() > limit).double().mean() > 0.9
            assert torch.equal(db2, ranks[0][mode][7])
            if not parallel:
                assert torch.equal(y2, ranks[0][mode][4])
                assert torch.equal(dx, ranks[0][mode][1])


# --- few rows, as in decoding


def few_rows(rank):
    """Without and with autograd: the same bits."""
    from pyparallel.comm import Communicator
    from pyparallel.layers import ColumnParallelLinear, RowParallelLinear

    found = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        for dtype in DTYPES:
            w, v, x = draw(5, [(512, 512), (512, 512), (3, 512)], dtype)
            up, down = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
            up.weight, down.weight = nn.Parameter(w), nn.Parameter(v)
            column = ColumnParallelLinear.from_linear(up, group)
            row = RowParallelLinear.from_linear(down, group)
            with torch.no_grad():
                y = column(x)
                z = row(y)
            assert torch.equal(column(x).detach(), y)
            assert torch.equal(row(y).detach(), z)
            found.append((y, z))
    return found


def test_few_rows_are_the_same_with_and_without_gradients():
    ranks = run_ranks(few_rows, 2)
    for i, dtype in enumerate(DTYPES):
        w, v, x = draw(5, [(512, 512), (512, 512), (3, 512)], dtype)
        for me in range(2):
            y, z = ranks[me][i]
            assert_within(y, *product(x, own(w, me, 2)), f"y, rank {me}, {dtype}")
            assert torch.equal(z, ranks[0][i][1])
        ys = [found[i][0] for found in ranks]
        parts = [(ys[r], own(v, r, 2, -1)) for r in range(2)]
        assert_within(ranks[0][i][1], *product(torch.cat(ys, -1), v, parts), f"z, {dtype}")


# --- variants, in float64


def whole_mlp(seed):
    torch.manual_seed(seed)
    first, second = nn.Linear(K, N), nn.Linear(N, K)
    return first.double(), second.double()


def mlp_reference(seed, x, dy):
    first, second = whole_mlp(seed)
    x = leaf(x)
    y = second(torch.nn.functional.gelu(first(x)))
    y.backward(dy)
    names = {"first.weight": first.weight, "first.bias": first.bias}
    names |= {"second.weight": second.weight, "second.bias": second.bias}
    return y.detach(), x.grad, {name: p.grad for name, p in names.items()}


def variants(rank):
    from torch.distributed import DeviceMesh

    from pyparallel import layers
    from tests.layers.test_model import gradients
    from tests.ops.seats import make_groups

    groups = make_groups(rank)
    groups["mesh"] = DeviceMesh.from_group(groups["gloo"], "cpu")
    x, dy = draw(7, [(ROWS, BATCH, K), (ROWS, BATCH, K)], torch.float64)
    expected = mlp_reference(3, x, dy)
    options = {
        "plain": ({}, {}),
        "gathered": ({"gather_output": True}, {"input_is_parallel": False}),
        "padded": ({"multiple_of": 8}, {"multiple_of": 8}),
        "gathered and padded": (
            {"multiple_of": 4, "gather_output": True},
            {"multiple_of": 16, "input_is_parallel": False},
        ),
    }
    for kind, group in groups.items():
        for name, (on_first, on_second) in options.items():
            if kind != "communicator" and name != "plain":
                continue
            first, second = whole_mlp(3)
            model = nn.Module()
            model.first = layers.ColumnParallelLinear.from_linear(first, group, **on_first)
            model.second = layers.RowParallelLinear.from_linear(second, group, **on_second)
            mine = torch.randn(ROWS, BATCH, 2 * K, dtype=torch.float64)[..., ::2].requires_grad_()
            with torch.no_grad():
                mine.copy_(x)
            assert not mine.is_contiguous()
            # sigmoid(0) is not 0: padding sees values, and must not learn from them
            y = model.second(torch.nn.functional.gelu(model.first(mine)))
            y.backward(dy)
            what = f"{kind}, {name}"
            assert_close64(y.detach(), expected[0], what)
            assert_close64(mine.grad, expected[1], what)
            grads = gradients(model)
            assert set(grads) == set(expected[2])
            for key, grad in grads.items():
                assert_close64(grad, expected[2][key], f"{what}, {key}")
    return True


@pytest.mark.parametrize("world", WORLDS)
def test_variants_and_kinds_of_groups(world):
    run_ranks(variants, world)


# --- padding


def padding(rank):
    """Padding stays zero through steps of Adam, with an activation that is not zero at zero."""
    from pyparallel import layers
    from pyparallel.comm import Communicator

    me, world = rank.rank, rank.world_size
    with Communicator.from_file(rank.rendezvous, me, world) as group:
        torch.manual_seed(0)
        up = layers.ColumnParallelLinear(5, 7, group, multiple_of=4, dtype=torch.float64)
        down = layers.RowParallelLinear(7, 5, group, multiple_of=4, dtype=torch.float64)
        model = nn.Sequential(up, nn.Sigmoid(), down)
        adam = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
        x = draw(1, [(6, 5)], torch.float64)[0]
        for _ in range(3):
            adam.zero_grad()
            model(x).square().sum().backward()
            adam.step()
        real = up.partition.real_size(me)
        assert up.partition.local_size(me) == 4 * -(-7 // (4 * world))
        assert not up.weight[real:].any()
        assert not up.bias[real:].any()
        assert not down.weight[:, real:].any()
        assert real == 0 or up.weight[:real].all()
        shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
        assert shapes == {
            "0.weight": (real, 5), "0.bias": (real,), "2.weight": (5, real), "2.bias": (5,)
        }  # fmt: skip
        twin = nn.Sequential(
            layers.ColumnParallelLinear(5, 7, group, multiple_of=4, dtype=torch.float64),
            nn.Sigmoid(),
            layers.RowParallelLinear(7, 5, group, multiple_of=4, dtype=torch.float64),
        )
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(x), model(x))
    return True


@pytest.mark.parametrize("world", WORLDS)
def test_padding_never_learns(world):
    run_ranks(padding, world)

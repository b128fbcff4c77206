"""The ops as torch's dispatcher, compiler and checkers see them.

Layers of proof: schemas read in one process; opcheck and torch.compile in two (opcheck runs each op
for real several times, so both ranks make the same checks in the same order).
"""

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.seats import make_groups

# Frozen: models compiled or exported with them, and libraries on top, keep working. To change one
# is to edit this table, and to say so in CHANGELOG.md.
# Of pyparallel.attention, where it has been imported too; tests/attention has them.
OF_ATTENTION = {"sequence_parallel_attention", "sequence_parallel_attention_backward"}
SCHEMAS = {
    "all_gather": "(Tensor x, str group, int dim, SymInt[]? shard_sizes) -> Tensor",
    "all_gather_matmul": "(Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, str group, "
    "int gather_dim, SymInt[]? shard_sizes, bool return_gathered, bool save_gathered, "
    "str? algorithm) -> Tensor[]",
    "all_gather_matmul_out": "(Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, "
    "str group, int gather_dim, SymInt[]? shard_sizes, str? algorithm, Tensor(a!)[] out) -> ()",
    "all_gather_matmul_scaled": "(Tensor x, Tensor[] weights, Tensor[] biases, int[] biased, "
    "Tensor x_scale, Tensor[] weight_scales, str group, SymInt[]? shard_sizes, "
    "ScalarType out_dtype, str? algorithm) -> Tensor[]",
    "matmul_all_reduce_scaled": "(Tensor x, Tensor weight, Tensor? bias, Tensor x_scale, "
    "Tensor weight_scale, str group, ScalarType out_dtype, str? algorithm) -> Tensor",
    "matmul_reduce_scatter_scaled": "(Tensor x, Tensor weight, Tensor? bias, Tensor x_scale, "
    "Tensor weight_scale, str group, SymInt[]? shard_sizes, ScalarType out_dtype, "
    "str? algorithm) -> Tensor",
    "all_reduce_": "(Tensor(a!) x, str group, str op) -> ()",
    "all_reduce_rms_norm_": "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, "
    "str group) -> ()",
    "matmul_all_reduce_out": "(Tensor x, Tensor weight, Tensor? bias, str group, str? algorithm, "
    "Tensor(a!)[] out) -> ()",
    "matmul_reduce_scatter_out": "(Tensor[] xs, Tensor[] weights, Tensor? bias, Tensor? addend, "
    "str group, int scatter_dim, SymInt[]? shard_sizes, str? algorithm, Tensor(a!)[] out) -> ()",
    "all_reduce": "(Tensor x, str group, str op) -> Tensor",
    "all_reduce_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps, str group) -> "
    "(Tensor, Tensor)",
    "matmul_all_reduce": "(Tensor x, Tensor weight, Tensor? bias, str group, "
    "str? algorithm) -> Tensor",
    "matmul_all_reduce_rms_norm": "(Tensor x, Tensor weight, Tensor? bias, Tensor residual, "
    "Tensor norm_weight, float eps, str group, str? algorithm) -> (Tensor, Tensor)",
    "matmul_reduce_scatter": "(Tensor[] xs, Tensor[] weights, Tensor? bias, Tensor? addend, "
    "str group, int scatter_dim, SymInt[]? shard_sizes, str? algorithm) -> Tensor",
    "reduce_scatter": "(Tensor x, str group, int dim, SymInt[]? shard_sizes) -> Tensor",
}


def test_schemas_are_those_of_the_table():
    import pyparallel.ops  # noqa: F401 - defines them

    every = {s.name.partition("::") for s in torch._C._jit_get_all_schemas()}
    names = {name for room, _, name in every if room == "pyparallel"}
    assert names - OF_ATTENTION == set(SCHEMAS)
    for name, schema in SCHEMAS.items():
        op = getattr(torch.ops.pyparallel, name).default
        assert str(op._schema) == f"pyparallel::{name}{schema}"


def t(*shape, grad=True):
    return torch.randn(*shape, requires_grad=grad)


def samples(name):
    """Arguments of each op: strided, uneven, with and without what is optional."""
    strided = torch.randn(4, 6).t().requires_grad_()
    yield "all_gather", (strided, name, 1, None)
    yield "all_gather", (t(2, 3, 2), name, -2, [3, 3])
    yield "reduce_scatter", (t(4, 6), name, 1, [6, 0])
    yield "reduce_scatter", (t(4, 6), name, -2, None)
    yield "all_reduce", (strided, name, "sum")
    yield "all_reduce", (t(3, grad=False), name, "max")
    yield (
        "all_gather_matmul",
        (t(2, 3, 4), [t(5, 4), t(2, 4)], [t(5)], [0], name, 1, None, True, True, None),
    )
    yield "all_gather_matmul", (strided, [t(2, 8)], [], [], name, 1, [4, 4], False, False, "plain")
    yield "matmul_reduce_scatter", ([strided], [t(5, 4)], t(5), None, name, 0, None, "chunked")
    yield (
        "matmul_reduce_scatter",
        ([t(4, 3), t(4, 2)], [t(6, 3), t(6, 2)], None, t(4, 6), name, -1, [2, 4], None),
    )
    yield "matmul_all_reduce", (strided, t(5, 4), t(5), name, "symmetric")
    yield "all_reduce_rms_norm", (t(2, 4), t(2, 4), t(4), 1e-5, name)
    yield (
        "matmul_all_reduce_rms_norm",
        (t(2, 3), t(4, 3), None, t(2, 4), t(4), 1e-5, name, None),
    )


def written_samples(name):
    """The same for those that write their arguments, which need no gradient."""

    def f(*shape):
        return t(*shape, grad=False)

    yield "all_reduce_", (f(6, 4).t(), name, "sum")
    yield "all_reduce_rms_norm_", (f(2, 4), f(2, 4), f(4), 1e-5, name)
    yield (
        "all_gather_matmul_out",
        (f(2, 4), [f(5, 4), f(3, 4)], [f(3)], [1], name, 0, None, None, [f(4, 5), f(4, 3)]),
    )
    yield "matmul_all_reduce_out", (f(2, 4), f(5, 4), f(5), name, None, [f(5, 2).t()])
    yield (
        "matmul_reduce_scatter_out",
        ([f(4, 3)], [f(5, 3)], None, None, name, 0, None, None, [f(2, 5)]),
    )


def opchecked(rank):
    from pyparallel import ops

    torch.manual_seed(0)  # both ranks draw alike; values do not matter here
    torch.set_num_threads(1)
    (group,) = make_groups(rank, ("pyparallel",)).values()
    seen = set()
    name_of_group = ops.group_name(group)
    for name, args in (*samples(name_of_group), *written_samples(name_of_group)):
        op = getattr(torch.ops.pyparallel, name).default
        torch.library.opcheck(op, args)
        seen.add(name)
    # Those with scales are for CUDA, or the interpreter: tests/ops/test_kernels.py.
    assert seen == {name for name in SCHEMAS if not name.endswith("_scaled")}


def test_opcheck():
    run_ranks(opchecked, 2)


def compiled(rank):
    from pyparallel import ops

    torch.set_num_threads(1)
    groups = make_groups(rank, ("communicator", "pyparallel"))

    def block(x, norm, w_in, w_gate, w_out, bias, group):
        (up, gate), whole = ops.all_gather_matmul(
            x * 2, [w_in, w_gate], group, bias=[bias, None], return_gathered=True
        )
        hidden = torch.nn.functional.silu(gate) * up
        y = ops.matmul_reduce_scatter(hidden, w_out, group)
        z = ops.matmul_all_reduce(hidden, w_out, group)
        with torch.no_grad():
            kept = torch.empty_like(z)
            ops.matmul_all_reduce(hidden.detach(), w_out.detach(), group, out=kept)
            ops.all_reduce_(kept, group, "max")
        z = z + 0 * kept
        n, h = ops.matmul_all_reduce_rms_norm(hidden, w_out, whole, norm, 1e-5, group)
        m, _ = ops.all_reduce_rms_norm(z, h, norm, 1e-5, group)
        s = ops.split(ops.gather(ops.replicate(y, group), group), group)
        r = ops.reduce_scatter(ops.all_gather(s, group), group) + ops.all_reduce(s, group)
        return y + r, z + n + m

    def small(x, norm, w_in, w_gate, w_out, bias, group):
        y = ops.all_gather_matmul(x * 2, w_in, group, bias=bias)
        with torch.no_grad():  # what is cloned and then written stays apart: pytorch/pytorch 198031
            kept = y.detach() * 2
            a, b = kept.clone(), kept.clone()
            ops.all_reduce_rms_norm_(a, b, bias.detach(), 1e-5, group)
        return ops.matmul_reduce_scatter(y.relu(), w_out, group), y + a + 2 * b + 4 * kept

    generator = torch.Generator().manual_seed(7 + rank.rank)
    for kind, backend, function in (
        ("communicator", "aot_eager", block),
        ("pyparallel", "aot_eager", block),
        ("pyparallel", "inductor", small),
    ):
        group = groups[kind]
        shapes = [(3, 4), (4,), (5, 4), (5, 4), (4, 5), (5,)]
        leaves = [torch.randn(*s, generator=generator) for s in shapes]
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
            args = [leaf.clone().requires_grad_() for leaf in leaves]
            y, z = run(*args, group)
            (y.sum() + (z * z).sum()).backward()
            found = [y.detach(), z.detach(), *[a.grad for a in args]]
            results.append([t for t in found if t is not None])
            with torch.no_grad():
                assert torch.equal(run(*args, group)[0], y)
        for eager, other in zip(*results, strict=True):
            assert eager.stride() == other.stride()
            torch.testing.assert_close(other, eager, rtol=2e-5, atol=2e-5)
        torch._dynamo.reset()


@pytest.mark.slow
def test_compile_fullgraph():
    run_ranks(compiled, 2, timeout=110)

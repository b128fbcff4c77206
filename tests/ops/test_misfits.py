"""What cannot work raises on every rank, before data moves, and the group goes on.

Layers of proof: N processes on a CPU. Two kinds of faults, on each kind of group: one rank's
arguments are wrong (it raises InvalidArgument, the others what it said), and ranks whose arguments
are each right, but differ. After each, a good call of all ranks is right.
"""

import re

import pytest
import torch

from tests.launch import run_ranks
from tests.ops.seats import KINDS, make_groups


def x(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def fp8(*shape):
    return x(*shape).to(torch.float8_e4m3fn)


# name -> (call of a rank that is right, call of rank 1 that is wrong, what all read)
def wrong_on_one(ops):
    return {
        "weight [K, N]": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(x(3, 4), x(4, 5), g),
            r"weight has shape \[4, 5\], but x has K = 4.*expected \[N, 4\].*pass weight\.t\(\)",
        ),
        "bias": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g, x(5)),
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g, x(4)),
            r"bias has shape \[4\]; expected \[5\]",
        ),
        "dtype": (
            lambda g: ops.matmul_reduce_scatter(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_reduce_scatter(x(6, 4).double(), x(5, 4), g),
            r"weight has dtype torch.float32, x has torch.float64",
        ),
        "device": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4).to("meta"), g),
            r"weight is on meta, x on cpu",
        ),
        "integers": (
            lambda g: ops.all_gather(x(6, 4), g),
            lambda g: ops.all_gather(torch.ones(6, 4, dtype=torch.int32), g),
            r"x has dtype torch.int32; expected one of float64",
        ),
        "no tensor": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce([3.0], x(5, 4), g),
            r"x is a list; expected a torch.Tensor",
        ),
        "fp8 on the CPU": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(
                x(3, 4).to(torch.float8_e4m3fn), x(5, 4).to(torch.float8_e4m3fn), g
            ),
            r"x has dtype torch.float8_e4m3fn; with x_scale= and weight_scale=",
        ),
        "fp8 with scales on the CPU": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(
                fp8(3, 4), fp8(5, 4), g, x_scale=torch.ones(1), weight_scale=torch.ones(5)
            ),
            r"x is on cpu: torch.float8_e4m3fn is multiplied on CUDA devices only",
        ),
        "scales of another shape": (
            lambda g: ops.all_gather_matmul(x(3, 4), x(5, 4), g),
            lambda g: ops.all_gather_matmul(
                fp8(3, 4), fp8(5, 4), g, x_scale=torch.ones(4), weight_scale=torch.ones(1).double()
            ),
            r"x_scale has shape \[4\]; expected one value, or \[3, 1\] or \[3\].*"
            r"weight_scale has dtype torch.float64",
        ),
        "scales of float32": (
            lambda g: ops.matmul_reduce_scatter(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_reduce_scatter(
                x(6, 4), x(5, 4), g, x_scale=torch.ones(1), weight_scale=torch.ones(1)
            ),
            r"x has dtype torch.float32; scales and out_dtype go with torch.float8_e4m3fn",
        ),
        "one scale only": (
            lambda g: ops.matmul_reduce_scatter(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_reduce_scatter(fp8(6, 4), fp8(5, 4), g, x_scale=torch.ones(1)),
            r"x_scale and weight_scale are Tensor, NoneType; torch.float8_e4m3fn operands need",
        ),
        "scales and out": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(
                fp8(3, 4), fp8(5, 4), g, out=x(3, 5), out_dtype=torch.float32
            ),
            r"with scales or out_dtype there is no out",
        ),
        "rows that do not divide": (
            lambda g: ops.matmul_reduce_scatter(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_reduce_scatter(x(7, 4), x(5, 4), g),
            r"is 7, which does not divide by \d ranks.*such as shard_sizes=\[\d",
        ),
        "sizes that do not sum": (
            lambda g: ops.reduce_scatter(x(6, 4), g),
            lambda g: ops.reduce_scatter(x(6, 4), g, 0, [1] * g_size(g)),
            r"shard_sizes \[1, 1.*\] add up to \d, but dim 0 of x is 6",
        ),
        "sizes of too few ranks": (
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g),
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g, shard_sizes=[2]),
            r"shard_sizes is \[2\]; expected \d sizes, one per rank",
        ),
        "own size": (
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g),
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g, shard_sizes=[3] * g_size(g)),
            r"shard_sizes\[1\] is 3, but dim 0 of this rank's x is 2",
        ),
        "dim": (
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g),
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g, 2),
            r"gather_dim is 2, but x has shape \[2, 4\]; expected -2 to 1",
        ),
        "norm": (
            lambda g: ops.all_reduce_rms_norm(x(2, 4), x(2, 4), x(4), 1e-5, g),
            lambda g: ops.all_reduce_rms_norm(x(2, 4), x(4), x(2), -1, g),
            r"residual has shape \[4\]; expected \[2, 4\].*weight has shape.*eps is -1",
        ),
        "algorithm": (
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g),
            lambda g: ops.all_gather_matmul(x(2, 4), x(5, 4), g, algorithm="fast"),
            r"algorithm is 'fast'|gathered from shards.*, algorithm 'fast'",
        ),
        "an unknown name": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(x(3, 4), weight=x(5, 4), group=g, biass=x(5)),
            r"matmul_all_reduce.* got an unexpected keyword argument 'biass'",
        ),
        "too few": (
            lambda g: ops.all_reduce_rms_norm(x(2, 4), x(2, 4), x(4), 1e-5, g),
            lambda g: ops.all_reduce_rms_norm(x(2, 4), x(2, 4), x(4), group=g),
            r"all_reduce_rms_norm.* missing 1 required positional argument: 'eps'",
        ),
        "too many": (
            lambda g: ops.all_gather(x(6, 4), g),
            lambda g: ops.all_gather(x(6, 4), g, 0, None, 1),
            r"all_gather.* takes from 2 to 4 positional arguments but 5 were given",
        ),
        "main_grad": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g, main_grad=x(4, 5)),
            r"main_grad has shape \[4, 5\] on cpu, its weight \[5, 4\]",
        ),
    }


# name -> (call of rank 0 and of all ranks from 2 on, call of rank 1, what all read)
def different(ops):
    return {
        "M and N change places": (
            lambda g: ops.matmul_all_reduce(x(3, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(x(5, 4), x(3, 4), g),
            r"result \[3, 5\] torch.float32; rank 1: .*result \[5, 3\]",
        ),
        "rows": (
            lambda g: ops.all_gather_matmul(x(4, 4), x(5, 4), g),
            lambda g: ops.all_gather_matmul(x(2, 8), x(5, 8), g),
            r"from shards \[4, 4.*rank 1: .*from shards \[2, 2",
        ),
        "dtype": (
            lambda g: ops.matmul_reduce_scatter(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_reduce_scatter(x(6, 4).bfloat16(), x(5, 4).bfloat16(), g),
            r"torch.float32.*rank 1: .*torch.bfloat16",
        ),
        "op": (
            lambda g: ops.matmul_all_reduce(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_reduce_scatter(x(6, 4), x(5, 4), g),
            r"matmul_all_reduce.*rank 1: matmul_reduce_scatter",
        ),
        "bias": (
            lambda g: ops.matmul_all_reduce(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(x(6, 4), x(5, 4), g, x(5)),
            r"with no bias.*rank 1: .*with bias",
        ),
        "eps": (
            lambda g: ops.all_reduce_rms_norm(x(2, 4), x(2, 4), x(4), 1e-5, g),
            lambda g: ops.all_reduce_rms_norm(x(2, 4), x(2, 4), x(4), 1e-6, g),
            r"eps 1e-05; rank 1: .*eps 1e-06",
        ),
        "sizes": (
            lambda g: ops.reduce_scatter(x(6, 4), g, 0, uneven(g, 0)),
            lambda g: ops.reduce_scatter(x(6, 4), g, 0, uneven(g, 1)),
            r"to shards \[6, 0.*rank 1: .*to shards \[0, 6",
        ),
        "algorithm": (
            lambda g: ops.matmul_all_reduce(x(6, 4), x(5, 4), g),
            lambda g: ops.matmul_all_reduce(x(6, 4), x(5, 4), g, algorithm="plain"),
            r"result \[6, 5\] torch.float32; rank 1: .*, algorithm 'plain'",
        ),
        "an op and a plain collective": (
            lambda g: ops.all_reduce(x(6, 4), g),
            lambda g: ops.all_reduce(x(4, 6), g, "max"),
            r"all_reduce sum of x \[6, 4\].*rank 1: all_reduce max of x \[4, 6\]",
        ),
    }


# name -> (arguments by name that work, without the group; a word that each misfit's text has)
def typed():
    one = {"x": x(6, 4), "weight": x(5, 4)}
    scales = {"x_scale": None, "weight_scale": None, "out_dtype": None}
    options = {"bias": None, "out": None, "algorithm": None, "main_grad": None, **scales}
    norm = {"residual": x(6, 5), "norm_weight": x(5), "eps": 1e-5}
    gathered = {"gather_dim": 0, "return_gathered": False, "save_gathered": True}
    shards = {"x": x(6, 4), "dim": 0, "shard_sizes": None}
    sums = {"x": x(6, 4), "op": "sum"}
    normed = {"x": x(6, 4), "residual": x(6, 4), "weight": x(4), "eps": 1e-5}
    return {
        "all_gather_matmul": {**one, **options, **gathered, "shard_sizes": None},
        "matmul_reduce_scatter": {**one, **options, "scatter_dim": 0, "shard_sizes": None},
        "matmul_all_reduce": {**one, **options},
        "matmul_all_reduce_rms_norm": {**one, **norm, "bias": None, "algorithm": None},
        "all_reduce_rms_norm": normed,
        "all_reduce_rms_norm_": normed,
        "all_gather": shards,
        "gather": shards,
        "reduce_scatter": shards,
        "split": shards,
        "all_reduce": sums,
        "all_reduce_": sums,
        "replicate": {"x": x(6, 4)},
    }


# Of no kind that any argument takes, and as little a size, a dim, a flag or the name of anything;
# and whether the tensors require a gradient, which goes through torch's dispatcher.
NONSENSE = ((77, True), ("nonsense", False), (object(), True), ([3.5], False))


def wrong_types(rank):
    from pyparallel import ops

    (group,) = make_groups(rank, ("communicator",)).values()
    world, silent = rank.world_size, []
    for name, right in typed().items():
        op = getattr(ops, name)
        for argument in right:
            for value, grad in NONSENSE:
                if argument == "eps" and isinstance(value, int):
                    continue  # a number is a number
                given = {
                    k: v.clone().requires_grad_(grad) if isinstance(v, torch.Tensor) else v
                    for k, v in right.items()
                }
                try:
                    with torch.set_grad_enabled(not name.endswith("_")):
                        if rank.rank == 1:
                            op(**{**given, argument: value}, group=group)
                        else:
                            op(**given, group=group)
                            ops.all_reduce(torch.zeros(3), group)  # after what sends nothing
                except (TypeError, ValueError) as error:
                    if name not in str(error):
                        silent.append((name, argument, value, grad, str(error)))
                else:
                    silent.append((name, argument, value, grad))
    total = ops.all_reduce(torch.full((3,), rank.rank + 1.0), group)
    assert total.tolist() == [sum(range(1, world + 1))] * 3
    return silent


def test_an_argument_of_another_type_on_one_rank():
    for rank, silent in enumerate(run_ranks(wrong_types, 2)):
        assert not silent, (rank, len(silent), silent[:3])


def g_size(group):
    from pyparallel.ops.groups import seat_of

    return seat_of(group).world_size


def uneven(group, owner):
    return [6 if r == owner else 0 for r in range(g_size(group))]


def raises_everywhere(rank, table, agree_on_text):
    from pyparallel import ops

    texts = {}
    for kind, group in make_groups(rank).items():
        for name, (right, wrong, pattern) in table(ops).items():
            with pytest.raises((TypeError, ValueError)) as caught:  # the text is checked below
                (wrong if rank.rank == 1 else right)(group)
            text = str(caught.value)
            assert re.search(pattern, text, re.DOTALL), (kind, name, text)
            total = ops.all_reduce(torch.full((3,), rank.rank + 1.0), group)
            assert total.tolist() == [sum(range(1, rank.world_size + 1))] * 3, (kind, name)
            texts[kind, name] = text if agree_on_text else ""
    return texts


@pytest.mark.parametrize("world", [2, 3])
def test_a_wrong_argument_on_one_rank(world):
    run_ranks(raises_everywhere, world, wrong_on_one, False)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ(world):
    results = run_ranks(raises_everywhere, world, different, True)
    assert all(texts == results[0] for texts in results), "all ranks read the same"
    assert len(results[0]) == 9 * len(KINDS)


CALLS = {
    "matmul_all_reduce": lambda ops, x, w, g: ops.matmul_all_reduce(x, w, g),
    "matmul_reduce_scatter": lambda ops, x, w, g: ops.matmul_reduce_scatter(x, w, g),
    "all_gather_matmul": lambda ops, x, w, g: ops.all_gather_matmul(x, w, g),
    "all_reduce_rms_norm": lambda ops, x, w, g: ops.all_reduce_rms_norm(x, x, w[0], 1e-5, g),
    "all_reduce": lambda ops, x, w, g: ops.all_reduce(x, g),
    "all_reduce_": lambda ops, x, w, g: ops.all_reduce_(x.detach().clone(), g),
    "all_gather": lambda ops, x, w, g: ops.all_gather(x, g),
    "reduce_scatter": lambda ops, x, w, g: ops.reduce_scatter(x, g),
}


def elsewhere(rank):
    """A device that the group does not serve (what CUDA tensors get), on one rank and on both."""
    from pyparallel import ops
    from pyparallel.ops.groups import seat_of

    (group,) = make_groups(rank, ("communicator",)).values()
    seat = seat_of(group)
    mine = r"a Communicator moves CPU memory; for CUDA tensors pass a torch\.distributed Proc"
    for name in ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "all_reduce"):
        for ranks in ((1,), (0, 1)):
            away = rank.rank in ranks
            text = mine if away else r"rank 1 could not make its call.*a Communicator moves CPU"
            seat.engine_of = lambda x, away=away: seat._device_engine if away else seat.engine
            with pytest.raises(ValueError, match=text):
                CALLS[name](ops, torch.ones(4, 4), torch.ones(5, 4), group)
            del seat.engine_of
            total = ops.all_reduce(torch.full((3,), rank.rank + 1.0), group)
            assert total.tolist() == [3.0] * 3


def test_tensors_of_a_device_that_the_group_does_not_serve():
    run_ranks(elsewhere, 2)


def shapes_alone(rank):
    """Operands on meta: on all ranks the result is too, and nothing is sent; on one, all raise."""
    from pyparallel import ops

    for kind, group in make_groups(rank).items():
        for name, call in CALLS.items():
            for grad in (False, True):
                real = torch.ones(4, 4, requires_grad=grad), torch.ones(5, 4)
                bare = [torch.ones_like(x, device="meta", requires_grad=grad) for x in real]
                wanted = call(ops, *real, group)
                found = call(ops, *bare, group)
                if wanted is not None and name != "all_reduce_":
                    for a, b in zip(several(found), several(wanted), strict=True):
                        assert (a.device.type, a.shape) == ("meta", b.shape), (kind, name)
                with pytest.raises((ValueError, RuntimeError), match=r"rank"):
                    call(ops, *(bare if rank.rank else real), group)
                total = ops.all_reduce(torch.full((3,), rank.rank + 1.0), group)
                assert total.tolist() == [3.0] * 3


def several(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


def test_tensors_without_numbers():
    run_ranks(shapes_alone, 2)


def bad_groups(rank):
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from pyparallel import ops

    make_groups(rank, ("pyparallel",))
    outside = dist.new_group([0])  # rank 1 gets torch's mark of a group that it is not in
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    cases = [
        (None, r"group is None; .*None could mean the world.*group\.WORLD"),
        ("nothing", r"group 'nothing' names no group of this process"),
        (3, r"group is 3; expected a torch.distributed ProcessGroup"),
        (mesh, r'DeviceMesh of 2 dimensions \(shape \[1, 2\]\); pass one.*mesh\["tp"\]'),
    ]
    if rank.rank == 1:
        cases.append((outside, r"a rank that is no member: only members may call"))
    for group, pattern in cases:
        with pytest.raises(ValueError, match=pattern):
            ops.matmul_all_reduce(x(3, 4), x(5, 4), group)
    y = ops.matmul_all_reduce(torch.ones(3, 4), torch.ones(5, 4), mesh["tp"])
    assert y.tolist() == [[8.0] * 5] * 3
    name = ops.group_name(mesh["tp"])
    assert torch.equal(ops.matmul_all_reduce(torch.ones(3, 4), torch.ones(5, 4), name), y)


def test_what_is_no_group():
    run_ranks(bad_groups, 2)

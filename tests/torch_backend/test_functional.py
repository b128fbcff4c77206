"""torch.distributed._functional_collectives and torch.distributed.nn on the backend.

Layers: processes as ranks, results against values known in each process; compiled once too. All of
it runs in CI.
"""

import torch
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as autograd

from tests.comm.reference import assert_same_bits, data, exact
from tests.launch import Rank, run_ranks
from tests.torch_backend.groups import process_group
from tests.torch_backend.test_collectives import everyone


def functional(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank) as group:
        inputs = everyone((world * 2, 3), torch.float32, world)
        x = inputs[me]
        kept = x.clone()
        total = exact(inputs, "sum")
        assert_same_bits(funcol.all_reduce(x, "sum", group).clone(), total, "all_reduce")
        assert_same_bits(funcol.all_reduce(x, "avg", group).clone(), exact(inputs, "avg"), "avg")
        gathered = funcol.all_gather_tensor(x, 0, group)
        assert_same_bits(gathered.clone(), torch.cat(inputs), "all_gather_tensor")
        by_column = funcol.all_gather_tensor(x, 1, group)
        assert_same_bits(by_column.clone(), torch.cat(inputs, 1), "all_gather_tensor, dim 1")
        shard = funcol.reduce_scatter_tensor(x, "sum", 0, group)
        assert_same_bits(shard.clone(), total.chunk(world)[me], "reduce_scatter_tensor")
        got = funcol.broadcast(x, 0, group)
        assert_same_bits(got.clone(), inputs[0], "broadcast")
        swapped = funcol.all_to_all_single(x, None, None, group)
        expected = torch.cat([inputs[r].chunk(world)[me] for r in range(world)])
        assert_same_bits(swapped.clone(), expected, "all_to_all_single")
        many = funcol.all_reduce_coalesced([x, x[:1]], "sum", group)
        assert_same_bits(many[1].clone(), total[:1], "all_reduce_coalesced")
        many = funcol.all_gather_into_tensor_coalesced([x, x[:1]], group)
        assert_same_bits(many[0].clone(), torch.cat(inputs), "all_gather_into_tensor_coalesced")
        many = funcol.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group)
        assert_same_bits(many[1].clone(), total.chunk(world)[me], "reduce_scatter coalesced")
        permuted = funcol.permute_tensor(x.view(-1), [(r + 1) % world for r in range(world)], group)
        expected = inputs[(me - 1) % world].view(-1)
        assert_same_bits(permuted.clone(), expected, "permute_tensor")
        assert_same_bits(x, kept, "functional calls leave their input alone")


def test_functional_collectives():
    run_ranks(functional, 2)


def compiled(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank) as group:

        @torch.compile(backend="aot_eager", fullgraph=True)
        def f(x):
            return funcol.all_reduce(x * 2, "sum", group) + 1

        x = torch.ones(3) * me
        assert f(x).tolist() == [world * (world - 1) + 1.0] * 3


def test_compiled_functional_collectives():
    run_ranks(compiled, 2)


def gradients(rank: Rank) -> None:
    me, world = rank.rank, rank.world_size
    with process_group(rank) as group:  # their default is the world at the time of torch's import
        x = data((3,), torch.float64, me).requires_grad_()
        weights = data((3,), torch.float64, "w", me)
        (autograd.all_reduce(x, group=group) * weights).sum().backward()
        total = sum(data((3,), torch.float64, "w", r) for r in range(world))
        assert torch.allclose(x.grad, total)
        x.grad = None
        (torch.stack(autograd.all_gather(x, group=group))[me] * weights).sum().backward()
        assert torch.allclose(x.grad, weights)


def test_autograd_collectives():
    run_ranks(gradients, 2)

"""Layers under torch.autocast compute as the whole model's do there.

Layers of proof: two processes on a CPU, with and without sequence parallelism: dtypes, values and
gradients of a block of float32 layers are those of the same block in bfloat16, norms in float32.
"""

import torch
from torch import nn
from torch.nn import functional

from tests.launch import run_ranks

BF16 = torch.bfloat16


def block(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator

    torch.set_num_threads(1)
    me = rank.rank
    with Communicator.from_file(rank.rendezvous, me, rank.world_size) as group:
        for parallel in (False, True):
            torch.manual_seed(1)
            norm, up, down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)
            x = torch.randn(4, 3, 6)
            part = slice(2 * me, 2 * me + 2) if parallel else slice(None)
            both = {"sequence_parallel": parallel}
            ours = nn.ModuleList(
                [
                    layers.LayerNorm.from_norm(norm, group, **both),
                    layers.ColumnParallelLinear.from_linear(up, group, **both),
                    layers.RowParallelLinear.from_linear(down, group, **both),
                ]
            )
            whole_x = x.clone().requires_grad_()
            own_x = x[part].clone().requires_grad_()
            with torch.autocast("cpu", BF16):
                expected = down(functional.gelu(up(norm(whole_x))))
                y = ours[2](functional.gelu(ours[1](ours[0](own_x))))
                # What comes out of one block goes into the next: 16 bits, float32 parameters.
                again, whole_again = ours[0](y), norm(expected)
                y_next, e_next = ours[2](ours[1](again)), down(up(whole_again))
            assert y.dtype is BF16
            assert again.dtype is whole_again.dtype
            limit = {"rtol": 0.05, "atol": 0.05}  # of 8 bits, three layers deep
            torch.testing.assert_close(y, expected[part], **limit)
            torch.testing.assert_close(y_next, e_next[part], **limit)
            y.float().square().sum().backward()
            expected.float().square().sum().backward()
            torch.testing.assert_close(own_x.grad, whole_x.grad[part], **limit)
            for p in ours.parameters():
                assert p.grad.dtype is torch.float32
            torch.testing.assert_close(ours[2].bias.grad, down.bias.grad, **limit)
        # One graph, of layers that have never run.
        pair = nn.Sequential(
            layers.ColumnParallelLinear(6, 10, group), layers.RowParallelLinear(10, 6, group)
        )
        graph = torch.compile(pair, fullgraph=True, backend="aot_eager")
        with torch.autocast("cpu", BF16):
            y, expected = graph(x), pair(x)
        assert y.dtype is BF16
        assert torch.equal(y, expected)


def test_block_under_autocast():
    run_ranks(block, 2)

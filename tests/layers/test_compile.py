"""torch.compile of layers: whole graphs, forward and backward, equal to eager execution.

Layers of proof: 2 processes on a CPU; a column- and a row-parallel layer through inductor, with a
sequence that is split also embedding, norm, fused layers and cross entropy traced by aot_eager.
Runs in CI.
"""

import pytest
import torch
from torch import nn

from tests.launch import run_ranks
from tests.layers.whole import Sharded, batch_of, whole_model


def compiled(rank):
    from pyparallel import layers
    from pyparallel.comm import Communicator

    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        torch.manual_seed(0)
        model = nn.Sequential(
            layers.ColumnParallelLinear(12, 17, group),
            nn.GELU(),
            layers.RowParallelLinear(17, 12, group),
        )
        x = torch.randn(5, 12, requires_grad=True)
        expected = model(x)
        expected.square().sum().backward()
        grads = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        x.grad = None
        model.zero_grad()
        y = torch.compile(model, fullgraph=True)(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([x.grad, *(p.grad for p in model.parameters())], grads)

        whole = Sharded(whole_model(0, torch.float64), group, parallel=True)
        loss_of = whole.loss_of(0.1, 1e-2)
        batch = batch_of(1)

        def step(ids, target):
            x = whole.embed(ids)
            x = x + whole.mlp(whole.norm2(x))
            return loss_of(whole.head(whole.norm3(x)), target)

        losses, gradients = [], []
        for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            whole.zero_grad()
            loss = run(batch.ids, batch.target)
            loss.backward()
            losses.append(loss.detach())
            gradients.append([p.grad.clone() for p in whole.parameters() if p.grad is not None])
        torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.slow
def test_compiled_layers_equal_eager():
    run_ranks(compiled, 2)

"""A whole training goes on from its checkpoint: at the same layout to the bit, at another the same
but for the order of sums; with AdamW, a schedule, dropout, gradient clipping and a tied head.

Layers: four ranks, one set of processes. test_checkpoint_layouts.py has the storage alone.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyparallel.training import (
    Checkpointer,
    ElasticSampler,
    ParallelConfig,
    ParallelModel,
    build_mesh,
)
from tests.launch import Rank, run_ranks
from tests.training.models import batch, llama

SAMPLES, BATCH, ROWS = 13, 4, 22
LIMIT = 1e-11  # float64: sums of a few thousand terms of size 1, in another order


class Job:
    """A training at one layout, from whatever it begins with."""

    def __init__(self, layout: dict[str, int], zero: int, folder: Path, seed: int) -> None:
        self.mesh = build_mesh(ParallelConfig(**layout))
        module = llama(seed, tie_word_embeddings=True, dropout=0.2)
        self.model = ParallelModel(module, self.mesh, microbatches=2, zero=zero, seed=7)
        self.optimizer = self.model.optimizer(
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01 * (seed + 1))
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 9)
        self.order = ElasticSampler(SAMPLES, BATCH, mesh=self.mesh, seed=seed)
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "order": self.order,
            "streams": self.model.streams,
            "run": self.model.run_state,
        }
        self.checkpointer = Checkpointer(folder, self.mesh, deadline=200)
        self.data = batch(SAMPLES, ROWS, seed=5)

    def step(self) -> tuple[float, float]:
        numbers = self.order.next()
        self.optimizer.zero_grad()
        loss = self.model.forward_backward(*(part[numbers] for part in self.data))
        norm = self.model.clip_grad_norm_(0.5)
        assert self.model.step(self.optimizer)
        self.schedule.step()
        return float(loss), float(norm)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def went_on(rank: Rank, folder: Path, before: Any, same: Any, others: list[Any]) -> str:
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    straight = Job(*before, folder, seed=0)
    assert straight.checkpointer.load(**straight.parts) is None
    for _ in range(2):
        straight.step()
    straight.checkpointer.save(2, **straight.parts)
    expected = [straight.step() for _ in range(3)]
    straight.checkpointer.close()
    weights = straight.weights()
    digest = hashlib.sha256()
    for layout, zero in [same, *others]:
        exact = (layout, zero) == before
        job = Job(layout, zero, folder, seed=1)
        assert job.checkpointer.load(**job.parts) == 2
        for number, (loss, norm) in enumerate(expected):
            found = job.step()
            limit = 0 if exact else LIMIT
            where = f"{layout}, zero {zero}, step {number + 3}: {found}, {(loss, norm)}"
            assert abs(found[0] - loss) <= limit * abs(loss), where
            assert abs(found[1] - norm) <= 100 * limit * abs(norm), where
        job.checkpointer.close()
        for name, tensor in job.weights().items():
            apart = float((tensor - weights[name]).abs().max())
            assert apart <= (0 if exact else 1e-8), (layout, zero, name, apart)
            if exact:
                digest.update(tensor.numpy().tobytes())
    assert straight.schedule.get_last_lr() == job.schedule.get_last_lr()
    return digest.hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_go_on(tmp_path: Path) -> None:
    before = ({"dp": 2, "tp": 2}, 1)
    others: list[Any] = [({"tp": 2, "pp": 2}, 0), ({"dp": 2, "sp": 2}, 3)]
    digests = run_ranks(went_on, 4, tmp_path, before, before, others, timeout=400)
    assert len(set(digests)) == 1

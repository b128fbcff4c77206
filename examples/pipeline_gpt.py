"""Trains a small GPT in two pipeline stages, with any schedule.

torchrun --nproc-per-node 2 examples/pipeline_gpt.py [--schedule zb-h1] [--microbatches 8]
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import pyparallel.comm  # noqa: F401  registers the backend
from pyparallel.pipeline import PipelineExecutor, partition_model, profile
from pyparallel.schedule import FAMILIES, generate, validate, with_transfers

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 64, 4, 8


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))


def loss_fn(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b", choices=FAMILIES)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("pyparallel")
    group, rank = dist.group.WORLD, dist.get_rank()
    torch.manual_seed(0)  # the same model on every rank; of it, this rank trains its stages
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    model = nn.Sequential(Embedding(), *(Block() for _ in range(LAYERS)), head)

    plan = with_transfers(generate(args.schedule, dist.get_world_size(), args.microbatches))
    report = validate(plan)
    partition = partition_model(model, stages=plan.stages)
    stages = {stage: partition.stage(stage) for stage in plan.held[rank]}
    executor = PipelineExecutor(stages, loss_fn, group=group)
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    print(f"rank {rank}: stages {list(stages)}, keeps {report.peak_bytes[rank]} microbatches")

    starts = torch.randint(VOCABULARY, (args.microbatches, 4, 1))
    batch = list((starts + torch.arange(LENGTH)) % VOCABULARY)  # to count, modulo the vocabulary
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = executor.step(plan, batch, batch).loss
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss:.4f}")

    measured = profile(executor, plan, lambda: executor.step(plan, batch, batch))
    if rank == 0:
        print(measured)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Twenty steps of a small model: in one process with plain torch, and on the ranks of a layout.

Dropout is on, embedding and output layer are tied (five untied layers where eight stages need
them), labels that do not count lie unevenly, gradients are clipped, AdamW's rate is warmed up.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from examples.llama import Llama, LlamaConfig
from pyparallel.training import (
    ParallelConfig,
    ParallelModel,
    RandomStreams,
    build_mesh,
    place_dropouts,
)
from tests.equivalence.cases import Case
from tests.launch import Rank

STEPS, SAMPLES, ROWS, VOCAB = 20, 8, 12, 37
MAX_NORM, SEED = 0.5, 11


@dataclass(frozen=True)
class Run:
    """What a training was: of every step the loss and the gradient's norm before clipping, and the
    weights in the end."""

    losses: Tensor
    norms: Tensor
    weights: dict[str, Tensor]


def model_of(stages: int) -> Llama:
    """The same on every rank. Nothing divides by 4 but the batch."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=27,
        num_hidden_layers=2 if stages < 8 else 5,
        num_attention_heads=5,
        num_key_value_heads=1,
        dropout=0.1,
        tie_word_embeddings=stages < 8,
        initializer_range=0.2 if stages < 8 else 0.1,  # float32's own error stays small
    )
    return Llama(config)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Of every step, [SAMPLES, ROWS]. What follows a token is a function of it, to be learnt."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (SAMPLES, ROWS), generator=generator)
        labels = (tokens * 5 + 3) % VOCAB
        labels[:3, : ROWS // 2] = -100
        found.append((tokens, labels))
    return found


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * min(1.0, (step + 1) / 5)


@cache
def reference(stages: int, precision: str, seed: int = SEED, steps: int = STEPS) -> Run:
    """One process, plain torch (also in "fp64"), its autocast, clip_grad_norm_ and AdamW."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # products are small: several threads only wait for each other
    try:
        return _reference(stages, precision, seed, steps)
    finally:
        torch.set_num_threads(before)


def _reference(stages: int, precision: str, seed: int, steps: int) -> Run:
    model = model_of(stages).to(torch.float64 if precision == "fp64" else torch.float32)
    streams = RandomStreams(seed)
    place_dropouts(model, streams)
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    for step, (tokens, labels) in enumerate(batches(steps)):
        set_rate(optimizer, step)
        optimizer.zero_grad()
        place = streams.at(step=step, samples=range(SAMPLES), positions=range(ROWS))
        with place, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            logits = model(tokens)
        logits = logits.double() if precision == "fp64" else logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Run(torch.tensor(losses).double(), torch.tensor(norms).double(), weights)


def on_ranks(rank: Rank, cases: list[Case], steps: int = STEPS) -> list[Any]:
    """All cases of one world, one after another: rank 0 gives runs, every rank their digests."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    meshes: dict[Any, Any] = {}
    found = []
    for case in cases:
        run = _train(case, meshes, steps)
        found.append((_digest(run), run if rank.rank == 0 else None))
    return found


def _train(case: Case, meshes: dict[Any, Any], steps: int) -> Run:
    config = ParallelConfig(
        dp=case.dp,
        tp=case.tp,
        sp=case.sp,
        pp=case.pp,
        zero=case.zero,
        tp_sequence_parallel=case.tp_sequence_parallel,
    )
    if config not in meshes:
        meshes[config] = build_mesh(config)
    mesh = meshes[config]
    own = SAMPLES // case.dp
    model = ParallelModel(
        model_of(case.pp),
        mesh,
        microbatches=min(own, 2),
        precision=case.precision,
        recompute=case.recompute,
        seed=SEED,
        layout=" | ".join(["E", "t", "t", "t", "t", "t", "N", "L"]) if case.pp == 8 else None,
    )
    optimizer = model.optimizer(optimizer_of)
    mine = slice(own * mesh.coordinates.dp, own * (mesh.coordinates.dp + 1))
    losses, norms = [], []
    for step, (tokens, labels) in enumerate(batches(steps)):
        set_rate(optimizer, step)
        optimizer.zero_grad()
        losses.append(model.forward_backward(tokens[mine], labels[mine]))
        norms.append(model.clip_grad_norm_(MAX_NORM))
        model.step(optimizer)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Run(torch.tensor(losses).double(), torch.tensor(norms).double(), weights)


def _digest(run: Run) -> str:
    digest = hashlib.sha256()
    for tensor in (run.losses, run.norms, *run.weights.values()):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()

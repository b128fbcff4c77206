"""A model, its data, its one-process reference and its ranks, for tests of the executor."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyparallel.comm  # noqa: F401  registers the backend
from pyparallel.pipeline import partition_model
from pyparallel.schedule import FAMILIES, Schedule, generate, with_transfers
from tests.launch import Rank

WIDTH = 6


class Counter:
    """How many microbatches' graphs are alive, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0


class _Counted(torch.autograd.Function):
    """Counts itself for as long as its place in the graph lives."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, counter: Counter) -> Tensor:
        ctx.mark = _Mark(counter)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clone(), None


class _Mark:
    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        counter.now += 1
        counter.most = max(counter.most, counter.now)

    def __del__(self) -> None:
        self.counter.now -= 1


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.counter: Counter | None = None

    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        if self.counter is not None:  # where both halves need what has been saved
            normed = _Counted.apply(normed, self.counter)
        out: Tensor = value + self.down(torch.tanh(self.up(normed)))
        return out


def model(layers: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Layer() for _ in range(layers))).to(dtype)


class Tied(nn.Sequential):
    """Embedding and output layer are one parameter, on the first and the last stage."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        embedding, head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        head.weight = embedding.weight
        super().__init__(embedding, nn.Linear(WIDTH, WIDTH), head)
        self.double()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def data(
    microbatches: int, dtype: torch.dtype = torch.float64, uneven: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(7)
    sizes = [2 + (i % 3 if uneven else 0) for i in range(microbatches)]
    return (
        [torch.randn(n, WIDTH, dtype=dtype) for n in sizes],
        [torch.randn(n, WIDTH, dtype=dtype) for n in sizes],
    )


def reference(
    whole: nn.Module,
    inputs: list[Any],
    targets: list[Tensor],
    loss: Callable[..., Tensor] = loss_fn,
    weights: list[float] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients in one process, of a copy."""
    twin = copy.deepcopy(whole)
    weights = weights or [1.0] * len(inputs)
    value = sum(
        w * loss(twin(x), t) for w, x, t in zip(weights, inputs, targets, strict=True)
    ) / sum(weights)
    value.backward()
    return value.item(), {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}


def largest_error(whole: nn.Module, gradients: dict[str, Tensor]) -> float:
    """Of the gradients in the parameters, from these."""
    found = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    return max(float((found[n] - g).abs().max()) for n, g in gradients.items())


def fp32_limits(layers: int, microbatches: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients in float64, and how far off those in float32 may be: |one process - ref| + m eps32
    sum |g_i|, as the microbatches' gradients are the same numbers, added in another order."""
    single = model(layers, torch.float32)
    inputs, targets = data(microbatches, torch.float32)
    wide = [[t.double() for t in ts] for ts in (inputs, targets)]
    _, truth = reference(copy.deepcopy(single).double(), *wide)
    _, stock = reference(single, inputs, targets)
    sizes = {n: torch.zeros_like(g) for n, g in stock.items()}
    for x, t in zip(inputs, targets, strict=True):
        for n, g in reference(single, [x], [t])[1].items():
            sizes[n] += g.abs() / microbatches
    eps = torch.finfo(torch.float32).eps
    limits = {n: (stock[n] - truth[n]).abs() + microbatches * eps * sizes[n] for n in stock}
    return truth, limits


def stages(whole: nn.Sequential, count: int) -> dict[int, nn.Module]:
    partition = partition_model(whole, counts=[1] * count)
    return {index: partition.stage(index) for index in range(count)}


def plan_of(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    return with_transfers(generate(name, ranks, microbatches, chunks=chunks))


def grid(ranks: tuple[int, ...], microbatches: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
    """(schedule, p, m, v) of every schedule, v from 1 to 3 where it leaves the choice."""
    return [
        (name, p, m, v)
        for name, family in FAMILIES.items()
        for p in ranks
        if not (family.even_ranks and p % 2)
        for m in microbatches
        for v in ((1, 2, 3) if family.chunks is None else (family.chunks,))
    ]


def start(rank: Rank, backend: str) -> dist.ProcessGroup:
    """The group of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=rank.store(), rank=rank.rank, world_size=rank.world_size)
    group = dist.group.WORLD
    assert group is not None
    return group


def own(plan: Schedule, rank: int, whole: nn.Sequential) -> dict[int, nn.Module]:
    parts = stages(whole, plan.stages)
    return {stage: parts[stage] for stage in plan.held[rank]}


def given(plan: Schedule, rank: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """What this rank passes: only what it needs."""
    held = plan.held[rank]
    return (inputs if 0 in held else None, targets if plan.stages - 1 in held else None)


def errors(plan: Schedule, rank: int, whole: nn.Module, gradients: dict[str, Tensor]) -> float:
    """The largest error of this rank's gradients, which are all there."""
    found = dict(whole.named_parameters())
    mine = [n for n in gradients if int(n.split(".")[0]) in plan.held[rank]]
    others = [n for n, p in found.items() if n not in mine and p.grad is not None]
    assert not others
    return max(float((found[n].grad - gradients[n]).abs().max()) for n in mine)


def several(rank: Rank, *jobs: Any) -> list[Any]:
    """Many checks, one start; each makes its group anew."""
    results = []
    for number, (job, *args) in enumerate(jobs):
        rank_of_job = type(rank)(
            rank.rank, rank.world_size, f"{rank.rendezvous}.{number}", rank.timeout, rank._report
        )
        results.append(job(rank_of_job, *args))
        dist.destroy_process_group()
    return results

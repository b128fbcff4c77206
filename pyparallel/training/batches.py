"""A batch on its way to the ranks: checked by all of them together, then cut."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pyparallel.attention import position_ids, shard
from pyparallel.errors import InvalidArgument
from pyparallel.pipeline.agreement import GroupAgreement
from pyparallel.training.mesh import ParallelMesh
from pyparallel.training.passing import Passing
from pyparallel.training.token_loss import counted

__all__ = ["Batch", "agree_on_batch"]


@dataclass(frozen=True)
class Batch:
    """What this rank computes of a step.

    Attributes:
        tokens, labels: per microbatch, this rank's rows: [samples, rows].
        keywords: per microbatch, what every stage gets besides: `passing` (passing.py), and
            `position_ids` [1, rows] where the model takes them.
        total: tokens that the loss counts in the whole step, over all ranks that have others.
    """

    tokens: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    keywords: tuple[Mapping[str, Any], ...]
    total: int


def agree_on_batch(
    op: str,
    mesh: ParallelMesh,
    tokens: Any,
    labels: Any,
    microbatches: int,
    *,
    step: int,
    positions: bool,
    agreement: GroupAgreement,
) -> Batch:
    """Cuts a batch into microbatches and rows. Collective over the mesh.

    Args:
        op: of which errors are to speak.
        tokens, labels: int64 [samples, rows], of this rank's dp coordinate, alike on the ranks that
            share it.
        step: of the model, from 0.
        positions: the model takes position_ids.
        agreement: of all of the mesh's ranks.

    Raises:
        ValueError: on all ranks, for what one of them finds wrong.
    """
    problem = _misfit(mesh, tokens, labels, microbatches)
    # What is alike on ranks with the same data: shape, and a sum that sees most mistakes.
    mine = [0] * 5
    if not problem:
        both = torch.add(tokens, labels, alpha=3).flatten()
        seen = int(both @ _weights(len(both), both.device))
        mine = [1, tokens.shape[0], tokens.shape[1], counted(labels), seen]
    every = agreement.numbers(mine)
    bad = [rank for rank, row in enumerate(every) if not row[0]]
    if bad:
        others = f"rank {bad[0]} was given what does not fit (ranks {bad}); its error says what"
        raise InvalidArgument(f"{op}, rank {mesh.rank}: {problem or others}")
    config = mesh.config
    total = 0
    for first, *rest in config.groups("tp", "sp", "pp"):
        for rank in rest:
            if every[rank] != every[first]:
                raise InvalidArgument(
                    f"{op}: ranks {first} and {rank} share the dp coordinate "
                    f"{config.coordinates(rank).dp}, and were given different tokens or labels "
                    f"([samples, rows] {every[first][1:3]} and {every[rank][1:3]})"
                )
        total += every[first][3]
    if not total:
        raise InvalidArgument(f"{op}: no label of the step is one that the loss counts")
    place = (mesh.coordinates.sp, mesh.size("sp"))
    here = _positions(tokens.shape[1], *place)
    if mesh.size("sp") > 1:
        tokens, labels = shard(tokens, place), shard(labels, place)
    size = len(tokens) // microbatches
    before = [every[rank][1] for rank in config.ranks(mesh.rank, "dp")[: mesh.coordinates.dp]]
    samples = (torch.arange(len(tokens)) + sum(before)).split(size)
    more = {"position_ids": here[None].to(tokens.device)} if positions else {}
    keywords = tuple({"passing": Passing(step, which, here), **more} for which in samples)
    return Batch(tokens.split(size), labels.split(size), keywords, total)


@lru_cache(maxsize=8)
def _positions(rows: int, rank: int, ranks: int) -> Tensor:
    return position_ids(rows, (rank, ranks))


@lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device)


def _misfit(mesh: ParallelMesh, tokens: Any, labels: Any, microbatches: int) -> str:
    for name, value in (("tokens", tokens), ("labels", labels)):
        if not isinstance(value, Tensor) or value.dtype is not torch.int64 or value.dim() != 2:
            found = (
                f"{value.dtype} of shape {list(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            return f"{name} is {found}; expected int64 [samples, rows]"
    if tokens.shape != labels.shape:
        return f"tokens has shape {list(tokens.shape)} and labels {list(labels.shape)}"
    samples, rows = tokens.shape
    if not samples or not rows:
        return f"tokens has shape {list(tokens.shape)}: it is empty"
    if samples % microbatches:
        dp = mesh.size("dp")
        fit = [m for m in range(1, samples + 1) if samples % m == 0]
        return (
            f"{samples} samples of this rank are no {microbatches} microbatches of one size; "
            f"samples of a step = size of a microbatch x microbatches x dp = ? x {microbatches} x "
            f"{dp}; of {samples} samples a rank could make {fit} microbatches"
        )
    return ""

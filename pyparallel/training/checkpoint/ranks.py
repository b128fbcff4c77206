"""What the ranks of a job tell each other about a checkpoint: small JSON, never pickles."""

import dataclasses
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyparallel.pipeline.agreement import GroupAgreement
from pyparallel.training.checkpoint.errors import CheckpointError

__all__ = ["Ranks", "reasons"]


class Ranks:
    """All ranks of a job; over a group of its own, so that a save may go on beside the training,
    or over the world's, where it waits.

    Attributes:
        rank, size: of this process.
        places: coordinates of every rank: axis -> number.
        sizes: of the axes.
    """

    def __init__(self, mesh: Any, deadline: float, *, own_group: bool = True) -> None:
        running = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if running else 0
        self.size = dist.get_world_size() if running else 1
        if mesh is None:
            self.places = [{"rank": rank} for rank in range(self.size)]
            self.sizes = {"rank": self.size}
        else:
            config = mesh.config
            self.places = [
                dataclasses.asdict(config.coordinates(rank)) for rank in range(self.size)
            ]
            self.sizes = {axis: getattr(config, axis) for axis in self.places[0]}
        self._agreement: GroupAgreement | None = None
        if self.size > 1:
            # NCCL has no groups of host memory, and a save must not wait for the device.
            backend = "gloo" if dist.get_backend() == "nccl" else None
            group: Any = dist.group.WORLD
            if own_group or backend is not None:
                group = dist.new_group(backend=backend, timeout=timedelta(seconds=deadline))
            self._agreement = GroupAgreement(group, torch.device("cpu"))

    @property
    def place(self) -> dict[str, int]:
        return self.places[self.rank]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, plain JSON, in rank order. Collective."""
        if self._agreement is None:
            return [value]
        return [json.loads(text) for text in self._agreement.texts(json.dumps(value))]

    def agree(self, what: str, problem: "Exception | None") -> None:
        """Raises on all ranks if some rank has a problem. Collective."""
        told = self.gather("" if problem is None else str(problem) or type(problem).__name__)
        self.refuse(what, told, problem)

    def refuse(self, what: str, told: Sequence[str], cause: "Exception | None") -> None:
        """Raises if some rank told a reason. What was told is the same on all ranks."""
        if any(told):
            raise CheckpointError(f"{what}: {reasons(told)}") from cause


def reasons(told: Sequence[str]) -> str:
    """Every rank's reason, equal ones once."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        if text:
            by_text.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    )

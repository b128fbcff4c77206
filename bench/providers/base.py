"""What a contestant is: an op of the table, bound to buffers, as a function without arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch

from bench.case import Case
from bench.ops import Layout


class Unsupported(Exception):
    """The contestant has no such op for this dtype, with the reason. Raised alike on all ranks."""


@dataclass(frozen=True)
class Setup:
    """What a provider may use to find its peers."""

    rank: int
    world: int
    device: torch.device
    scratch: Path  # a folder that all ranks see and that goes away after the run
    timeout: float  # seconds
    busy: bool

    @property
    def neighbours(self) -> tuple[int, int]:
        """Next and previous rank of the ring."""
        return (self.rank + 1) % self.world, (self.rank - 1) % self.world


@dataclass(frozen=True)
class Buffers:
    """One set of arrays for a case on this rank. In place: `x` and `y` are the same tensor."""

    x: torch.Tensor
    y: torch.Tensor
    layout: Layout

    def x_parts(self) -> list[torch.Tensor]:
        return list(self.x.split(list(self.layout.in_splits)))

    def y_parts(self) -> list[torch.Tensor]:
        return list(self.y.split(list(self.layout.out_splits)))


class Provider:
    """One contestant on one rank. Subclasses have a method per op: (Case, Buffers) -> callable."""

    name = ""
    wide_sum = False  # whether 16-bit floats are added up in float32
    stock = False  # whether it is what PyTorch alone gives
    lacks: tuple[str, ...] = ()  # ops that there is no such thing as: no row

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def prepare(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        method = getattr(self, case.op, None)
        if method is None:
            raise Unsupported(f"{self.name} has no {case.op}")
        return method(case, buffers)

    def batch(self, case: Case, sets: Sequence[Buffers]) -> Callable[[int], None]:
        """A function that makes n calls, going round the sets."""
        calls = [self.prepare(case, buffers) for buffers in sets]

        def run(n: int) -> None:
            for call in islice(cycle(calls), n):
                call()

        return run

    def note(self, case: Case) -> str:
        """What a reader must know to judge this contestant on this case."""
        return ""

    def close(self) -> None:
        pass

"""Around the forward of every stage: the numbers' width, and what passes just now.

A stage's class gets a subclass whose forward takes one keyword more, `passing`; so it is still
itself to torch's wrappers, which come after, and to a pipeline's executor.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from pyparallel.training.precision import Precision
from pyparallel.training.random import RandomStreams

__all__ = ["Passing", "pass_through"]


@dataclass(frozen=True)
class Passing:
    """A microbatch.

    Attributes:
        step: of how many steps of the model it is, from 0.
        samples: int64 [batch], numbers in the step's global batch.
        positions: int64 [rows], of this rank's rows in the sequence.
    """

    step: int
    samples: Tensor
    positions: Tensor


class _Stage(nn.Module):
    """Before a stage's own class."""

    def forward(self, *values: Any, passing: Passing, **keywords: Any) -> Any:
        streams: RandomStreams = self.__dict__["_passing_streams"]
        precision: Precision = self.__dict__["_passing_precision"]
        where = streams.at(step=passing.step, samples=passing.samples, positions=passing.positions)
        with where, precision.forward():
            if not torch.autograd.profiler._is_profiler_enabled:
                return super().forward(*values, **keywords)
            with record_function(f"forward of samples from {int(passing.samples[0])} on"):
                return super().forward(*values, **keywords)


_made: dict[type, type] = {}


def pass_through(stage: nn.Module, streams: RandomStreams, precision: Precision) -> None:
    """Makes a stage one that is called with `passing`, in place."""
    kind = type(stage)
    if kind not in _made:
        _made[kind] = type(f"Passing{kind.__name__}", (_Stage, kind), {"__module__": __name__})
    stage.__class__ = _made[kind]
    stage.__dict__["_passing_streams"] = streams
    stage.__dict__["_passing_precision"] = precision

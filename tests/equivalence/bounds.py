"""How far a layout may be from one process.

fp32  1e-5 of the value: each loss, each norm of the gradient, and the weights as a vector.

bf16  Rounding every product once takes one process from its float32 run by E (the root mean square
      over the steps; of the weights the length of the difference). In a layout, each rounding may
      fall the other way, since sums before it are added in another order: once E. What tp ranks
      contribute to a sum is rounded on each of them, and so is what sp ranks give to each other:
      E for each rank. So the distance to one process in bf16 is at most (1 + tp + sp) E, to first
      order in the rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.equivalence.cases import Case
from tests.equivalence.training import SEED, Run, reference

FP32 = 1e-5


@dataclass(frozen=True)
class Shares:
    """Of what is allowed, how much a run has used; up to 1 is well."""

    loss: float
    norm: float
    weights: float

    @property
    def worst(self) -> float:
        found = max(self.loss, self.norm, self.weights)
        return found if found == found else float("inf")  # nan is far away


def vector(run: Run) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in run.weights.values()])


def rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def relative(run: Run, single: Run) -> Shares:
    """Of FP32."""
    return Shares(
        float(((run.losses - single.losses) / single.losses).abs().max()) / FP32,
        float(((run.norms - single.norms) / single.norms).abs().max()) / FP32,
        float((vector(run) - vector(single)).norm() / vector(single).norm()) / FP32,
    )


def shares(case: Case, run: Run) -> Shares:
    """Of the case's bound, after as many steps as the run has."""
    steps = len(run.losses)
    single = reference(case.pp, case.precision, steps=steps)
    if case.precision == "fp32":
        return relative(run, single)
    weights = vector(run) - vector(single)
    wide, often = reference(case.pp, "fp32", steps=steps), 1 + case.tp + case.sp
    return Shares(
        rms(run.losses - single.losses) / (often * rms(single.losses - wide.losses)),
        rms(run.norms - single.norms) / (often * rms(single.norms - wide.norms)),
        float(weights.norm() / (vector(single) - vector(wide)).norm()) / often,
    )


def control(case: Case) -> Shares:
    """What another seed of dropout makes of it, by the same measure: it must not pass."""
    return shares(case, reference(case.pp, case.precision, SEED + 1))

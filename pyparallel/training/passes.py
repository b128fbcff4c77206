"""The microbatches of a step through this rank's stages: in a loop, or by a pipeline's schedule.

Both add the gradient of `sum of the microbatches' losses / total` to the parameters, and reduce it
over the replicas once, behind the last microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.pipeline import PipelineExecutor
from pyparallel.schedule import FAMILIES, Schedule, generate, with_transfers
from pyparallel.training.token_loss import Loss

__all__ = ["Loop", "Passes", "Pipeline", "check_schedule"]

Keywords = Sequence[Mapping[str, Any]]  # of each microbatch, to every stage


class Passes(Protocol):
    """How microbatches run."""

    def step(
        self,
        tokens: Sequence[Tensor],
        labels: Sequence[Tensor],
        keywords: Keywords,
        total: float,
        loss_scale: float,
    ) -> float:
        """Adds gradients, times loss_scale; gives the sum of the losses divided by `total`."""

    def evaluate(
        self, tokens: Sequence[Tensor], labels: Sequence[Tensor], keywords: Keywords, total: float
    ) -> float:
        """The same loss, without gradients."""

    def outputs(self, tokens: Tensor, keywords: Keywords) -> Tensor | None:
        """What the last stage gives, where this rank holds it."""


class Loop:
    """One stage: the microbatches one after another.

    Args:
        module: the whole model, wrapped or not.
        accumulate: (last) -> what a forward and backward run in: a wrapper's reduction takes place
            only in the last.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        accumulate: Callable[[bool], AbstractContextManager[Any]],
    ) -> None:
        self._module, self._loss, self._accumulate = module, loss, accumulate

    def step(
        self,
        tokens: Sequence[Tensor],
        labels: Sequence[Tensor],
        keywords: Keywords,
        total: float,
        loss_scale: float,
    ) -> float:
        summed: Tensor | None = None
        for number, (inputs, targets) in enumerate(zip(tokens, labels, strict=True)):
            with self._accumulate(number + 1 == len(tokens)):
                loss = self._loss(self._module(inputs, **keywords[number]), targets)
                loss.backward(torch.full_like(loss, loss_scale / total))
            summed = loss.detach() if summed is None else summed + loss.detach()
        assert summed is not None
        return float(summed) / total

    @torch.no_grad()
    def evaluate(
        self, tokens: Sequence[Tensor], labels: Sequence[Tensor], keywords: Keywords, total: float
    ) -> float:
        every = zip(tokens, labels, keywords, strict=True)
        return sum(float(self._loss(self._module(x, **more), y)) for x, y, more in every) / total

    @torch.no_grad()
    def outputs(self, tokens: Tensor, keywords: Keywords) -> Tensor | None:
        found: Tensor = self._module(tokens, **keywords[0])
        return found


class Pipeline:
    """Stages on several ranks, by a schedule of `pyparallel.schedule`."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        loss: Loss,
        group: dist.ProcessGroup,
        schedule: str,
        device: torch.device,
    ) -> None:
        self.schedule = schedule
        self.scale = 1.0
        self._plain_loss = loss
        self.executor = PipelineExecutor(stages, self._scaled_loss, group=group, device=device)
        self._ranks = group.size()
        self._plans: dict[int, Schedule] = {}

    def plan(self, microbatches: int) -> Schedule:
        """The schedule of a step of so many."""
        if microbatches not in self._plans:
            plan = generate(self.schedule, self._ranks, microbatches)
            self._plans[microbatches] = with_transfers(plan)
        return self._plans[microbatches]

    def _scaled_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self._plain_loss(logits, labels)
        return loss if self.scale == 1.0 else loss * self.scale

    def step(
        self,
        tokens: Sequence[Tensor],
        labels: Sequence[Tensor],
        keywords: Keywords,
        total: float,
        loss_scale: float,
    ) -> float:
        self.scale = loss_scale
        plan = self.plan(len(tokens))
        result = self.executor.step(plan, tokens, labels, total=total, keywords=keywords)
        assert result.loss is not None
        return result.loss / loss_scale

    def evaluate(
        self, tokens: Sequence[Tensor], labels: Sequence[Tensor], keywords: Keywords, total: float
    ) -> float:
        self.scale = 1.0
        plan = self.plan(len(tokens))
        result = self.executor.evaluate(plan, tokens, labels, total=total, keywords=keywords)
        assert result.loss is not None
        return result.loss

    def outputs(self, tokens: Tensor, keywords: Keywords) -> Tensor | None:
        result = self.executor.evaluate(self.plan(1), [tokens], keywords=keywords)
        found: Tensor | None = result.outputs.get(0)
        return found


def check_schedule(name: str) -> None:
    """
    Raises:
        ValueError: it is none that a composed model can run.
    """
    usable = [n for n, family in FAMILIES.items() if family.copies == 1]
    if name not in usable:
        why = "has two copies of each stage" if name in FAMILIES else "is not known"
        raise ValueError(f"schedule {name!r} {why}; expected one of {', '.join(usable)}")

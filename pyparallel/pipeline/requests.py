"""What is passed to a step, checked against the plan, before anything runs."""

import functools
import hashlib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pyparallel.pipeline.packets import Packet, Shape, pack, to_wire
from pyparallel.pipeline.plans import nearest
from pyparallel.pipeline.row import Job
from pyparallel.pipeline.stage import Loss
from pyparallel.schedule import Schedule

__all__ = ["Request", "factors_digest", "prepare"]


@dataclass(frozen=True)
class Request:
    """The arguments of a step, as of `PipelineExecutor.step`."""

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    weights: Sequence[float] | None
    total: float | None
    keywords: Sequence[Mapping[str, Any]] | None
    training: bool


def prepare(request: Request, plan: Schedule, ranks: Sequence[int], loss: Loss | None) -> Job:
    """The job of these ranks of a plan that has been proved.

    Raises:
        ValueError: everything that does not fit.
    """
    misfits: list[str] = []
    has_loss = loss is not None
    enters = _passing(plan, ranks, 0)
    ends = _passing(plan, ranks, plan.stages - 1)
    for name in ("inputs", "targets", "weights", "keywords"):
        values = getattr(request, name)
        if values is not None and len(values) != plan.microbatches:
            misfits.append(
                f"{name} has {len(values)} microbatches, the plan {plan.microbatches}: for "
                f"{len(values)} run {nearest(plan, max(len(values), 1))}"
            )
    if enters and request.inputs is None:
        misfits.append(f"inputs are missing: microbatches {enters} enter stage 0 here")
    if request.training and ends and not has_loss:
        misfits.append("loss_fn is missing: the last stage is here, and its backward begins there")
    if has_loss and ends and (request.training or request.targets is not None):
        misfits += _loss_misfits(loss, ends, request.targets is not None)
    weights = [1.0] * plan.microbatches if request.weights is None else list(request.weights)
    wrong = [w for w in weights if not (isinstance(w, (int, float)) and 0 <= w < math.inf)]
    total = sum(weights) if request.total is None and not wrong else request.total
    if wrong:
        misfits.append(f"weights {wrong}: finite numbers >= 0 are expected")
    elif total is None or not 0 < total < math.inf:
        misfits.append(f"total is {total} (the sum of the weights by default): > 0 is expected")
    if misfits:
        raise ValueError("; ".join(misfits))
    assert total is not None
    inputs = {m: _packed(m, request.inputs) for m in enters}
    kinds = [0] * plan.microbatches
    for microbatch, packet in inputs.items():
        kinds[microbatch] = _kind(packet.shape)
    keywords = dict(enumerate(request.keywords or ()))
    targets = {} if request.targets is None else {m: (request.targets[m],) for m in ends}
    factors = {m: weight / total for m, weight in enumerate(weights)}
    return Job(plan, request.training, inputs, targets, keywords, factors, kinds)


def _loss_misfits(loss: Loss | None, ends: list[int], with_targets: bool) -> Iterable[str]:
    """Whether a loss_fn whose arguments can be known takes what it will be given."""
    asked = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(asked)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    try:
        takes = ", ".join(signature.parameters)
        signature.bind(*range(1 + with_targets))
    except TypeError:
        if with_targets:
            yield f"loss_fn({takes}) takes no target, and targets are given: leave them out"
        else:
            yield (
                f"targets are missing: microbatches {ends} end here, and loss_fn({takes}) takes "
                "a target"
            )


@functools.lru_cache(maxsize=256)
def _kind(shape: Shape) -> int:
    return _number(to_wire(shape))


def factors_digest(job: Job) -> int:
    """Equal on ranks that weigh the microbatches in the same way."""
    return _number(repr(sorted(job.factors.items())).encode())


def _passing(plan: Schedule, ranks: Sequence[int], stage: int) -> list[int]:
    return [m for m in range(plan.microbatches) if plan.placement[stage, m] in ranks]


def _packed(microbatch: int, inputs: Sequence[Any] | None) -> Packet:
    assert inputs is not None
    try:
        shape, tensors = pack(inputs[microbatch], differentiable=False)
    except TypeError as error:
        raise ValueError(f"inputs[{microbatch}]: {error}") from None
    if not tensors:
        raise ValueError(f"inputs[{microbatch}] has no tensor, and enters stage 0 here")
    return Packet(shape, tensors)


def _number(data: bytes) -> int:
    """56 bits of a hash, never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little") | 1

"""The norm of a model's gradient whose stages are on several ranks."""

import math
import struct
from collections.abc import Iterable

import torch

from pyparallel.pipeline.executor import PipelineExecutor
from pyparallel.pipeline.partition import TiedParameter

__all__ = ["clip_gradient_norm_", "gradient_norm"]


def gradient_norm(executor: PipelineExecutor, tied: Iterable[TiedParameter] = ()) -> float:
    """The 2-norm of the whole model's gradient, summed in float64: the same number on every rank.

    All ranks of the executor's group call it, after copies' and tied gradients have been summed. A
    stage that several ranks hold counts once, and so does a parameter that several stages hold.
    Parameters without a gradient count as zero; of parameters sharded inside a stage only the shard
    counts (`layers.gradient_norm` is for these).

    Args:
        tied: `Partition.tied`.
    """
    elsewhere = {
        (stage, name)
        for one in tied
        for name, stage in zip(one.names, one.stages, strict=True)
        if stage != min(one.stages)
    }
    squares = {
        stage: sum(
            float(parameter.grad.detach().to(torch.float64).square().sum())
            for name, parameter in module.named_parameters()
            if parameter.grad is not None and (stage, name) not in elsewhere
        )
        for stage, module in executor.stages.items()
    }
    count = 1 + max(row[0] for row in executor.agreement.numbers([max(squares)]))
    held = [int(stage in squares) for stage in range(count)]
    bits = [
        struct.unpack("q", struct.pack("d", squares.get(stage, 0.0)))[0] for stage in range(count)
    ]
    every = executor.agreement.numbers([*held, *bits])
    total = 0.0
    for stage in range(count):
        first = next((row for row in every if row[stage]), None)
        if first is not None:
            total += struct.unpack("d", struct.pack("q", first[count + stage]))[0]
    return math.sqrt(total)


def clip_gradient_norm_(
    executor: PipelineExecutor, max_norm: float, tied: Iterable[TiedParameter] = ()
) -> float:
    """Scales all gradients so that `gradient_norm` is at most `max_norm`; gives the norm before.

    As torch.nn.utils.clip_grad_norm_ on the whole model; a norm that is not finite makes the
    gradients so too.

    Raises:
        ValueError: max_norm is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}: a positive number is expected")
    norm = gradient_norm(executor, tied)
    # Of infinity 0, which makes infinite gradients nan; min() would drop a nan in second place.
    factor = norm if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))
    seen: set[int] = set()
    for module in executor.stages.values():
        for parameter in module.parameters():
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                parameter.grad.mul_(factor)
    return norm

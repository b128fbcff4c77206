"""One stage at work: the passes of its microbatches through its module, and what is kept between
them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pyparallel.pipeline.dry_run import call
from pyparallel.pipeline.engine import accumulate
from pyparallel.pipeline.in_place import adding
from pyparallel.pipeline.packets import Packet, pack, unpack
from pyparallel.pipeline.split_backward import WeightHalf, backward_input
from pyparallel.pipeline.wrapped import wrapping_of

__all__ = ["Loss", "Stage"]

Loss = Callable[..., Tensor]


@dataclass
class _Kept:
    """Of a microbatch between forward and backward: the ends of its graph. The tensors that have
    been sent on are not among them; autograd keeps what it needs itself."""

    inputs: list[Tensor]  # leaves, those whose gradients the stage before wants
    outputs: list[GradientEdge]
    seeds: list[Tensor] | None  # gradients of the outputs, where the stage knows them


class _Enter(torch.autograd.Function):
    """A leaf may not be changed in place, which a stage's first operation may well do (ReLU)."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _enter(leaf: Tensor) -> Tensor:
    return cast(Tensor, _Enter.apply(leaf))  # type: ignore[no-untyped-call]


class Stage:
    """A module and its microbatches.

    Args:
        module: takes the value of the stage before: a tuple as positional arguments, a dictionary
            as keywords, anything else as the only argument.
        loss: where this is the last stage, (output, target) -> a tensor of one element; or
            (output,) where no targets are given.
    """

    def __init__(self, module: nn.Module, loss: Loss | None) -> None:
        self.module, self.loss = module, loss
        self._wrapping = wrapping_of(module)
        self._kept: dict[int, _Kept] = {}
        self._weight_halves: dict[int, WeightHalf] = {}

    def begin(self, training: bool) -> None:
        """Before a step's first pass. A meeting of the stage's replicas, where it is wrapped."""
        self.clear()
        self._wrapping.begin(training)

    @property
    def wrapped(self) -> bool:
        """Its wrapper reduces over replicas."""
        return self._wrapping.reduces

    def reduce(self) -> None:
        """The wrapper's reduction, after a step's last pass. A meeting of the stage's replicas."""
        self._wrapping.finish()

    def clear(self) -> None:
        """Forgets microbatches that a failure has left behind."""
        self._kept.clear()
        self._weight_halves.clear()

    def forward(
        self, microbatch: int, packet: Packet, keywords: Mapping[str, Any], training: bool
    ) -> Any:
        """The stage's value, with its graph where training; and keeps the graph's beginning."""
        inputs = []
        tensors = []
        for tensor, shape in zip(packet.tensors, packet.shape.tensors, strict=True):
            if training and shape.differentiable:
                tensor = tensor.detach().requires_grad_()
                inputs.append(tensor)
                tensor = _enter(tensor)
            tensors.append(tensor)
        value = unpack(packet.shape, tensors)
        with torch.set_grad_enabled(training), self._wrapping.passing():
            result = call(self.module, value, keywords)
        if training:
            self._kept[microbatch] = _Kept(inputs, [], None)
        return result

    def pass_on(self, microbatch: int, value: Any, training: bool) -> Packet:
        """The value for the next stage; of its graph only the ends are kept."""
        shape, tensors = pack(value, training)
        if training:
            self._kept[microbatch].outputs = [
                get_gradient_edge(tensor)
                for tensor, its in zip(tensors, shape.tensors, strict=True)
                if its.differentiable
            ]
        return Packet(shape, [tensor.detach() for tensor in tensors])

    def end(
        self, microbatch: int, value: Any, target: tuple[Any, ...], factor: float, training: bool
    ) -> Tensor:
        """The loss of the last stage's value, detached; its backward begins with `factor`."""
        assert self.loss is not None
        with torch.set_grad_enabled(training):
            loss = self.loss(value, *target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss)
            raise ValueError(f"loss_fn gave {found}: a tensor of one element is expected")
        if training and loss.requires_grad:
            kept = self._kept[microbatch]
            kept.outputs = [get_gradient_edge(loss)]
            kept.seeds = [torch.full_like(loss, factor)]
        return loss.detach()

    def backward(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """The whole backward: weights' gradients are added, the inputs' given back."""
        kept = self._kept.pop(microbatch)
        if kept.outputs:
            with adding():
                accumulate(kept.outputs, kept.seeds or gradients)
        return [_or_zeros(tensor.grad, tensor) for tensor in kept.inputs]

    def backward_input(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """The inputs' gradients; the weights' are left to `backward_weight`."""
        kept = self._kept.pop(microbatch)
        found, rest = backward_input(kept.outputs, kept.seeds or gradients, kept.inputs)
        self._weight_halves[microbatch] = rest
        return [_or_zeros(g, t) for g, t in zip(found, kept.inputs, strict=True)]

    def backward_weight(self, microbatch: int) -> None:
        self._weight_halves.pop(microbatch).run()


def _or_zeros(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if gradient is None else gradient

"""The norm of a sharded model's gradient, every element of the whole counted once.

Shards are summed over their group, what every rank holds is counted once, and so is each copy of a
kv head; padding has no gradient. So the norm is that of the unsharded model, at any number of
ranks, and the same bits on all of them.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.module import ShardedModule
from pyparallel.layers.place import Place
from pyparallel.ops.groups import seat_of

__all__ = ["clip_gradient_norm_", "gradient_norm"]


def gradient_norm(model: nn.Module, norm_type: float = 2.0) -> Tensor:
    """The norm of the whole model's gradient, a float64 scalar, alike on all ranks. Collective.

    norm_type: 1, 2, any other positive number, or inf. Parameters without a gradient count as zero.
    All sharded layers must be of one group, all of whose ranks call. Raises ValueError otherwise.
    """
    if not norm_type > 0:
        raise InvalidArgument(f"norm_type is {norm_type}; expected a positive number or inf")
    place = _only_place(model)
    largest = math.isinf(norm_type)
    total = torch.zeros(1, dtype=torch.float64)
    for counted in _counted(model, place):
        for grad in counted:
            if not grad.numel():
                continue
            wide = grad.detach().abs().to(torch.float64)
            value = wide.amax() if largest else wide.pow(norm_type).sum()
            total = torch.maximum(total, value.cpu()) if largest else total + value.cpu()
    if place is not None and place.size > 1:
        total = seat_of(place.name).engine.all_reduce(total, "max" if largest else "sum")
    return (total if largest else total.pow(1.0 / norm_type)).squeeze(0)


@torch.no_grad()
def clip_gradient_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that their norm is at most `max_norm`; gives the norm before.

    As torch.nn.utils.clip_grad_norm_ on the unsharded model. Collective, as `gradient_norm`; a norm
    that is not finite makes the gradients so too.
    """
    norm = gradient_norm(model, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        grad = gradient_of(parameter)
        if grad is not None:
            grad.mul_(factor.to(grad.device))
    return norm


def gradient_of(parameter: nn.Parameter) -> "Tensor | None":
    """Its `.grad`, or else its `main_grad`."""
    found: Tensor | None = parameter.grad
    return getattr(parameter, "main_grad", None) if found is None else found


def _only_place(model: nn.Module) -> "Place | None":
    places = {m.place.name: m.place for m in model.modules() if isinstance(m, ShardedModule)}
    if len(places) > 1:
        raise InvalidArgument(
            f"the model's layers are of {len(places)} groups, {sorted(places)}; expected one: call "
            "for the parts apart and combine the norms"
        )
    return next(iter(places.values()), None)


def _counted(model: nn.Module, place: "Place | None") -> "Iterator[list[Tensor]]":
    """For each parameter, once, those slices of its gradient that this rank counts."""
    seen: set[int] = set()
    rank = 0 if place is None else place.rank
    for module in model.modules():
        layouts = module.parameter_layouts() if isinstance(module, ShardedModule) else {}
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            grad, layout = gradient_of(parameter), layouts.get(name)
            if grad is None:
                yield []
            elif layout is None or layout.dim is None or layout.partition is None:
                yield [grad] if rank == 0 else []
            else:
                dim, segments = layout.dim, layout.partition.counted(rank)
                yield [grad.narrow(dim, s.local, s.length) for s in segments]

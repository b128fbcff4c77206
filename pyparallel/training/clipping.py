"""The norm of a composed model's gradient: every number of the whole model counted once.

    tp   shards add up; what every rank holds is counted on the first, each copy of a kv head once
    pp   stages add up; a parameter that several stages hold is counted on the first of them
    dp   gradients are alike, and counted on the first rank; of fully sharded ones (DTensors) every
    sp   shard counts, on one of its replicas

Each rank adds up what it counts in float64, and one all-reduce over the whole mesh adds the ranks'
sums, in rank order: the same bits on all ranks.
"""

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers import ShardedModule
from pyparallel.pipeline import TiedParameter
from pyparallel.training.layout import AXES
from pyparallel.training.precision import local

if TYPE_CHECKING:
    from pyparallel.training.mesh import ParallelMesh

__all__ = ["clip_grad_norm_", "global_grad_norm", "tied_copies"]


def global_grad_norm(
    model: "nn.Module | Iterable[nn.Module]",
    mesh: "ParallelMesh | None" = None,
    *,
    norm_type: float = 2.0,
    copies: Iterable[nn.Parameter] = (),
) -> Tensor:
    """The norm of the whole model's gradient, a float64 scalar, the same on all ranks. Collective.

    Called by all ranks of the mesh, once gradients are summed over dp, sp and tied stages.

    Args:
        model: this rank's part, or its parts (stages), wrapped or not. Parameters without a
            gradient count as zero, and a `main_grad` stands for a missing `.grad`.
        mesh: None: one process.
        norm_type: 1, 2, any other positive number, or inf.
        copies: parameters that another stage counts (`tied_copies`).

    Raises:
        ValueError: norm_type is not positive.
    """
    if not norm_type > 0:
        raise InvalidArgument(f"norm_type is {norm_type}; expected a positive number or inf")
    elsewhere = {id(parameter) for parameter in copies}
    first = mesh is None or (mesh.coordinates.dp == 0 and mesh.coordinates.sp == 0)
    norms: dict[torch.device, list[Tensor]] = {}
    for parameter, slices in _counted(_modules(model), mesh, first):
        if id(parameter) not in elsewhere:
            for grad in slices:
                if grad.numel():
                    one = torch.linalg.vector_norm(grad.detach(), norm_type, dtype=torch.float64)
                    norms.setdefault(one.device, []).append(one)
    zero = torch.zeros(1, dtype=torch.float64)
    of_devices = [torch.linalg.vector_norm(torch.stack(n), norm_type).cpu() for n in norms.values()]
    own: Tensor = torch.linalg.vector_norm(torch.stack([zero[0], *of_devices]), norm_type)
    if mesh is None:
        return own
    largest = math.isinf(norm_type)
    total = (own if largest else own.pow(norm_type)).to(mesh.device_type)
    reduction = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    dist.all_reduce(total, reduction, group=mesh.group(*AXES))
    total = total.cpu()
    return total if largest else total.pow(1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    model: "nn.Module | Iterable[nn.Module]",
    max_norm: float,
    mesh: "ParallelMesh | None" = None,
    *,
    norm_type: float = 2.0,
    copies: Iterable[nn.Parameter] = (),
) -> Tensor:
    """Scales all gradients so that their norm is at most `max_norm`; gives the norm before.

    As torch.nn.utils.clip_grad_norm_ on the whole model in one process. Collective, and arguments
    as of `global_grad_norm`. A norm that is not finite makes the gradients so too.

    Raises:
        ValueError: max_norm or norm_type is not positive.
    """
    if not max_norm > 0:
        raise InvalidArgument(f"max_norm is {max_norm}; expected a positive number")
    norm = global_grad_norm(model, mesh, norm_type=norm_type, copies=copies)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    seen: set[int] = set()
    for module in _modules(model):
        for parameter in module.parameters():
            grad = _gradient(parameter)
            if grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                grad.mul_(factor.to(grad.device, grad.dtype))
    return norm


def tied_copies(stage: nn.Module, index: int, tied: Iterable[TiedParameter]) -> list[nn.Parameter]:
    """Parameters of a stage that a stage before it holds as well, and counts.

    Args:
        stage: from `Partition.stage`, wrapped or not.
        index: its number.
        tied: `Partition.tied`.
    """
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    found = []
    for one in tied:
        for name, number in zip(one.names, one.stages, strict=True):
            if number == index != min(one.stages):
                found.append(parameters.get(name, parameters.get(f"module.{name}")))
                if found[-1] is None:
                    raise InvalidArgument(f"stage {index} has no parameter {name}, which is tied")
    return [parameter for parameter in found if parameter is not None]


def _modules(model: "nn.Module | Iterable[nn.Module]") -> list[nn.Module]:
    return [model] if isinstance(model, nn.Module) else list(model)


def _gradient(parameter: nn.Parameter) -> "Tensor | None":
    """This rank's: of a DTensor its shard."""
    found: Tensor | None = parameter.grad
    if found is None:
        found = getattr(parameter, "main_grad", None)
    return None if found is None else local(found)


def _counted(
    modules: Iterable[nn.Module], mesh: "ParallelMesh | None", first: bool
) -> "Iterator[tuple[nn.Parameter, list[Tensor]]]":
    """Each parameter once, with those slices of its gradient that this rank counts."""
    seen: set[int] = set()
    tp = 0 if mesh is None else mesh.coordinates.tp
    for module in (inner for outer in modules for inner in outer.modules()):
        layouts = module.parameter_layouts() if isinstance(module, ShardedModule) else {}
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            grad, layout = _gradient(parameter), layouts.get(name)
            if grad is None or not _is_counted(parameter, first):
                continue
            if layout is None or layout.dim is None or layout.partition is None:
                if tp == 0:
                    yield parameter, [grad]
                continue
            begin = _first_row(parameter) if layout.dim == 0 else 0
            assert isinstance(module, ShardedModule)
            yield (
                parameter,
                [
                    _part(grad, layout.dim, s.local - begin, s.length)
                    for s in layout.partition.counted(module.place.rank)
                ],
            )


def _is_counted(parameter: nn.Parameter, first: bool) -> bool:
    """Of replicas the first counts; of a DTensor that is in its own mesh's coordinates."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return first
    coordinate = mesh.get_coordinate()
    placements = parameter.placements  # type: ignore[attr-defined]
    return coordinate is not None and all(
        placement.is_shard() or at == 0
        for placement, at in zip(placements, coordinate, strict=True)
    )


def _first_row(parameter: nn.Parameter) -> int:
    """Where a fully sharded parameter's rows begin in the tensor that it is a shard of."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape,
        mesh,
        parameter.placements,  # type: ignore[attr-defined]
    )
    return offset[0] if offset else 0


def _part(grad: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Of rows start .. start + length those that the gradient has."""
    low = min(max(start, 0), grad.shape[dim])
    high = min(max(start + length, 0), grad.shape[dim])
    return grad.narrow(dim, low, high - low)

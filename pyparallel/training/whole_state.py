"""State dicts of the whole model, of ranks that hold shards of some of its stages."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers import full_state_dict, load_full_state_dict

__all__ = ["WholeState"]


class WholeState:
    """The names, shapes and stages of a model's tensors, noted before anything is sharded.

    Args:
        model: the whole one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sizes = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
        self._owner: dict[str, int] = {}
        self._names: dict[int, list[str]] = {}

    def own(self, stage: int, module: nn.Module, rank: int) -> None:
        """Every stage, on every rank, and the pipeline's rank that has it."""
        self._names[stage] = list(module.state_dict())
        for name in self._names[stage]:
            self._owner.setdefault(name, rank)

    def get(
        self,
        stages: Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        shards: dist.ProcessGroup,
        device: str,
    ) -> dict[str, Tensor]:
        """The whole model's state dict, on every rank. Collective over the mesh.

        Args:
            group: the pipeline.
            shards: ranks over which parameters are fully sharded, if they are.
        """
        mine: dict[str, Tensor] = {}
        for stage in sorted(stages):
            with whole_shards(stages[stage], shards):
                mine.update(full_state_dict(stages[stage]))
        if group.size() == 1:
            return {name: mine[name] for name in self._sizes}
        state: dict[str, Tensor] = {}
        for name, (shape, dtype) in self._sizes.items():
            owner = self._owner[name]
            here = mine[name] if owner == group.rank() else None
            tensor = torch.empty(shape, dtype=dtype, device=device) if here is None else here
            dist.broadcast(tensor, group=group, group_src=owner)
            state[name] = tensor
        return state

    def load(
        self,
        stages: Mapping[int, nn.Module],
        shards: dist.ProcessGroup,
        state: Mapping[str, Any],
    ) -> None:
        """Every rank takes its shards of its stages. Collective over the mesh.

        Raises:
            ValueError: names or shapes are not those of the model.
        """
        missing = [name for name in self._sizes if name not in state]
        unexpected = [name for name in state if name not in self._sizes]
        misfits = [
            f"{name} has shape {list(state[name].shape)}, expected {list(shape)}"
            for name, (shape, _) in self._sizes.items()
            if name in state and state[name].shape != shape
        ]
        misfits += [f"missing: {missing[:8]}"] * bool(missing)
        misfits += [f"unexpected: {unexpected[:8]}"] * bool(unexpected)
        if misfits:
            raise InvalidArgument(f"load_state_dict: {'; '.join(misfits)}")
        for stage in sorted(stages):
            own = {name: state[name] for name in self._names[stage]}
            with whole_shards(stages[stage], shards, write=True):
                load_full_state_dict(stages[stage], own)


@contextmanager
def whole_shards(
    module: nn.Module, group: dist.ProcessGroup, *, write: bool = False
) -> Iterator[None]:
    """Within it, parameters that fully_shard has cut are whole again, as far as tensor parallelism
    leaves them so. Collective over the group.

    Args:
        group: of the ranks that they are cut over.
        write: what they are afterwards is what their shards become.
    """
    cut: list[tuple[nn.Module, str, Any, nn.Parameter]] = []
    made: dict[int, nn.Parameter] = {}
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is None or not hasattr(parameter, "to_local"):
                continue
            if id(parameter) not in made:
                whole = _joined(parameter, group)
                made[id(parameter)] = nn.Parameter(whole, parameter.requires_grad)
            cut.append((inner, name, parameter, made[id(parameter)]))
    try:
        for inner, name, _, whole in cut:
            inner._parameters[name] = whole
        yield
    finally:
        for inner, name, sharded, _ in cut:
            inner._parameters[name] = sharded
    if write:
        for _, _, sharded, whole in cut:
            rows = _rows(whole, group)
            sharded.to_local().detach().copy_(whole.detach()[rows])


def _joined(sharded: Any, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor. By our own gather: a DTensor's goes through the groups of whichever mesh of
    these ranks torch has seen first, which may have ended since."""
    own = sharded.to_local().detach()
    each = -(-sharded.shape[0] // group.size())
    padded = own.new_zeros((each, *own.shape[1:]))
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[: sharded.shape[0]]


def _rows(whole: Tensor, group: dist.ProcessGroup) -> slice:
    """Those that fully_shard leaves on this rank."""
    each = -(-len(whole) // group.size())
    return slice(each * group.rank(), each * (group.rank() + 1))

"""`ShardedModule`: what the layers share. Parameters that are shards of whole ones, and know it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.parameters import (
    ParameterLayout,
    is_complete,
    share_gradient_,
    shared_gradient,
    take,
)
from pyparallel.layers.place import Place
from pyparallel.ops.main_grad import MainGrad

__all__ = ["InitMethod", "ShardedModule"]

InitMethod = Callable[[Tensor], object]


class ShardedModule(nn.Module):
    """A module of one rank of a group. Its own parameters have layouts (`parameter_layouts`).

    A subclass makes them with `_shard`, reads them in forward with `_trained`, and says in
    `_init_whole` how a whole one begins. Local state dicts hold shards, without padding; those of
    the whole model come from `pyparallel.layers.full_state_dict`. Deep copies share the group.
    """

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.place = Place(group)
        self._layouts: dict[str, ParameterLayout] = {}

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """Layouts of this module's own parameters, by name."""
        return {
            n: layout for n, layout in self._layouts.items() if self._parameters.get(n) is not None
        }

    # --- for subclasses

    def _shard(
        self,
        name: str,
        whole: tuple[int, ...],
        layout: ParameterLayout,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        """An uninitialised parameter: this rank's shard of one of shape `whole`."""
        shape = list(whole)
        if layout.dim is not None and layout.partition is not None:
            if layout.partition.world_size != self.place.size:
                raise InvalidArgument(
                    f"partition is over {layout.partition.world_size} ranks, the group has "
                    f"{self.place.size}"
                )
            shape[layout.dim] = layout.partition.local_size(self.place.rank)
        self._layouts[name] = layout
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def _trained(self, name: str) -> "Tensor | None":
        """The parameter, its gradient kept alike on copies and zero on padding; None without it."""
        parameter = self._parameters[name]
        if parameter is None:
            return None
        return shared_gradient(parameter, self._layouts[name], self.place.rank, self.place.name)

    def _trained_into(self, name: str) -> "tuple[Tensor, MainGrad | None]":
        """As `_trained`, and where the gradient goes instead: to the parameter's `main_grad`."""
        parameter = self._parameters[name]
        assert parameter is not None
        buffer = getattr(parameter, "main_grad", None)
        if buffer is None:
            return shared_gradient(
                parameter, self._layouts[name], self.place.rank, self.place.name
            ), None
        layout, rank, group = self._layouts[name], self.place.rank, self.place.name
        if is_complete(layout, rank):
            return parameter, MainGrad(buffer)
        return parameter, MainGrad(buffer, lambda grad: share_gradient_(grad, layout, rank, group))

    def _tensor(self, x: Any, what: str = "input") -> None:
        """Raises on all ranks if `x` is none."""
        if not isinstance(x, Tensor):
            error = InvalidArgument(f"{what} is a {type(x).__name__}; expected a torch.Tensor")
            raise self._refused(error)

    def _init_whole(self, name: str, whole: Tensor) -> None:
        """Fills a whole parameter (one part of it, if it is fused) as the unsharded model does."""
        raise NotImplementedError

    def _set_whole(self, name: str, whole: Tensor, requires_grad: bool) -> None:
        """Takes this rank's shard of `whole`, with its dtype and device, as the parameter."""
        shard = take(whole.detach(), self._layouts[name], self.place.rank)
        self.register_parameter(name, nn.Parameter(shard, requires_grad))

    def _refused(self, error: Exception) -> Exception:
        return self.place.refused(type(self).__name__, error)

    # --- beginning

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begins anew, as the unsharded model would: every rank draws the whole, keeps its shard.

        So ranks seeded alike get the slices of the model that one process with that seed gets, and
        their generators stay alike. For a moment one whole parameter is there.
        """
        mine = {n: p for n, p in self._parameters.items() if p is not None and not p.is_meta}
        wholes = {
            n: torch.empty(self._layouts[n].whole_shape(p.shape), dtype=p.dtype, device=p.device)
            for n, p in mine.items()
        }
        pieces = {n: self._layouts[n].pieces(whole) for n, whole in wholes.items()}
        for part in range(max((len(views) for views in pieces.values()), default=0)):
            for name, views in pieces.items():  # as separate modules would: weight, bias, weight...
                self._init_whole(name, views[part])
        for name, parameter in mine.items():
            parameter.copy_(take(wholes[name], self._layouts[name], self.place.rank))

    # --- local state dicts: shards without their padding

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        for name, layout in self.parameter_layouts().items():
            if layout.is_padded(self.place.rank):
                destination[prefix + name] = layout.trimmed(
                    destination[prefix + name], self.place.rank
                )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict = dict(state_dict)
        for name, layout in self.parameter_layouts().items():
            given = state_dict.get(prefix + name)
            if given is not None and layout.is_padded(self.place.rank):
                state_dict[prefix + name] = layout.padded(given, self.place.rank)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]

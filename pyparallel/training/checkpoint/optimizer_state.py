"""An optimizer's state by the names of the parameters it belongs to.

A state that has its parameter's shape (a moment) lies in the whole as its parameter does; one
number (a step) belongs to every tensor that the parameter holds parts of. Options (learning rate,
betas) are written beside the keys of the parameters they hold for: a rank that has other
parameters, in other groups, finds its own.

    optimizer.exp_avg.layers.0.weight       a state, by its name and the parameter's key
    optimizer.step:int.layers.0.weight      one that was a number of Python's
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from pyparallel.errors import InvalidArgument
from pyparallel.training.checkpoint.pieces import Held, Piece
from pyparallel.training.checkpoint.plain import decoded, encoded

__all__ = ["OptimizerState"]

PREFIX = "optimizer."
NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
# How it computes on this machine: not what is trained.
NOT_SAVED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class _Awaited(NamedTuple):
    """A state that is being loaded, before it is the optimizer's."""

    parameter: Tensor
    name: str
    value: Tensor
    number: type | None


class OptimizerState:
    """Of this rank's part of a model. ZeRO-1's optimizer holds the states of some parameters only:
    the others are those of other ranks.

    Raises:
        TypeError: it is no torch optimizer.
        ValueError: it has parameters that are not the model's.
    """

    def __init__(self, optimizer: Any, held: Sequence[Held]) -> None:
        if hasattr(optimizer, "checkpoint_optimizer"):
            optimizer = optimizer.checkpoint_optimizer()
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}: a torch Optimizer is expected, or an "
                "object whose checkpoint_optimizer() gives one"
            )
        self._outer = optimizer
        self._inner: Optimizer = optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            self._inner = optimizer.optim
        by_id = {id(h.tensor): h for h in held}
        self._groups: list[list[Held]] = []
        for number, group in enumerate(optimizer.param_groups):
            strangers = [list(p.shape) for p in group["params"] if id(p) not in by_id]
            if strangers:
                raise InvalidArgument(
                    f"group {number} of the optimizer has {len(strangers)} parameters that are not "
                    f"the model's, of shapes {strangers[:4]}: make it over the model's parameters, "
                    "after everything that replaces them"
                )
            self._groups.append([by_id[id(p)] for p in group["params"]])
        self._local = [by_id[id(p)] for g in self._inner.param_groups for p in g["params"]]
        self._awaited: list[_Awaited] = []

    # --- saving

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds of the states.

        Raises:
            TypeError: a state is neither a tensor nor a number.
            ValueError: a state's shape is not its parameter's, and that is sharded.
        """
        for held in self._local:
            for name, value in self._inner.state.get(held.tensor, {}).items():
                if value is None:
                    continue
                if not isinstance(name, str) or "." in name:
                    raise TypeError(f"the optimizer's state {name!r} has no name without a dot")
                yield from self._pieces_of(held, name, value)

    def _pieces_of(self, held: Held, name: str, value: Any) -> Iterator[Piece]:
        kind = type(value).__name__
        if kind in NUMBERS:
            name, value = f"{name}:{kind}", torch.tensor(value, dtype=NUMBERS[kind][1])
        if not isinstance(value, Tensor):
            raise TypeError(
                f"the optimizer's state {name!r} of {held.keys[0]} is a {kind}: tensors and "
                "numbers can be saved"
            )
        if value.dim() == 0:
            for key in held.keys:
                yield Piece(f"{PREFIX}{name}.{key}", (), (), value.detach())
        elif value.shape == held.tensor.shape:
            yield from held.pieces(value, counted=True, prefix=f"{PREFIX}{name}.")
        elif held.is_whole:
            shape = tuple(value.shape)
            key = f"{PREFIX}{name}.{held.keys[0]}"
            yield Piece(key, shape, (0,) * len(shape), value.detach())
        else:
            raise InvalidArgument(
                f"the optimizer's state {name!r} of {held.keys[0]} has shape {list(value.shape)}, "
                f"and its parameter, a shard, {list(held.tensor.shape)}: where it would lie in the "
                "whole is not known"
            )

    def options(self) -> list[dict[str, Any]]:
        """[{"options": ..., "parameters": keys}] of this rank's groups."""
        return [
            {
                "options": {k: _plain(k, v) for k, v in group.items() if k not in NOT_SAVED},
                "parameters": [key for held in members for key in held.keys],
            }
            for group, members in zip(self._outer.param_groups, self._groups, strict=True)
        ]

    # --- loading: `await_states` and `find_options` change nothing, `take` does

    def await_states(
        self,
        saved: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        key_of: Callable[[Sequence[str]], str],
    ) -> list[Piece]:
        """Memory for the states of this rank's parameters that a checkpoint has, to be filled.

        saved: dtype and shape of all that it has, by key. key_of: of the names of a tensor, the one
        by which it is there.
        """
        by_parameter: dict[str, list[str]] = {}
        for full in saved:
            if full.startswith(PREFIX):
                name, _, key = full[len(PREFIX) :].partition(".")
                by_parameter.setdefault(key, []).append(name)
        self._awaited = []
        wanted: list[Piece] = []
        on_device = {
            id(p): bool(group.get("fused") or group.get("capturable"))
            for group in self._inner.param_groups
            for p in group["params"]
        }
        for held in self._local:
            keys = [key_of(names) for names in zip(*held.names, strict=True)]
            for full_name in by_parameter.get(keys[0], []):
                name, _, kind = full_name.partition(":")
                dtype, shape = saved[f"{PREFIX}{full_name}.{keys[0]}"]
                if shape == () and held.tensor.dim():
                    device = held.tensor.device if on_device[id(held.tensor)] else "cpu"
                    value = torch.zeros((), dtype=dtype, device=device)
                    wanted.append(Piece(f"{PREFIX}{full_name}.{keys[0]}", (), (), value))
                elif shape == held.shapes[0]:
                    value = torch.zeros_like(held.tensor, dtype=dtype, requires_grad=False)
                    wanted += held.renamed(keys).pieces(
                        value, counted=False, prefix=f"{PREFIX}{full_name}."
                    )
                else:
                    value = torch.zeros(shape, dtype=dtype, device=held.tensor.device)
                    key = f"{PREFIX}{full_name}.{keys[0]}"
                    wanted.append(Piece(key, shape, (0,) * len(shape), value))
                number = NUMBERS[kind][0] if kind in NUMBERS else None
                self._awaited.append(_Awaited(held.tensor, name, value, number))
        return wanted

    def find_options(
        self, saved: Sequence[Mapping[str, Any]], key_of: Callable[[Sequence[str]], str]
    ) -> list[Mapping[str, Any]]:
        """The saved options of each of this rank's groups.

        Raises:
            ValueError: a group's parameters have none, or different ones.
        """
        of_key = {key: n for n, group in enumerate(saved) for key in group["parameters"]}
        found: list[Mapping[str, Any]] = []
        for number, members in enumerate(self._groups):
            keys = [key_of(names) for held in members for names in zip(*held.names, strict=True)]
            unknown = [key for key in keys if key not in of_key]
            groups = sorted({of_key[key] for key in keys if key in of_key})
            if unknown:
                raise InvalidArgument(
                    f"the checkpoint has no optimizer options for {unknown[:4]} (group {number})"
                )
            if len(groups) > 1:
                raise InvalidArgument(
                    f"group {number} of the optimizer has parameters of the saved groups {groups}: "
                    "make its groups as they were"
                )
            options = saved[groups[0]]["options"] if groups else {}
            found.append({k: decoded(v, _no_number) for k, v in options.items()})
        return found

    def take(self, options: Sequence[Mapping[str, Any]]) -> None:
        """The states that were awaited, now filled, and the options become the optimizer's."""
        for held in self._local:
            self._inner.state.pop(held.tensor, None)
        for parameter, name, value, number in self._awaited:
            self._inner.state[parameter][name] = value if number is None else number(value.item())
        self._awaited = []
        for groups in {id(o): o.param_groups for o in (self._outer, self._inner)}.values():
            for group, values in zip(groups, options, strict=True):
                for name, value in values.items():
                    old = group.get(name)
                    if isinstance(old, Tensor):
                        old.fill_(value)
                    else:
                        group[name] = value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return encoded(value, _no_tensor, f"the optimizer's option {name!r}")


def _no_number(number: int) -> Tensor:
    raise ValueError(f"tensor {number} among the optimizer's options")


def _no_tensor(tensor: Tensor) -> int:
    raise TypeError(f"an option of the optimizer is a tensor of shape {list(tensor.shape)}")

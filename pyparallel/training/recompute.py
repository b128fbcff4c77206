"""Activations that are computed again instead of kept, or kept on the host.

    none        everything is kept
    full        a layer keeps its input, and runs again in backward
    selective   so do the modules that are named; by default the attentions

Modules keep their names, classes (a subclass of each), parameters and hooks. They run again with
the random numbers, the autocast and the lengths of the first time: `contexts` are in the manner of
torch.utils.checkpoint's context_fn. In a pipeline once per microbatch, in split backwards too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pyparallel.errors import InvalidArgument
from pyparallel.pipeline import recompute

__all__ = ["MODES", "HostOffload", "apply_recompute", "layers_of"]

MODES = ("none", "full", "selective")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def apply_recompute(
    model: nn.Module,
    mode: str = "full",
    *,
    every: int = 1,
    modules: "Sequence[str] | None" = None,
    contexts: Sequence[Contexts] = (),
) -> list[str]:
    """Makes modules of the model run again in backward, in place. Gives their names.

    After `parallelize`, before the model is cut into stages or wrapped (DDP, fully_shard).

    Args:
        mode: of `MODES`.
        every: with full, of so many layers one, beginning with the first.
        modules: with selective, patterns of qualified names (`*` is any text): "layers.*.mlp". By
            default the innermost modules whose class is called Attention: a core attention, where
            there is one.
        contexts: `RandomStreams.recompute`, `SequenceSharding.recompute`, ...: what else must be as
            it was the first time.

    Raises:
        ValueError: an argument has no effect, or finds no module.
    """
    if mode not in MODES:
        raise InvalidArgument(f"recompute is {mode!r}; expected one of {', '.join(MODES)}")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidArgument(f"every is {every!r}; expected 1 or more layers")
    if mode != "full" and every != 1:
        raise InvalidArgument(
            f"every={every} has no effect with recompute {mode!r}, only with full"
        )
    if mode != "selective" and modules is not None:
        raise InvalidArgument(f"modules has no effect with recompute {mode!r}, only with selective")
    if mode == "none":
        return []
    if mode == "full":
        chosen = layers_of(model)[::every]
        if not chosen:
            raise InvalidArgument(
                f"{type(model).__name__} has no list of layers of one kind (nn.ModuleList), and is "
                "no nn.Sequential; name modules with recompute 'selective'"
            )
    else:
        chosen = _selected(model, modules)
    found = {name: model.get_submodule(name) for name in chosen}
    twice = [name for name, module in found.items() if isinstance(module, _Recomputed)]
    if twice:
        raise InvalidArgument(f"{twice[0]} and {len(twice) - 1} more are recomputed already")
    for module in found.values():
        _become(module, tuple(contexts))
    return chosen


def layers_of(model: nn.Module) -> list[str]:
    """Names of the model's layers: those of its outermost lists of modules of one kind, or, where
    there is none, of the children of an nn.Sequential."""
    found: list[str] = []
    outer: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        if any(name.startswith(f"{one}.") for one in outer):
            continue
        if len({type(child) for child in module}) == 1:
            outer.append(name)
            found += [f"{name}.{child}" if name else child for child, _ in module.named_children()]
    if not found and isinstance(model, nn.Sequential):
        found = [name for name, _ in model.named_children()]
    return found


def _selected(model: nn.Module, patterns: "Sequence[str] | None") -> list[str]:
    if patterns is None:
        names = [n for n, module in model.named_modules() if n and _is_attention(module)]
        found = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
        if not found:
            raise InvalidArgument(
                f"{type(model).__name__} has no module whose class is called Attention; name those "
                "that are to be recomputed: modules=['layers.*.attention']"
            )
        return found
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if idle or not patterns:
        raise InvalidArgument(
            f"recompute of modules {list(patterns)}: no module is called {idle or 'nothing'}; "
            f"names are such as {names[:4]}"
        )
    return [n for n in found if not any(n.startswith(f"{other}.") for other in found)]


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


class _Recomputed(nn.Module):
    """Before a module's own class."""

    _recompute_contexts: tuple[Contexts, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return recompute(_Call(super().forward, self._recompute_contexts), *args, **kwargs)


class _Call:
    """A forward: the first time as it is, then in the circumstances of the first."""

    def __init__(self, forward: Callable[..., Any], contexts: tuple[Contexts, ...]) -> None:
        self._forward, self._contexts = forward, contexts
        self._again: list[AbstractContextManager[Any]] | None = None
        self.__name__ = getattr(forward, "__qualname__", "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        contexts = self._again
        if contexts is None:
            pairs = [context() for context in self._contexts]
            contexts, self._again = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return self._forward(*args, **kwargs)


_made: dict[type, type] = {}


def _become(module: nn.Module, contexts: tuple[Contexts, ...]) -> None:
    kind = type(module)
    if kind not in _made:
        name = f"Recomputed{kind.__name__}"
        _made[kind] = type(name, (_Recomputed, kind), {"__module__": kind.__module__})
    module.__class__ = _made[kind]
    module.__dict__["_recompute_contexts"] = contexts


class HostOffload(saved_tensors_hooks):
    """Within it, what forward saves for backward goes to the host, and comes back in backward.

    As torch.autograd.graph.save_on_cpu, but weights stay where they are, and so do small tensors.
    Together with recompute it is the inputs of recomputed modules that go. Pinned memory, on the
    stream that computes.

    Args:
        device: where the activations are, "cuda".
        least_bytes: smaller tensors stay.

    Attributes:
        moved: bytes that have gone to the host so far.

    Raises:
        ValueError: the device's memory is the host's: nothing would go anywhere.
    """

    def __init__(self, device: "torch.device | str", *, least_bytes: int = 1 << 16) -> None:
        kind = torch.device(device).type
        if kind == "cpu":
            raise InvalidArgument(
                "activations on the CPU are in host memory already: offloading them has no effect; "
                "recompute them to save memory"
            )
        self._kind, self._least = kind, least_bytes
        self.moved = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        """(None, the tensor), or (where it was, its copy on the host)."""
        origin = tensor if tensor._base is None else tensor._base
        small = tensor.nbytes < self._least
        if tensor.device.type != self._kind or small or isinstance(origin, nn.Parameter):
            return None, tensor.detach()
        self.moved += tensor.nbytes
        return tensor.device, self._copy(tensor)

    def _copy(self, tensor: Tensor) -> Tensor:
        packed = torch.empty(
            tensor.size(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            pin_memory=tensor.is_cuda,
        )
        packed.copy_(tensor, non_blocking=True)
        return packed

    def _unpack(self, packed: Any) -> Tensor:
        device, tensor = packed
        moved: Tensor = tensor if device is None else tensor.to(device, non_blocking=True)
        return moved

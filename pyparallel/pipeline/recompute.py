"""Activations computed again instead of kept: once per microbatch, in a backward of two halves too.

torch's non-reentrant checkpoint computes them again for every run of the engine, and a backward in
halves has two. Here what the first half has computed again stays until the second has used it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["keep_recomputed", "recompute"]

_keeping = 0  # engine runs under way that another one follows on the same graph


@contextlib.contextmanager
def keep_recomputed() -> Iterator[None]:
    """Around a backward's first half. Device threads of the engine see it too."""
    global _keeping
    _keeping += 1
    try:
        yield
    finally:
        _keeping -= 1


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), whose activations are not kept but computed again in backward.

    In a pipeline that is once per microbatch, whatever the schedule; a module's layers may each
    have it, and Hugging Face models take it as `gradient_checkpointing_func`.

    Args:
        function: gives the same again for the same arguments; it runs in backward once more, with
            the random numbers, and under the autocast, of the first time. It must save as many
            tensors for backward then. Tensors of the arguments are kept as those that an operation
            saves: hooks on saved tensors (which move them to the host, say) see them.

    Raises:
        RuntimeError: in backward, where the second run saves other tensors than the first.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    frame = _Frame(function, args, kwargs)
    with saved_tensors_hooks(frame.pack, frame.unpack):
        return function(*args, **kwargs)


class _Enough(Exception):
    """The last saved tensor has been computed again."""


class _Frame:
    """One call: how to run it again, and what that gave."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        leaves, self._structure = tree_flatten((args, kwargs))
        self._wants_grad = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        self._others = [None if isinstance(x, Tensor) else x for x in leaves]
        self._are_tensors = [isinstance(x, Tensor) for x in leaves]
        self._inputs = _keep([x for x in leaves if isinstance(x, Tensor)])
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._again: dict[int, Tensor] = {}
        self._left = 0
        self._devices = sorted({d for a in (args, kwargs) for d in _cuda_devices(a)})
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = [torch.cuda.get_rng_state(device) for device in self._devices]
        kinds = ["cpu", "cuda"] if self._devices else ["cpu"]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]

    def pack(self, tensor: Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def unpack(self, index: int) -> Tensor:
        if index not in self._again:
            self._run_again()
        return self._again[index] if _keeping else self._again.pop(index)

    def _run_again(self) -> None:
        found: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            found.append(tensor.detach())
            if len(found) == len(self._saved):
                raise _Enough

        function = self._function
        args, kwargs = self._arguments()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            torch.set_rng_state(self._cpu_state)
            for device, state in zip(self._devices, self._cuda_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(pack, _never))
            stack.enter_context(contextlib.suppress(_Enough))
            function(*args, **kwargs)
        again = [(tensor.shape, tensor.dtype) for tensor in found]
        if again != self._saved:
            raise RuntimeError(
                f"recompute: {getattr(function, '__name__', type(function).__name__)} saved "
                f"{len(self._saved)} tensors for backward, and {len(again)} when it ran again"
                f"{_first_difference(self._saved, again)}: it must do the same each time"
            )
        self._again = dict(enumerate(found))

    def _arguments(self) -> Any:
        tensors = iter(self._inputs())
        leaves = [
            next(tensors).detach().requires_grad_(wants) if is_tensor else other
            for is_tensor, wants, other in zip(
                self._are_tensors, self._wants_grad, self._others, strict=True
            )
        ]
        return tree_unflatten(leaves, self._structure)


class _Kept(torch.autograd.Function):
    """An operation that does nothing but save its inputs, where autograd saves those of others."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise AssertionError("nothing comes of what has been kept")


def _keep(tensors: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Saves tensors under the hooks that are on now; gives what gives them back."""
    if not tensors:
        return tuple
    anchor = torch.empty(0, requires_grad=True)
    # In torch 2.9 an operation that is held forgets its tensors with its result: that is held.
    result: Any = _Kept.apply(anchor, *tensors)  # type: ignore[no-untyped-call]
    return lambda: result.grad_fn.saved_tensors


def _first_difference(before: list[Any], after: list[Any]) -> str:
    for index, (a, b) in enumerate(zip(before, after, strict=False)):
        if a != b:
            return f"; number {index} was {tuple(a[0])} {a[1]}, then {tuple(b[0])} {b[1]}"
    return ""


def _cuda_devices(value: Any) -> set[int]:
    found: set[int] = set()
    tree_map(lambda x: found.add(x.get_device()) if _on_cuda(x) else None, value)
    return found


def _on_cuda(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _never(_: Any) -> Tensor:
    raise AssertionError("nothing runs backward through what has been computed again")

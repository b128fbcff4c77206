"""How much memory a call takes at most: all that torch allocates in it and that is alive at once,
whoever keeps it. Parameters, and what was there before, do not count."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["peak_bytes"]


class _Live(TorchDispatchMode):
    """Sees every operation of its thread, backward's too."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._known:
                    size = storage.nbytes()
                    self.now += size
                    self._known[key] = weakref.finalize(storage, self._free, key, size)
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size

    def close(self) -> None:
        for finalizer in list(self._known.values()):
            finalizer.detach()


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Runs the call once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Live() as live:
        call()
    live.close()
    return live.peak

"""Memory of a step, measured: what is kept from forward to backward, and the peak.

On CUDA the allocator is asked. On a CPU storages are counted as operations make them, and until
they are freed: bytes of tensors, without what an operation allocates for itself.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pyparallel.planner import Job, Layout, ModelSpec
from pyparallel.planner.activations import layer_activations, layer_transient, logits_bytes
from pyparallel.planner.memory import end_activations

__all__ = ["StepMemory", "expected_step", "measure_step"]


@dataclass(frozen=True)
class StepMemory:
    """Bytes beyond those that were there before the step.

    Attributes:
        kept: after forward: activations that wait for backward, and the loss.
        peak: at most, in forward or backward.
        left: after backward: gradients, where there were none.
    """

    kept: int
    peak: int
    left: int


def measure_step(forward: Callable[[], Tensor], device: "torch.device | str" = "cpu") -> StepMemory:
    """Runs `forward` and the backward of the loss that it gives; what memory they took.

    Measure a second step: a first one also makes what later ones find (gradients, caches).
    """
    meter = _Allocator(device) if torch.device(device).type == "cuda" else _Meter()
    with meter:
        loss = forward()
        kept = meter.now
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        return StepMemory(kept, meter.peak, meter.now)


def expected_step(
    spec: ModelSpec, rows: int, batch: int, *, recomputed: int = 0, precision: str = "fp32"
) -> tuple[float, float]:
    """The planner's (kept, peak) of a step in one process, without gradients of weights.

    Args:
        spec: sizes of the model.
        rows, batch: of a microbatch.
        recomputed: how many of the layers are computed again.
        precision: of `pyparallel.planner`.
    """
    job = Job(spec, seq=rows, global_batch=batch, precision=precision)
    plain = Layout(micro_batch=batch, sequence_parallel=False)
    full = plain.with_(recompute="full")
    each = [full] * recomputed + [plain] * (spec.layers - recomputed)
    layers = sum(layer_activations(job, layout, i) for i, layout in enumerate(each))
    kept = layers + sum(end_activations(job, plain)) + logits_bytes(job, plain)
    return kept, kept + layer_transient(job, each[0], 0)


class _Allocator:
    """CUDA's caching allocator, from now on."""

    def __init__(self, device: "torch.device | str") -> None:
        self._device = torch.device(device)

    def __enter__(self) -> "_Allocator":
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class _Meter(TorchDispatchMode):
    """Counts storages that operations make within it, once each, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):  # that of before is not the step's
                self._known.setdefault(tensor.untyped_storage(), True)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = True
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size

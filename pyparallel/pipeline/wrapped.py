"""Stages that are wrapped for data parallelism: what their replicas do once per step, not once per
microbatch.

torch's wrappers reduce gradients in every backward, driven by the engine. Here microbatches add up
without a word to the replicas; after the last one the wrapper reduces, in its own way: with its
buckets and hooks (DistributedDataParallel), into its shards (fully_shard).
"""

import contextlib
import sys
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Wrapping", "wrapping_of"]


class Wrapping(Protocol):
    """Of one stage."""

    def begin(self, training: bool) -> None:
        """Before the stage's first pass of a step."""

    def passing(self) -> contextlib.AbstractContextManager[None]:
        """Around each forward."""

    def finish(self) -> None:
        """Once the stage's gradients of a step are complete. A meeting of the replicas."""


class _Plain:
    def begin(self, training: bool) -> None:
        pass

    def passing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass


class _DataParallel:
    """DistributedDataParallel. Buffers are broadcast in a step's first forward."""

    def __init__(self, module: DistributedDataParallel) -> None:
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(module, option):
                raise ValueError(
                    f"{option}=True has no effect in a pipeline: every parameter is reduced once, "
                    "after the last microbatch, used or not: wrap the stage without it"
                )
        self._module: Any = module

    def begin(self, training: bool) -> None:
        if training:
            self._module.require_forward_param_sync = True

    def passing(self) -> contextlib.AbstractContextManager[None]:
        passing: contextlib.AbstractContextManager[None] = self._module.no_sync()
        return passing

    def finish(self) -> None:
        """A backward that adds nothing to each gradient: the reducer's hooks see it, and reduce
        what the microbatches have added up."""
        parameters = [p for p in self._module.module.parameters() if p.requires_grad]
        self._module.reducer.prepare_for_backward([])
        edges = [get_gradient_edge(p) for p in parameters]
        torch.autograd.backward(edges, [p.new_zeros(()).expand(p.shape) for p in parameters])


class _FullySharded:
    """A module that went through fully_shard. Parameters stay gathered from a step's first forward
    to its reduction: schedules go from forward to backward and back all the time."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def begin(self, training: bool) -> None:
        if training:
            self._last(False)

    def passing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        """What its hooks would do in the last backward; the weights' half of a backward does not
        pass them."""
        from torch.distributed.fsdp import fully_shard

        self._last(True)
        state = fully_shard.state(self._module)  # type: ignore[attr-defined]
        for inner in state._state_ctx.all_states:
            groups = getattr(inner, "_fsdp_param_groups", None)
            if groups is None:  # torch before 2.13: one or none
                groups = [inner._fsdp_param_group] if inner._fsdp_param_group else []
            for group in groups:
                group.post_backward()
        state._root_post_backward_final_callback()

    def _last(self, last: bool) -> None:
        self._module.set_is_last_backward(last)
        self._module.set_reshard_after_backward(last)
        self._module.set_requires_gradient_sync(last)


def wrapping_of(module: nn.Module) -> Wrapping:
    """
    Raises:
        ValueError: it is wrapped with options that cannot have their effect.
    """
    if isinstance(module, DistributedDataParallel):
        return _DataParallel(module)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # takes a while to import
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return _FullySharded(module)
    return _Plain()

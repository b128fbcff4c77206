"""Stages that are wrapped for data parallelism: what their replicas do once per step, not once per
microbatch.

torch's wrappers talk to the replicas in passes, driven by the engine: parameters are gathered and
buffers sent in a forward, gradients reduced in every backward.

The protocol here: replicas meet before a step's first pass and after its last, never between. A
rank in a pass is waited for by its pipeline; were it to wait for another replica's rank there, a
fault in one pipeline would hold up all the others and, where a rank has several stages, its own
pipeline in return. So `begin` fetches what the passes need, microbatches add up without a word to
the replicas, and once the whole pipeline has ended its passes well, `finish` reduces in the
wrapper's own way: with its buckets and hooks (DistributedDataParallel), into its shards
(fully_shard). A pipeline in which a rank has failed reduces nothing; the others wait in `finish`
until it has repeated the step, or has ended.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Wrapping", "wrapping_of"]


class Wrapping(Protocol):
    """Of one stage; `reduces` says whether there are replicas to meet."""

    reduces: bool

    def begin(self, training: bool) -> None:
        """Before the stage's first pass of a step. A meeting of the replicas."""

    def passing(self) -> contextlib.AbstractContextManager[None]:
        """Around each forward."""

    def finish(self) -> None:
        """Once the stage's gradients of a step are complete. A meeting of the replicas."""


class _Plain:
    reduces = False

    def begin(self, training: bool) -> None:
        pass

    def passing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass


class _DataParallel:
    """DistributedDataParallel. Buffers are broadcast before a step."""

    reduces = True

    def __init__(self, module: DistributedDataParallel) -> None:
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(module, option):
                raise ValueError(
                    f"{option}=True has no effect in a pipeline: every parameter is reduced once, "
                    "after the last microbatch, used or not: wrap the stage without it"
                )
        self._module: Any = module
        self._met = False  # since the last reduction: a step that is repeated meets nobody

    def begin(self, training: bool) -> None:
        module = self._module
        module.require_forward_param_sync = True
        if training and not self._met and module.will_sync_module_buffers():
            module._sync_buffers()
        module.require_forward_param_sync = False
        self._met = self._met or training

    def passing(self) -> contextlib.AbstractContextManager[None]:
        passing: contextlib.AbstractContextManager[None] = self._module.no_sync()
        return passing

    def finish(self) -> None:
        """A backward that adds nothing to each gradient: the reducer's hooks see it, and reduce
        what the microbatches have added up."""
        self._met = False
        parameters = [p for p in self._module.module.parameters() if p.requires_grad]
        self._module.reducer.prepare_for_backward([])
        edges = [get_gradient_edge(p) for p in parameters]
        torch.autograd.backward(edges, [p.new_zeros(()).expand(p.shape) for p in parameters])


class _FullySharded:
    """A module that went through fully_shard. Parameters stay gathered from a step's begin to its
    reduction: schedules go from forward to backward and back all the time. Modules that are to be
    resharded after each forward break the protocol: their replicas meet in every pass."""

    reduces = True

    def __init__(self, module: Any) -> None:
        self._module = module

    def begin(self, training: bool) -> None:
        if training:
            self._last(False)
            for group in self._groups():
                if not group._reshard_after_forward:
                    group.lazy_init()
                    group.unshard(async_op=True)

    def passing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        """What its hooks would do in the last backward; the weights' half of a backward does not
        pass them."""
        self._last(True)
        for group in self._groups():
            group.post_backward()
        self._state()._root_post_backward_final_callback()

    def _groups(self) -> Iterator[Any]:
        """Of parameters gathered together. None before the first forward, which finds them."""
        for inner in self._state()._state_ctx.all_states:
            groups = getattr(inner, "_fsdp_param_groups", None)
            if groups is None:  # torch before 2.13: one or none
                groups = [inner._fsdp_param_group] if inner._fsdp_param_group else []
            yield from groups

    def _state(self) -> Any:
        from torch.distributed.fsdp import fully_shard

        return fully_shard.state(self._module)  # type: ignore[attr-defined]

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

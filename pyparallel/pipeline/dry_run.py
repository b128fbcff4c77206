"""Whether each stage takes what the stage before gives, found out before anything runs: each stage
once on tensors without numbers (torch's fake tensors), which takes its code's time only.

What only numbers can tell is left to the run: a stage whose shapes depend on data, that leaves
torch, or that has hooks, which may do anything (FSDP's gather parameters), and all stages after it.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from pyparallel.pipeline.packets import Shape, pack, unpack

__all__ = ["DryRun", "MisfitError"]

_UNKNOWABLE = tuple(
    getattr(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
    if hasattr(fake_tensor, name)
)
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)
# Of what says that a fake tensor was somewhere where only a real one can be.
_OF_FAKES = ("fake", "subclass", "data pointer", "data_ptr", "meta tensor", "storage")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class MisfitError(ValueError):
    """A stage does not take what it would be given."""


class DryRun:
    """Stages of this process on tensors without numbers."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        # Code that leaves torch is to meet an error, not the address 0.
        self._mode._allow_unsafe_data_ptr_access = False

    def stage(
        self,
        module: nn.Module,
        shape: Shape,
        keywords: Mapping[str, Any],
        device: torch.device,
        training: bool,
    ) -> Shape | None:
        """What the module gives for a value of this shape; None where only a run can tell.

        Raises:
            MisfitError: it raises for any numbers.
        """
        if isinstance(module, DistributedDataParallel):
            module = module.module
        if any(getattr(inner, name) for inner in module.modules() for name in _HOOKS):
            return None
        try:
            with (
                self._without_numbers(module),
                _quiet(),
                _uncompiled(),
                torch.set_grad_enabled(training),
            ):
                leaves = [
                    torch.empty(one.shape, dtype=one.dtype, device=device).requires_grad_(
                        training and one.differentiable
                    )
                    for one in shape.tensors
                ]
                tensors = [leaf.clone() for leaf in leaves]  # as in a step, may change in place
                value = unpack(shape, tensors)
                return pack(call(module, value, keywords), training)[0]
        except _UNKNOWABLE:
            return None
        except NotImplementedError:
            return None
        except _REFUSALS as error:
            if any(word in str(error).lower() for word in _OF_FAKES):
                return None
            raise MisfitError(f"{type(error).__name__}: {error}") from error
        except Exception:  # not about shapes: the run will tell, and where
            return None

    @contextlib.contextmanager
    def _without_numbers(self, module: nn.Module) -> Iterator[None]:
        """The mode, with the module's parameters and buffers as fakes. Whatever modules note about
        themselves, such as counts or tables made at the first call, is afterwards as before."""
        before = [
            (inner, dict(vars(inner)), dict(inner._buffers), dict(inner._parameters))
            for inner in module.modules()
        ]
        try:
            for inner, _, buffers, parameters in before:
                for name, buffer in buffers.items():
                    inner._buffers[name] = self._fake(buffer)
                for name, parameter in parameters.items():
                    inner._parameters[name] = self._fake(parameter)
            with self._mode:
                yield
        finally:
            for inner, values, buffers, parameters in before:
                vars(inner).clear()
                vars(inner).update(values)
                inner._buffers.clear()
                inner._buffers.update(buffers)
                inner._parameters.clear()
                inner._parameters.update(parameters)

    def _fake(self, tensor: Any) -> Any:
        return None if tensor is None else self._mode.from_tensor(tensor)


def call(module: nn.Module, value: Any, keywords: Mapping[str, Any]) -> Any:
    """A stage's module on the value of the stage before: a tuple are positional arguments, a
    dictionary keywords, anything else the only argument."""
    if isinstance(value, tuple):
        return module(*value, **keywords)
    if isinstance(value, dict):
        return module(**value, **keywords)
    return module(value, **keywords)


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """Nothing is compiled for a trial."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs the stack of what a fake tensor refuses; it is raised all the same."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before

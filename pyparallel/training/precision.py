"""16-bit passes over float32 weights, and float16's loss scale, on which all ranks decide as one.

Parameters stay float32: they are the master weights, `.grad` is float32 and sums microbatches in
it, and optimizers see nothing else. Products run in 16 bits where torch.autocast says so: a
weight's gradient is rounded to 16 bits once per microbatch, and added in float32.
"""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.training.layout import AXES

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from pyparallel.training.mesh import ParallelMesh

__all__ = ["LossScaler", "Precision", "local"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_log = logging.getLogger("pyparallel.training")


class Precision:
    """How a model's passes compute: "fp32", "bf16" or "fp16".

    Attributes:
        name: as given.
        dtype: of products in forward and backward.
    """

    def __init__(self, name: str = "fp32", *, device_type: str = "cpu") -> None:
        if name not in DTYPES:
            raise InvalidArgument(f"precision is {name!r}; expected one of {', '.join(DTYPES)}")
        self.name = name
        self.dtype = DTYPES[name]
        self.device_type = device_type

    def forward(self) -> AbstractContextManager[Any]:
        """Around each forward and its loss; backward runs outside of it, in the dtypes it finds."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def check(self, parameters: "Iterable[tuple[str, nn.Parameter]]") -> None:
        """
        Raises:
            ValueError: a parameter that is trained is no float32 (or float64): it would be rounded
                in every step, and there would be no master weight.
        """
        narrow = [
            f"{name} ({str(p.dtype).removeprefix('torch.')})"
            for name, p in parameters
            if p.requires_grad and p.dtype not in (torch.float32, torch.float64)
        ]
        if narrow:
            raise InvalidArgument(
                f"precision {self.name} keeps its master weights in the parameters, and "
                f"{len(narrow)} are no float32: {', '.join(narrow[:4])}; make the model in float32 "
                "(model.float()), its products run in 16 bits all the same"
            )

    def sharded_policy(self) -> "MixedPrecisionPolicy | None":
        """For fully_shard: weights are gathered in 16 bits, gradients summed in float32. None: as
        they are. Shards, and so master weights, stay float32."""
        if self.name == "fp32":
            return None
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )

    def scaler(self, mesh: "ParallelMesh | None" = None, **options: Any) -> "LossScaler | None":
        """A `LossScaler` with fp16; the others need none."""
        return LossScaler(mesh, **options) if self.name == "fp16" else None


class LossScaler:
    """A loss scale that grows until gradients overflow float16, then backs off; one for all ranks.

        loss = scaler.scale(loss)            its value is unchanged, its gradient is scaled
        loss.backward()
        scaler.unscale_(parameters)          once all gradients are summed; then clip, if you like
        scaler.step(optimizer)               leaves the step out where some rank's overflowed
        scaler.update()

    Whether a step is left out is decided by the gradients of all ranks of all axes: a rank whose
    own are finite leaves it out too. torch.amp.GradScaler's rule for the scale.

    Args:
        mesh: None: one process.
        initial: the scale to begin with.
        growth: of the scale, after `interval` steps without overflow.
        backoff: of the scale, after an overflow.
        smallest: an overflow at this scale is none of float16's range: `update` raises.

    Attributes:
        scale_factor: the scale now.
        steps: of the optimizer and left out, together.
        skipped: left out.
    """

    def __init__(
        self,
        mesh: "ParallelMesh | None" = None,
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        smallest: float = 1.0,
    ) -> None:
        misfits = [
            f"{name}={value!r}: {wanted} is expected"
            for name, value, wanted, fits in (
                ("initial", initial, f"a number from smallest={smallest} on", initial >= smallest),
                ("growth", growth, "a number above 1", growth > 1),
                ("backoff", backoff, "a number between 0 and 1", 0 < backoff < 1),
                ("interval", interval, "1 or more steps", interval >= 1),
                ("smallest", smallest, "a positive number", smallest > 0),
            )
            if not fits
        ]
        if misfits:
            raise InvalidArgument(f"LossScaler: {'; '.join(misfits)}")
        self._group = None if mesh is None else mesh.group(*AXES)
        self._speaks = mesh is None or mesh.rank == 0
        self.scale_factor = float(initial)
        self._growth, self._backoff = growth, backoff
        self._interval, self._smallest = interval, smallest
        self.steps = self.skipped = 0
        self._good = 0  # steps without overflow since the scale changed
        self._finite: bool | None = None  # of this step's gradients, on all ranks

    def scale(self, loss: Tensor) -> Tensor:
        """The loss with its own value; gradients behind it are `scale_factor` times theirs."""
        scaled: Tensor = _ScaledGradient.apply(loss, self.scale_factor)  # type: ignore[no-untyped-call]
        return scaled

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divides the gradients by the scale, in place; whether those of all ranks are finite.

        Collective over all ranks of the mesh. A second call in a step changes nothing.
        """
        if self._finite is not None:
            return self._finite
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        seen: set[int] = set()
        for parameter in parameters:
            if parameter.grad is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            grad = local(parameter.grad)
            grads.setdefault((grad.device, grad.dtype), []).append(grad)
        bad = torch.zeros(1, dtype=torch.float32)
        for (device, _), found in grads.items():
            overflow = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1.0 / self.scale_factor, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(found, overflow, inverse)
            bad = torch.maximum(bad, overflow.cpu())
        if self._group is not None:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._group)
        self._finite = not bool(bad)
        return self._finite

    def step(
        self, optimizer: torch.optim.Optimizer, closure: "Callable[[], Any] | None" = None
    ) -> bool:
        """The optimizer's step, or none; whether it was taken: the same on all ranks."""
        if closure is not None:
            raise InvalidArgument(
                "LossScaler.step takes no closure: gradients are computed, and unscaled, once"
            )
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        finite = self.unscale_(parameters)
        if finite:
            optimizer.step()
        return finite

    def update(self) -> None:
        """The scale of the next step. After the last optimizer's `step`.

        Raises:
            FloatingPointError: gradients were not finite at the smallest scale; on all ranks.
        """
        if self._finite is None:
            raise RuntimeError(
                "LossScaler.update: no gradients were unscaled since the last one; call unscale_ "
                "or step first"
            )
        finite, self._finite = self._finite, None
        self.steps += 1
        if finite:
            self._good += 1
            if self._good >= self._interval:
                self._good = 0
                self.scale_factor *= self._growth
            return
        self.skipped += 1
        self._good = 0
        before = self.scale_factor
        if before <= self._smallest:
            raise FloatingPointError(
                f"step {self.steps}: gradients are not finite at loss scale {before:g}, the "
                "smallest: they do not come from float16's range. Look for what made them (a "
                "learning rate, data, a division by zero), or train in bf16"
            )
        self.scale_factor = max(self._smallest, before * self._backoff)
        if self._speaks:
            _log.info(
                "step %d: gradients at loss scale %g went past float16's range, as they do now "
                "and then while the scale is sought; weights are unchanged, on all ranks, and the "
                "scale is %g from now on",
                self.steps,
                before,
                self.scale_factor,
            )

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks."""
        return {
            "scale_factor": self.scale_factor,
            "good": self._good,
            "steps": self.steps,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`, at any layout."""
        self.scale_factor = float(state["scale_factor"])
        self._good, self.steps = int(state["good"]), int(state["steps"])
        self.skipped = int(state["skipped"])
        self._finite = None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()

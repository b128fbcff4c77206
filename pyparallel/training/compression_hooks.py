"""Where torch's data parallelism hands over its gradients to be summed in fewer bytes."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from pyparallel.training.compressed_sums import CompressedSums, Part

__all__ = ["BucketHook", "Feedback", "UnitHooks"]


class Feedback(ABC):
    """What compression has lost and not yet fed back, as a checkpoint keeps it: of this rank alone.

    A run that goes on at the same layout takes it up again, up to rounding: torch fills other
    buckets in a process's first step, so blocks begin elsewhere.
    """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Between steps."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first step.

        Raises:
            ValueError: it is of other parameters.
        """

    def load_resharded(self, states: Any, sizes: Any) -> None:
        """At another layout: begins with nothing, and says so."""
        warnings.warn(
            f"what compression had not fed back yet is left out: it was kept for {len(states)} "
            f"ranks of another layout than {sizes}",
            stacklevel=2,
        )


class BucketHook(Feedback):
    """A communication hook of DistributedDataParallel.

    A bucket takes several collectives, each of which needs the last one's result, while other
    buckets become ready. One thread makes them, bucket by bucket in the order of the hook's calls,
    which is the same on all ranks, and on a group that nothing else uses: so no two ranks ever meet
    in different orders, and the backward goes on meanwhile.

    What steps have lost is kept by parameter: torch fills other buckets from the second step on.
    """

    def __init__(self, sums: CompressedSums, names: Mapping[str, Tensor]) -> None:
        self.sums = sums
        self._names = {parameter: name for name, parameter in names.items()}
        self._parts: dict[tuple[Tensor, ...], Part] = {}
        self._residuals: dict[Tensor, Tensor] = {}
        self._factors: dict[Tensor, Tensor] = {}  # that the next bucket begins with
        self._steps = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pyparallel-compression")

    def __call__(self, _: object, bucket: GradBucket) -> Future[Tensor]:
        whole = self._steps < (self.sums.compression.warm_up or 0)
        if bucket.is_last():
            self._steps += 1
        flat = bucket.buffer()
        parameters = tuple(bucket.parameters())
        future: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)
        ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        self._thread.submit(self._run, future, flat, parameters, whole, ready)
        return future

    def _run(
        self,
        future: Future[Tensor],
        flat: Tensor,
        parameters: tuple[Tensor, ...],
        whole: bool,
        ready: Any,
    ) -> None:
        try:
            with torch.no_grad():
                if ready is not None:
                    torch.cuda.set_device(flat.device)
                    torch.cuda.current_stream().wait_event(ready)
                shapes = [p.shape for p in parameters]
                part = self._part(parameters, flat)
                flat.copy_(self.sums.mean(flat, part, shapes, whole))
            future.set_result(flat)
        except BaseException as error:
            # It is raised where the backward waits.
            future.set_exception(error)  # type: ignore[arg-type]

    def _part(self, parameters: tuple[Tensor, ...], flat: Tensor) -> Part:
        if parameters not in self._parts:
            residual = torch.zeros(flat.numel(), dtype=torch.float32, device=flat.device)
            views = residual.split([p.numel() for p in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                if parameter in self._residuals:
                    view.copy_(self._residuals[parameter])
                self._residuals[parameter] = view
            gone = set(parameters)
            self._parts = {key: p for key, p in self._parts.items() if not gone & set(key)}
            factors = {
                number: self._factors.pop(parameter)
                for number, parameter in enumerate(parameters)
                if parameter in self._factors
            }
            self._parts[parameters] = Part(residual, factors)
        return self._parts[parameters]

    def state_dict(self) -> dict[str, Any]:
        factors = {self._names[p]: factor for p, factor in self._factors.items()}
        for parameters, part in self._parts.items():
            factors.update({self._names[parameters[n]]: f for n, f in part.factors.items()})
        residuals = {
            self._names[p]: view.view(p.shape).clone() for p, view in self._residuals.items()
        }
        return {"steps": self._steps, "residuals": residuals, "factors": factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        by_name = {name: parameter for parameter, name in self._names.items()}
        residuals, factors = state["residuals"], state["factors"]
        wrong = [
            f"{name} {list(tensor.shape)}"
            for name, tensor in residuals.items()
            if name not in by_name or by_name[name].shape != tensor.shape
        ]
        wrong += [name for name in factors if name not in by_name]
        if wrong:
            raise ValueError(f"compression's feedback is of parameters that are not here: {wrong}")
        self._parts.clear()
        self._steps = int(state["steps"])
        on = {name: by_name[name].device for name in (*residuals, *factors)}
        self._residuals = {by_name[n]: t.flatten().to(on[n]) for n, t in residuals.items()}
        self._factors = {by_name[n]: t.to(on[n]) for n, t in factors.items()}


class UnitHooks(Feedback):
    """Every unit of a module that went through fully_shard scatters its gradients in fewer bytes.

    What a unit's steps have lost is kept beside it: as long as the unit's whole gradient.
    """

    def __init__(self, module: Any, sums: CompressedSums) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._parts: dict[str, Part] = {}
        self._units: set[str] = set()
        for name, unit in module.named_modules():
            if isinstance(unit, FSDPModule) and any(True for _ in _own_parameters(unit)):
                self._units.add(name)
                unit.set_custom_reduce_scatter(_reduce_scatter(sums, self._parts, name))

    def state_dict(self) -> dict[str, Any]:
        return {"units": {name: part.residual.clone() for name, part in self._parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        unknown = sorted(set(state["units"]) - self._units)
        if unknown:
            raise ValueError(f"compression's feedback is of units that are not here: {unknown}")
        self._parts.clear()
        self._parts.update({name: Part(tensor.clone()) for name, tensor in state["units"].items()})


def _own_parameters(unit: Any) -> Any:
    """Of a unit without those of the units inside of it."""
    from torch.distributed.fsdp import FSDPModule

    yield from unit._parameters.values()
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _own_parameters(child)


def _reduce_scatter(sums: CompressedSums, parts: dict[str, Part], name: str) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class Compressed(ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> None:
            if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or async_op:
                raise ValueError(
                    f"compressed reduce-scatter: op {op}, async_op {async_op}: SUM and AVG are "
                    "compressed, synchronously"
                )
            if name not in parts:
                parts[name] = Part(torch.zeros_like(input_tensor, dtype=torch.float32))
            part = parts[name]
            if part.residual.shape != input_tensor.shape:
                raise ValueError(
                    f"compression's feedback of unit {name!r} has {part.residual.numel()} "
                    f"elements, its gradient {input_tensor.numel()}: it is of another sharding"
                )
            part.residual = part.residual.to(input_tensor.device)
            average = op == dist.ReduceOp.AVG
            sums.reduce_scatter(output_tensor, input_tensor, part, average)

    return Compressed()

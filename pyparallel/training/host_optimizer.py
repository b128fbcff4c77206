"""An optimizer that works in host memory, for parameters that stay on their device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["HostOptimizer"]


class HostOptimizer(Optimizer):
    """Steps copies of the parameters in host memory, and sends the new values back.

    A step sends each gradient to the host and each parameter back; states (and whatever the inner
    optimizer keeps) never touch the device. `state` is keyed by the device's parameters and holds
    the inner optimizer's own dictionaries, so that checkpoints and schedulers see a plain one.
    Parameters that somebody else has changed (a checkpoint that was loaded) are read again.

    Args:
        params: parameters or dictionaries of parameter groups.
        factory: makes the inner optimizer, of such of the host.
    """

    def __init__(self, params: Any, factory: Callable[[Any], Optimizer]) -> None:
        super().__init__(params, {})
        self._host: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        groups = []
        for group in self.param_groups:
            for parameter in group["params"]:
                self._host[parameter] = _on_host(parameter)
                self._versions[parameter] = parameter._version
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({"params": [self._host[p] for p in group["params"]], **options})
        self.inner = factory(groups)
        self._copy_options(self.inner.param_groups, self.param_groups)

    @torch.no_grad()
    def step(self, closure: "Callable[[], float] | None" = None) -> "float | None":  # type: ignore[override]
        """One step of the inner optimizer. A closure is called once, on the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_options(self.param_groups, self.inner.param_groups)
        for parameter, host in self._host.items():
            if parameter._version != self._versions[parameter]:
                host.copy_(parameter, non_blocking=True)
            host.grad = _received(parameter.grad, host.grad)
            if parameter in self.state:
                self.inner.state[host] = _state_on_host(self.state[parameter])
            else:
                self.inner.state.pop(host, None)
        _wait_for_copies(self._host)
        self.inner.step()
        for parameter, host in self._host.items():
            if host.grad is not None:
                parameter.copy_(host, non_blocking=True)
            self._versions[parameter] = parameter._version
            if host in self.inner.state:
                self.state[parameter] = self.inner.state[host]
        _wait_for_copies(self._host)
        return loss

    @staticmethod
    def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Learning rates and the like: schedulers change those of the outer groups."""
        for one, other in zip(source, target, strict=True):
            other.update({key: value for key, value in one.items() if key != "params"})


def _on_host(parameter: Tensor) -> Tensor:
    host = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
    host.copy_(parameter.detach())
    return host.requires_grad_(parameter.requires_grad)


def _received(grad: "Tensor | None", before: "Tensor | None") -> "Tensor | None":
    """A gradient on the host, in the memory of the step before."""
    if grad is None:
        return None
    if before is None:
        before = torch.empty_like(grad, device="cpu", pin_memory=grad.is_cuda)
    return before.copy_(grad, non_blocking=True)


def _state_on_host(state: dict[str, Any]) -> dict[str, Any]:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device.type != "cpu":
            state[key] = value.cpu()
    return state


def _wait_for_copies(parameters: "dict[Tensor, Tensor]") -> None:
    for device in {p.device for p in parameters if p.is_cuda}:
        torch.cuda.current_stream(device).synchronize()

"""What of a model changes with a run and is no parameter."""

from typing import Any

from pyparallel.training.precision import LossScaler

__all__ = ["RunState"]


class RunState:
    """What a run that goes on needs to know of a model beside its parameters; the same on all
    ranks.

    Attributes:
        steps: calls of `forward_backward`, which dropout masks are a function of.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self.steps = 0
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        scale = None if self._scaler is None else self._scaler.state_dict()
        return {"steps": self.steps, "scaler": scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A run that has had no loss scale begins with the one it has now."""
        self.steps = int(state["steps"])
        if self._scaler is not None and state["scaler"] is not None:
            self._scaler.load_state_dict(state["scaler"])

"""What a rank can do: the vocabulary of schedules.

An action is one step of one rank: a kind, the stage and microbatch it concerns, and the chunk,
    which is that stage's place among the stages of the rank (0 for the lowest). A stage is a run
    of layers; stage 0 takes the input and the last stage computes the loss.
"""

import enum
from typing import NamedTuple

__all__ = ["COMPUTE", "NO_MICROBATCH", "Action", "Kind", "Place"]

NO_MICROBATCH = -1


class Kind(enum.Enum):
    """What an action does; the value is its code in every written form.

    Attributes:
        code: the value.
        is_compute: a pass through a stage, of one microbatch.
        is_backward: gives the gradient of the stage's input: a whole backward, or its first half.
        gives_weight_gradient: after it the microbatch's weight gradient is there, and nothing is
            kept.
        is_transfer, is_send, is_recv: communication between ranks.
        is_of_a_microbatch: false for what is done once per step and chunk.
        direction: +1 for what goes to the next stage (activations), -1 for the way back
            (gradients).
    """

    FORWARD = "F"
    BACKWARD = "B"  # both halves at once
    BACKWARD_INPUT = "I"  # the gradient of the stage's input, which the stage before waits for
    BACKWARD_WEIGHT = "W"  # the gradient of the stage's weights, which nobody waits for
    SEND_ACTIVATION = "SEND_F"
    RECV_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECV_GRADIENT = "RECV_B"
    REDUCE = "REDUCE"  # a chunk's weight gradients over its replicas
    STEP = "STEP"  # the optimizer's step of a chunk

    # Plain attributes, and identity as hash: properties and Enum's own hash are slow Python
    # functions.
    __hash__ = object.__hash__

    def __init__(self, code: str) -> None:
        self.code = code
        self.is_compute = code in ("F", "B", "I", "W")
        self.is_backward = code in ("B", "I")
        self.gives_weight_gradient = code in ("B", "W")
        self.is_send = code.startswith("SEND")
        self.is_recv = code.startswith("RECV")
        self.is_transfer = self.is_send or self.is_recv
        self.is_of_a_microbatch = self.is_compute or self.is_transfer
        self.direction = 1 if code.endswith("F") else -1

    @property
    def counterpart(self) -> "Kind":
        """The kind at the other end of a transfer."""
        return _COUNTERPARTS[self]


COMPUTE = tuple(kind for kind in Kind if kind.is_compute)
_COUNTERPARTS = {
    Kind.SEND_ACTIVATION: Kind.RECV_ACTIVATION,
    Kind.RECV_ACTIVATION: Kind.SEND_ACTIVATION,
    Kind.SEND_GRADIENT: Kind.RECV_GRADIENT,
    Kind.RECV_GRADIENT: Kind.SEND_GRADIENT,
}


class Action(NamedTuple):
    """One step of one rank. `with_next`: runs together with the action after it (F beside B)."""

    rank: int
    kind: Kind
    stage: int
    microbatch: int
    chunk: int
    with_next: bool = False

    def __str__(self) -> str:
        """Stage, kind, microbatch: `2F5` is microbatch 5 forward through stage 2."""
        of = str(self.microbatch) if self.kind.is_of_a_microbatch else ""
        return f"{self.stage}{self.kind.code}{of}{'+' if self.with_next else ''}"


class Place(NamedTuple):
    """Where a stage lives: what a generator writes its actions at. Letters as in the figures."""

    rank: int
    stage: int
    chunk: int = 0

    def F(self, microbatch: int, with_next: bool = False) -> Action:
        return Action(self.rank, Kind.FORWARD, self.stage, microbatch, self.chunk, with_next)

    def B(self, microbatch: int) -> Action:
        return Action(self.rank, Kind.BACKWARD, self.stage, microbatch, self.chunk)

    def I(self, microbatch: int) -> Action:  # noqa: E743
        return Action(self.rank, Kind.BACKWARD_INPUT, self.stage, microbatch, self.chunk)

    def W(self, microbatch: int) -> Action:
        return Action(self.rank, Kind.BACKWARD_WEIGHT, self.stage, microbatch, self.chunk)

"""One rank's row of a schedule at work: for every kind of action a method, in the row's order."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pyparallel.pipeline.clock import Clock
from pyparallel.pipeline.packets import Packet, Shape
from pyparallel.pipeline.stage import Stage
from pyparallel.schedule import Action, Kind, Schedule, Unit

__all__ = ["Job", "Key", "Measured", "Row"]


class Key(NamedTuple):
    """A message by where it is used: (is a gradient, the stage that takes it, microbatch)."""

    gradient: bool
    stage: int
    microbatch: int

    @classmethod
    def of(cls, action: Action) -> "Key":
        """Of a transfer."""
        kind = action.kind
        stage = action.stage + kind.direction if kind.is_send else action.stage
        return cls(kind.direction < 0, stage, action.microbatch)


class Measured(NamedTuple):
    """Actions that ran as one and when: a pass, or the transfers of a meeting being issued.

    Attributes:
        actions: one, or all of a meeting.
        asked: when the rank began to wait for what they need, such as a message.
        start, end: when they ran.

    Times are stamps of the rank's clock while the step runs, and seconds in its result.
    """

    actions: tuple[Action, ...]
    asked: Any
    start: Any
    end: Any


@dataclass
class Job:
    """A step: what runs, on what.

    Attributes:
        inputs: microbatch -> what enters stage 0 here.
        targets: microbatch -> (target,) or ().
        keywords: microbatch -> what every stage gets besides.
        factors: microbatch -> what its loss is multiplied with.
        kinds: microbatch -> a number; equal ones have the same shapes all along.
    """

    plan: Schedule
    training: bool
    inputs: Mapping[int, Packet]
    targets: Mapping[int, tuple[Any, ...]]
    keywords: Mapping[int, Mapping[str, Any]]
    factors: Mapping[int, float]
    kinds: list[int]
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


class Row:
    """What a rank does in one step.

    After a failure passes are left out, and messages go on empty, so that no other rank waits: all
    learn of it at the end of the step.

    Args:
        clock: what tells when actions run.
        meet: what carries out a meeting; it yields where it has to let other rows go on.

    Attributes:
        at_end: REDUCE and STEP, in the row's order. They wait for other replicas and may not be
            done over what another rank failed to compute: that is known when all passes have ended.
    """

    def __init__(
        self,
        rank: int,
        job: Job,
        stages: Mapping[int, Stage],
        clock: Clock,
        meet: "Callable[[Row, Unit], Iterator[None]]",
    ) -> None:
        self.rank, self.job, self.stages = rank, job, stages
        self._meet = meet
        self._stamp = clock.stamp
        self.inbox: dict[Key, Callable[[], Any]] = {}  # called, it waits for the message
        self.outbox: dict[Key, Any] = {}
        self.shapes: dict[tuple[int, int], Shape] = {}  # (sending stage, microbatch) -> what went
        self.error: Exception | None = None
        self.where = ""
        self.failed = False
        self.measured: list[Measured] = []
        self.at_end: list[Action] = []
        self._methods: dict[Kind, Callable[[Action, Any], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }

    def run(self, units: tuple[Unit, ...]) -> Iterator[None]:
        for unit in units:
            if unit.partner is not None:
                start = self._stamp()
                yield from self._meet(self, unit)
                self.measured.append(Measured(unit.actions, start, start, self._stamp()))
            else:
                for action in unit.actions:
                    if action.kind.is_of_a_microbatch:
                        self._do(action)
                    else:
                        self.at_end.append(action)

    def fail(self, error: Exception | None) -> None:
        """From here on only messages go. None: another rank has the reason."""
        self.failed = True
        if self.error is None:
            self.error = error

    def _do(self, action: Action) -> None:
        given = None
        asked = self._stamp()
        if action.kind is Kind.FORWARD or action.kind.is_backward:
            key = Key(action.kind.is_backward, action.stage, action.microbatch)
            wait = self.inbox.pop(key, None)
            given = wait() if wait is not None else None
        if self.failed:
            return
        try:
            start = self._stamp()
            self._methods[action.kind](action, given)
            self.measured.append(Measured((action,), asked, start, self._stamp()))
        except Exception as error:  # whatever a stage, a loss or a hook raises
            self.where = f"{action}{self._given(action, given)}"
            self.fail(error)

    def _given(self, action: Action, given: Any) -> str:
        """For messages: what a forward was given."""
        if action.kind is not Kind.FORWARD:
            return ""
        packet = self.job.inputs[action.microbatch] if action.stage == 0 else given
        return f" of {packet.shape}" if isinstance(packet, Packet) else ""

    def _forward(self, action: Action, packet: Packet | None) -> None:
        job, microbatch = self.job, action.microbatch
        if action.stage == 0:
            packet = job.inputs[microbatch]
        assert packet is not None
        stage = self.stages[action.stage]
        value = stage.forward(microbatch, packet, job.keywords.get(microbatch, {}), job.training)
        if action.stage + 1 < job.plan.stages:
            self._hand_on(action, stage.pass_on(microbatch, value, job.training))
            return
        if not job.training:
            job.outputs[microbatch] = value
        if stage.loss is not None:
            target, factor = job.targets.get(microbatch, ()), job.factors[microbatch]
            job.losses[microbatch] = stage.end(microbatch, value, target, factor, job.training)

    def _backward(self, action: Action, gradients: list[Tensor] | None) -> None:
        stage = self.stages[action.stage]
        self._hand_on(action, stage.backward(action.microbatch, gradients or []))

    def _backward_input(self, action: Action, gradients: list[Tensor] | None) -> None:
        stage = self.stages[action.stage]
        self._hand_on(action, stage.backward_input(action.microbatch, gradients or []))

    def _backward_weight(self, action: Action, _: Any) -> None:
        self.stages[action.stage].backward_weight(action.microbatch)

    def _hand_on(self, action: Action, result: Any) -> None:
        """To the neighbouring stage where this rank holds it, else to where its send finds it."""
        plan = self.job.plan
        gradient = action.kind is not Kind.FORWARD
        key = Key(gradient, action.stage + (-1 if gradient else 1), action.microbatch)
        if key.stage < 0:
            return
        if plan.placement[key.stage, key.microbatch] == self.rank:
            self.inbox[key] = lambda: result
        else:
            self.outbox[key] = result

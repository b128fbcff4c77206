"""What actions take: seconds, bytes sent, bytes kept. One object for the simulator, `auto` and
the planner."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import NamedTuple

from pyparallel.schedule.errors import ScheduleError

__all__ = ["Costs", "StageCosts"]

PerStage = float | Sequence[float]
_MOST = 1e100  # sums and shares of such figures are still finite
_SINGLE = ("overlap", "issue", "bandwidth")  # the same for all stages
_PER_BOUNDARY = ("latency", "message_bytes")


class StageCosts(NamedTuple):
    """`Costs` with one value per stage; `hop[s]` is the message time between stages s and s + 1."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    activation_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    static_bytes: tuple[float, ...]
    reduce: tuple[float, ...]
    step: tuple[float, ...]
    hop: tuple[float, ...]
    issue: float


@dataclass(frozen=True)
class Costs:
    """Times and bytes of every action. A single number holds for all stages, a sequence has one
    each.

    Any unit of time will do. Numbers are used as they are: with integers or fractions every
    result is exact.

    Attributes:
        forward, backward_input, backward_weight: time of a pass of one microbatch.
        backward: time of a whole backward; the sum of its halves by default.
        overlap: of a forward and a backward that run together, the share of the shorter one that is
            hidden: 0 they take as long as one after the other, 1 as the longer alone.
        latency, message_bytes, bandwidth: a message takes latency + message_bytes / bandwidth;
            the first two per boundary (stages - 1 of them), the gradient being as large.
        issue: time that a rank's own thread takes to start a send, or to post a receive; the
            message leaves after it. Where messages overlap and this is not 0, simulating a schedule
            without transfers inserts them.
        overlapped: True: ranks compute while messages travel, and messages do not slow each other.
            False: sender and receiver meet, and both wait until the message is through.
        activation_bytes: kept for a microbatch from its forward to its backward (or input half).
        weight_bytes: kept from the input half to the weight half; all of activation_bytes by
            default.
        static_bytes: kept always, per stage on the rank (weights, optimizer state).
        reduce, step: time to reduce a stage's gradients, and of its optimizer step.
    """

    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    backward: PerStage | None = None
    overlap: float = 0
    latency: PerStage = 0
    issue: float = 0
    message_bytes: PerStage = 0
    bandwidth: float = math.inf
    overlapped: bool = True
    activation_bytes: PerStage = 1
    weight_bytes: PerStage | None = None
    static_bytes: PerStage = 0
    reduce: PerStage = 0
    step: PerStage = 0

    def __post_init__(self) -> None:
        misfits = []
        if not isinstance(self.overlapped, bool):
            misfits.append(f"overlapped={self.overlapped!r}: True or False is expected")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "overlapped" or (value is None and field.default is None):
                continue
            single = field.name in _SINGLE or not _is_sequence(value)
            for number in (value,) if single else value:
                if isinstance(number, bool) or not isinstance(number, (int, float, Fraction)):
                    misfits.append(f"{field.name}={_cut(value)}: {_cut(number)} is no number")
                elif not number >= 0 or (number > _MOST and field.name != "bandwidth"):
                    misfits.append(
                        f"{field.name}={_cut(value)}: {_cut(number)} is not finite and >= 0"
                        + (f", and at most {_MOST:g}" if math.inf > number > _MOST else "")
                    )
        if misfits:
            raise ScheduleError("costs: " + "; ".join(misfits))
        if self.overlap > 1:
            raise ScheduleError(f"costs: overlap={self.overlap}: a share lies from 0 to 1")
        if self.bandwidth == 0:
            raise ScheduleError(
                "costs: bandwidth=0: no message would arrive; infinite is the default"
            )

    def for_stages(self, stages: int) -> StageCosts:
        """One value per stage.

        Raises:
            ScheduleError: a sequence has another length than stages (of boundaries: stages - 1).
        """
        spread = {
            name: self._spread(name, stages)
            for name in StageCosts._fields
            if name not in ("hop", "issue", "backward", "weight_bytes")
        }
        halves = zip(spread["backward_input"], spread["backward_weight"], strict=True)
        backward = tuple(i + w for i, w in halves)
        if self.backward is not None:
            backward = self._spread("backward", stages)
        weight_bytes = spread["activation_bytes"]
        if self.weight_bytes is not None:
            weight_bytes = self._spread("weight_bytes", stages)
        delays, sizes = (self._spread(name, max(stages - 1, 0)) for name in _PER_BOUNDARY)
        hop = tuple(
            delay + (size / self.bandwidth if size else 0)
            for delay, size in zip(delays, sizes, strict=True)
        )
        return StageCosts(
            backward=backward, weight_bytes=weight_bytes, hop=hop, issue=self.issue, **spread
        )

    def pair(self, forward: float, backward: float) -> float:
        """Time of a forward and a backward that run together."""
        if not self.overlap:
            return forward + backward
        return forward + backward - self.overlap * min(forward, backward)

    def _spread(self, name: str, count: int) -> tuple[float, ...]:
        value = getattr(self, name)
        if not _is_sequence(value):
            return (value,) * count
        if len(value) != count:
            of = "boundaries between stages" if name in _PER_BOUNDARY else "stages"
            raise ScheduleError(
                f"costs: {name} has {len(value)} values for {count} {of}: {value!r}"
            )
        return tuple(value)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

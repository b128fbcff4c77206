"""How long a step takes, where ranks idle, what they keep, and which actions decide it."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pyparallel.schedule.actions import Action, Kind
from pyparallel.schedule.costs import Costs
from pyparallel.schedule.deadlock import explain_stuck
from pyparallel.schedule.dependencies import phase, predecessor
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.memory import peak_bytes
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.timing import Timeline, run, run_meetings
from pyparallel.schedule.transfers import with_transfers
from pyparallel.schedule.units import message

__all__ = ["Simulation", "Span", "simulate"]


class Span(NamedTuple):
    """One action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The times of a step, which begins at 0 on every rank.

    Two conventions of "bubble" are in use. Where the step ends on all ranks at once, a rank idles
    for step_time - busy. Where ranks may begin the next step on their own (zero-bubble
    schedules), what counts is each rank's span from its first action to its last, and the longest
    span is the cost.

    Attributes:
        schedule: what was simulated; with transfers where these take time of a rank's own.
        costs: what its actions took.
        starts, ends: per rank, the times of its actions, position by position.
        busy: per rank, the time in passes, reductions and steps (not in messages or their issue).
        peak_bytes: per rank, the most bytes kept at once.
    """

    schedule: Schedule
    costs: Costs
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    busy: tuple[float, ...]
    peak_bytes: tuple[float, ...]

    @cached_property
    def step_time(self) -> float:
        """From the beginning to the last rank's last action."""
        return max(max(ends, default=0) for ends in self.ends)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, the idle time of a step that ends on all ranks at once."""
        return tuple(self.step_time - busy for busy in self.busy)

    @cached_property
    def bubble_share(self) -> float:
        """The share of all ranks' time that is idle."""
        return sum(self.bubble) / (self.step_time * len(self.busy)) if self.step_time else 0

    @cached_property
    def span(self) -> tuple[float, ...]:
        """Per rank, from its first pass to its last action."""
        return tuple(
            max(ends, default=0)
            - min((s.start for s in spans if s.action.kind.is_compute), default=0)
            for ends, spans in zip(self.ends, self.spans, strict=True)
        )

    @cached_property
    def span_bubble(self) -> float:
        """The longest span less the time that its rank is busy."""
        return max(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Per rank, its actions with their times."""
        return tuple(
            tuple(map(Span, row, starts, ends))
            for row, starts, ends in zip(self.schedule.rows, self.starts, self.ends, strict=True)
        )

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """Actions of which each waited for the one before it, up to the end of the step.

        To shorten the step, one of these has to become shorter, or a message between two of them.
        """
        return _critical_path(self)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Runs a right schedule (`validate`) on paper.

    Args:
        costs: what actions take; every pass 1, messages nothing by default. Where
            `costs.overlapped` is False, or `costs.issue` not 0, and the schedule has no transfers,
            they are inserted.

    Raises:
        ScheduleError: nothing can go on; the circle of waits is named.
    """
    costs = costs or Costs()
    if not schedule.has_transfers and (costs.issue or not costs.overlapped):
        schedule = with_transfers(schedule, costs)
    timeline = (run if costs.overlapped else run_meetings)(schedule, costs)
    if timeline.stuck:
        text, rank, position = explain_stuck(schedule, timeline.stuck)
        raise ScheduleError(f"{schedule.name}: {text}", rank, position)
    return Simulation(
        schedule,
        costs,
        timeline.starts,
        timeline.ends,
        _busy(schedule, timeline),
        peak_bytes(schedule, costs.for_stages(schedule.stages)),
    )


def _busy(schedule: Schedule, timeline: Timeline) -> tuple[float, ...]:
    """Per rank, the time in everything but messages; a pair that runs together counts once."""
    busy = []
    for row, starts, ends in zip(schedule.rows, timeline.starts, timeline.ends, strict=True):
        total: float = 0
        second = False
        for action, start, end in zip(row, starts, ends, strict=True):
            if not second and not action.kind.is_transfer:
                total += end - start
            second = action.with_next
        busy.append(total)
    return tuple(busy)


def _critical_path(simulation: Simulation) -> tuple[Span, ...]:
    schedule, spans = simulation.schedule, simulation.spans
    meet = not simulation.costs.overlapped
    issued = not meet and simulation.costs.issue > 0
    hop = simulation.costs.for_stages(schedule.stages).hop
    place = {
        (phase(s.action.kind), s.action.stage, s.action.microbatch): (rank, position)
        for rank, row in enumerate(spans)
        for position, s in enumerate(row)
        if s.action.kind.is_compute
    }
    sent = {
        message(s.action): (rank, position)
        for rank, row in enumerate(spans)
        for position, s in enumerate(row)
        if issued and s.action.kind.is_send
    }

    def before(rank: int, position: int) -> tuple[int, int] | None:
        """The action that ended, or whose message arrived, as this one began."""
        span = spans[rank][position]
        sides = [(rank, position)]
        if span.action.kind.is_transfer and meet:
            peer = schedule.peer(span.action)
            mate = next(
                i
                for i, other in enumerate(spans[peer])
                if other.action.kind is span.action.kind.counterpart
                and (other.start, other.action.microbatch) == (span.start, span.action.microbatch)
                and schedule.channel(other.action) == schedule.channel(span.action)
            )
            sides.append((peer, mate))
        for r, i in sides:
            while i > 0:
                i -= 1
                earlier = spans[r][i]
                if (
                    earlier.start == span.start
                    and earlier.end == span.end
                    and span.start < span.end
                ):
                    continue  # runs together with it
                if meet or issued or not earlier.action.kind.is_transfer:
                    if earlier.end == span.start:
                        return r, i
                    break
        group = [span.action]
        if span.action.with_next:
            group.append(spans[rank][position + 1].action)
        for action in group:
            need = (
                predecessor(action.kind, action.stage, schedule.stages)
                if action.kind.is_compute
                else None
            )
            if need is None or meet:
                continue
            r, i = place[need[0], need[1], action.microbatch]
            delay = hop[min(need[1], action.stage)] if r != rank else 0
            if r != rank and issued:
                kind = Kind.SEND_GRADIENT if need[0] else Kind.SEND_ACTIVATION
                r, i = sent[kind, need[1], action.microbatch]
            if spans[r][i].end + delay == span.start:
                return r, i
        return None

    ends = [
        (span.end, -rank, position)
        for rank, row in enumerate(spans)
        for position, span in enumerate(row)
        if meet or issued or not span.action.kind.is_transfer
    ]
    last = max(ends, default=None)
    path: list[Span] = []
    at = None if last is None else (-last[1], last[2])
    while at is not None:
        path.append(spans[at[0]][at[1]])
        at = before(*at) if path[-1].start > 0 else None
    return tuple(reversed(path))

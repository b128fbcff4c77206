"""The times of one step, of all ranks: what each action took its rank, what each message took on
its way.

A rank's time is passes, issuing messages, and waiting. An action takes from when it has what it
needs until the rank turns to the next one, so that nothing between two actions is left out. A
message takes from when its send has been issued until the pass that needs it begins, where that
rank was waiting by then; one that was not says only what its message took at most.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pyparallel.pipeline.agreement import Agreement
from pyparallel.pipeline.executor import StepResult
from pyparallel.pipeline.row import Measured
from pyparallel.schedule import Costs, Kind, Schedule

__all__ = ["StepTimes", "clock_offsets", "own_times", "step_times"]

_KINDS = (*(kind for kind in Kind if kind.is_compute), Kind.REDUCE)
_MISSING = -1
_ROUNDS = 8


class StepTimes(NamedTuple):
    """A step: its costs by its own times, and how long it took its slowest rank, in seconds."""

    costs: Costs
    seconds: float


def clock_offsets(agreement: Agreement) -> list[float]:
    """Nanoseconds that each rank's clock is ahead of rank 0's.

    Nobody leaves a gathering before everybody has come: that bounds the difference of two clocks
    from both sides, and the middle of the closest bounds of some rounds is it, to within the time
    of one message.
    """
    came, left = [], []
    for _ in range(_ROUNDS):
        came.append(_now())
        agreement.numbers([0])
        left.append(_now())
    every = agreement.numbers([*came, *left])

    def bound(late: Sequence[int], early: Sequence[int]) -> int:
        return min(late[_ROUNDS + i] - early[i] for i in range(_ROUNDS))

    return [(bound(row, every[0]) - bound(every[0], row)) / 2 for row in every]


def own_times(plan: Schedule, result: StepResult) -> list[int]:
    """A rank's times of a step, as numbers to be gathered: nanoseconds, -1 where there is none.
    `step_times` reads them."""
    begin, end = result.span
    passes: dict[tuple[Kind, int], list[float]] = {}
    issued, transfers = 0.0, 0
    sent, came, asked = ([_MISSING] * (2 * plan.stages * plan.microbatches) for _ in range(3))
    for row in result.measured.values():
        for one, takes in _takes(row):
            first = one.actions[0]
            if first.kind.is_transfer:
                issued, transfers = issued + takes, transfers + len(one.actions)
                for action in one.actions:
                    if action.kind.is_send:
                        gradient = action.kind.direction < 0
                        place = _place(plan, gradient, action.stage, action.microbatch)
                        sent[place] = _ns(one.end)
                continue
            passes.setdefault((first.kind, first.stage), []).append(takes)
            if first.kind is Kind.FORWARD or first.kind.is_backward:
                source = first.stage + (1 if first.kind.is_backward else -1)
                if 0 <= source < plan.stages:
                    place = _place(plan, first.kind.is_backward, source, first.microbatch)
                    came[place], asked[place] = _ns(one.start), _ns(one.asked)
    means = [
        _ns(statistics.mean(passes[kind, stage])) if (kind, stage) in passes else _MISSING
        for kind in _KINDS
        for stage in range(plan.stages)
    ]
    return [_ns(end - begin), _ns(issued), transfers, *means, *sent, *came, *asked]


def step_times(
    plan: Schedule, rows: Sequence[Sequence[int]], offsets: Sequence[float]
) -> StepTimes:
    """What the ranks' `own_times` say together."""
    stages, messages = plan.stages, 2 * plan.stages * plan.microbatches
    passes = {
        (kind, stage): _mean([row[3 + i * stages + stage] for row in rows])
        for i, kind in enumerate(_KINDS)
        for stage in range(stages)
    }
    start = 3 + len(_KINDS) * stages
    sent, came, asked = (
        [row[at : at + messages] for row in rows]
        for at in range(start, start + 3 * messages, messages)
    )
    hops = _hops(plan, sent, came, asked, offsets)
    transfers = sum(row[2] for row in rows)
    issue = sum(row[1] for row in rows) / transfers / 1e9 if transfers else 0.0
    return StepTimes(_costs(stages, passes, hops, issue), max(row[0] for row in rows) / 1e9)


def _hops(
    plan: Schedule,
    sent: Sequence[Sequence[int]],
    came: Sequence[Sequence[int]],
    asked: Sequence[Sequence[int]],
    offsets: Sequence[float],
) -> list[float]:
    """Per boundary, the mean time of the messages that were waited for, in seconds; where none
    was, the least that one may have taken."""
    waited: list[list[float]] = [[] for _ in range(plan.stages - 1)]
    there: list[list[float]] = [[] for _ in range(plan.stages - 1)]
    for gradient in (False, True):
        for source in range(plan.stages):
            for microbatch in range(plan.microbatches):
                place = _place(plan, gradient, source, microbatch)
                ends = [(r, row[place]) for r, row in enumerate(sent) if row[place] != _MISSING]
                takers = [r for r, row in enumerate(came) if row[place] != _MISSING]
                if not ends or not takers:
                    continue  # both stages are on one rank
                (sender, left), taker = ends[0], takers[0]
                left_at = left - offsets[sender] + offsets[taker]
                took = max(came[taker][place] - left_at, 0.0) / 1e9
                boundary = source - 1 if gradient else source
                (waited if asked[taker][place] <= left_at else there)[boundary].append(took)
    return [
        statistics.mean(late) if late else min(early, default=0.0)
        for late, early in zip(waited, there, strict=True)
    ]


def _costs(
    stages: int,
    passes: dict[tuple[Kind, int], float | None],
    hops: list[float],
    issue: float,
) -> Costs:
    def of(kind: Kind) -> list[float | None]:
        return [passes[kind, stage] for stage in range(stages)]

    whole = of(Kind.BACKWARD)
    halves = [
        (i or 0.0, w or 0.0) if i is not None or w is not None else ((b or 0.0) / 2,) * 2
        for b, i, w in zip(whole, of(Kind.BACKWARD_INPUT), of(Kind.BACKWARD_WEIGHT), strict=True)
    ]
    return Costs(
        forward=[f or 0.0 for f in of(Kind.FORWARD)],
        backward=[i + w if b is None else b for b, (i, w) in zip(whole, halves, strict=True)],
        backward_input=[i for i, _ in halves],
        backward_weight=[w for _, w in halves],
        reduce=[r or 0.0 for r in of(Kind.REDUCE)],
        latency=hops,
        issue=issue,
    )


def _takes(row: Sequence[Measured]) -> Iterator[tuple[Measured, float]]:
    """Each action and its time, up to the rank's turning to the next."""
    for one, after in pairwise(row):
        yield one, after.asked - one.start
    if row:
        yield row[-1], row[-1].end - row[-1].start


def _place(plan: Schedule, gradient: bool, source: int, microbatch: int) -> int:
    """Of a message among those of a step: by direction, the stage it comes from, microbatch."""
    return (gradient * plan.stages + source) * plan.microbatches + microbatch


def _mean(column: Sequence[int]) -> float | None:
    """In seconds, over the ranks that have it."""
    there = [value for value in column if value != _MISSING]
    return statistics.mean(there) / 1e9 if there else None


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _now() -> int:
    return time.perf_counter_ns()

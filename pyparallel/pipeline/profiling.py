"""A few steps measured: what every action took, as input of the simulator, and what that makes of
the step."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyparallel.pipeline.executor import PipelineExecutor, StepResult
from pyparallel.schedule import Costs, Kind, Schedule, simulate

__all__ = ["StepProfile", "profile"]

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_MISSING = -1


@dataclass(frozen=True)
class StepProfile:
    """Of some steps of one plan; the same on every rank. `print` shows it.

    Attributes:
        plan: what ran.
        costs: medians, in seconds, per stage; for `simulate`, `auto_schedule` and
            `partition_model(by=...)`. Where only whole backwards ran, each half is taken as half
            of one; `latency` is what it takes a rank to issue a message.
        step_time: median of the steps, of the slowest rank each.
        simulated: the step time that the simulator makes of these costs.
    """

    plan: Schedule
    costs: Costs
    step_time: float
    simulated: float

    @property
    def ratio(self) -> float:
        """simulated / measured: below 1, time went elsewhere than into passes and their waits."""
        return self.simulated / self.step_time

    def __str__(self) -> str:
        return (
            f"{self.plan.name}, {self.plan.ranks} ranks, {self.plan.microbatches} microbatches: "
            f"step {self.step_time * 1e3:.2f} ms, simulated {self.simulated * 1e3:.2f} ms, "
            f"simulated / measured {self.ratio:.2f}"
        )


def profile(
    executor: PipelineExecutor,
    plan: Schedule,
    run: Callable[[], StepResult],
    steps: int = 5,
) -> StepProfile:
    """Measures `run`, after one step that is not counted. All ranks of the group call it.

    Args:
        executor: of a group; rows of one process run in turn, which no simulation is about.
        run: makes one step of the plan, such as `lambda: executor.step(plan, inputs, targets)`;
            gradients add up as always.
        steps: how many are counted.

    Raises:
        ValueError: the executor has no group, or steps is not positive.
    """
    if executor.group is None:
        raise ValueError("the rows of an executor without a group run in turn: pass it a group")
    if steps < 1:
        raise ValueError(f"steps is {steps}: allowed are 1, 2, 3, ...")
    run()
    results = [run() for _ in range(steps)]
    own: dict[tuple[int, Kind], list[float]] = {}
    for result in results:
        for measured in result.measured.values():
            for action, start, end in measured:
                own.setdefault((action.stage, action.kind), []).append(end - start)
    messages = [seconds for result in results for seconds in result.meetings]
    row = [
        _nanoseconds(own.get((stage, kind), [])) for kind in _KINDS for stage in range(plan.stages)
    ]
    row.append(_nanoseconds(messages))
    row += [round(result.seconds * 1e9) for result in results]
    every = executor.agreement.numbers(row)
    merged = [_merge(column) for column in zip(*every, strict=True)]
    times = {kind: merged[i * plan.stages : (i + 1) * plan.stages] for i, kind in enumerate(_KINDS)}
    costs = _costs(times, merged[len(_KINDS) * plan.stages])
    slowest = [max(column) for column in zip(*every, strict=True)][-steps:]
    step_time = statistics.median(slowest) / 1e9
    return StepProfile(plan, costs, step_time, float(simulate(plan, costs).step_time))


def _nanoseconds(seconds: list[float]) -> int:
    return round(statistics.median(seconds) * 1e9) if seconds else _MISSING


def _merge(column: tuple[int, ...]) -> float | None:
    """In seconds, over the ranks that have it: the mean of their medians."""
    there = [value for value in column if value != _MISSING]
    return statistics.mean(there) / 1e9 if there else None


def _costs(times: Mapping[Kind, list[float | None]], latency: float | None) -> Costs:
    forward, whole, by_input, by_weight = (times[kind] for kind in _KINDS)
    halves = [
        (i or 0.0, w or 0.0) if i is not None or w is not None else ((b or 0.0) / 2,) * 2
        for b, i, w in zip(whole, by_input, by_weight, strict=True)
    ]
    return Costs(
        forward=[f or 0.0 for f in forward],
        backward=[i + w if b is None else b for b, (i, w) in zip(whole, halves, strict=True)],
        backward_input=[i for i, _ in halves],
        backward_weight=[w for _, w in halves],
        latency=latency or 0.0,
    )

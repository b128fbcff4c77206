"""A few steps measured: what every action took, as input of the simulator, and what that makes of
the step."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from pyparallel.pipeline.executor import PipelineExecutor, StepResult
from pyparallel.pipeline.timeline import clock_offsets, own_times, step_times
from pyparallel.schedule import Costs, Schedule, simulate

__all__ = ["StepProfile", "profile"]


@dataclass(frozen=True)
class StepProfile:
    """Of some steps of one plan; the same on every rank. `print` shows it.

    Attributes:
        plan: what ran.
        costs: of the step that took the median time, in seconds: means over its microbatches, per
            stage; for `simulate`, `auto_schedule` and `partition_model(by=...)`. Where only whole
            backwards ran, each half is taken as half of one. `issue` is what a message keeps its
            ranks' own threads busy, `latency` what it takes on its way, per boundary: how both are
            found is in timeline.py.
        step_time: of that step, of its slowest rank.
        simulated: the step time that the simulator makes of these costs.
        ratios: simulated / measured of each step by its own costs.
    """

    plan: Schedule
    costs: Costs
    step_time: float
    simulated: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """simulated / measured, the median of the steps: below 1, time went elsewhere than into
        passes, messages and their waits, or a stage's passes took very different times."""
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        return (
            f"{self.plan.name}, {self.plan.ranks} ranks, {self.plan.microbatches} microbatches: "
            f"step {self.step_time * 1e3:.2f} ms, simulated {self.simulated * 1e3:.2f} ms, "
            f"simulated / measured {self.ratio:.2f} (median of {len(self.ratios)} steps)"
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
    own = [own_times(plan, run()) for _ in range(steps)]
    offsets = clock_offsets(executor.agreement)
    every = executor.agreement.numbers([number for step in own for number in step])
    length = len(own[0])
    found = [
        step_times(plan, [row[i * length : (i + 1) * length] for row in every], offsets)
        for i in range(steps)
    ]
    simulated = [float(simulate(plan, step.costs).step_time) for step in found]
    ratios = [made / step.seconds for made, step in zip(simulated, found, strict=True)]
    middle = sorted(range(steps), key=lambda i: found[i].seconds)[steps // 2]
    return StepProfile(
        plan, found[middle].costs, found[middle].seconds, simulated[middle], tuple(ratios)
    )

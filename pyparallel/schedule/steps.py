"""The pass that inserts what ends a step: gradients reduced, then the optimizer."""

from dataclasses import replace

from pyparallel.schedule.actions import NO_MICROBATCH, Action, Kind
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.schedule import Schedule

__all__ = ["with_steps"]


def with_steps(schedule: Schedule) -> Schedule:
    """The schedule with a REDUCE per chunk and then a STEP per chunk at the end of each row: a
    reduction waits for other replicas, so it comes behind all passes and messages of its own.

    REDUCE stands for the data-parallel reduction and, where a stage is held by two ranks
    (DualPipe), for the sum of their gradients.

    Raises:
        ScheduleError: it has reductions or steps already.
    """
    if any(not action.kind.is_of_a_microbatch for row in schedule.rows for action in row):
        raise ScheduleError(
            f"{schedule.name} has reductions or steps already; compute_only() takes them out"
        )
    rows = []
    for rank, (row, held) in enumerate(zip(schedule.rows, schedule.held, strict=True)):
        reductions = [Action(rank, Kind.REDUCE, s, NO_MICROBATCH, c) for c, s in enumerate(held)]
        steps = [Action(rank, Kind.STEP, s, NO_MICROBATCH, c) for c, s in enumerate(held)]
        rows.append((*row, *reductions, *steps))
    return replace(schedule, rows=tuple(rows))

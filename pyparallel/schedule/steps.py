"""The pass that inserts what ends a step: gradients reduced as soon as they are complete, then
the optimizer."""

from dataclasses import replace

from pyparallel.schedule.actions import NO_MICROBATCH, Action, Kind
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.schedule import Schedule

__all__ = ["with_steps"]


def with_steps(schedule: Schedule) -> Schedule:
    """The schedule with a REDUCE per chunk, after its last weight gradient (and the sends that
    follow it, which others wait for), and a STEP per chunk at the end of each row.

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
        last = {a.stage: i for i, a in enumerate(row) if a.kind.gives_weight_gradient}
        after: dict[int, list[Action]] = {}
        for chunk, stage in enumerate(held):
            position = last.get(
                stage, len(row) - 1
            )  # a stage that no microbatch came by: at the end
            while position + 1 < len(row) and row[position + 1].kind.is_send:
                position += 1
            reduce = Action(rank, Kind.REDUCE, stage, NO_MICROBATCH, chunk)
            after.setdefault(position, []).append(reduce)
        steps = [Action(rank, Kind.STEP, s, NO_MICROBATCH, c) for c, s in enumerate(held)]
        body = [a for i, action in enumerate(row) for a in (action, *after.get(i, ()))]
        rows.append((*body, *steps))
    return replace(schedule, rows=tuple(rows))

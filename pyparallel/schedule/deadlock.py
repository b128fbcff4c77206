"""Why nothing can go on: the circle of waits, in words."""

from collections.abc import Sequence

from pyparallel.schedule.actions import Action
from pyparallel.schedule.dependencies import describe, phase, predecessor
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.units import message

__all__ = ["explain_stuck"]

Where = tuple[int, int]


def explain_stuck(schedule: Schedule, stuck: Sequence[Where]) -> tuple[str, int, int]:
    """(explanation, rank, position) of a schedule in which these ranks stand for ever."""
    standing = dict(stuck)
    done = {
        (phase(action.kind), action.stage, action.microbatch)
        for rank, row in enumerate(schedule.rows)
        for action in row[: standing.get(rank, len(row))]
        if action.kind.is_compute
    }
    waits = {rank: _wait(schedule, rank, position, done) for rank, position in stuck}

    # Every wait is for something on a rank that stands itself, so following them closes a circle.
    path: list[int] = []
    rank = stuck[0][0]
    while rank not in path:
        path.append(rank)
        rank = waits[rank][1]
    circle = path[path.index(rank) :]
    at = next((r for r in circle if waits[r][1] == r), circle[0])
    lines = [f"{schedule.rows[r][standing[r]]} on rank {r} waits for {waits[r][0]}" for r in circle]
    return "deadlock: " + "; ".join(lines), at, standing[at]


def _wait(
    schedule: Schedule, rank: int, position: int, done: set[tuple[int, int, int]]
) -> tuple[str, int]:
    """What the action at a position waits for, in words, and the rank that has it to do."""
    row = schedule.rows[rank]
    together = (
        row[position : position + 2] if row[position].with_next else row[position : position + 1]
    )
    for action in together:
        if action.kind.is_transfer:
            peer = schedule.peer(action)
            other = next(
                (i for i, a in enumerate(schedule.rows[peer])
                 if a.kind is action.kind.counterpart and message(a) == message(action)),
                None,
            )  # fmt: skip
            return f"{_named(schedule.rows[peer], other, peer)}", peer
        if not action.kind.is_compute:
            continue
        need = predecessor(action.kind, action.stage, schedule.stages)
        if need is not None and (*need, action.microbatch) not in done:
            owner = schedule.placement.get((need[1], action.microbatch), rank)
            wanted = describe(need, action.microbatch)
            found = next(
                (i for i, a in enumerate(schedule.rows[owner])
                 if a.kind.is_compute and phase(a.kind) == need[0]
                 and (a.stage, a.microbatch) == (need[1], action.microbatch)),
                None,
            )  # fmt: skip
            if found is None:
                return f"{wanted}, which is nowhere", owner
            return _named(schedule.rows[owner], found, owner), owner
    return "nothing", rank


def _named(row: Sequence[Action], position: int | None, rank: int) -> str:
    if position is None:
        return f"its counterpart on rank {rank}, which is missing"
    return f"{row[position]} on rank {rank} at position {position}"

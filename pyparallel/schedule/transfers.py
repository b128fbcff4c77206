"""The pass that inserts communication: a send after each result another rank needs, and its
receive.

One order of everything, over all ranks: passes at the times they would begin, messages at the
    time their sender's pass would end. Each row takes its own actions in that order. So whichever
    action comes first in it among those not done yet can always go on, even where a send waits
    until it is received, and between any two ranks messages are received in the order they are
    sent. Messages of two ranks to each other at the
same time end up side by side in both rows: units.py makes one meeting of them.
"""

from dataclasses import replace

from pyparallel.schedule.actions import Action, Kind
from pyparallel.schedule.costs import Costs
from pyparallel.schedule.deadlock import explain_stuck
from pyparallel.schedule.dependencies import crosses
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.timing import run

__all__ = ["with_transfers"]

_SENDS = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.BACKWARD_INPUT: Kind.SEND_GRADIENT,
}


def with_transfers(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """The schedule with sends and receives. Stages that follow each other on one rank need none.

    Args:
        schedule: a right schedule without transfers (`validate` says whether it is).
        costs: times that order the messages; equal passes by default. Any times are safe.

    Raises:
        ScheduleError: it has transfers already, or its passes wait for each other for ever.
    """
    if schedule.has_transfers:
        raise ScheduleError(f"{schedule.name} has transfers already; compute_only() takes them out")
    timeline = run(schedule, costs or Costs(), positive=True)
    if timeline.stuck:
        text, rank, position = explain_stuck(schedule, timeline.stuck)
        raise ScheduleError(f"{schedule.name}: {text}", rank, position)
    entries: list[list[tuple[tuple[float, ...], Action]]] = [[] for _ in schedule.rows]
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            start, end = timeline.starts[rank][position], timeline.ends[rank][position]
            entries[rank].append(((start, 1, position), action))
            if not crosses(action, schedule.stages):
                continue
            send = Action(rank, _SENDS[action.kind], action.stage, action.microbatch, action.chunk)
            peer = schedule.peer(send)
            if peer == rank:
                continue
            stage = action.stage + send.kind.direction
            chunk = schedule.held[peer].index(stage)
            receive = Action(peer, send.kind.counterpart, stage, action.microbatch, chunk)
            key = (end, 0, min(rank, peer), max(rank, peer), action.stage, -send.kind.direction,
                   action.microbatch)  # fmt: skip
            entries[rank].append((key, send))
            entries[peer].append((key, receive))
    rows = tuple(tuple(a for _, a in sorted(row, key=lambda entry: entry[0])) for row in entries)
    return replace(schedule, rows=rows)

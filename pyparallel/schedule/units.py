"""What a rank issues at once: a pass, a pair that runs together, or a meeting with one other rank.

A meeting is a set of transfers between two ranks that both issue as one batch, with the same
members on both sides. Transfers next to each other in both rows are one meeting whatever their
order, so two ranks that each send first and receive second still meet (issued one by one they
would wait for each other), and no batch has members that its counterpart lacks.
"""

from typing import NamedTuple

from pyparallel.schedule.actions import Action, Kind
from pyparallel.schedule.schedule import Schedule

__all__ = ["Unit", "units"]

Message = tuple[Kind, int, int]


class Unit(NamedTuple):
    """Actions of one rank to be issued together.

    Attributes:
        actions: one action; two that run together; or the transfers of a meeting, in issue order.
        partner: the other rank of a meeting, None for anything else.
        meeting: the meeting's number, the same on both ranks; None for anything else.
    """

    actions: tuple[Action, ...]
    partner: int | None = None
    meeting: int | None = None


def message(action: Action) -> Message:
    """What a transfer carries, the same for its send and its receive: kind and stage of the
    sender."""
    _, kind, stage, microbatch, _, _ = action
    if kind.is_send:
        return (kind, stage, microbatch)
    return (kind.counterpart, stage - kind.direction, microbatch)


def units(schedule: Schedule) -> tuple[tuple[Unit, ...], ...]:
    """The rows of a schedule, cut into units. Every transfer must have its counterpart."""
    groups = _meetings(schedule)
    rows = []
    for row in schedule.rows:
        out: list[Unit] = []
        i = 0
        while i < len(row):
            action = row[i]
            size = 1
            if action.kind.is_transfer:
                number = groups[message(action)]
                while (
                    i + size < len(row)
                    and row[i + size].kind.is_transfer
                    and groups[message(row[i + size])] == number
                ):
                    size += 1
                out.append(Unit(row[i : i + size], schedule.peer(action), number))
            else:
                size = 2 if action.with_next else 1
                out.append(Unit(row[i : i + size]))
            i += size
        rows.append(tuple(out))
    return tuple(rows)


def _meetings(schedule: Schedule) -> dict[Message, int]:
    """The number of each message's meeting: the coarsest cut that both ranks agree on.

    Begin with each row's stretches of transfers with one peer; as long as the two rows of a message
    cut differently, cut by both.
    """
    stretches: list[list[list[Message]]] = []
    for row in schedule.rows:
        cuts: list[list[Message]] = []
        last = None
        for action in row:
            peer = schedule.peer(action) if action.kind.is_transfer else None
            if peer is not None and peer != last:
                cuts.append([])
            if peer is not None:
                cuts[-1].append(message(action))
            last = peer
        stretches.append(cuts)

    label: dict[Message, int] = {}
    while True:
        sides: dict[Message, list[int]] = {}
        for number, stretch in enumerate(s for row in stretches for s in row):
            for carried in stretch:
                sides.setdefault(carried, []).append(number)
        numbers: dict[tuple[int, ...], int] = {}
        label = {
            carried: numbers.setdefault(tuple(at), len(numbers)) for carried, at in sides.items()
        }
        finer = [[cut for s in row for cut in _cut_by(s, label)] for row in stretches]
        if finer == stretches:
            return label
        stretches = finer


def _cut_by(stretch: list[Message], label: dict[Message, int]) -> list[list[Message]]:
    cuts: list[list[Message]] = []
    for i, carried in enumerate(stretch):
        if i == 0 or label[carried] != label[stretch[i - 1]]:
            cuts.append([])
        cuts[-1].append(carried)
    return cuts

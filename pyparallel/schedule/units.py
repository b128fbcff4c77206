"""What a rank issues at once: a pass, a pair that runs together, or a meeting with one other rank.

A meeting is a set of transfers between two ranks that both issue as one batch, with the same
members on both sides. Transfers next to each other in both rows are one meeting whatever their
order, so two ranks that each send first and receive second still meet (issued one by one they
would wait for each other), and no batch has members that its counterpart lacks.
"""

from collections.abc import Iterator, Sequence
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
    known: tuple[tuple[Unit, ...], ...] | None = schedule.__dict__.get("_units")
    if known is None:  # a schedule is a constant: whoever validates and then runs it cuts once
        known = schedule.__dict__["_units"] = tuple(_cut(schedule))
    return known


def _cut(schedule: Schedule) -> Iterator[tuple[Unit, ...]]:
    stretches: list[list[int]] = []
    rows = [_transfers(schedule, row, stretches) for row in schedule.rows]
    numbers = _meetings(stretches)
    for row, (ids, peers) in zip(schedule.rows, rows, strict=True):
        out: list[Unit] = []
        begin, seen = 0, 0  # of the unit at hand; transfers before it
        count = len(row)
        while begin < count:
            action = row[begin]
            end = begin + 1
            if action.kind.is_transfer:
                number = numbers[ids[seen]]
                first = seen
                seen += 1
                while end < count and row[end].kind.is_transfer and numbers[ids[seen]] == number:
                    end, seen = end + 1, seen + 1
                out.append(Unit(row[begin:end], peers[first], number))
            else:
                end += action.with_next
                out.append(Unit(row[begin:end]))
            begin = end
        yield tuple(out)


def _transfers(
    schedule: Schedule, row: Sequence[Action], stretches: list[list[int]]
) -> tuple[list[int], list[int]]:
    """Of a row's transfers, in order: a number of the message, the same at both ends; the other
    rank. `stretches` gets the messages of transfers with one peer that follow each other."""
    stages, microbatches = schedule.stages, schedule.microbatches
    placement = schedule.placement
    ids, peers = [], []
    last: int | None = None
    for action in row:
        _, kind, stage, microbatch, _, _ = action
        if not kind.is_transfer:
            last = None
            continue
        step = kind.direction if kind.is_send else -kind.direction
        sender = stage if kind.is_send else stage + step
        carried = ((kind.direction > 0) * stages + sender) * microbatches + microbatch
        peer = placement.get((stage + step, microbatch))
        peer = schedule.peer(action) if peer is None else peer
        if peer != last:
            stretches.append([])
        stretches[-1].append(carried)
        ids.append(carried)
        peers.append(peer)
        last = peer
    return ids, peers


def _meetings(stretches: list[list[int]]) -> dict[int, int]:
    """The number of each message's meeting: the coarsest cut that both ranks agree on.

    Begin with each row's stretches of transfers with one peer; as long as the two rows of a message
    cut differently, cut by both.
    """
    while True:
        sides: dict[int, tuple[int, ...]] = {}
        for number, stretch in enumerate(stretches):
            for carried in stretch:
                sides[carried] = (*sides.get(carried, ()), number)
        numbers: dict[tuple[int, ...], int] = {}
        label = {carried: numbers.setdefault(at, len(numbers)) for carried, at in sides.items()}
        finer = [cut for stretch in stretches for cut in _cut_by(stretch, label)]
        if len(finer) == len(stretches):
            return label
        stretches = finer


def _cut_by(stretch: list[int], label: dict[int, int]) -> list[list[int]]:
    if len(stretch) == 1:
        return [stretch]
    cuts: list[list[int]] = []
    last = None
    for carried in stretch:
        if label[carried] != last:
            cuts.append([])
        cuts[-1].append(carried)
        last = label[carried]
    return cuts

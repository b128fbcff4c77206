"""Whether a schedule is right: complete, possible, free of deadlock, within memory.

From cheap to dear: each action by itself; every microbatch through every stage, once each way, on
one rank; sends and receives matched and in FIFO order; everything run to its end in the strictest
way, where a message needs both ranks at once, so that no transport can hang on it.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pyparallel.schedule.actions import NO_MICROBATCH, Action, Kind
from pyparallel.schedule.costs import Costs
from pyparallel.schedule.deadlock import explain_stuck
from pyparallel.schedule.dependencies import crosses
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.grid import grid
from pyparallel.schedule.memory import peak_bytes, peak_in_flight
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.timing import run, run_meetings
from pyparallel.schedule.units import Message, message

__all__ = ["Report", "validate"]

_HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Report:
    """What a right schedule needs of each rank.

    Attributes:
        in_flight: per rank and chunk, the most microbatches at once between their forward and their
            backward (or its input half): how many sets of activations are kept.
        peak_bytes: per rank, the most bytes kept at once, after the costs given; with the default
            costs, in activations of one stage.
        receive_buffers: per rank, the most messages at once that have been received and not yet
            used; zeros for a schedule without transfers.
    """

    in_flight: tuple[tuple[int, ...], ...]
    peak_bytes: tuple[float, ...]
    receive_buffers: tuple[int, ...]


def validate(
    schedule: Schedule,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Report:
    """Proves that a schedule can run, with or without transfers in it, and says what it needs.

    Args:
        costs: for the bytes kept; by default each stage keeps 1 per microbatch until its weight
            gradient is there.
        memory_limit: bytes each rank has, one number or one per rank.

    Raises:
        ScheduleError: what is wrong, where, and the grid around it with the faulty cell marked.
    """
    with _no_collector():
        return _validate(schedule, costs, memory_limit)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Tables of millions of entries, without a cycle among them, are made and dropped: the garbage
    collector would look through them again and again, which takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _validate(
    schedule: Schedule, costs: Costs | None, memory_limit: float | Sequence[float] | None
) -> Report:
    _check_actions(schedule)
    _check_complete(schedule)
    if schedule.has_transfers:
        _check_transfers(schedule)
    _check_steps(schedule)
    timeline = run_meetings(schedule, Costs()) if schedule.has_transfers else run(schedule, Costs())
    if timeline.stuck:
        text, rank, position = explain_stuck(schedule, timeline.stuck)
        _fail(schedule, rank, position, text)
    peaks = peak_bytes(schedule, (costs or Costs()).for_stages(schedule.stages))
    _check_memory(schedule, peaks, memory_limit)
    return Report(peak_in_flight(schedule), peaks, _receive_buffers(schedule))


def _fail(schedule: Schedule, rank: int, position: int, text: str) -> NoReturn:
    drawing = grid(schedule, rank, position)
    raise ScheduleError(
        f"{schedule.name}: rank {rank}, position {position}: {text}\n{drawing}", rank, position
    )


def _each(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            yield rank, position, action


def _check_actions(schedule: Schedule) -> None:
    for name, value in (
        ("ranks", schedule.ranks),
        ("stages", schedule.stages),
        ("microbatches", schedule.microbatches),
    ):
        if value < 1:
            raise ScheduleError(f"{schedule.name}: {value} {name}; allowed are 1, 2, 3, ...")
    if len(schedule.held) != schedule.ranks or any(
        h != tuple(sorted(set(h))) for h in schedule.held
    ):
        text = (
            f"held is {schedule.held}: expected are the stages of {schedule.ranks} ranks, ascending"
        )
        raise ScheduleError(f"{schedule.name}: {text}")
    for rank, position, action in _each(schedule):
        if action.rank != rank:
            text = f"{action} is of rank {action.rank}, but stands in the row of rank {rank}"
            _fail(schedule, rank, position, text)
        if not 0 <= action.stage < schedule.stages:
            text = f"{action}: stages are 0 to {schedule.stages - 1}"
            _fail(schedule, rank, position, text)
        held = schedule.held[rank]
        if action.stage not in held or action.chunk != held.index(action.stage):
            text = f"{action} as chunk {action.chunk}: the rank's chunks are stages {list(held)}"
            _fail(schedule, rank, position, text)
        if not action.kind.is_of_a_microbatch:
            if action.microbatch != NO_MICROBATCH:
                text = f"{action.kind.code} is of no microbatch, but has {action.microbatch}"
                _fail(schedule, rank, position, text)
        elif not 0 <= action.microbatch < schedule.microbatches:
            text = f"{action}: microbatches are 0 to {schedule.microbatches - 1}"
            _fail(schedule, rank, position, text)
        if action.with_next:
            _check_pair(schedule, rank, position)


def _check_pair(schedule: Schedule, rank: int, position: int) -> None:
    row = schedule.rows[rank]
    following = row[position + 1] if position + 1 < len(row) else None
    if (
        row[position].kind is not Kind.FORWARD
        or following is None
        or not following.kind.is_backward
        or following.with_next
    ):
        text = f"{row[position]} runs with the next action, which is {following}: only a forward "
        _fail(schedule, rank, position, text + "does, and with a backward")


def _check_complete(schedule: Schedule) -> None:
    """Every microbatch through every stage: one forward, one backward or its two halves, one
    rank."""
    seen: set[tuple[Kind, int, int]] = set()
    for rank, position, action in _each(schedule):
        if not action.kind.is_compute:
            continue
        stage, microbatch = action.stage, action.microbatch
        kinds = _HALVES if action.kind is Kind.BACKWARD else (action.kind,)
        if any((kind, stage, microbatch) in seen for kind in kinds):
            _fail(schedule, rank, position, f"{action} has been done before")
        seen.update((kind, stage, microbatch) for kind in kinds)
        owner = schedule.placement.get((stage, microbatch))
        if owner != rank:
            where = "nowhere" if owner is None else f"on rank {owner}"
            text = f"{action}: its forward {stage}F{microbatch} is {where}"
            _fail(schedule, rank, position, text)
    # Look for what is missing only as far as needed: a file may claim any number of stages.
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            for kind in (Kind.FORWARD, *_HALVES):
                if (kind, stage, microbatch) not in seen:
                    what = f"{stage}{kind.code}{microbatch}"
                    whole = "" if kind is Kind.FORWARD else f" (or {stage}B{microbatch})"
                    text = (
                        f"{what}{whole} is missing: each of {schedule.microbatches} microbatches "
                    )
                    text += f"passes each of {schedule.stages} stages once each way"
                    near = _grid_near(schedule, stage, microbatch)
                    raise ScheduleError(f"{schedule.name}: {text}\n{near}")


def _grid_near(schedule: Schedule, stage: int, microbatch: int) -> str:
    """The grid where a missing pass would be looked for: by the same microbatch on the same
    stage, or the start."""
    for rank, position, action in _each(schedule):
        if (action.stage, action.microbatch) == (stage, microbatch):
            return grid(schedule, rank, position)
    for rank, position, action in _each(schedule):
        if action.stage == stage:
            return grid(schedule, rank, position)
    return grid(schedule, 0, 0)


def _check_transfers(schedule: Schedule) -> None:
    """One send after each pass whose result crosses ranks, one receive before each that needs
    it."""
    due: dict[Message, tuple[int, int]] = {}
    for rank, position, action in _each(schedule):
        if action.kind.is_compute and crosses(action, schedule.stages):
            kind = Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT
            target = (action.stage + kind.direction, action.microbatch)
            if schedule.placement[target] != rank:
                due[kind, action.stage, action.microbatch] = (rank, position)
    place: dict[Action, int] = {}
    for rank, position, action in _each(schedule):
        if not action.kind.is_transfer:
            continue
        carried = message(action)
        if carried not in due:
            text = f"{action} carries what no rank needs: "
            text += f"{carried[1]}{'F' if carried[0] is Kind.SEND_ACTIVATION else 'B'}{carried[2]}"
            _fail(schedule, rank, position, text + " has its follower on the same rank, or none")
        sender, _ = due[carried]
        owner = (
            sender if action.kind.is_send else schedule.placement[action.stage, action.microbatch]
        )
        if rank != owner or action in place:
            why = "has been done before" if action in place else f"belongs to rank {owner}"
            _fail(schedule, rank, position, f"{action} {why}")
        place[action] = position
    _check_each_message(schedule, due, place)
    _check_fifo(schedule)


def _check_each_message(
    schedule: Schedule, due: dict[Message, tuple[int, int]], place: dict[Action, int]
) -> None:
    consumers = {
        (0 if a.kind is Kind.FORWARD else 1, a.stage, a.microbatch): (r, i, a)
        for r, i, a in _each(schedule)
        if a.kind is Kind.FORWARD or a.kind.is_backward
    }
    for (kind, stage, microbatch), (rank, position) in due.items():
        producer = schedule.rows[rank][position]
        send = Action(rank, kind, stage, microbatch, producer.chunk)
        if send not in place:
            _fail(schedule, rank, position, f"{producer} is never sent: {send} is missing")
        if place[send] < position:
            text = f"{send} comes before {producer} (position {position}), whose result it sends"
            _fail(schedule, rank, place[send], text)
        backward = 0 if kind is Kind.SEND_ACTIVATION else 1
        peer, needed_at, consumer = consumers[backward, stage + kind.direction, microbatch]
        receive = Action(peer, kind.counterpart, consumer.stage, microbatch, consumer.chunk)
        if receive not in place:
            text = f"{consumer} is never given its input: {receive} is missing"
            _fail(schedule, peer, needed_at, text)
        if place[receive] > needed_at:
            text = f"{receive} comes after {consumer} (position {needed_at}), which needs it"
            _fail(schedule, peer, place[receive], text)


def _check_fifo(schedule: Schedule) -> None:
    """Between any two ranks messages are received in the order they are sent, whatever they
    carry."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[tuple[int, Action]]] = {}
    for rank, position, action in _each(schedule):
        if action.kind.is_send:
            sent.setdefault((rank, schedule.peer(action)), []).append(action)
        elif action.kind.is_recv:
            received.setdefault((schedule.peer(action), rank), []).append((position, action))
    for (source, target), arrivals in received.items():
        for order, (send, (position, receive)) in enumerate(
            zip(sent[source, target], arrivals, strict=True)
        ):
            if message(send) != message(receive):
                text = f"{receive} is receive {order} from rank {source}, but that rank's send "
                text += f"{order} to rank {target} is {send}: without tags the messages are swapped"
                _fail(schedule, target, position, text)


def _check_steps(schedule: Schedule) -> None:
    """Reductions and steps, if there are any: one per chunk, after all its weight gradients, and
    the step after the reduction."""
    present = {a.kind for row in schedule.rows for a in row if not a.kind.is_of_a_microbatch}
    for rank, row in enumerate(schedule.rows if present else ()):
        complete = {a.stage: i for i, a in enumerate(row) if a.kind.gives_weight_gradient}
        found: set[tuple[Kind, int]] = set()
        for position, action in enumerate(row):
            if action.kind.is_of_a_microbatch:
                continue
            if (action.kind, action.stage) in found:
                _fail(schedule, rank, position, f"{action} has been done before")
            if position < complete.get(action.stage, 0):
                text = (
                    f"{action} comes before {row[complete[action.stage]]}, whose gradient it needs"
                )
                _fail(schedule, rank, position, text)
            if action.kind is Kind.STEP and (Kind.REDUCE, action.stage) not in found:
                _fail(schedule, rank, position, f"{action} comes before {action.stage}REDUCE")
            found.add((action.kind, action.stage))
        for kind in (Kind.REDUCE, Kind.STEP):
            for stage in schedule.held[rank]:
                if kind in present and (kind, stage) not in found:
                    text = f"{stage}{kind.code} is missing: other chunks have theirs"
                    _fail(schedule, rank, len(row) - 1, text)


def _check_memory(
    schedule: Schedule, peaks: tuple[float, ...], limit: float | Sequence[float] | None
) -> None:
    if limit is None:
        return
    limits = list(limit) if isinstance(limit, Sequence) else [limit] * schedule.ranks
    if len(limits) != schedule.ranks:
        raise ScheduleError(f"memory_limit has {len(limits)} values for {schedule.ranks} ranks")
    over = [
        f"rank {rank} keeps {peak} of {most}"
        for rank, (peak, most) in enumerate(zip(peaks, limits, strict=True))
        if peak > most
    ]
    if over:
        raise ScheduleError(f"{schedule.name}: over the memory limit: {', '.join(over)}")


def _receive_buffers(schedule: Schedule) -> tuple[int, ...]:
    most = []
    for row in schedule.rows:
        waiting = peak = 0
        arrived: set[tuple[bool, int, int]] = set()
        for action in row:
            backward = action.kind.direction < 0
            key = (backward, action.stage, action.microbatch)
            if action.kind.is_recv:
                arrived.add(key)
                waiting += 1
                peak = max(peak, waiting)
            elif (
                action.kind.is_compute
                and key in arrived
                and action.kind is not Kind.BACKWARD_WEIGHT
            ):
                arrived.discard(key)
                waiting -= 1
        most.append(peak)
    return tuple(most)

"""When every action begins and ends, each as early as its row and what it waits for allow.

Two engines. `run`: ranks compute while messages travel. `run_meetings`: the two ranks of a
message meet and both wait until it is through, which needs transfers in the rows and is the
strictest way any transport could work. Both stop where nothing can go on and say where each rank
stands.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pyparallel.schedule.actions import COMPUTE, Action, Kind
from pyparallel.schedule.costs import Costs, StageCosts
from pyparallel.schedule.dependencies import PHASES, crosses, phase, predecessor
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.units import Message, Unit, message, units

__all__ = ["Timeline", "durations", "run", "run_meetings"]

_LONGEST_RATIO = 2**20  # how much shorter than the longest pass a pass may be where none may be 0


@dataclass(frozen=True)
class Timeline:
    """Times of the actions, position by position of the schedule's rows.

    Attributes:
        starts, ends: per rank; shorter than the row where the rank got stuck.
        stuck: the (rank, position) where each rank that did not finish stands; empty when all did.
    """

    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]
    stuck: tuple[tuple[int, int], ...]


def durations(costs: StageCosts) -> dict[Kind, tuple[float, ...]]:
    """Kind -> time by stage, of everything that keeps a rank busy."""
    return {
        Kind.FORWARD: costs.forward,
        Kind.BACKWARD: costs.backward,
        Kind.BACKWARD_INPUT: costs.backward_input,
        Kind.BACKWARD_WEIGHT: costs.backward_weight,
        Kind.REDUCE: costs.reduce,
        Kind.STEP: costs.step,
    }


def run(schedule: Schedule, costs: Costs, positive: bool = False) -> Timeline:
    """Times where messages travel beside the passes. Transfers in the rows keep no rank waiting;
    with `costs.issue` they take their rank's time, and a message leaves once it has been issued.

    Args:
        positive: no pass takes 0: a pass then begins after everything it waits for has ended, and
            before anything that waits for it begins.
    """
    of_stage = costs.for_stages(schedule.stages)
    busy = durations(of_stage)
    if positive:
        longest = max((max(times) for times in busy.values()), default=0)
        floor = longest / _LONGEST_RATIO or 1
        busy = {kind: tuple(max(t, floor) for t in times) for kind, times in busy.items()}
    issue = of_stage.issue if schedule.has_transfers else 0
    rows = [_compile(schedule, rank, busy, of_stage.hop, issue) for rank in range(schedule.ranks)]

    passes = (PHASES + 2) * schedule.stages * schedule.microbatches  # and sends, either way
    done: list[float | None] = [None] * passes
    at = [0] * schedule.ranks
    clock: list[float] = [0] * schedule.ranks
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    waiting: dict[int, int] = {}  # pass -> the rank that stands before an action that needs it
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        keys, needs, delays, takes, joins = rows[rank]
        starting, ending = starts[rank], ends[rank]
        i, now, count = at[rank], clock[rank], len(keys)
        while i < count:
            begin = now
            last = i + 1 if joins[i] else i
            j = i
            while j <= last:
                need = needs[j]
                if need >= 0:
                    arrived = done[need]
                    if arrived is None:
                        waiting[need] = rank
                        break
                    arrived += delays[j]
                    if arrived > begin:
                        begin = arrived
                j += 1
            if j <= last:
                break
            now = begin + (costs.pair(takes[i], takes[last]) if last > i else takes[i])
            while i <= last:
                starting.append(begin)
                ending.append(now)
                key = keys[i]
                if key >= 0:
                    done[key] = now
                    if key in waiting:
                        ready.append(waiting.pop(key))
                i += 1
        at[rank], clock[rank] = i, now
    if schedule.has_transfers and not issue:
        return _with_messages(schedule, starts, ends, of_stage.hop)
    stuck = tuple((r, at[r]) for r, row in enumerate(schedule.rows) if at[r] < len(row))
    return Timeline(tuple(starts), tuple(ends), stuck)


Compiled = tuple[list[int], list[int], list[float], list[float], list[bool]]


def _compile(
    schedule: Schedule,
    rank: int,
    busy: dict[Kind, tuple[float, ...]],
    hop: tuple[float, ...],
    issue: float,
) -> Compiled:
    """For each action of a row that keeps the rank busy: its pass, the pass it needs, how long
    that one's message travels, its own time, and whether the next action runs with it. Passes are
    numbers, -1 for none; where transfers take time, sends are such passes, after the others."""
    stages, microbatches = schedule.stages, schedule.microbatches
    placement = schedule.placement
    # By kind and stage, what predecessor() says: (pass, its number's offset, stages hopped over).
    rules = {
        (kind, stage): (phase(kind), predecessor(kind, stage, stages))
        for kind in COMPUTE
        for stage in schedule.held[rank]
        if 0 <= stage < stages
    }
    keys: list[int] = []
    needs: list[int] = []
    delays: list[float] = []
    takes: list[float] = []
    joins: list[bool] = []
    for position, (_, kind, stage, microbatch, _, joined) in enumerate(schedule.rows[rank]):
        if kind.is_transfer:
            if issue:
                forward = kind.direction > 0
                keys.append(
                    ((PHASES + forward) * stages + stage) * microbatches + microbatch
                    if kind.is_send
                    else -1
                )
                needs.append(-1)
                delays.append(0)
                takes.append(issue)
                joins.append(False)
            continue
        if not (0 <= stage < stages and microbatch < microbatches):
            raise ScheduleError(
                f"{schedule.name}: {schedule.rows[rank][position]} on rank {rank}: stages are 0 to "
                f"{stages - 1}, microbatches 0 to {microbatches - 1}",
                rank,
                position,
            )
        key = need = -1
        delay: float = 0
        rule = rules.get((kind, stage))
        if rule is not None:
            key = (rule[0] * stages + stage) * microbatches + microbatch
            if rule[1] is not None:
                need_phase, need_stage = rule[1]
                need = (need_phase * stages + need_stage) * microbatches + microbatch
                if need_stage != stage and placement.get((need_stage, microbatch)) != rank:
                    delay = hop[min(need_stage, stage)]
                    if issue:
                        sent = PHASES + (need_stage < stage)
                        need = (sent * stages + need_stage) * microbatches + microbatch
        keys.append(key)
        needs.append(need)
        delays.append(delay)
        takes.append(busy[kind][stage])
        joins.append(joined)
    if joins and joins[-1]:
        raise ScheduleError(
            f"{schedule.name}: the last action of rank {rank} runs with a next one: there is none",
            rank,
            len(schedule.rows[rank]) - 1,
        )
    return keys, needs, delays, takes, joins


def _with_messages(
    schedule: Schedule,
    starts: list[list[float]],
    ends: list[list[float]],
    hop: tuple[float, ...],
) -> Timeline:
    """Puts the transfers among the times of the others: a message leaves as its sender's pass
    ends."""
    left: dict[Message, float] = {}
    for row, ending in zip(schedule.rows, ends, strict=True):
        computed = (action for action in row if not action.kind.is_transfer)
        for action, end in zip(computed, ending, strict=False):
            if crosses(action, schedule.stages):
                send = Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT
                left[send, action.stage, action.microbatch] = end
    all_starts, all_ends, stuck = [], [], []
    for rank, row in enumerate(schedule.rows):
        times = iter(zip(starts[rank], ends[rank], strict=True))
        starting: list[float] = []
        ending = []
        for action in row:
            if not action.kind.is_transfer:
                span = next(times, None)
            else:
                sent = left.get(message(action))
                span = None if sent is None else (sent, sent + _hop_of(action, hop))
            if span is None:
                stuck.append((rank, len(starting)))
                break
            starting.append(span[0])
            ending.append(span[1])
        all_starts.append(starting)
        all_ends.append(ending)
    return Timeline(tuple(all_starts), tuple(all_ends), tuple(stuck))


def run_meetings(schedule: Schedule, costs: Costs) -> Timeline:
    """Times where the ranks of a message meet and wait until it is through.

    Messages of one meeting travel at once, in both directions; it takes as long as the longest.
    """
    of_stage = costs.for_stages(schedule.stages)
    busy = durations(of_stage)
    rows = units(schedule)
    done: dict[tuple[int, int, int], float] = {}
    at = [0] * schedule.ranks
    clock: list[float] = [0] * schedule.ranks
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]

    def finish(rank: int, unit: Unit, begin: float, end: float) -> None:
        starts[rank] += [begin] * len(unit.actions)
        ends[rank] += [end] * len(unit.actions)
        clock[rank] = end
        at[rank] += 1

    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(rows[rank]):
            unit = rows[rank][at[rank]]
            if unit.partner is not None:
                other = unit.partner
                if at[other] == len(rows[other]) or rows[other][at[other]].meeting != unit.meeting:
                    break  # whichever comes second goes on for both
                begin = max(clock[rank], clock[other])
                takes = of_stage.issue + max(_hop_of(a, of_stage.hop) for a in unit.actions)
                finish(other, rows[other][at[other]], begin, begin + takes)
                finish(rank, unit, begin, begin + takes)
                ready.append(other)
                continue
            if not _has_what_it_needs(unit, schedule.stages, done):
                break
            times = [busy[action.kind][action.stage] for action in unit.actions]
            takes = times[0] if len(times) == 1 else costs.pair(times[0], times[1])
            for action in unit.actions:
                if action.kind.is_compute:
                    done[phase(action.kind), action.stage, action.microbatch] = clock[rank] + takes
            finish(rank, unit, clock[rank], clock[rank] + takes)
    stuck = tuple((r, len(starts[r])) for r, row in enumerate(rows) if at[r] < len(row))
    return Timeline(tuple(starts), tuple(ends), stuck)


def _has_what_it_needs(unit: Unit, stages: int, done: Mapping[tuple[int, int, int], float]) -> bool:
    for action in unit.actions:
        if action.kind.is_compute:
            need = predecessor(action.kind, action.stage, stages)
            if need is not None and (*need, action.microbatch) not in done:
                return False
    return True


def _hop_of(transfer: Action, hop: tuple[float, ...]) -> float:
    """How long a transfer's message travels: over the boundary after its stage, or before it."""
    _, sender, _ = message(transfer)
    return hop[sender if transfer.kind.direction > 0 else sender - 1]

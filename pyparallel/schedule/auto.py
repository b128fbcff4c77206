"""A schedule made for given times: uneven stages, slow links, a memory limit per rank.

List scheduling: the ranks are played forward in time, and whenever one is free it takes the best
action that is ready, by a fixed order of preference. A few orders are played, and the named
schedules that have the same places and fit the memory are tried as well; the shortest step wins.
So the result is never worse than those, and it is the same on every rank that has the same costs.
To schedule dynamically is to call this again with times measured meanwhile.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from math import inf
from typing import NamedTuple

from pyparallel.schedule.actions import Action, Kind, Place
from pyparallel.schedule.costs import Costs, StageCosts
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.generate import FAMILIES, generate
from pyparallel.schedule.memory import peak_bytes
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.simulate import simulate
from pyparallel.schedule.timing import durations

__all__ = ["auto_schedule"]


def auto_schedule(
    ranks: int,
    microbatches: int,
    costs: Costs,
    *,
    chunks: int = 1,
    layout: str = "loop",
    memory_limit: float | Sequence[float] | None = None,
    halves: bool = True,
    barrier: bool = True,
) -> Schedule:
    """The shortest schedule found for these costs, compute only, called "auto".

    Args:
        ranks, microbatches: p and m, one or more.
        costs: what the actions of each of the ranks * chunks stages take.
        chunks: v, stages per rank.
        layout: "loop": rank i holds stages i, p + i, 2p + i, ...; "v": there and back, stages i,
            2p - 1 - i, 2p + i, ...
        memory_limit: bytes each rank has (one number, or one per rank), for `static_bytes` and what
            microbatches keep. None: no limit.
        halves: backward may be taken in two halves. False: whole backwards only.
        barrier: the step ends on all ranks at once, so what counts is the step time; False: ranks
            go on by themselves, what counts is the longest span of one.

    Raises:
        ScheduleError: a choice that gives no schedule, with what would: the least memory, for one.
    """
    problem = _Problem.of(ranks, microbatches, costs, chunks, layout, memory_limit, halves)

    def cost(schedule: Schedule) -> tuple[float, float]:
        result = simulate(schedule, costs)
        times = result.step_time, max(result.span)
        return times if barrier else times[::-1]

    played = (_play(problem, order) for order in _orders(problem))
    return min((*played, *_named(problem)), key=cost)


@dataclass(frozen=True)
class _Problem:
    costs: Costs
    stage_costs: StageCosts
    places: tuple[tuple[Place, ...], ...]  # by rank, then chunk
    at: tuple[Place, ...]  # by stage
    microbatches: int
    limits: tuple[float, ...]  # for what microbatches keep
    halves: bool

    @classmethod
    def of(
        cls,
        ranks: int,
        microbatches: int,
        costs: Costs,
        chunks: int,
        layout: str,
        memory_limit: float | Sequence[float] | None,
        halves: bool,
    ) -> "_Problem":
        for name, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
            if value < 1:
                raise ScheduleError(f"auto: {value} {name}: allowed are 1, 2, 3, ...; nearest 1.")
        if layout not in ("loop", "v"):
            raise ScheduleError(f"auto: layout {layout!r}: allowed are 'loop' and 'v'.")
        places = tuple(tuple(_places(r, ranks, chunks, layout)) for r in range(ranks))
        stage_costs = costs.for_stages(ranks * chunks)
        for s, (kept, left) in enumerate(
            zip(stage_costs.activation_bytes, stage_costs.weight_bytes, strict=True)
        ):
            if left > kept:
                raise ScheduleError(
                    f"auto: stage {s} keeps {left} bytes for its weight half and {kept} before: "
                    "an input half must not need memory; weight_bytes <= activation_bytes works."
                )
        return cls(
            costs,
            stage_costs,
            places,
            tuple(sorted((p for row in places for p in row), key=lambda place: place.stage)),
            microbatches,
            _limits(places, stage_costs, memory_limit),
            halves,
        )


def _places(rank: int, ranks: int, chunks: int, layout: str) -> Iterator[Place]:
    for c in range(chunks):
        back = layout == "v" and c % 2
        yield Place(rank, c * ranks + (ranks - 1 - rank if back else rank), c)


def _limits(
    places: Sequence[Sequence[Place]], costs: StageCosts, limit: float | Sequence[float] | None
) -> tuple[float, ...]:
    """What each rank has for microbatches, once its stages' own bytes are taken off."""
    if limit is None:
        return (inf,) * len(places)
    limits = list(limit) if isinstance(limit, Sequence) else [limit] * len(places)
    if len(limits) != len(places):
        raise ScheduleError(f"auto: memory_limit has {len(limits)} values for {len(places)} ranks.")
    misfits = []
    for rank, (row, most) in enumerate(zip(places, limits, strict=True)):
        least = sum(costs.static_bytes[p.stage] + costs.activation_bytes[p.stage] for p in row)
        if most < least:
            misfits.append(f"rank {rank} has {most}, one microbatch needs {least}")
    if misfits:
        raise ScheduleError(f"auto: memory_limit is too small: {'; '.join(misfits)}.")
    return tuple(
        most - sum(costs.static_bytes[p.stage] for p in row)
        for row, most in zip(places, limits, strict=True)
    )


def _named(problem: _Problem) -> Iterator[Schedule]:
    """The named schedules with the same places that fit, under the name of "auto"."""
    p, v = len(problem.places), len(problem.places[0])
    for name, family in FAMILIES.items():
        if family.chunks not in (None, v) or (family.even_ranks and p % 2):
            continue
        schedule = generate(name, p, problem.microbatches, chunks=v)
        held = tuple(tuple(place.stage for place in row) for row in problem.places)
        if schedule.held != held or (not problem.halves and _has_halves(schedule)):
            continue
        peaks = peak_bytes(schedule, problem.stage_costs._replace(
            static_bytes=(0,) * (p * v)))  # fmt: skip
        if all(peak <= most for peak, most in zip(peaks, problem.limits, strict=True)):
            yield Schedule("auto", schedule.rows, schedule.stages, schedule.microbatches, held)


def _has_halves(schedule: Schedule) -> bool:
    return any(action.kind is Kind.BACKWARD_WEIGHT for row in schedule.rows for action in row)


class _Order(NamedTuple):
    """An order of preference.

    Attributes:
        backward_first: of a forward and a backward that are both ready, take the backward.
        lazy: leave weight halves until nothing else is ready, or memory is short.
        ahead: begin at most `ahead` times as many microbatches as 1F1B has in flight.
        patience: so many backwards of a rank are waited for, rather than begin something else while
            they are on their way. The first one matters most: it ends the fill of all ranks before.
    """

    backward_first: bool
    lazy: bool
    ahead: int
    patience: int


def _orders(problem: _Problem) -> Iterable[_Order]:
    ahead = (1, 2, problem.microbatches)
    lazy = (True, False) if problem.halves else (False,)
    return starmap(_Order, product((True, False), lazy, ahead, (0, 1)))


class _Rank:
    """One rank while it is played: what is ready, what is kept, what has been taken."""

    def __init__(self, problem: _Problem, rank: int, order: _Order) -> None:
        self.problem = problem
        self.places = problem.places[rank]
        self.limit = problem.limits[rank]
        self.order = order
        self.most = order.ahead * (len(problem.places) - rank) + (order.ahead > 1)
        self.row: list[Action] = []
        self.free: float = 0
        self.taken = 0  # backwards
        self.kept: float = 0
        # (time, negative or positive stage, microbatch) of passes whose input has come or is on
        # its way
        self.forwards: list[tuple[float, int, int]] = []
        self.backwards: list[tuple[float, int, int]] = []
        self.weights: list[tuple[int, int]] = []  # (stage, microbatch), oldest first
        self.left: dict[int, int] = {}  # microbatch -> its passes to come on this rank, once begun
        self.begun: dict[int, int] = {}  # microbatch -> chunks it has been forward through
        self.holds: dict[int, float] = {}  # microbatch -> what of `kept` is its

    def admits(self, stage: int, microbatch: int) -> bool:
        """True if the forward's memory is there, and afterwards the microbatches can still finish
        one after another, oldest first, each with what the ones before it have given back: so
        nothing waits for memory for ever (Dijkstra's banker). Younger ones than this could finish
        before, and find no less when it has finished."""
        costs = self.problem.stage_costs.activation_bytes
        if microbatch not in self.left and len(self.left) >= self.most:
            return False
        if self.limit == inf:
            return True
        free = self.limit - self.kept - costs[stage]
        if free < 0:
            return False
        for j in sorted({*self.left, microbatch}):
            done = self.begun.get(j, 0) + (j == microbatch)
            if sum(costs[place.stage] for place in self.places[done:]) > free:
                return False
            if j == microbatch:
                break
            free += self.holds[j]
        return True

    def choose(self, now: float) -> Action | float | None:
        """The action to take now; else the time at which to look again; else None."""
        costs = self.problem.stage_costs
        backward = min(
            ((stage, j) for when, stage, j in self.backwards if when <= now), default=None
        )
        coming = min((when for when, _, _ in self.backwards if when > now), default=None)
        patient = backward is None and self.taken < self.order.patience
        limit = coming if patient else None
        forward = self._ready_forward(now)
        if forward and limit is not None and now + costs.forward[forward[0]] > limit:
            forward = None
        may_weigh = self.weights and (
            limit is None or now + costs.backward_weight[self.weights[0][0]] <= limit
        )
        if may_weigh and not self.order.lazy:
            return self._take_weight()
        choices = (backward, forward) if self.order.backward_first else (forward, backward)
        for chosen in choices:
            if chosen is not None:
                return self._take(chosen, chosen is backward)
        if may_weigh:
            return self._take_weight()
        others = (when for when, _, _ in (*self.forwards, *self.backwards) if when > now)
        return min(others, default=None)

    def _ready_forward(self, now: float) -> tuple[int, int] | None:
        """The deepest forward that is ready and admitted: it frees memory soonest."""
        ready = sorted((-stage, j) for when, stage, j in self.forwards if when <= now)
        for negative, j in ready:
            if self.admits(-negative, j):
                return -negative, j
        return None

    def _take(self, chosen: tuple[int, int], is_backward: bool) -> Action:
        stage, j = chosen
        place = self.problem.at[stage]
        waiting = self.backwards if is_backward else self.forwards
        waiting.remove(next(entry for entry in waiting if entry[1:] == chosen))
        costs = self.problem.stage_costs
        if not is_backward:
            self._keep(j, costs.activation_bytes[stage])
            self.left.setdefault(j, 2 * len(self.places))
            self.begun[j] = self.begun.get(j, 0) + 1
            self.left[j] -= 1
            return place.F(j)
        self.taken += 1
        if self.problem.halves:
            self._keep(j, costs.weight_bytes[stage] - costs.activation_bytes[stage])
            self.weights.append(chosen)
            return place.I(j)
        self._keep(j, -costs.activation_bytes[stage])
        self._finish(j)
        return place.B(j)

    def _take_weight(self) -> Action:
        stage, j = self.weights.pop(0)
        self._keep(j, -self.problem.stage_costs.weight_bytes[stage])
        self._finish(j)
        return self.problem.at[stage].W(j)

    def _keep(self, microbatch: int, more: float) -> None:
        self.kept += more
        self.holds[microbatch] = self.holds.get(microbatch, 0) + more

    def _finish(self, microbatch: int) -> None:
        self.left[microbatch] -= 1
        if not self.left[microbatch]:
            del self.left[microbatch], self.holds[microbatch]


def _play(problem: _Problem, order: _Order) -> Schedule:
    """The ranks played forward in time with one order of preference."""
    costs = problem.stage_costs
    ranks = [_Rank(problem, r, order) for r in range(len(problem.places))]
    stages, takes = len(problem.at), durations(costs)
    ranks[0].forwards = [(0, 0, j) for j in range(problem.microbatches)]
    events: list[tuple[float, int]] = [(0, 0)]
    while events:
        now, r = heapq.heappop(events)
        rank = ranks[r]
        if now < rank.free:
            continue  # busy: it looks again when it is done
        chosen = rank.choose(now)
        if chosen is None:
            continue  # what arrives wakes it
        if not isinstance(chosen, Action):
            heapq.heappush(events, (chosen, r))
            continue
        rank.row.append(chosen)
        _, kind, s, j, _, _ = chosen
        rank.free = now + takes[kind][s]
        heapq.heappush(events, (rank.free, r))
        if kind is Kind.BACKWARD_WEIGHT:
            continue
        forward = kind is Kind.FORWARD
        turns = forward and s == stages - 1
        target = s if turns else s + kind.direction
        if target < 0:
            continue
        owner = problem.at[target].rank
        arrives = rank.free
        if owner != r:
            rank.free += costs.issue
            arrives = rank.free + costs.hop[min(s, target)]
            heapq.heappush(events, (rank.free, r))
        waiting = ranks[owner].forwards if forward and not turns else ranks[owner].backwards
        waiting.append((arrives, target, j))
        heapq.heappush(events, (arrives, owner))
    schedule = Schedule.from_rows("auto", (rank.row for rank in ranks))
    assert all(not rank.left for rank in ranks), "every microbatch that began has ended"
    assert schedule.stages == stages
    assert schedule.microbatches == problem.microbatches
    return schedule

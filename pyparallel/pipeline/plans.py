"""Plans made ready to run: proved and cut into units, once for each."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace

from pyparallel.schedule import Kind, Schedule, Unit, generate, units, validate
from pyparallel.schedule.dependencies import crosses

__all__ = ["Plans", "Ready", "nearest"]

_KEPT = 16
_FORWARD = (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)


@dataclass(frozen=True)
class Ready:
    """A plan that has been proved.

    Attributes:
        plan: what runs: the plan as given, or its forward passes.
        units: per rank, what it issues together.
        digest: equal plans have equal ones.
        halves: it has backwards in halves.
    """

    plan: Schedule
    units: tuple[tuple[Unit, ...], ...]
    digest: int
    halves: bool


class Plans:
    """The last plans that ran. They are told apart by identity: a plan is a constant."""

    def __init__(self) -> None:
        self._ready: OrderedDict[tuple[int, bool], tuple[Schedule, Ready]] = OrderedDict()

    def ready(self, plan: Schedule, training: bool) -> Ready:
        """
        Raises:
            ScheduleError: it cannot run (`validate`).
            ValueError: it lacks transfers.
        """
        key = (id(plan), training)
        if key in self._ready and self._ready[key][0] is plan:
            self._ready.move_to_end(key)
            return self._ready[key][1]
        ready = _prove(plan, training)
        self._ready[key] = (plan, ready)
        while len(self._ready) > _KEPT:
            self._ready.popitem(last=False)
        return ready


def _prove(plan: Schedule, training: bool) -> Ready:
    validate(plan)
    if not plan.has_transfers:
        for rank, row in enumerate(plan.rows):
            for action in row:
                if action.kind.is_compute and crosses(action, plan.stages):
                    step = 1 if action.kind is Kind.FORWARD else -1
                    other = plan.placement[action.stage + step, action.microbatch]
                    if other != rank:
                        raise ValueError(
                            f"{plan.name}: the result of {action} is used on rank {other}, and "
                            "nothing sends it there: run with_transfers(plan)"
                        )
    runs = plan if training else _forward_only(plan)
    text = repr((runs.rows, runs.stages, runs.microbatches, runs.held))
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    halves = any(a.kind is Kind.BACKWARD_INPUT for row in runs.rows for a in row)
    return Ready(runs, units(runs), int.from_bytes(digest, "little"), halves)


def _forward_only(plan: Schedule) -> Schedule:
    """The forward passes and their messages, in the plan's order. They wait for nothing else."""
    rows = tuple(
        tuple(action._replace(with_next=False) for action in row if action.kind in _FORWARD)
        for row in plan.rows
    )
    return replace(plan, rows=rows)


def nearest(plan: Schedule, microbatches: int) -> str:
    """How to come to a plan for that many microbatches."""
    try:
        chunks = len(plan.held[0])
        generate(plan.name, plan.ranks, microbatches, chunks=chunks)
    except ValueError:
        return f"a plan with microbatches={microbatches}"
    return (
        f"with_transfers(generate({plan.name!r}, ranks={plan.ranks}, "
        f"microbatches={microbatches}, chunks={chunks}))"
    )

"""What a rank keeps, action by action. It follows from the row's order alone, whatever passes
take."""

from collections.abc import Iterable, Iterator

from pyparallel.schedule.actions import Action, Kind
from pyparallel.schedule.costs import StageCosts
from pyparallel.schedule.schedule import Schedule

__all__ = ["kept_after", "peak_bytes", "peak_in_flight"]


def kept_after(row: Iterable[Action], costs: StageCosts) -> Iterator[float]:
    """Bytes kept once each action of a row has begun: a forward takes its activations, an input
    half keeps what its weight half needs, and the end of the backward frees all.

    A backward frees after it has run, so what counts at its beginning is what was there before it.
    """
    kept: float = 0
    activation, weight = costs.activation_bytes, costs.weight_bytes
    for action in row:
        stage = action.stage
        if action.kind is Kind.FORWARD:
            kept += activation[stage]
        elif action.kind is Kind.BACKWARD:
            kept -= activation[stage]
        elif action.kind is Kind.BACKWARD_INPUT:
            kept += weight[stage] - activation[stage]
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept -= weight[stage]
        yield kept


def peak_bytes(schedule: Schedule, costs: StageCosts) -> tuple[float, ...]:
    """The most each rank keeps at once, with what its stages keep always."""
    return tuple(
        sum(costs.static_bytes[stage] for stage in held) + max(kept_after(row, costs), default=0)
        for row, held in zip(schedule.rows, schedule.held, strict=True)
    )


def peak_in_flight(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Per rank and chunk, the most microbatches between forward and backward (or input half) at
    once: how many sets of activations an executor has to hold."""
    peaks = []
    for row, held in zip(schedule.rows, schedule.held, strict=True):
        now = dict.fromkeys(held, 0)
        most = dict(now)
        for action in row:
            if action.kind is Kind.FORWARD:
                now[action.stage] += 1
                most[action.stage] = max(most[action.stage], now[action.stage])
            elif action.kind.is_backward:
                now[action.stage] -= 1
        peaks.append(tuple(most[stage] for stage in held))
    return tuple(peaks)

"""A simulated step in the trace event format that Perfetto and chrome://tracing open."""

from typing import Any

from pyparallel.schedule import Simulation
from pyparallel.schedule.units import message

__all__ = ["chrome_trace"]

_MICROSECONDS = 1e6


def chrome_trace(simulation: Simulation, unit: float = 1.0) -> dict[str, Any]:
    """The step as trace events: a process per rank with one line of passes and one of messages,
    and an arrow from each send to its receive.

    Args:
        unit: seconds per unit of the simulation's times (the format counts microseconds).

    Returns:
        what `json.dump` writes; messages appear where the schedule has transfers.
    """
    if not unit > 0:
        raise ValueError(f"unit={unit}: seconds per unit of time, above 0")
    events: list[dict[str, Any]] = []
    arrows: dict[tuple[Any, ...], int] = {}
    for rank, spans in enumerate(simulation.spans):
        held = ", ".join(map(str, simulation.schedule.held[rank]))
        events.append(_named("process_name", rank, 0, f"rank {rank}, stages {held}"))
        events.append(_named("thread_name", rank, 0, "passes"))
        if any(span.action.kind.is_transfer for span in spans):
            events.append(_named("thread_name", rank, 1, "messages"))
        for span in spans:
            action = span.action
            start, end = float(span.start * unit), float(span.end * unit)
            common = {"pid": rank, "tid": int(action.kind.is_transfer)}
            events.append(
                {
                    "name": str(action).rstrip("+"),
                    "cat": "message" if action.kind.is_transfer else action.kind.name.lower(),
                    "ph": "X",
                    "ts": start * _MICROSECONDS,
                    "dur": (end - start) * _MICROSECONDS,
                    **common,
                    "args": {
                        "stage": action.stage,
                        "microbatch": action.microbatch,
                        "chunk": action.chunk,
                        "kind": action.kind.name,
                    },
                }
            )
            if action.kind.is_transfer:
                number = arrows.setdefault(message(action), len(arrows))
                arrow = {"name": "message", "cat": "message", "id": number, **common}
                if action.kind.is_send:
                    events.append({**arrow, "ph": "s", "ts": start * _MICROSECONDS})
                else:
                    events.append({**arrow, "ph": "f", "bp": "e", "ts": end * _MICROSECONDS})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, rank: int, line: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": line, "args": {"name": name}}

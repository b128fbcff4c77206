"""Where every pass of a simulated step stands in a timeline: what SVG and PNG draw alike."""

from typing import NamedTuple

from pyparallel.schedule import Kind, Simulation, Span

__all__ = ["COLOURS", "EDGED", "LEGEND", "Box", "boxes", "lanes"]

# Light enough for black text, apart from each other in grey as well.
COLOURS = {
    Kind.FORWARD: "#9ecae9",
    Kind.BACKWARD: "#f0a868",
    Kind.BACKWARD_INPUT: "#f9d5ad",
    Kind.BACKWARD_WEIGHT: "#a8d08d",
    Kind.REDUCE: "#d0b5e8",
    Kind.STEP: "#c8c8c8",
}
LEGEND = (
    (Kind.FORWARD, "forward"),
    (Kind.BACKWARD, "backward"),
    (Kind.BACKWARD_INPUT, "backward for the input"),
    (Kind.BACKWARD_WEIGHT, "backward for the weight"),
    (Kind.REDUCE, "reduction"),
    (Kind.STEP, "optimizer step"),
)
EDGED = 3  # pixels: of narrower boxes an edge would be all that is seen


class Box(NamedTuple):
    """A rectangle: which rank's line, from when to when, which part of the line's height.

    Attributes:
        rank: the line.
        start, end: times.
        top, bottom: 0 to 1 of the line's height; halves where two passes run together.
        label: the microbatch, or the code of what is of none.
        colour: by kind.
        chunk: later chunks are drawn darker.
        title: the action in full, with its times.
    """

    rank: int
    start: float
    end: float
    top: float
    bottom: float
    label: str
    colour: str
    chunk: int
    title: str


def boxes(simulation: Simulation) -> list[Box]:
    """All passes, reductions and steps that take time, rank by rank."""
    out: list[Box] = []
    for rank, spans in enumerate(simulation.spans):
        second = False
        for span in spans:
            if span.action.kind in COLOURS and span.end > span.start:
                top, bottom = 0.0, 1.0
                if span.action.with_next:
                    bottom = 0.5
                elif second:
                    top = 0.5
                out.append(_box(rank, span, top, bottom))
            second = span.action.with_next
    return out


def _box(rank: int, span: Span, top: float, bottom: float) -> Box:
    action = span.action
    label = str(action.microbatch) if action.kind.is_of_a_microbatch else action.kind.code
    title = (
        f"{str(action).rstrip('+')} on rank {rank}: "
        f"{float(span.start):.6g} to {float(span.end):.6g}"
    )
    return Box(
        rank,
        float(span.start),
        float(span.end),
        top,
        bottom,
        label,
        _darker(COLOURS[action.kind], action.chunk),
        action.chunk,
        title,
    )


def _darker(colour: str, chunk: int) -> str:
    """A tenth less light per chunk, down to half."""
    share = max(1 - 0.15 * chunk, 0.5)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part * share):02x}" for part in parts)


def lanes(simulation: Simulation) -> list[str]:
    """The label of each rank's line, with its stages."""
    return [
        f"rank {rank}: stage{'s' * (len(held) > 1)} {', '.join(map(str, held))}"
        for rank, held in enumerate(simulation.schedule.held)
    ]

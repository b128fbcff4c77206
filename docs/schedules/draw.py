"""Draws the pictures of docs/schedules.md: `python docs/schedules/draw.py` writes them anew."""

from collections.abc import Iterator
from pathlib import Path

from pyparallel.schedule import FAMILIES, Costs, auto_schedule, generate, simulate
from pyparallel.viz import timeline_svg

FOLDER = Path(__file__).parent
UNEVEN = Costs(
    forward=(3, 4, 5, 3),
    backward_input=(4, 1, 5, 2),
    backward_weight=(1, 1, 2, 4),
)


def drawings() -> Iterator[tuple[str, str]]:
    """(file name, SVG) of every schedule on 4 ranks with 8 microbatches, equal passes."""
    for name in FAMILIES:
        yield f"{name}.svg", timeline_svg(simulate(generate(name, 4, 8)))
    for name in ("1f1b", "zb-h1"):
        yield f"{name}-uneven.svg", timeline_svg(simulate(generate(name, 4, 8), UNEVEN))
    yield "auto-uneven.svg", timeline_svg(simulate(auto_schedule(4, 8, UNEVEN), UNEVEN))


if __name__ == "__main__":
    for file, svg in drawings():
        (FOLDER / file).write_text(svg)

"""A timeline as PNG, drawn by matplotlib, which is loaded only for it."""

import io
import textwrap

from pyparallel.schedule import Simulation
from pyparallel.viz.boxes import COLOURS, EDGED, LEGEND, boxes, lanes
from pyparallel.viz.plotting import matplotlib
from pyparallel.viz.svg import default_title

__all__ = ["timeline_png"]

_OTHERWISE = ", or write an SVG, which needs nothing"
_LETTER = 8  # pixels a character needs


def timeline_png(simulation: Simulation, title: str | None = None, width: int = 960) -> bytes:
    """The picture of `timeline_svg` as the bytes of a PNG file.

    Raises:
        ImportError: matplotlib is not installed; it says how to get it, and that SVG needs nothing.
    """
    figures, patches = (matplotlib(name, _OTHERWISE) for name in ("figure", "patches"))
    ranks = simulation.schedule.ranks
    figure = figures.Figure(figsize=(width / 100, 1 + 0.28 * ranks), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    step = float(simulation.step_time) or 1.0
    for box in boxes(simulation):
        corner = (box.start, box.rank + 0.08 + box.top * 0.84)
        size = box.end - box.start, (box.bottom - box.top) * 0.84
        line = 0.5 if size[0] * width > EDGED * step else 0
        axes.add_patch(
            patches.Rectangle(
                corner, *size, facecolor=box.colour, edgecolor="#555555", linewidth=line
            )
        )
        if size[0] * width > _LETTER * len(box.label) * step:
            middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
            axes.text(*middle, box.label, ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_xlim(0, step)
    axes.set_ylim(ranks, 0)
    axes.set_yticks([rank + 0.5 for rank in range(ranks)], labels=lanes(simulation))
    heading = textwrap.fill(default_title(simulation) if title is None else title, width // 7)
    figure.suptitle(heading, x=0.01, ha="left", fontsize=9)
    used = {action.kind for row in simulation.schedule.rows for action in row}
    handles = [
        patches.Patch(facecolor=COLOURS[kind], edgecolor="#555555", label=meaning)
        for kind, meaning in LEGEND
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()

"""A timeline as SVG, written out by hand: no dependency, and the same bytes for the same
simulation."""

from xml.sax.saxutils import escape

from pyparallel.schedule import Simulation
from pyparallel.viz.boxes import COLOURS, EDGED, LEGEND, Box, boxes, lanes

__all__ = ["timeline_svg"]

_LINE = 24  # height of a rank's line
_LEFT = 130  # width of the labels
_TOP = 28
_LEGEND = 26
_EDGE = ' class="b"'
_LETTER = 6.2  # width of a character at 10 px


def timeline_svg(simulation: Simulation, title: str | None = None, width: int = 960) -> str:
    """A picture of a simulated step: a line per rank, a box per pass with its microbatch in it.

    Args:
        title: above the picture; by default the schedule's name with its sizes, step time and idle
            share.
        width: of the whole picture, in pixels.

    Pointing at a box shows its action and times. Chunks after the first are darker. Passes that run
    together share a line's height.
    """
    if width <= _LEFT:
        raise ValueError(f"width={width}: the labels alone take {_LEFT} pixels")
    step = float(simulation.step_time) or 1.0
    scale = (width - _LEFT - 10) / step
    ranks = simulation.schedule.ranks
    drawn = boxes(simulation)
    height = _TOP + ranks * (_LINE + 4) + _LEGEND
    heading = escape(default_title(simulation) if title is None else title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">',
        f"<title>{heading}</title>",
        "<style>.b{stroke:#555555;stroke-width:0.5}.m{text-anchor:middle}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="16" font-size="12">{heading}</text>',
    ]
    for rank, label in enumerate(lanes(simulation)):
        y = _TOP + rank * (_LINE + 4)
        parts.append(f'<text x="4" y="{y + 16}">{escape(_cut(label, _LEFT - 8))}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{_number(step * scale)}" height="{_LINE}" '
            'fill="#f2f2f2"/>'
        )
    parts += [_drawn(box, scale) for box in drawn]
    parts += _legend(simulation, height - _LEGEND + 8)
    return "\n".join([*parts, "</svg>"]) + "\n"


def default_title(simulation: Simulation) -> str:
    """Name, sizes, step time and idle share, in a line."""
    schedule = simulation.schedule
    return (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, "
        f"{schedule.microbatches} microbatches; step {float(simulation.step_time):.6g}, "
        f"idle {100 * float(simulation.bubble_share):.1f} %"
    )


def _drawn(box: Box, scale: float) -> str:
    x, w = _LEFT + box.start * scale, (box.end - box.start) * scale
    y = _TOP + box.rank * (_LINE + 4) + box.top * _LINE
    h = (box.bottom - box.top) * _LINE
    text = ""
    if w >= _LETTER * len(box.label) + 1 and h >= 10:
        text = (
            f'<text x="{_number(x + w / 2)}" y="{_number(y + h / 2 + 3.5)}" '
            f'class="m">{escape(box.label)}</text>'
        )
    return (
        f'<g><title>{escape(box.title)}</title><rect x="{_number(x)}" y="{_number(y)}" '
        f'width="{_number(w)}" height="{_number(h)}" fill="{box.colour}"'
        f"{_EDGE if w > EDGED else ''}/>{text}</g>"
    )


def _legend(simulation: Simulation, y: int) -> list[str]:
    """The kinds that occur, side by side."""
    used = {action.kind for row in simulation.schedule.rows for action in row}
    parts, x = [], float(_LEFT)
    for kind, meaning in LEGEND:
        if kind in used:
            parts.append(
                f'<rect x="{_number(x)}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}" '
                f'class="b"/>'
                f'<text x="{_number(x + 16)}" y="{y + 10}">{meaning}</text>'
            )
            x += 34 + _LETTER * len(meaning)
    return parts


def _cut(text: str, width: float) -> str:
    most = int(width / _LETTER)
    return text if len(text) <= most else text[: most - 1] + "…"


def _number(value: float) -> str:
    """Two decimals, without what says nothing: the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")

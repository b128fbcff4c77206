"""Who holds which rows of a sequence, and who computes which scores, as SVG."""

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

__all__ = ["sharding_svg"]

_CELL = 14
_LEFT = 40
_TOP = 64
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")


def sharding_svg(owners: Sequence[int], visible: Callable[[int, int], bool], title: str) -> str:
    """A square of scores, query by key, in the colours of the ranks that hold the queries.

    Args:
        owners: the rank that holds each row, in the order of the sequence.
        visible: whether a query sees a key, by their rows.
        title: above the picture.

    Along the top and the left are the rows' owners; below, how many scores each rank computes.
    """
    rows, ranks = len(owners), max(owners, default=0) + 1
    width = max(_LEFT + rows * _CELL + 10, 330)
    height = _TOP + rows * _CELL + 16 + 18 * ((ranks + 3) // 4)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="16" font-size="12">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="36">keys</text>',
        f'<text x="4" y="{_TOP + 10}">queries</text>',
    ]
    work = [0] * ranks
    for row, owner in enumerate(owners):
        colour = _colour(owner)
        at = row * _CELL
        parts.append(_square(_LEFT + at, _TOP - 20, colour, f"row {row}: rank {owner}"))
        parts.append(_square(_LEFT - 20, _TOP + at, colour, f"row {row}: rank {owner}"))
        for key in range(rows):
            if visible(row, key):
                work[owner] += 1
                what = f"rank {owner}: query {row}, key {key} of rank {owners[key]}"
                x = _LEFT + key * _CELL
                parts.append(_square(x, _TOP + at, colour, what, owners[key] != owner))
    for rank, count in enumerate(work):
        x = _LEFT - 20 + rank % 4 * 76
        y = _TOP + rows * _CELL + 12 + 18 * (rank // 4)
        parts.append(_square(x, y, _colour(rank), f"rank {rank}"))
        parts.append(f'<text x="{x + 18}" y="{y + 10}">rank {rank}: {count}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]


def _square(x: int, y: int, colour: str, title: str, pale: bool = False) -> str:
    """Pale: the key is another rank's, and travels."""
    faded = ' fill-opacity="0.45"' if pale else ""
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" fill="{colour}"{faded}>'
        f"<title>{escape(title)}</title></rect>"
    )

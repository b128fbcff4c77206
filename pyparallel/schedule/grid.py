"""A schedule as a grid of text: a line per rank, a column per position, a faulty cell marked."""

from pyparallel.schedule.schedule import Schedule

__all__ = ["grid"]

_AROUND = 6  # columns shown on each side of a marked cell
_LINES = 8  # and lines


def grid(schedule: Schedule, rank: int | None = None, position: int | None = None) -> str:
    """The rows as text; with `rank` and `position`, the part around that cell, marked as `>cell<`.

    Without them everything is shown, however wide.
    """
    columns = range(max(map(len, schedule.rows), default=0))
    lines = range(schedule.ranks)
    if rank is not None and position is not None:
        columns = range(max(position - _AROUND, 0), min(position + _AROUND + 1, len(columns)))
        lines = range(max(rank - _LINES, 0), min(rank + _LINES + 1, len(lines)))
    cells = [
        [
            "" if c >= len(schedule.rows[r])
            else f">{schedule.rows[r][c]}<" if (r, c) == (rank, position)
            else f" {schedule.rows[r][c]} "
            for c in columns
        ]
        for r in lines
    ]  # fmt: skip
    header = [f" {c} " for c in columns]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    label = len(f"rank {schedule.ranks - 1}")
    out = [_line("position".ljust(label), header, widths)]
    out += [
        _line(f"rank {r}".ljust(label), row, widths) for r, row in zip(lines, cells, strict=True)
    ]
    return "\n".join(out)


def _line(label: str, cells: list[str], widths: list[int]) -> str:
    return (
        label.ljust(8) + "".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True))
    ).rstrip()

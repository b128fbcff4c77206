"""Published tables beside the code, and what a comparison with one value of them is."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "planner"
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    """The rows of a table, by column; lines that begin with # are its source and notes."""
    with (FOLDER / f"{name}.csv").open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def source(name: str) -> str:
    """The source that a table names in its first line."""
    first = (FOLDER / f"{name}.csv").read_text().splitlines()[0]
    return first.removeprefix("# source: ")


@dataclass(frozen=True)
class Compared:
    """One published value and ours.

    Attributes:
        label: which one.
        published, ours: in `unit`.
        counted: whether it is held to the bound; `note` says why not.
        points: the error is a difference (of percentages), not a share of the published value.
    """

    label: str
    published: float
    ours: float
    unit: str
    note: str = ""
    counted: bool = True
    points: bool = False

    @property
    def error(self) -> float:
        """Signed: percent of the published value, or points."""
        if self.points:
            return self.ours - self.published
        return 100 * (self.ours / self.published - 1)


@dataclass(frozen=True)
class Group:
    """Rows of one kind with their bound.

    Attributes:
        worst, mean: bounds of the absolute errors; None without one.
        said: what is assumed, what was fitted, what was chosen after the rows were seen.
    """

    title: str
    table: str
    rows: tuple[Compared, ...]
    worst: float | None
    mean: float | None = None
    said: str = ""

    @property
    def counted(self) -> list[Compared]:
        return [row for row in self.rows if row.counted]

    @property
    def worst_error(self) -> float:
        return max((abs(row.error) for row in self.counted), default=0.0)

    @property
    def mean_error(self) -> float:
        counted = self.counted
        return sum(abs(row.error) for row in counted) / len(counted) if counted else 0.0

    @property
    def bias(self) -> float:
        counted = self.counted
        return sum(row.error for row in counted) / len(counted) if counted else 0.0

    def problems(self) -> list[str]:
        """Bounds that do not hold."""
        found = []
        if self.worst is not None and self.worst_error > self.worst:
            found.append(f"{self.title}: worst {self.worst_error:.2f}, bound {self.worst:g}")
        if self.mean is not None and self.mean_error > self.mean:
            found.append(f"{self.title}: mean {self.mean_error:.2f}, bound {self.mean:g}")
        return found

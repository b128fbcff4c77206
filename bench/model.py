"""`python -m bench model`: the model of pyparallel.ops beside published measurements.

No rank is started and nothing is timed. Exit status 1 where the model says win for a loss, or turns
the order of a library's shapes round, more often than it may (the limits below).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.published import (
    FITTED,
    LIBRARIES,
    OTHER,
    READING_ERROR,
    Compared,
    compared,
    misordered,
    rank_correlation,
    rows,
)

TITLE = "Predicted against published: unfused time over fused time"
LEAST_RIGHT = 0.8  # of all rows: win or lose
LEAST_CORRELATION = 0.9  # of ranks, within a library


def by(items: Sequence[Compared], *fields: str) -> dict[str, list[Compared]]:
    """Groups of rows that agree in these fields, in order of appearance."""
    found: dict[str, list[Compared]] = {}
    for item in items:
        key = " ".join(str(getattr(item.row, name)) for name in fields)
        found.setdefault(key, []).append(item)
    return found


def correlation(items: Sequence[Compared]) -> float:
    return rank_correlation([c.row.ratio for c in items], [c.ratio for c in items])


def problems(items: Sequence[Compared]) -> list[str]:
    """What the model gets wrong beyond its limits; empty when it may be trusted as far as these."""
    found = []
    right = sum(c.agrees for c in items) / len(items)
    if right < LEAST_RIGHT:
        found.append(f"win or lose is right on {right:.0%} of rows; want {LEAST_RIGHT:.0%}")
    for key, group in by(items, "library", "hardware", "op").items():
        found += [f"order of {key}: {a} before {b}" for a, b in misordered(group)]
    for key, group in by(items, "library").items():
        if correlation(group) < LEAST_CORRELATION:
            found.append(f"{key}: rank correlation {correlation(group):.2f}")
    return found


def report(console: Console, _out: Path | None = None) -> list[str]:
    """Prints every row; gives what is wrong beyond the limits."""
    inside = [compared(row) for row in rows()]
    outside = [compared(row) for row in OTHER]
    console.print(_table(inside, f"{TITLE} (bench/data/fused_gemm_published.csv)"))
    console.print(_table(outside, "Rows outside of that file (bench/published.py)"))
    for name, group in (("in the file", inside), ("outside", outside)):
        right = sum(c.agrees for c in group)
        console.print(f"win or lose right, {name}: {right} of {len(group)}")
    for key, group in by(inside, "library").items():
        console.print(
            f"{key}: rank correlation {correlation(group):.2f} over {len(group)} rows; pairs "
            f"turned round across ops: {len(misordered(group))}"
        )
    console.print(
        "In-sample: one set of costs per library and op was fitted on the rows of the file; pairs "
        f"closer than the reading error ({READING_ERROR}) have no order.",
        style="dim",
    )
    for what, on in FITTED.items():
        console.print(Text(f"fitted, {what}: {on}", style="dim"))
    for (library, op), design in LIBRARIES.items():
        text = f"{library} {op}: {design.summary} [{design.source}]"
        console.print(Text(text, style="dim"))
    found = problems(inside)
    for problem in found:
        console.print(Text(problem, style="bold red"))
    return found


def _table(items: Sequence[Compared], title: str) -> Table:
    out = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for name in ("library", "machine", "op", "M x N x K"):
        out.add_column(name, no_wrap=True)
    for name in ("published", "predicted", "unfused us", "fused us"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("why", overflow="fold")
    for c in items:
        row = c.row
        sizes = "x".join(str(s) for s in (row.m, row.n, row.k) if s is not None)
        style = "green" if c.agrees else "bold red"
        out.add_row(
            row.library,
            f"{row.hardware} x{row.world}",
            row.op.replace("matmul", "mm"),
            sizes,
            f"{row.ratio:.2f}",
            Text(f"{c.ratio:.2f}", style=style),
            f"{c.unfused.us + c.beside_us:.0f}",
            f"{c.fused.us + c.beside_us:.0f}",
            c.why,
        )
    return out

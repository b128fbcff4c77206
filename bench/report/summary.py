"""The end of a run: what a reader who scrolls no further should know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.case import SHORT, Outcome, Row
from bench.stats import geometric_mean
from bench.targets import GROUP_GOALS, missed, target

WORST = 5  # rows named


def margin(row: Row) -> float:
    """How far a row is from its goal, as a ratio: under 1 misses it."""
    return (row.speedup or 0.0) / (target(row) or 1.0)


def worst(rows: Sequence[Row]) -> list[Row]:
    """The rows that are wrong, then those that miss their goal or come closest to it."""
    wrong = [row for row in rows if not row.verified]
    held = sorted((r for r in rows if r.verified and r.speedup and target(r)), key=margin)
    return [*wrong, *held][: max(WORST, len(wrong))]


def show_summary(outcome: Outcome, files: Sequence[Path], console: Console) -> None:
    """Rows verified, goals met and missed, the worst rows, the problems, the files, the verdict."""
    console.print()
    if outcome.rows:
        console.print(_suites(outcome.rows))
    for goal in GROUP_GOALS:
        found = goal.found(outcome.rows)
        if found is not None:
            kind = "green" if found >= goal.least else "yellow"
            text = f"{goal.name}: {found:.2f}x together (goal {goal.least:g})"
            console.print(Text(text, style=kind))
    rows = worst(outcome.rows)
    if rows:
        console.print("worst rows:")
    for row in rows:
        console.print(Text(f"  {_line(row)}", style=_style(row)))
    for problem in outcome.problems:
        console.print(Text(problem.splitlines()[0], style="bold red"))
    if files:
        console.print(f"written: {', '.join(str(path) for path in files)}", soft_wrap=True)
    seconds = outcome.meta.get("seconds")
    console.print(
        Text(
            f"verdict: {'all verified' if outcome.ok else 'FAILED'}"
            + (f", {seconds:.0f} s" if seconds else ""),
            style="bold green" if outcome.ok else "bold red",
        )
    )


def _suites(rows: Sequence[Row]) -> Table:
    out = Table(title="Summary", title_justify="left", header_style="bold", pad_edge=False)
    for name in ("suite", "peer", "ranks"):
        out.add_column(name, no_wrap=True)
    for name in ("rows", "verified", "goals met", "missed", "mean", "least"):
        out.add_column(name, justify="right", no_wrap=True)
    keys = dict.fromkeys((row.suite, row.peer, row.world_size) for row in rows)
    for key in keys:
        some = [row for row in rows if (row.suite, row.peer, row.world_size) == key]
        ratios = [row.speedup for row in some if row.speedup]
        short = sum(map(missed, some))
        goals = sum(target(row) is not None for row in some if row.speedup)
        right = sum(row.verified for row in some)
        out.add_row(
            key[0],
            key[1],
            str(key[2]),
            str(len(some)),
            Text(str(right), style="green" if right == len(some) else "bold red"),
            str(goals - short),
            Text(str(short), style="yellow" if short else "dim"),
            f"{geometric_mean(ratios):.2f}x" if ratios else "-",
            f"{min(ratios):.2f}x" if ratios else "-",
        )
    return out


def _line(row: Row) -> str:
    what = f"{row.suite} {row.op} {row.size_text} {SHORT[row.dtype]} x{row.world_size}"
    if not row.verified:
        return f"{what}, {row.api}: NOT VERIFIED: {row.note}"
    return f"{what}, {row.api} against {row.peer}: {row.speedup:.2f}x (goal {target(row):g})"


def _style(row: Row) -> str:
    if not row.verified:
        return "bold red"
    return "yellow" if missed(row) else "dim"

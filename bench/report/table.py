"""The table on the terminal: a line per op, size and dtype, a column per door and peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.case import SHORT, Outcome, Row, Summary
from bench.stats import geometric_mean
from bench.targets import missed, target

_DOORS = {"torch.distributed": "torch"}  # a narrower word for the terminal


def format_us(value: float) -> str:
    if value < 10:
        return f"{value:.2f}"
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.3g} ms"


def format_error(row: Row) -> str:
    if row.error is None:
        return "-"
    return f"{row.error:.1e} / {row.error_bound:.1e}" if row.error_bound or row.error else "exact"


def _timing(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    spread = f"{format_us(summary.p10)}..{format_us(summary.p90)}"
    return f"{format_us(summary.median)} [dim]({spread})[/dim]"


def _speedup(row: Row) -> Text:
    if not row.verified:
        return Text("NOT VERIFIED", style="bold red")
    if row.speedup is None:
        return Text("-", style="dim")
    goal = target(row)
    style = "green" if goal is None or row.speedup >= goal else "yellow"
    missed = f" (goal {goal:g})" if goal is not None and row.speedup < goal else ""
    return Text(f"{row.speedup:.2f}x{missed}", style=style)


def in_order(rows: Sequence[Row]) -> list[Row]:
    ops = {op: i for i, op in enumerate(dict.fromkeys(r.op for r in rows))}
    return sorted(rows, key=lambda r: (ops[r.op], r.dtype == "bfloat16", _extent(r), r.api))


def _extent(row: Row) -> list[int]:
    """What rows of an op are sorted by: bytes, or the sizes of a shape that has a text."""
    return row.shape if row.size else [row.bytes]


def columns(rows: Sequence[Row]) -> list[str]:
    """Names of the figures that stand between size and times, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.parts))


def figure(row: Row, name: str) -> str:
    """One of these: a percentage, a size, or microseconds."""
    if name not in row.parts:
        return "-"
    value = row.parts[name]
    if name.endswith("MB"):
        return f"{value:.3g}"
    if name.endswith("tok/s"):
        return f"{value:,.0f}"
    return f"{value:.0f} %" if name.endswith("%") else format_us(value)


def table(rows: Sequence[Row], title: str) -> Table:
    """Rows with figures of their own leave room for them: one door, and medians without spread."""
    out = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    figures = columns(rows)
    for name in ("op", "size", "dtype", *(() if figures else ("called",))):
        out.add_column(name, no_wrap=True)
    spread = "" if figures else " us (p10..p90)"
    times = [f"ours{spread}", f"peer{spread}", "speed-up"]
    for name in (*figures, *times, "of bound" if figures else "error / bound"):
        out.add_column(name, justify="right", no_wrap=True)
    last = ""
    for row in in_order(rows):
        if last and row.op != last:
            out.add_section()
        out.add_row(
            row.op if row.op != last else "",
            row.size_text,
            SHORT[row.dtype] if row.bytes else "",
            *(() if figures else (_DOORS.get(row.api, row.api),)),
            *(figure(row, name) for name in figures),
            *(_median(us) if figures else _timing(us) for us in (row.ours_us, row.peer_us)),
            _speedup(row),
            _of_bound(row) if figures else format_error(row),
        )
        last = row.op
    return out


def _median(summary: Summary | None) -> str:
    return "-" if summary is None else format_us(summary.median)


def _of_bound(row: Row) -> str:
    if row.error is None or not row.error_bound:
        return "-"
    return f"{100 * row.error / row.error_bound:.0f} %"


def summary_line(rows: Sequence[Row]) -> str:
    timed = [row.speedup for row in rows if row.speedup]
    wrong = sum(not row.verified for row in rows)
    text = f"{len(rows)} rows, {wrong} not verified"
    if timed:
        mean, least = geometric_mean(timed), min(timed)
        text += f"; speed-up {mean:.2f}x (geometric mean), {least:.2f}x (least)"
    return text + f"; {sum(map(missed, rows))} below their goal (bench/targets.py)"


def load_note(meta: Mapping[str, Any]) -> str:
    """Says that other programs seem to have had a share of the cores; "" where not."""
    machine = meta.get("machine", {})
    load, cores = machine.get("load_at_start", 0.0), machine.get("usable_cores") or 1
    if load <= cores / 2:
        return ""
    return (
        f"load {load:.1f} on {cores} cores at the start: unless a build had just ended, other "
        "programs had a share of the cores, and small calls and ratios may be far off"
    )


def groups(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows by peer and world size, in order of appearance."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.peer, row.world_size), []).append(row)
    return found


def show(outcome: Outcome, console: Console) -> None:
    for (peer, world), rows in groups(outcome.rows).items():
        console.print()
        console.print(table(rows, f"ours against {peer}, {world} ranks"))
        console.print(summary_line(rows))
        notes = dict.fromkeys(f"{row.op}: {row.note}" for row in rows if row.note)
        for note in notes:
            console.print(Text(note, style="dim"))
    for problem in outcome.problems:
        console.print(Text(problem, style="bold red"))
    if note := load_note(outcome.meta):
        console.print(Text(f"\n{note}", style="yellow"))
    machine = outcome.meta.get("machine", {})
    versions = ", ".join(f"{k} {v}" for k, v in outcome.meta.get("versions", {}).items())
    console.print()
    console.print(
        Text(f"{machine.get('cpu')}, {machine.get('cores')} cores; {versions}", style="dim")
    )

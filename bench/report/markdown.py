"""Tables for docs/performance.md: `python -m bench.report.markdown RESULT.json..` prints them.

So that the numbers of the page are those of the files beside it, and nobody types any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.case import SHORT, Outcome, Row, Summary, format_bytes
from bench.report.json import read_json
from bench.report.table import columns, figure, format_us, groups, in_order
from bench.stats import geometric_mean
from bench.targets import target


def result(path: Path) -> str:
    """One results file as a section: conditions, the goals, every row."""
    outcome = read_json(path)
    meta = outcome.meta
    machine = meta["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    parts = [
        f"`{meta['command']}` at commit {meta['commit']}, {meta['date'][:10]}: {machine['cpu']}, "
        f"{machine['cores']} cores{' (virtual)' if machine['virtual'] else ''}, "
        f"load {machine['load_at_start']:.1f} at the start; {versions}.",
    ]
    if any(row.peer == "gloo" and not row.busy for row in outcome.rows):
        parts.append(goals(outcome))
    for (peer, world), rows in groups(outcome.rows).items():
        parts.append(f"**Against {peer}, {world} ranks{', busy cores' if rows[0].busy else ''}**")
        parts.append(rows_table(rows))
    return "\n\n".join(parts)


def goals(outcome: Outcome) -> str:
    """The issue's table: what was wanted, and the least that was found."""
    rows = [r for r in outcome.rows if r.peer == "gloo" and r.speedup and not r.busy]
    near = [r for r in rows if not r.crowded]
    lines = [["", "direct API", "through torch.distributed"]]
    for size in (4 << 10, 256 << 10, 64 << 20):
        some = [r for r in near if (r.op, r.bytes, r.dtype) == ("all_reduce", size, "float32")]
        lines.append([f"all_reduce {format_bytes(size)} fp32", *_doors(some)])
    others = [r for r in near if r.op != "all_reduce"]
    small, large = "any other op, under 1 MB", "any other op, 1 MB and more"
    lines.append([small, *_doors([r for r in others if r.bytes < 1 << 20])])
    lines.append([large, *_doors([r for r in others if r.bytes >= 1 << 20])])
    crowd = [r for r in rows if r.crowded]
    lines.append(["more ranks than cores, any op and size", *_doors(crowd)])
    return _table(lines)


def _doors(rows: Sequence[Row]) -> list[str]:
    cells = []
    for api in ("direct", "torch.distributed"):
        mine = [r for r in rows if r.api == api]
        if not mine:
            cells.append("not measured")
            continue
        least = min(mine, key=lambda r: (r.speedup or 0) / (target(r) or 1))
        mean = geometric_mean([r.speedup for r in mine if r.speedup])
        text = f"{least.speedup:.1f}x (goal {target(least) or 1:g}x)"
        if len(mine) > 1:
            what = f"{least.op} {least.size_text} {SHORT[least.dtype]}"
            text = f"mean {mean:.1f}x, least {text}: {what}"
        cells.append(text)
    return cells


def rows_table(rows: Sequence[Row]) -> str:
    figures = columns(rows)
    times = ["ours us (p10..p90)", "peer us (p10..p90)", "ratio"]
    lines = [["op", "size", "dtype", "called", *figures, *times]]
    for row in in_order(rows):
        ratio = f"{row.speedup:.2f}x" if row.speedup else "-"
        goal = target(row)
        if row.speedup and goal and row.speedup < goal:
            ratio = f"**{ratio}** (goal {goal:g})"
        between = [figure(row, name) for name in figures]
        times = [_timing(row.ours_us), _timing(row.peer_us)]
        start = [row.op, row.size_text, SHORT[row.dtype], row.api]
        lines.append([*start, *between, *times, ratio])
    return _table(lines)


def _timing(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    p10, p90 = format_us(summary.p10), format_us(summary.p90)
    return f"{format_us(summary.median)} ({p10}..{p90})"


def _table(lines: Iterable[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"### {Path(name).name}\n\n{result(Path(name))}\n")

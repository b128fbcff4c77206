"""One HTML page with everything in it: no script, no font, no file or address beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.case import SHORT, Outcome, Row, Summary
from bench.report.plots import Chart
from bench.report.table import (
    columns,
    figure,
    format_error,
    format_us,
    groups,
    in_order,
    load_note,
    summary_line,
)
from bench.targets import target

_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
  color: #1c2321; background: #fdfdfb }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
table { border-collapse: collapse; width: 100%; font: 13px sans-serif;
  font-variant-numeric: tabular-nums }
th { text-align: left; border-bottom: 2px solid #444; padding: .3rem .5rem }
td { padding: .2rem .5rem; border-bottom: 1px solid #e4e4de }
td.n, th.n { text-align: right } .dim { color: #777 }
.good { color: #0b6e4f; font-weight: 600 } .low { color: #a86400; font-weight: 600 }
.bad { color: #b00020; font-weight: 700 }
svg { width: 100%; height: auto } details { margin: 1rem 0 }
dt { font-weight: 600 } dd { margin: 0 0 .4rem 1rem }
"""


def page(outcome: Outcome, drawn: Sequence[Chart]) -> str:
    verdict = "all rows verified" if outcome.ok else "FAILED: see the marked rows and problems"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>pyparallel benchmark</title><style>{_STYLE}</style></head><body>",
        "<h1>pyparallel against its peers</h1>",
        f'<p class="{"good" if outcome.ok else "bad"}">{verdict}</p>',
        *(f'<pre class="bad">{escape(problem)}</pre>' for problem in outcome.problems),
        *(f'<p class="low">{escape(note)}</p>' for note in [load_note(outcome.meta)] if note),
        _conditions(outcome),
    ]
    for chart in drawn:
        parts.append(f"<h2>{escape(chart.title)}</h2>{chart.svg}")
    for (peer, world), rows in groups(outcome.rows).items():
        parts.append(f"<h2>Ours against {escape(peer)}, {world} ranks</h2>")
        parts.append(f"<p>{escape(summary_line(rows))}</p>{_table(in_order(rows))}")
    return "\n".join([*parts, "</body></html>\n"])


def _conditions(outcome: Outcome) -> str:
    meta = outcome.meta
    facts = {
        "command": meta.get("command"),
        "date": meta.get("date"),
        "commit": meta.get("commit"),
        "machine": ", ".join(f"{k} {_plain(v)}" for k, v in meta.get("machine", {}).items()),
        "versions": ", ".join(f"{k} {v}" for k, v in meta.get("versions", {}).items()),
        "method": meta.get("method"),
    }
    body = "".join(f"<dt>{k}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items() if v)
    return f"<details open><summary>Conditions</summary><dl>{body}</dl></details>"


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(rows: Sequence[Row]) -> str:
    heads, figures = ["op", "size", "dtype", "called"], columns(rows)
    numbers = [*figures, "ours us", "p10..p90", "peer us", "p10..p90", "speed-up", "error / bound"]
    head = "".join(f"<th>{h}</th>" for h in heads)
    head += "".join(f'<th class="n">{h}</th>' for h in numbers) + "<th>note</th>"
    lines = []
    for row in rows:
        text = [row.op, row.size_text, SHORT[row.dtype], row.api]
        cells = "".join(f"<td>{escape(t)}</td>" for t in text)
        cells += "".join(f'<td class="n">{escape(figure(row, f))}</td>' for f in figures)
        for summary in (row.ours_us, row.peer_us):
            cells += f'<td class="n">{_median(summary)}</td>'
            cells += f'<td class="n dim">{_spread(summary)}</td>'
        cells += _speedup(row) + f'<td class="n dim">{format_error(row)}</td>'
        cells += f'<td class="dim">{escape(row.note)}</td>'
        lines.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _median(summary: Summary | None) -> str:
    return format_us(summary.median) if summary else "-"


def _spread(summary: Summary | None) -> str:
    return f"{format_us(summary.p10)}..{format_us(summary.p90)}" if summary else ""


def _speedup(row: Row) -> str:
    if not row.verified:
        return '<td class="n bad">NOT VERIFIED</td>'
    if row.speedup is None:
        return '<td class="n dim">-</td>'
    goal = target(row)
    kind = "good" if goal is None or row.speedup >= goal else "low"
    missed = f" (goal {goal:g})" if kind == "low" else ""
    return f'<td class="n {kind}">{row.speedup:.2f}x{missed}</td>'

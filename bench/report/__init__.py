"""Turns an Outcome into what people read: bench.json, a table, plots, one HTML page."""

from __future__ import annotations

from pathlib import Path

from bench.case import Outcome
from bench.report.html import page
from bench.report.json import write_json
from bench.report.plots import charts


def write(outcome: Outcome, folder: Path) -> list[Path]:
    """Writes bench.json first, so that a failure to draw loses no figure. Gives the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [write_json(outcome, folder / "bench.json")]
    drawn = charts(outcome.rows)
    for chart in drawn:
        written.append(folder / f"{chart.name}.png")
        written[-1].write_bytes(chart.png)
    written.append(folder / "bench.html")
    written[-1].write_text(page(outcome, drawn))
    return written

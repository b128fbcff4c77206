"""The four views of a plan as figures for papers: PNG or SVG, drawn by matplotlib, which is loaded
only here (the timeline's SVG needs nothing)."""

import io
from collections.abc import Sequence
from typing import Any

from pyparallel.planner import Plan
from pyparallel.planner.clusters import GIB
from pyparallel.viz.plotting import matplotlib
from pyparallel.viz.png import timeline_png
from pyparallel.viz.svg import timeline_svg
from pyparallel.viz.views import compare, overview, simulated, trend

__all__ = ["VIEWS", "plan_figure"]

VIEWS = ("overview", "flow", "compare", "trend")
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac",
            "#eeca3b", "#ff9da6")  # fmt: skip
_ACROSS = 64  # devices in a line of the grid, at most


def plan_figure(view: str, plan: Plan, others: Sequence[Plan] = (), form: str = "png") -> bytes:
    """One view of a plan as the bytes of a PNG or SVG file.

    Args:
        view: a member of `VIEWS`.
        others: for "compare", the layouts beside it.
        form: "png" or "svg".

    Raises:
        ValueError: another view or form.
        ImportError: matplotlib is not installed; it says how to get it.
    """
    if view not in VIEWS or form not in ("png", "svg"):
        raise ValueError(
            f"view {view!r}, form {form!r}: views are {', '.join(VIEWS)}, forms png and svg"
        )
    title = f"{plan.job.model.name}: {plan.layout.label}"
    if view == "flow":
        # As many as show the beginning, the rhythm and the end in a line of print.
        result, shown = simulated(plan, most=max(2 * plan.layout.pp + 4, 12))
        total = plan.layout.microbatches(plan.job)
        heading = title + (f" (first {shown} of {total} microbatches)" if shown < total else "")
        if form == "svg":
            return timeline_svg(result, heading).encode()
        return timeline_png(result, heading)
    figures, style = matplotlib("figure", ""), matplotlib("", "")
    drawn = {"overview": _overview, "compare": _compare, "trend": _trend}[view]
    out = io.BytesIO()
    # Text stays text, and the same plan gives the same bytes.
    with style.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pyparallel", "font.size": 9}):
        figure = figures.Figure(dpi=150, layout="constrained")
        drawn(figure, plan, others)
        figure.suptitle(title, fontsize=10)
        figure.savefig(out, format=form, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def _overview(figure: Any, plan: Plan, others: Sequence[Plan]) -> None:
    data = overview(plan)
    across = min(_ACROSS, data["devices"])
    lines = -(-data["devices"] // across)
    figure.set_size_inches(8, 2.6 + 0.12 * min(lines, 64) + 0.3 * len(data["ranks"]))
    grid, bars = figure.subplots(2, 1, height_ratios=[max(0.1 * lines, 0.6), 2])
    per_rank = data["devices"] // len(data["ranks"])
    for rank in range(data["devices"]):
        colour = _COLOURS[rank // per_rank % len(_COLOURS)]
        x, y = rank % across, rank // across
        grid.add_patch(_square(x, y, colour))
    grid.set_xlim(-0.5, across - 0.5)
    grid.set_ylim(lines - 0.5, -0.5)
    grid.set_yticks([])
    step = max(data["node_size"], across // 8)
    grid.set_xticks(range(0, across, step))
    grid.set_title(f"{data['devices']} devices, coloured by pipeline rank", fontsize=9)
    _stacked(
        bars,
        [f"rank {rank['rank']}" for rank in data["ranks"]],
        [rank["parts"] for rank in data["ranks"]],
        "GiB of one device",
        data["capacity"],
    )


def _square(x: float, y: float, colour: str) -> Any:
    patches = matplotlib("patches", "")
    return patches.Rectangle((x - 0.45, y - 0.45), 0.9, 0.9, facecolor=colour)


def _compare(figure: Any, plan: Plan, others: Sequence[Plan]) -> None:
    entries = compare([plan, *others])
    figure.set_size_inches(9, 2.4 + 0.7 * len(entries))
    times, sizes = figure.subplots(2, 1)
    labels = [entry["label"] for entry in entries]
    _stacked(times, labels, [entry["time"] for entry in entries], "seconds of a step", None)
    capacity = entries[0]["capacity"]
    _stacked(
        sizes, labels, [entry["memory"] for entry in entries], "GiB of the fullest device", capacity
    )


def _stacked(
    axes: Any,
    labels: Sequence[str],
    bars: Sequence[dict[str, float]],
    unit: str,
    capacity: float | None,
) -> None:
    """Horizontal bars of parts, with the capacity as a line."""
    left = [0.0] * len(bars)
    for number, name in enumerate(bars[0]):  # a part has its colour whether or not others are there
        widths = [bar[name] for bar in bars]
        if not any(widths):
            continue
        axes.barh(
            labels,
            widths,
            left=left,
            label=name,
            color=_COLOURS[number % len(_COLOURS)],
            height=0.7,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    if capacity is not None:
        axes.axvline(capacity, color="#b3261e", linewidth=1.5, label="capacity")
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)


def _trend(figure: Any, plan: Plan, others: Sequence[Plan]) -> None:
    curves = trend(plan)
    figure.set_size_inches(9, 6)
    grid = figure.subplots(3, 3, sharex="col", squeeze=False)
    rows = (("rate", "tokens/s per device", 1.0), ("bubble", "bubble (%)", 100.0),
            ("memory", "memory (GiB)", 1.0))  # fmt: skip
    for column, (name, points) in enumerate(curves.items()):
        xs = [point["x"] for point in points]
        for row, (kind, word, scale) in enumerate(rows):
            axes = grid[row][column]
            ys = [scale * p[kind] for p in points]
            axes.plot(xs, ys, "o-", color=_COLOURS[row], markersize=4)
            most = max(ys)
            if kind == "memory":
                capacity = plan.memory.capacity / GIB
                axes.axhline(capacity, color="#b3261e", linewidth=1.5)
                most = max(most, capacity)
                axes.set_xlabel("sequence length" if name == "sequence" else name)
            axes.set_xscale("log", base=2)
            axes.set_xticks(xs[::2], labels=[f"{x:,}" for x in xs[::2]], fontsize=7)
            axes.set_ylim(0, 1.08 * most or 1)
            axes.grid(alpha=0.3)
            if column == 0:
                axes.set_ylabel(word)

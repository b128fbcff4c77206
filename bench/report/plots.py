"""Charts of a run: time over size for each op, and the speed-ups at a glance."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from bench.case import SHORT, Row, format_bytes

_COLORS = {
    "direct": "#0b6e4f",
    "torch.distributed": "#3fa34d",
    "gloo": "#c44536",
    "nccl": "#c44536",
    "mpich": "#7768ae",
    "deepspeed": "#d98e04",
    "limit": "#555555",
    "ops": "#0b6e4f",
}
_LABELS = {
    "ops": "ours, one call",
    "direct": "ours, direct",
    "torch.distributed": "ours, torch.distributed",
}


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    png: bytes
    svg: str


def charts(rows: Sequence[Row]) -> list[Chart]:
    """One overview for each suite, world size and dtype that was timed, and one page of curves."""
    found = []
    keys = {(r.suite, r.world_size, r.dtype): None for r in rows}
    for suite, world, dtype in sorted(keys, key=lambda key: key[1]):
        some = [r for r in rows if (r.suite, r.world_size, r.dtype) == (suite, world, dtype)]
        some = [r for r in some if r.speedup]
        if not some:
            continue
        prefix = "" if suite == "collectives" else f"{suite}_"
        suffix = f"{SHORT[dtype]}_world{world}"
        title = f"{suite}, {SHORT[dtype]}, {world} ranks"
        name = f"{prefix}speedup_{suffix}"
        found.append(_render(name, f"Speed-up, {title}", _overview(some)))
        if any(row.bytes and not row.size for row in some):
            found.append(
                _render(f"{prefix}time_{suffix}", f"Time per call, {title}", _curves(some))
            )
    return found


def _render(name: str, title: str, figure: Figure) -> Chart:
    png, svg = io.BytesIO(), io.StringIO()
    # Text stays text; ids are salted by name, so several drawings may share one page.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.suptitle(title)  # the page has it as a heading, a file stands alone
    figure.savefig(png, format="png", dpi=130)
    plt.close(figure)
    text = svg.getvalue()
    return Chart(name, title, png.getvalue(), text[text.index("<svg") :])


def _overview(rows: Sequence[Row]) -> Figure:
    """Horizontal bars of the speed-up against stock PyTorch, logarithmic."""
    stock = [r for r in rows if r.peer in ("gloo", "nccl")] or list(rows)
    sized = {(r.op, r.size_text): (r.op, r.shape if r.size else [r.bytes]) for r in stock}
    lines = sorted(sized, key=lambda line: sized[line])
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.26 * len(lines)), layout="constrained")
    apis = list(dict.fromkeys(r.api for r in stock))
    shifts = (-0.2, 0.2) if len(apis) > 1 else (0.0,)
    for shift, api in zip(shifts, apis, strict=False):
        mine = {(r.op, r.size_text): r.speedup for r in stock if r.api == api}
        places = [(i + shift, mine[line]) for i, line in enumerate(lines) if mine.get(line)]
        if places:
            y, width = zip(*places, strict=True)
            lengths = [w - 1 for w in width]
            axes.barh(
                y, lengths, height=0.38, left=1, color=_COLORS.get(api), label=_LABELS.get(api, api)
            )
    axes.set_yticks(range(len(lines)))
    axes.set_yticklabels([f"{op} {size}" for op, size in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.axvline(1.0, color="#333333", linewidth=1)
    axes.set_xlabel(f"times as fast as {stock[0].peer} (medians, same run)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _curves(rows: Sequence[Row]) -> Figure:
    ops = [op for op in dict.fromkeys(r.op for r in rows) if op != "barrier"]
    columns = 3
    lines = -(-len(ops) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(11, 2.7 * lines), layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(ops) :]:
        axes.remove()
    for axes, op in zip(grid.flat, ops, strict=False):
        for name, points in _series([r for r in rows if r.op == op]).items():
            sizes, low, middle, high = zip(*sorted(points), strict=True)
            color = _COLORS.get(name)
            axes.plot(
                sizes, middle, marker="o", markersize=3, color=color, label=_LABELS.get(name, name)
            )
            axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_title(op, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({r.bytes for r in rows if r.op == op})
        axes.set_xticks(ticks, [format_bytes(t) for t in ticks], fontsize=6, rotation=30)
        axes.set_xticks([], minor=True)
        axes.tick_params(axis="y", labelsize=7)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("us per call, slowest rank", fontsize=7)
    grid[0][0].legend(fontsize=6)
    return figure


def _series(rows: Sequence[Row]) -> dict[str, list[tuple[int, float, float, float]]]:
    """Points (bytes, p10, median, p90) by contestant; a peer in several rows counts once."""
    found: dict[str, dict[int, tuple[int, float, float, float]]] = {}
    for row in rows:
        for name, us in ((row.api, row.ours_us), (row.peer, row.peer_us)):
            if us:
                found.setdefault(name, {})[row.bytes] = (row.bytes, us.p10, us.median, us.p90)
    return {name: list(points.values()) for name, points in found.items()}

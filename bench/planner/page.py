"""`python -m bench planner`: the planner against published figures: docs/validation.md.

Nothing is started and nothing timed. Exit status 1 where an error is beyond its bound, or an order
is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.planner import afterwards, guide, quantities, rankings, times
from bench.planner.rankings import Order
from bench.planner.tables import Compared, Group, source
from pyparallel.planner import kernels

TITLE = "The planner against published figures"
PAGE = Path(__file__).parents[2] / "docs" / "validation.md"
FITTED = (
    ("`JITTER` = 0.0245 in pyparallel/planner/kernels.py: kernels of a job of N devices take "
     "1 + 0.0245 sqrt(2 ln N) times as long as alone, 1.05 on 8", "the mean by which SimuMax, "
     "which has every kernel's own time, falls short of its 22 measurements on 8 B200; it was not "
     "fitted on errors of this planner, nor on any A100 or H100 row"),
    ("the fp8 share of B200 in hardware.py", "one row, LLAMA3_8B on 8 B200, which is left out "
     "of the errors"),
)  # fmt: skip
CHOSEN = (
    "the growth of that factor with the number of devices, as the slowest of N equal normal "
    "deviates (after the rows of 1000 devices and more, which a constant left 7 to 13 % low)",
    "in fp8 a norm or an activation function casts what it writes, at no cost of its own (after "
    "the fp8 rows)",
    "memory: of every shape of a layer's matrices one bf16 gradient stays allocated; logits and a "
    "layer's temporaries do not add up (after the B200 memory rows)",
    "memory: a plain loss holds 14 bytes a logit, and what recompute by operation keeps (after "
    "torchtitan's rows)",
    "experts: what routing reads and writes, and which inputs are cast to fp8 (counted, not "
    "fitted, after runs of Qwen3; no time changed by more than 2 %)",
    "an unfused attention's products do not hide the traffic of their scores (after the layer "
    "times of 22B)",
    "ZeRO-3 of 2021: one adapter per ring, nothing overlapped (after PTD-P's table 2; held to the "
    "order only)",
)
NOT_PREDICTED = (
    ("megatron_bridge_25_11: GB300", "a device without a published rate of kernels"),
    ("megatron_bridge_25_11: GPT-OSS 120B", "the row contradicts itself (its batch gives 8 "
     "microbatches, its column says 2)"),
    ("megatron_bridge_25_11: Qwen3 30B-A3B", "held to no bound: with the other mixtures below"),
    ("zero_max_model_size: measured columns", "models whose sizes are not printed"),
    ("torchtitan_async_tp, ultrascale_scaling: absolute rates", "recomputation, or the model, is "
     "not printed; used for their order"),
    ("torchtitan's H100 of 2024: times, and tables 4 to 6", "devices of 500 W and 2.4 TB/s, whose "
     "peak is not known; with tensor parallelism or a pipeline the plan, which counts Megatron's "
     "buffers, is 6 to 21 % below its memory"),
    ("models: rows without a preset", "sizes only; nothing to predict"),
    ("zero_bubble_bubble_rates", "pass times are not printed; order and size are held by "
     "tests/schedule/test_bubble_rates.py"),
    ("fused_gemm_published", "`python -m bench model`"),
)  # fmt: skip


def report(console: Console, _out: Path | None = None) -> list[str]:
    """Prints every row, writes the page and the guide in docs, and gives what is wrong."""
    made = quantities.groups()
    timed = times.groups()
    orders = rankings.orders(timed)
    plain = _without_fitted()
    for group in made + timed:
        console.print(_table(group))
    for order in orders:
        console.print(f"{order.title}: {order.right} of {order.pairs} pairs in order")
    wrong = problems(made + timed, orders)
    PAGE.write_text("\n".join(page(made, timed, orders, plain)) + "\n")
    guide.GUIDE.write_text(guide.refreshed(guide.GUIDE.read_text()))
    console.print(f"written: {PAGE}, {guide.GUIDE}")
    for line in wrong:
        console.print(f"[bold red]{line}")
    return wrong


def problems(groups: list[Group], orders: list[Order]) -> list[str]:
    """Bounds that do not hold, orders that are wrong."""
    found = [line for group in groups for line in group.problems()]
    found += [f"{order.title}: {', '.join(order.wrong)}" for order in orders if order.wrong]
    return found


def _without_fitted() -> list[Group]:
    """Step times with the fitted factor left out."""
    saved, kernels.JITTER = kernels.JITTER, 0.0
    try:
        return times.groups()
    finally:
        kernels.JITTER = saved


def _table(group: Group) -> Table:
    table = Table(title=f"{group.title} ({group.table})")
    for column in ("", "published", "planner", "error"):
        table.add_column(column, justify="left" if not column else "right")
    for row in group.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Compared) -> tuple[str, str, str, str]:
    unit = "points" if row.points else "%"
    error = f"{row.error:+.2f} {unit}"
    if not row.counted:
        error = f"({error})"
    return row.label, f"{row.published:.6g}", f"{row.ours:.6g} {row.unit}".strip(), error


def page(
    made: list[Group], timed: list[Group], orders: list[Order], plain: list[Group]
) -> Iterator[str]:
    """docs/validation.md."""
    yield "# The planner against published figures"
    yield ""
    yield "Made by `python -m bench planner`, which recomputes every row; do not edit. Errors are"
    yield "signed: above zero where the planner says more than was published. Tables with their"
    yield "sources: bench/data/planner."
    yield ""
    yield "| what | rows | mean | worst | bias | bound |"
    yield "|---|---|---|---|---|---|"
    for group in made + timed:
        yield _summary(group)
    right, pairs = sum(o.right for o in orders), sum(o.pairs for o in orders)
    yield f"| Orders: what is faster | {pairs} pairs | | {pairs - right} wrong | | 0 wrong |"
    yield ""
    count, held = sum(len(g.rows) for g in made + timed), sum(len(g.counted) for g in made + timed)
    steps = [abs(row.error) for group in timed for row in group.counted]
    yield f"{count} values, {held} of them held to a bound. All {len(steps)} times together:"
    yield f"mean {sum(steps) / len(steps):.1f} %, worst {max(steps):.1f} %."
    yield "(mean and worst of absolute errors, in percent or points; bias: mean of the signed ones)"
    yield ""
    yield "## Fitted, and chosen after the fact"
    for what, how in FITTED:
        yield f"- Fitted: {what}: {how}."
    for what in CHOSEN:
        yield f"- Structure chosen after the rows were seen: {what}."
    yield ""
    yield "Everything else is a specification, a kernel's or a link's rate that somebody published"
    yield "apart from these rows, or an assumption; hardware.py and kernels.py name each."
    yield "Without the fitted factor the step times are:"
    yield ""
    yield "| what | mean | worst | bias |"
    yield "|---|---|---|---|"
    for group in plain:
        yield (
            f"| {group.title} | {group.mean_error:.1f} % | {group.worst_error:.1f} % | "
            f"{group.bias:+.1f} % |"
        )
    yield ""
    loose, mixtures = afterwards.unfused(), afterwards.mixtures()
    yield "## Not held to a bound"
    short, over_all = -_mean(loose, 4096), -_mean(loose)
    yield f"{len(loose.rows)} runs of FSDP in eager PyTorch (below) took longer than"
    yield f"planned: the plan is {short:.0f} % below them in the mean up to 4096 tokens, and"
    yield f"{over_all:.0f} % over all. So much do unfused passes cost, and that time's attention."
    yield ""
    errors = [row.error for row in mixtures.rows]
    yield f"{len(errors)} runs of mixtures of experts (below): {min(errors):+.0f} to"
    yield f"{max(errors):+.0f} %, lowest where the host cannot launch their many kernels as fast as"
    yield "the device could end them."
    yield ""
    yield "## Not predicted"
    for what, why in NOT_PREDICTED:
        yield f"- {what}: {why}."
    yield ""
    yield "## Orders"
    yield "Published values within 2 % of each other have no order."
    yield ""
    yield "| comparison | pairs in order | table |"
    yield "|---|---|---|"
    for order in orders:
        note = f" {order.said}" if order.said else ""
        yield f"| {order.title}.{note} | {order.right} of {order.pairs} | {order.table} |"
    for group in [*made, *timed, loose, mixtures]:
        yield ""
        yield f"## {group.title}"
        yield f"Table {group.table}: {source(group.table)}."
        if group.said:
            yield group.said
        yield ""
        yield "| | published | planner | error |"
        yield "|---|---|---|---|"
        for row in group.rows:
            cells = _cells(row)
            note = f" ({row.note})" if row.note else ""
            yield f"| {cells[0]}{note} | {cells[1]} | {cells[2]} | {cells[3]} |"


def _mean(group: Group, most: int = 2**30) -> float:
    """Mean signed error of the runs of up to so many tokens."""
    errors = [row.error for row in group.rows if int(row.label.split()[3]) <= most]
    return sum(errors) / len(errors)


def _summary(group: Group) -> str:
    points = any(row.points for row in group.rows)
    unit = " points" if points else " %"
    bounds = [f"worst {group.worst:g}"] if group.worst is not None else []
    if group.mean is not None:
        bounds.insert(0, f"mean {group.mean:g}")
    return (
        f"| {group.title} | {len(group.counted)} of {len(group.rows)} | "
        f"{group.mean_error:.2f}{unit} | {group.worst_error:.2f}{unit} | "
        f"{group.bias:+.2f} | {', '.join(bounds)} |"
    )

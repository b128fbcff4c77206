"""What the four pictures of a plan show, as data: overview, flow, compare, trend.

The page and the figures are drawn from it; nothing is computed there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from pyparallel.planner import Job, Layout, Plan, PlanError, evaluate, pipeline_costs
from pyparallel.planner.clusters import GIB
from pyparallel.planner.flight import made_schedule
from pyparallel.schedule import Kind, Simulation, simulate

__all__ = ["AXES", "compare", "flow", "overview", "simulated", "trend"]

AXES = ("tp", "cp", "dp", "pp")  # as ranks are numbered, fastest first
_MOST_SPANS = 2400  # of a timeline that is still drawn smoothly and read by eye


def overview(plan: Plan) -> dict[str, Any]:
    """Devices with their groups' sizes, and the memory of every pipeline rank."""
    layout, cluster = plan.layout, plan.cluster
    return {
        "axes": [{"name": name, "size": getattr(layout, name)} for name in AXES],
        "devices": layout.devices,
        "node_size": cluster.node_size,
        "capacity": plan.memory.capacity / GIB,
        "ranks": [
            {
                "rank": stage.rank,
                "layers": stage.layers,
                "parts": {name: size / GIB for name, size in stage.parts.items()},
                "total": stage.total / GIB,
            }
            for stage in plan.memory.stages
        ],
    }


def simulated(plan: Plan, most: int | None = None) -> tuple[Simulation, int]:
    """The step of one replica as the simulator runs it, and its microbatches: fewer than the plan's
    where these would be too many to look at, or more than `most`."""
    layout = plan.layout
    m = layout.microbatches(plan.job)
    if most is None:
        most = max(_MOST_SPANS // (3 * layout.stages), 2 * layout.pp, 4)
    shown = min(m, most)
    costs = pipeline_costs(plan.job, plan.cluster, layout)
    return simulate(made_schedule(layout, shown), costs), shown


def flow(plan: Plan) -> dict[str, Any]:
    """Passes with their times and the messages between ranks, in seconds."""
    result, shown = simulated(plan)
    schedule = result.schedule
    spans, ends, starts = [], {}, {}
    for rank, row in enumerate(result.spans):
        second = False
        for span in row:
            action = span.action
            if action.kind.is_compute and span.end > span.start:
                half = 1 if action.with_next else 2 if second else 0
                spans.append(
                    [rank, _seconds(span.start), _seconds(span.end), action.kind.code,
                     action.microbatch, action.chunk, half, action.stage]
                )  # fmt: skip
                key = (action.kind is Kind.FORWARD, action.stage, action.microbatch)
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    ends[key], starts[key] = span.end, span.start
            second = action.with_next
    messages = []
    for (forward, stage, microbatch), end in ends.items():
        other = stage + (1 if forward else -1)
        source = schedule.placement.get((stage, microbatch))
        target = schedule.placement.get((other, microbatch))
        used = starts.get((forward, other, microbatch))
        if target is None or source is None or used is None or source == target:
            continue
        messages.append([source, target, _seconds(end), _seconds(used), microbatch, int(forward)])
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "held": [list(held) for held in schedule.held],
        "microbatches": plan.layout.microbatches(plan.job),
        "shown": shown,
        "step": _seconds(result.step_time),
        "idle": float(result.bubble_share),
        "spans": spans,
        "messages": sorted(messages, key=lambda message: message[2]),
    }


def _seconds(value: float) -> float:
    return float(f"{float(value):.7g}")


def compare(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Layouts beside each other: seconds and GiB by part."""
    return [
        {
            "label": plan.layout.label,
            "step": plan.time.step,
            "time": plan.time.parts,
            "memory": {name: size / GIB for name, size in plan.memory.fullest.parts.items()},
            "total": plan.memory.peak / GIB,
            "capacity": plan.memory.capacity / GIB,
            "fits": plan.memory.fits,
            "rate": plan.tokens_per_second_per_gpu,
            "bubble": plan.time.bubble_share,
        }
        for plan in plans
    ]


def trend(plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Throughput, bubble and memory of the layout as one thing at a time changes: microbatches (by
    the batch), devices (by replicas, the batch kept), sequence length. What cannot be is left out.
    """
    job, layout = plan.job, plan.layout
    m = layout.microbatches(job)
    once = layout.micro_batch * layout.dp
    return {
        "microbatches": _points(
            plan, _around(m), lambda count: (replace(job, global_batch=count * once), layout)
        ),
        "devices": _points(
            plan,
            (dp * layout.devices // layout.dp for dp in _around(layout.dp)),
            lambda count: (job, layout.with_(dp=count * layout.dp // layout.devices)),
        ),
        "sequence": _points(
            plan,
            _around(job.seq),
            lambda length: (replace(job, seq=length), layout),
        ),
    }


def _around(value: int) -> list[int]:
    """The value, and those 2, 4, 8, 16 times as small and as large, where they are whole."""
    smaller = [value // 2**i for i in range(4, 0, -1) if value % 2**i == 0]
    return [*smaller, value, *(value * 2**i for i in range(1, 5))]


def _points(
    plan: Plan, values: Iterable[int], change: Callable[[int], tuple[Job, Layout]]
) -> list[dict[str, float]]:
    points = []
    for value in values:
        try:
            job, layout = change(value)
            other = evaluate(job, plan.cluster, layout, exact=False)
        except PlanError:
            continue
        points.append(
            {
                "x": value,
                "rate": other.tokens_per_second_per_gpu,
                "bubble": other.time.bubble_share,
                "memory": other.memory.peak / GIB,
            }
        )
    return points

"""Which strategy, how many of each, and why: memory and time of a layout, and the search for one.

    job = Job(preset("llama-3-70b"), seq=8192, global_batch=512)
    cluster = cluster_named("a100-80")
    plan = evaluate(job, cluster, Layout(dp=2, tp=8, pp=4, recompute="full"))
    print(plan.memory.peak, plan.time.step, plan.flops.mfu)
    print(search(job, cluster, devices=64).best.layout.label)

Knows nothing of torch.
"""

from pyparallel.planner.candidates import Space
from pyparallel.planner.clusters import ClusterSpec, Gpu, Link
from pyparallel.planner.cost import pipeline_costs
from pyparallel.planner.errors import PlanError
from pyparallel.planner.evaluate import evaluate
from pyparallel.planner.flops import CONVENTIONS
from pyparallel.planner.hardware import CLUSTERS, cluster_named
from pyparallel.planner.layout import PRECISIONS, Job, Layout, Precision
from pyparallel.planner.models import Experts, LatentAttention, Linear, ModelSpec, linears
from pyparallel.planner.presets import PRESETS, preset
from pyparallel.planner.report import (
    FlopsReport,
    MemoryReport,
    Plan,
    Rejected,
    StageMemory,
    TimeReport,
)
from pyparallel.planner.rules import Violation, violations
from pyparallel.planner.search import SearchResult, fewest_devices, search

__all__ = [
    "CLUSTERS",
    "CONVENTIONS",
    "PRECISIONS",
    "PRESETS",
    "ClusterSpec",
    "Experts",
    "FlopsReport",
    "Gpu",
    "Job",
    "LatentAttention",
    "Layout",
    "Linear",
    "Link",
    "MemoryReport",
    "ModelSpec",
    "Plan",
    "PlanError",
    "Precision",
    "Rejected",
    "SearchResult",
    "Space",
    "StageMemory",
    "TimeReport",
    "Violation",
    "cluster_named",
    "evaluate",
    "fewest_devices",
    "linears",
    "pipeline_costs",
    "preset",
    "search",
    "violations",
]

"""A layout worked out: rules, memory, time, FLOPs by convention."""

from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.cost import time_report
from pyparallel.planner.flops import step_flops
from pyparallel.planner.kernels import Kernels
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.memory import memory_report
from pyparallel.planner.notes import notes
from pyparallel.planner.report import FlopsReport, Plan
from pyparallel.planner.rules import check

__all__ = ["evaluate", "flops_report"]


def evaluate(
    job: Job,
    cluster: ClusterSpec,
    layout: Layout,
    *,
    exact: bool = True,
    kernels: Kernels | None = None,
) -> Plan:
    """Memory, time and FLOPs of one layout; whether it fits is in `memory.fits`.

    Args:
        exact: the pipeline from its schedule object: passes in flight counted, the step simulated.
            False: from closed forms, in less than a millisecond.
        kernels: of this device, precision and number of devices, to remember GEMM times.

    Raises:
        PlanError: the layout cannot be; every broken rule is named.
    """
    check(job, cluster, layout)
    memory = memory_report(job, cluster, layout, exact=exact)
    time = time_report(job, cluster, layout, exact=exact, kernels=kernels)
    flops = flops_report(job, cluster, layout, time.step)
    return Plan(job, cluster, layout, memory, time, flops, notes(job, cluster, layout))


def flops_report(job: Job, cluster: ClusterSpec, layout: Layout, step: float) -> FlopsReport:
    """FLOPs of a step by convention, and the MFU that a step time would be reported as."""
    counts = step_flops(job, layout)
    per_gpu = {name: flops / step / layout.devices for name, flops in counts.items()}
    peak = cluster.gpu.peak(job.bytes.compute)
    return FlopsReport(
        counts=counts,
        tflops_per_gpu={name: rate / 1e12 for name, rate in per_gpu.items()},
        mfu={name: rate / peak for name, rate in per_gpu.items()},
    )

"""What would help where no layout fits: more devices, larger ones, shorter sequences."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from time import process_time
from typing import TYPE_CHECKING

from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.errors import MOST_DEVICES, PlanError
from pyparallel.planner.layout import Job

if TYPE_CHECKING:
    from pyparallel.planner.search import SearchResult

__all__ = ["mends"]

SECONDS = 2.0  # of looking, at most: of this process, so that a busy machine finds as much
LEAST_SEQ = 1024


def mends(result: "SearchResult", look: "Callable[..., SearchResult]") -> list[str]:
    """What each by itself lets some layout fit, as words with an option of the command; empty where
    it is not memory that binds, or nothing was found in a few seconds.

    Args:
        look: `search`.
    """
    near = [r.numbers["over"] for r in result.rejected if r.rule == "memory"]
    if result.plans or not near:
        return []
    started = process_time()
    job, cluster, devices = result.job, result.cluster, result.devices

    def label(job: Job, cluster: ClusterSpec, devices: int) -> str | None:
        if process_time() - started > SECONDS:
            return None
        try:
            found = look(job, cluster, devices, objective="memory", space=result.space, exact=1)
        except PlanError:  # what is fixed does not go with so many devices
            return None
        return found.plans[0].layout.label if found.plans else None

    def first(tries: Iterable[tuple[str, Job, ClusterSpec, int]]) -> Iterator[str]:
        for text, at_job, at_cluster, at_devices in tries:
            fitting = label(at_job, at_cluster, at_devices)
            if fitting is not None:
                yield f"{text} ({fitting})"
                return

    most = min(cluster.devices or MOST_DEVICES, MOST_DEVICES)
    counts = [devices << k for k in range(1, 6) if devices << k <= most]
    gib = math.ceil(min(near) * cluster.gpu.memory_gib)
    larger = replace(cluster, gpu=replace(cluster.gpu, memory_gib=gib))
    halves = [job.seq >> k for k in range(1, 4) if job.seq >> k >= LEAST_SEQ]
    return [
        *first((f"--gpus {n}", job, cluster, n) for n in counts),
        *first([(f"--memory {gib}", job, larger, devices)]),
        *first((f"--seq {n}", replace(job, seq=n), cluster, devices) for n in halves),
    ]

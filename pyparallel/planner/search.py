"""All layouts of a number of devices: which fit, which is best, and why the others are not.

Estimates of all (quick.py), then the best ones worked out exactly (evaluate.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pyparallel.planner.candidates import Space, choices, misfit, sizes
from pyparallel.planner.clusters import GIB, ClusterSpec
from pyparallel.planner.errors import MOST_DEVICES, PlanError, shown
from pyparallel.planner.evaluate import evaluate
from pyparallel.planner.flops import step_flops
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.mends import mends
from pyparallel.planner.quick import Estimate, Estimator
from pyparallel.planner.report import Plan, Rejected
from pyparallel.planner.rules import violations

__all__ = ["OBJECTIVES", "SearchResult", "fewest_devices", "search"]

OBJECTIVES = ("time", "memory")
EXACT = 8  # how many of the best are worked out with the simulator


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plans: the best layouts, best first, worked out exactly.
        estimates: all that fit, best first.
        pareto: of those, the ones that no other beats in both step time and memory; the first
            of them worked out exactly, as `plans` are.
        rejected: every layout that was looked at and cannot be used, with the reason that binds.
        considered: how many layouts were looked at.
        seconds: what the search took.
        space: what could be chosen.
    """

    job: Job
    cluster: ClusterSpec
    devices: int
    objective: str
    plans: tuple[Plan, ...]
    estimates: tuple[Estimate, ...]
    pareto: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    considered: int
    seconds: float
    space: Space

    @property
    def best(self) -> Plan:
        """The best plan.

        Raises:
            PlanError: nothing fits; the layout that came nearest is named, and what would fit.
        """
        if not self.plans:
            raise PlanError(nothing_fits(self))
        return self.plans[0]

    def to_json(self, rejected: int = 200) -> dict[str, Any]:
        """As data; of the rejected layouts the nearest ones, and a count by rule of all."""
        return {
            "job": self.job.to_json(),
            "cluster": self.cluster.to_json(),
            "devices": self.devices,
            "objective": self.objective,
            "considered": self.considered,
            "fitting": len(self.estimates),
            "plans": [_short(plan) for plan in self.plans],
            "pareto": [
                {"layout": e.layout.to_json(), "step": e.step, "peak_bytes": e.peak}
                for e in self.pareto
            ],
            "rejected_by_rule": by_rule(self.rejected),
            "rejected": [r.to_json() for r in self.rejected[:rejected]],
            "mends": mends(self, search),
            "seconds": self.seconds,
        }


def _short(plan: Plan) -> dict[str, Any]:
    """A plan without the job and cluster that all have in common."""
    document = plan.to_json()
    return {key: value for key, value in document.items() if key not in ("job", "cluster")}


def by_rule(rejected: Iterable[Rejected]) -> dict[str, int]:
    """How many layouts each rule rejects, most first."""
    counts: dict[str, int] = {}
    for one in rejected:
        counts[one.rule] = counts.get(one.rule, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def nothing_fits(result: SearchResult) -> str:
    """Why there is no plan, with the layout that came nearest."""
    text = f"{result.job.model.name} on {result.devices} {result.cluster.name}: no layout fits"
    near = [r for r in result.rejected if "over" in r.numbers]
    if near:
        nearest = min(near, key=lambda r: r.numbers["over"])
        text = f"{text}; nearest: {nearest.layout.label}: {nearest.reason}"
        would = mends(result, search)
        return f"{text}; what would fit: {', or '.join(would)}" if would else text
    if result.rejected:
        first = result.rejected[0]
        counts = ", ".join(f"{rule} {n}" for rule, n in by_rule(result.rejected).items())
        return f"{text} (rejected: {counts}); as {first.layout.label}: {first.rule}: {first.reason}"
    return f"{text}: none was left to look at with what is fixed"


def search(
    job: Job,
    cluster: ClusterSpec,
    devices: int,
    *,
    objective: str = "time",
    space: Space | None = None,
    exact: int = EXACT,
) -> SearchResult:
    """Looks at all layouts of so many devices.

    Args:
        objective: "time": the shortest step; "memory": the least memory per device.
        space: what may be chosen; everything by default.
        exact: how many of the best are worked out with the simulator.

    Raises:
        PlanError: devices, objective or a fixed size that cannot be.
    """
    _check(cluster, devices, objective, exact)
    started = perf_counter()
    space = space or Space()
    wrong = misfit(devices, space)
    if wrong is not None:
        raise PlanError(wrong)
    estimator = Estimator(job, cluster)
    fitting: list[Estimate] = []
    rejected: list[Rejected] = []
    considered = 0
    offloads = space.values("offload", ("none",))
    for found in sizes(job, cluster, devices, space):
        if isinstance(found, Rejected):
            considered += 1
            rejected.append(found)
            continue
        before = considered
        for ladder in choices(job, found, space):
            for offload in offloads:
                considered += _climb(estimator, ladder, offload, objective, fitting, rejected)
        if considered == before:
            considered += 1
            rejected.append(_no_choice(job, cluster, found, space))
    if not fitting and space.offload and "offload" not in space.fixed and cluster.host_gib:
        for found in sizes(job, cluster, devices, space):
            if isinstance(found, Layout):
                for ladder in choices(job, found, space):
                    for offload in ("optimizer", "all"):
                        considered += _climb(
                            estimator, ladder, offload, objective, fitting, rejected
                        )
    fitting.sort(key=_key(objective))
    rejected.sort(key=lambda r: r.numbers.get("over", float("inf")))
    front = pareto_front(fitting)
    plans = _exact(job, cluster, estimator, [*fitting[:exact], *front[:exact]], objective)
    worked = [
        Estimate(plan.layout, plan.memory.peak, plan.memory.host_bytes, plan.time.step)
        for plan in plans
    ]
    return SearchResult(
        job,
        cluster,
        devices,
        objective,
        plans[:exact],
        tuple(fitting),
        pareto_front([*worked, *front[exact:]]),
        tuple(rejected),
        considered,
        perf_counter() - started,
        space,
    )


def _check(cluster: ClusterSpec, devices: int, objective: str, exact: int) -> None:
    if objective not in OBJECTIVES:
        raise PlanError(f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}")
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise PlanError(f"{devices!r} devices: 1 or more are expected")
    if devices > MOST_DEVICES:
        raise PlanError(f"{shown(devices)} devices: at most {MOST_DEVICES} are planned")
    if cluster.devices and devices > cluster.devices:
        raise PlanError(f"{devices} devices: {cluster.name} has {cluster.devices}")
    if exact < 1:
        raise PlanError(f"{exact} layouts to work out: 1 or more is expected")


def _climb(
    estimator: Estimator,
    ladder: tuple[Layout, ...],
    offload: str,
    objective: str,
    fitting: list[Estimate],
    rejected: list[Rejected],
) -> int:
    """Takes of a ladder, for each recomputation, the least sharded layout that fits, and ends where
    that is the least sharded of all: what comes later is slower. With the objective memory every
    one that fits is taken. Gives the number of layouts looked at."""
    looked, settled = 0, None
    for layout in ladder:
        if layout.recompute == settled:
            continue
        if offload != "none":
            if offload == "all" and layout.zero != 3:
                continue
            layout = layout.with_(offload=offload)
        looked += 1
        broken = violations(estimator.job, estimator.cluster, layout)
        if broken:
            rejected.append(Rejected(layout, broken[0].rule, broken[0].text))
            continue
        peak, host = estimator.memory(layout)
        capacity = estimator.cluster.capacity
        if peak > capacity:
            text = f"{peak / GIB:.1f} GiB on the fullest device of {capacity / GIB:.4g} GiB"
            rejected.append(Rejected(layout, "memory", text, {"over": peak / capacity}))
            continue
        room = estimator.cluster.host_gib * GIB
        if host > room:
            text = (
                f"{host / GIB:.1f} GiB per device on a host that has {room / GIB:.4g} GiB for each"
            )
            over = {"over": host / room} if room else {}
            rejected.append(Rejected(layout, "host memory", text, over))
            continue
        fitting.append(Estimate(layout, peak, host, estimator.step(layout)))
        if objective == "time":
            settled = layout.recompute
            if layout.zero == ladder[0].zero:
                break
    return looked


def _no_choice(job: Job, cluster: ClusterSpec, layout: Layout, space: Space) -> Rejected:
    """Sizes for which no micro batch and schedule are left: the rule that says so."""
    fixed = dict(space.fixed)
    if fixed.get("chunks", 1) > 1:
        fixed.setdefault("schedule", "interleaved-1f1b")
    layout = layout.with_(**fixed)
    broken = violations(job, cluster, layout)
    if broken:
        return Rejected(layout, broken[0].rule, broken[0].text)
    return Rejected(layout, "choices", "what is fixed leaves no micro batch and schedule")


def _key(objective: str) -> Any:
    if objective == "memory":
        return lambda e: (e.peak, e.step)
    return lambda e: (e.step, e.peak)


def _exact(
    job: Job,
    cluster: ClusterSpec,
    estimator: Estimator,
    best: list[Estimate],
    objective: str,
) -> tuple[Plan, ...]:
    layouts = dict.fromkeys(e.layout for e in best)
    plans = [evaluate(job, cluster, one, kernels=estimator.kernels(one)) for one in layouts]
    plans = [plan for plan in plans if plan.memory.fits]
    if objective == "memory":
        return tuple(sorted(plans, key=lambda plan: (plan.memory.peak, plan.time.step)))
    return tuple(sorted(plans, key=lambda plan: (plan.time.step, plan.memory.peak)))


def pareto_front(estimates: Iterable[Estimate]) -> tuple[Estimate, ...]:
    """Those that no other beats in both step time and memory, fastest first."""
    front: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda e: (e.step, e.peak)):
        if not front or estimate.peak < front[-1].peak:
            front.append(estimate)
    return tuple(front)


def fewest_devices(
    job: Job,
    cluster: ClusterSpec,
    step_seconds: float,
    *,
    most: int = 16384,
    space: Space | None = None,
) -> SearchResult:
    """The search of the fewest devices whose best step takes no longer than so many seconds.

    Looks at one node's parts (1, 2, 4, ...), then whole nodes: doubled until it suffices, then the
    numbers between (multiples of an eighth of the last doubling). Fewer devices than would need
    more than their peak for the step's FLOPs are not looked at.

    Raises:
        PlanError: the deadline is no positive number, or `most` devices do not meet it.
    """
    if not step_seconds > 0:
        raise PlanError(f"a step in {step_seconds} s: more than 0 is expected")
    most = min(most, cluster.devices or most, MOST_DEVICES)

    peak = 1e12 * max(cluster.gpu.peak_tflops.values())
    least = step_flops(job, Layout())["causal"] / (peak * step_seconds)

    def meets(devices: int) -> SearchResult | None:
        if devices < least or (space is not None and misfit(devices, space) is not None):
            return None
        result = search(job, cluster, devices, space=space, exact=2)
        fast = result.plans and result.plans[0].time.step <= step_seconds
        return result if fast else None

    low, high = 0, 1
    found = meets(high)
    while found is None:
        low, high = high, high * 2
        if high > most:
            raise PlanError(
                f"{job.model.name}: no layout of up to {most} {cluster.name} takes a step in "
                f"{step_seconds:g} s; give more time, devices or a smaller global batch"
            )
        found = meets(high)
    node = cluster.node_size
    grid = max(node, (high - low) // 8 // node * node) if high > node else 1
    for devices in range(low + grid, high, grid):
        fewer = meets(devices)
        if fewer is not None:
            return fewer
    return found

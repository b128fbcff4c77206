"""A search in plain words: the decision tree, why the best is best, what each part costs, what
would change it.

Everything here is lines of text made from a `SearchResult`; nothing is decided.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.describe import gib
from pyparallel.planner.errors import in_microbatches
from pyparallel.planner.evaluate import evaluate
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.memory import memory_report, state_bytes
from pyparallel.planner.quick import Estimator
from pyparallel.planner.search import SearchResult

__all__ = [
    "Sensitivity",
    "decision_tree",
    "improved",
    "per_device_parameters",
    "sensitivity",
]


class Step(NamedTuple):
    """One question of the decision tree, answered with numbers."""

    question: str
    answer: str
    then: str


def decision_tree(job: Job, cluster: ClusterSpec, devices: int, best: Layout) -> tuple[Step, ...]:
    """Fits on one device? Crosses hosts? Fast links? As a person would go about it, with numbers;
    `best` is where the search ended."""
    return (
        _one_device(job, cluster),
        _replicas(job, cluster, devices),
        _links(job, cluster, best),
        _hosts(job, cluster, devices, best),
        _sequence(job, cluster, best),
        _rest(job, devices, best),
    )


def _one_device(job: Job, cluster: ClusterSpec) -> Step:
    parameters = job.model.parameters()
    each = sum(state_bytes(job.bytes, 0, 1))
    states = each * parameters
    whole = memory_report(
        replace(job, global_batch=1),
        cluster,
        Layout(zero=0),
    )
    question = "Does it fit on one device?"
    numbers = (
        f"{parameters / 1e9:.2f}B parameters x {each:g} bytes = {gib(states)} of weights, "
        f"gradients and optimizer; with one sequence's activations {gib(whole.peak)}, of "
        f"{gib(whole.capacity)}"
    )
    if whole.fits:
        return Step(question, f"yes: {numbers}", "data parallelism alone will do")
    least = -(-states // (0.9 * whole.capacity))
    if least == 1:
        return Step(
            question,
            f"no: {numbers}",
            "the states do, a sequence's activations do not: context or tensor parallelism "
            "splits the sequence, or its forward is computed again",
        )
    return Step(
        question,
        f"no: {numbers}",
        f"states must be spread over {least:.0f} devices or more: ZeRO shards them over replicas, "
        "tensor and pipeline parallelism cut the model itself",
    )


def _replicas(job: Job, cluster: ClusterSpec, devices: int) -> Step:
    """ZeRO-3 over all devices, no model parallelism."""
    question = "Is sharding over the replicas enough (ZeRO), without cutting the model?"
    if devices > job.global_batch:
        return Step(
            question,
            f"no: {devices} replicas, and a step has only {job.global_batch} sequences",
            "some devices must share a sequence or a layer",
        )
    found = []
    for zero in (1, 3):
        report = memory_report(
            job, cluster, Layout(dp=devices, zero=zero, recompute="full"), exact=False
        )
        found.append((zero, report))
    texts = [f"zero {z} with full recompute {gib(r.peak)}" for z, r in found]
    fits = [z for z, r in found if r.fits]
    if not fits:
        return Step(question, f"no: {'; '.join(texts)}", "cut the model as well")
    return Step(
        question,
        f"yes, from zero {fits[0]}: {'; '.join(texts)}",
        "simplest to run; whether it is fast depends on the links",
    )


def _links(job: Job, cluster: ClusterSpec, best: Layout) -> Step:
    ratio = cluster.intra.rate / cluster.inter.rate
    question = "Are there fast links, and how far do they reach?"
    answer = (
        f"{cluster.intra.name} in nodes of {cluster.node_size}: {cluster.intra.rate / 1e9:.0f} "
        f"GB/s per device, {ratio:.0f} times the {cluster.inter.rate / 1e9:.0f} GB/s of "
        f"{cluster.inter.name} between nodes"
    )
    size = job.bytes.activation * job.model.hidden * job.seq * best.micro_batch / best.cp
    then = (
        f"tensor parallelism sends {size / 1e6:.0f} MB eight times per layer and microbatch: "
        f"inside a node only; here tp {best.tp}"
    )
    if best.tp > cluster.node_size:
        then += f", beyond the node, because nothing within {cluster.node_size} was faster"
    return Step(question, answer, then)


def _hosts(job: Job, cluster: ClusterSpec, devices: int, best: Layout) -> Step:
    question = "Does a replica cross hosts?"
    replica = best.tp * best.pp * best.cp
    if replica <= cluster.node_size:
        return Step(
            question,
            f"no: tp {best.tp} x pp {best.pp} x cp {best.cp} = {replica} devices, within a node "
            f"of {cluster.node_size}",
            "only gradients cross, once per step"
            + (", and with zero 3 weights, every pass" if best.zero == 3 else ""),
        )
    whole = job.seq * best.micro_batch / best.cp / (best.tp if best.sequence_parallel else 1)
    message = job.bytes.activation * job.model.hidden * whole
    return Step(
        question,
        f"yes: tp {best.tp} x pp {best.pp} x cp {best.cp} = {replica} devices on "
        f"{cluster.nodes(replica)} nodes",
        f"pipeline parallelism crosses them: it sends {message / 1e6:.1f} MB per boundary and "
        "microbatch, far less than tensor parallelism"
        if best.pp > 1
        else "context parallelism crosses them, beside the attention",
    )


def _sequence(job: Job, cluster: ClusterSpec, best: Layout) -> Step:
    question = "Is one sequence too long for a device?"
    one = Layout(tp=best.tp, pp=1, zero=3, dp=1, recompute=best.recompute)
    report = memory_report(
        replace(job, global_batch=1),
        cluster,
        one,
    )
    kept = report.stages[0].activations
    text = f"{job.seq} tokens keep {gib(kept)} of activations over all layers at tp {best.tp}" + (
        f", {best.recompute} recompute" if best.recompute != "none" else ""
    )
    if best.cp > 1:
        return Step(question, f"split: {text}", f"context parallelism, cp {best.cp}")
    return Step(question, f"no: {text}", "no context parallelism")


def _rest(job: Job, devices: int, best: Layout) -> Step:
    m = best.microbatches(job)
    text = (
        f"{devices} / (tp {best.tp} x pp {best.pp} x cp {best.cp}) = dp {best.dp}; "
        f"{job.global_batch} sequences / (dp {best.dp} x micro batch {best.micro_batch}) = "
        f"{in_microbatches(m)}"
    )
    then = "no pipeline, so no bubble"
    if best.pp > 1:
        ideal = (best.pp - 1) / (best.chunks * m)
        then = (
            f"{best.schedule}: bubble (p-1)/(v m) = {best.pp - 1}/({best.chunks} x {m}) = "
            f"{100 * ideal:.1f} % over the passes"
        )
    return Step("What do the remaining devices do?", text, then)


def per_device_parameters(job: Job, layout: Layout) -> str:
    """What "parameters per device" means here, against the parameters divided by all devices."""
    total = job.model.parameters()
    held = total / (layout.tp * layout.pp)
    spread = total / layout.devices
    text = (
        f"{total / 1e9:.1f}B parameters / (tp {layout.tp} x pp {layout.pp}) = {held / 1e9:.2f}B "
        "per device"
    )
    if layout.shards > 1 and layout.zero < 3:
        text += (
            f". Dividing by all {layout.devices} devices instead, {spread / 1e9:.2f}B, silently "
            f"assumes that the dp {layout.dp} replicas share weights too (ZeRO-3); with zero "
            f"{layout.zero} each replica holds its own"
        )
        if layout.zero:
            text += " weights" + (
                ", and only the optimizer's states are shared"
                if layout.zero == 1
                else " and shares gradients and optimizer"
            )
    elif layout.shards > 1:
        kept = held / layout.shards
        text += f" while in use; zero 3 keeps {kept / 1e9:.2f}B of them between uses"
    return text + "."


class Sensitivity(NamedTuple):
    """What would be if something were different.

    Attributes:
        change: what is different.
        step: seconds of the layout that was best, then; None if it does not fit any more.
        winner: the layout that would be best then, of those that fit now; None if none does.
        winner_step: its seconds.
    """

    change: str
    step: float | None
    winner: Layout | None
    winner_step: float | None


def sensitivity(result: SearchResult, among: int = 200) -> tuple[Sensitivity, ...]:
    """The best layout under other links, compute and memory, and what would be best there, of the
    `among` best layouts: estimated, and the first of them worked out as the search's own are."""
    cluster, job = result.cluster, result.job
    best = result.best.layout
    slow_gpu = replace(
        cluster.gpu, gemm_share={d: 0.8 * s for d, s in cluster.gpu.gemm_share.items()}
    )
    less = replace(cluster.gpu, memory_gib=0.8 * cluster.gpu.memory_gib)
    half = job.global_batch // 2
    cases: list[tuple[str, ClusterSpec, Job]] = [
        ("links between nodes half as fast", cluster.slower_links(inter=0.5), job),
        ("links inside nodes half as fast", cluster.slower_links(intra=0.5), job),
        ("all links half as fast", cluster.slower_links(0.5, 0.5), job),
        ("GEMMs a fifth slower", replace(cluster, gpu=slow_gpu), job),
        ("a fifth less memory", replace(cluster, gpu=less), job),
    ]
    if half and half % (best.dp * best.micro_batch) == 0 and half >= best.dp * best.pp:
        cases.append(("half the global batch", cluster, replace(job, global_batch=half)))
    layouts = [e.layout for e in result.estimates[:among]]
    return tuple(_one_change(*case, best, layouts) for case in cases)


def _one_change(
    change: str, cluster: ClusterSpec, job: Job, best: Layout, layouts: Sequence[Layout]
) -> Sensitivity:
    estimator = Estimator(job, cluster)
    found = []
    for layout in layouts:
        if job.global_batch % (layout.dp * layout.micro_batch):
            continue
        if layout.microbatches(job) < layout.pp:
            continue
        estimate = estimator.estimate(layout)
        if estimate.peak <= cluster.capacity:
            found.append(estimate)
    found.sort(key=lambda e: e.step)
    near = [e.layout for e in found[:2]]
    if any(e.layout == best for e in found):
        near.append(best)
    steps = {layout: evaluate(job, cluster, layout) for layout in near}
    exact = {layout: plan.time.step for layout, plan in steps.items() if plan.memory.fits}
    if not exact:
        return Sensitivity(change, None, None, None)
    winner = min(exact, key=lambda layout: (exact[layout], layout != best))
    return Sensitivity(change, exact.get(best), winner, exact[winner])


def improved(job: Job, cluster: ClusterSpec, layout: Layout) -> Iterator[str]:
    """For a layout that was given and does not fit: one change at a time, and what it brings."""
    changes: list[tuple[str, dict[str, object]]] = [
        ("zero 1: the optimizer over the replicas", {"zero": 1}),
        ("full recompute", {"recompute": "full"}),
        ("zero 1 and full recompute", {"zero": 1, "recompute": "full"}),
        ("zero 3: weights too", {"zero": 3}),
        ("zero 3 and full recompute", {"zero": 3, "recompute": "full"}),
        ("tp doubled, dp halved", {"tp": 2 * layout.tp, "dp": layout.dp // 2}),
        ("pp doubled, dp halved", {"pp": 2 * layout.pp, "dp": layout.dp // 2}),
        ("optimizer on the host", {"offload": "optimizer", "zero": max(layout.zero, 1)}),
    ]
    seen = {layout}
    for text, change in changes:
        changed = layout.with_(**change)
        if changed in seen:
            continue
        seen.add(changed)
        try:
            plan = evaluate(job, cluster, changed)
        except ValueError:
            continue
        fits = "fits" if plan.memory.fits else "does not fit"
        yield f"  {text:42} {gib(plan.memory.peak):>10}  {fits}, {plan.time.step:.1f} s a step"

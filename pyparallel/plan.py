"""`python -m pyparallel plan`: which layout, how much memory, how fast, and why.

Needs neither torch nor the native core: it plans any cluster on any machine.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pyparallel import plan_files
from pyparallel.plan_options import (
    check_numbers,
    cluster_of,
    given_sizes,
    job_of,
    layout_of,
    parser,
)
from pyparallel.planner import Job, Layout, Plan, PlanError, evaluate
from pyparallel.planner.candidates import Space
from pyparallel.planner.clusters import GIB, ClusterSpec
from pyparallel.planner.describe import describe, formulas
from pyparallel.planner.explain import (
    decision_tree,
    improved,
    per_device_parameters,
    sensitivity,
)
from pyparallel.planner.measured import calibrated, read_json
from pyparallel.planner.search import SearchResult, by_rule, fewest_devices, search

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the command with these arguments and gives its exit status: 0 planned; 1 nothing fits;
    2 the request cannot be."""
    options = parser().parse_args(arguments)
    try:
        check_numbers(options)
        cluster = cluster_of(options)
        said: list[str] = []
        if options.calibrate is not None:
            cluster, said = calibrated(cluster, read_json(options.calibrate))
        if options.source is not None:
            return plan_files.show_imported(options, cluster, said, _show_one)
        job = job_of(options)
        fixed = given_sizes(options)
        if {"dp", "tp", "pp", "cp"} <= set(fixed) or _one_layout(options, fixed):
            return _show_one(options, job, cluster, layout_of(options, fixed), said)
        return _show_search(options, _searched(options, job, cluster, fixed), said)
    except PlanError as error:
        print(f"pyparallel plan: {error}", file=sys.stderr)
        return 2


def _one_layout(options: argparse.Namespace, fixed: dict[str, Any]) -> bool:
    """Whether the sizes given multiply to the devices, those left out being 1."""
    if options.gpus is None or not {"dp", "tp", "pp"} <= set(fixed):
        return False
    return bool(fixed["dp"] * fixed["tp"] * fixed["pp"] == options.gpus)


def _searched(
    options: argparse.Namespace, job: Job, cluster: ClusterSpec, fixed: dict[str, Any]
) -> SearchResult:
    space = Space(fixed=fixed)
    if options.objective == "devices":
        if options.deadline is None or options.tokens is None:
            raise PlanError("--objective devices needs --deadline DAYS and --tokens N")
        steps = max(1.0, options.tokens / job.tokens)
        return fewest_devices(
            job, cluster, options.deadline * 86400 / steps, most=options.gpus or 16384, space=space
        )
    if options.deadline is not None:
        raise PlanError("--deadline has no effect: only --objective devices takes one")
    if options.gpus is None:
        raise PlanError("--gpus is missing: how many devices there are")
    return search(
        job, cluster, options.gpus, objective=options.objective, space=space, exact=options.top
    )


def _show_one(
    options: argparse.Namespace, job: Job, cluster: ClusterSpec, layout: Layout, said: list[str]
) -> int:
    plan = evaluate(job, cluster, layout)
    plan_files.write(options, plan)
    if options.json:
        document = {**plan.to_json(), **_asked(options, plan, said)}
        if not plan.memory.fits:
            document["what_to_change"] = [line.strip() for line in improved(job, cluster, layout)]
        print(json.dumps(document, indent=1))
        return 0 if plan.memory.fits else 1
    print(_heading(job, cluster, layout.devices, said))
    print("\n".join(describe(plan)))
    if options.explain:
        print("\nWhere the numbers come from:")
        print("\n".join(formulas(plan)))
    print(f"\nparameters: {per_device_parameters(job, layout)}")
    if options.tokens is not None:
        print(_run_text(plan, options.tokens))
    if plan.memory.fits:
        print("\nIt fits.")
        return 0
    print(f"\nIt does not fit: {_over(plan)}.")
    print("What to change:")
    print("\n".join(improved(job, cluster, layout)))
    better = search(job, cluster, layout.devices, exact=1)
    if better.plans:
        best = better.plans[0]
        print(
            f"  best of all {layout.devices}: {best.layout.label}: "
            f"{best.memory.peak / GIB:.1f} GiB, {best.time.step:.1f} s a step"
        )
    return 1


def _over(plan: Plan) -> str:
    """By how much a plan does not fit, and whether it is only by the margin."""
    memory = plan.memory
    text = f"{memory.peak / GIB:.1f} of {memory.capacity / GIB:.4g} GiB"
    bare = max(stage.allocated for stage in memory.stages)
    if memory.peak > memory.capacity >= bare:
        return (
            f"{text}, of which {memory.fullest.margin / GIB:.1f} are margin for fragments and the "
            "process itself; it may run, with nothing to spare"
        )
    if memory.peak <= memory.capacity:
        text = (
            f"{memory.host_bytes / GIB:.1f} GiB per device on a host that has "
            f"{memory.host_capacity / GIB:.4g} GiB for each"
        )
    return text


def _show_search(options: argparse.Namespace, result: SearchResult, said: list[str]) -> int:
    if result.plans:
        fitting = plan_files.emittable(options.emit, given_sizes(options), result)
        drawn = options.html is not None or options.figures is not None
        plan_files.write(options, result.best, plan_files.unlike(result) if drawn else (), fitting)
    if options.json:
        best = result.best if result.plans else None
        document = {**result.to_json(), **_asked(options, best, said)}
        if result.plans:
            document["decision_tree"] = [
                step._asdict()
                for step in decision_tree(
                    result.job, result.cluster, result.devices, result.best.layout
                )
            ]
            document["sensitivity"] = [
                {**s._asdict(), "winner": s.winner and s.winner.label} for s in sensitivity(result)
            ]
        print(json.dumps(document, indent=1))
        return 0 if result.plans else 1
    print(_heading(result.job, result.cluster, result.devices, said))
    if not result.plans:
        try:
            print(result.best)
        except PlanError as error:
            print(f"pyparallel plan: {error}", file=sys.stderr)
        return 1
    print("\n".join(_table(result, options.top)))
    if options.tokens is not None:
        print(f"\n{_run_text(result.best, options.tokens)}")
    if options.explain:
        print("\n".join(_explanation(result)))
    else:
        print("\n--explain says why, and what would change it.")
    return 0


def _heading(job: Job, cluster: ClusterSpec, devices: int, said: list[str]) -> str:
    model = job.model
    text = (
        f"{model.name}: {model.parameters() / 1e9:.2f}B parameters"
        + (f" ({model.active_parameters() / 1e9:.2f}B active)" if model.experts is not None else "")
        + f", {job.seq} tokens x {job.global_batch} sequences a step, {job.precision}\n"
        f"{devices} x {cluster.gpu.name} ({cluster.gpu.memory_gib:.4g} GiB), nodes of "
        f"{cluster.node_size}: {cluster.intra.name} {cluster.intra.gbps:.3g} GB/s inside, "
        f"{cluster.inter.name} {cluster.inter.gbps:.3g} GB/s between"
    )
    return "\n".join([text, *(f"calibrated: {line}" for line in said), ""])


def _asked(options: argparse.Namespace, plan: Plan | None, said: list[str]) -> dict[str, Any]:
    """What the document of --json has because of other options."""
    found: dict[str, Any] = {"calibrated": said} if said else {}
    if options.tokens is not None and plan is not None:
        found["run"] = _run(plan, options.tokens)
    return found


def _run(plan: Plan, tokens: float) -> dict[str, float]:
    seconds = tokens / plan.tokens_per_second
    return {
        "tokens": tokens,
        "steps": tokens / plan.job.tokens,
        "days": seconds / 86400,
        "device_hours": seconds / 3600 * plan.layout.devices,
    }


def _run_text(plan: Plan, tokens: float) -> str:
    run = _run(plan, tokens)
    return (
        f"{tokens:.3g} tokens take {run['steps']:.0f} steps, {run['days']:.1f} days, "
        f"{run['device_hours']:.3g} device hours"
    )


def _table(result: SearchResult, top: int) -> Iterator[str]:
    yield f"{'step s':>8} {'tok/s/gpu':>10} {'MFU %':>6} {'bubble %':>8} {'GiB':>6}  layout"
    for plan in result.plans[:top]:
        yield (
            f"{plan.time.step:8.3f} {plan.tokens_per_second_per_gpu:10.0f} "
            f"{100 * plan.flops.mfu['full']:6.1f} {100 * plan.time.bubble_share:8.1f} "
            f"{plan.memory.peak / GIB:6.1f}  {plan.layout.label}"
        )
    yield "(MFU: model FLOPs, attention counted whole; --explain has all conventions)"
    yield "(GiB: the fullest device; mbs: sequences of a microbatch; v: stages per pipeline rank)"
    counts = ", ".join(f"{rule} {count}" for rule, count in by_rule(result.rejected).items())
    yield (
        f"{result.considered} layouts in {result.seconds:.1f} s: {len(result.estimates)} fit, "
        f"{len(result.rejected)} rejected ({counts or 'none'})"
    )


def _explanation(result: SearchResult) -> Iterator[str]:
    job, best = result.job, result.best
    yield "\nHow to get there:"
    tree = decision_tree(job, result.cluster, result.devices, best.layout)
    for number, (question, answer, then) in enumerate(tree, 1):
        yield f"{number}. {question}"
        yield f"   {answer}"
        yield f"   -> {then}"
    yield "\nThe best one:"
    yield from describe(best)
    yield "\nWhere the numbers come from:"
    yield from formulas(best)
    yield f"\nparameters: {per_device_parameters(job, best.layout)}"
    yield "\nNone is both faster and smaller than these (Pareto front):"
    for e in result.pareto[:10]:
        yield f"  {e.step:8.3f} s  {e.peak / GIB:6.1f} GiB  {e.layout.label}"
    if result.rejected:
        yield "\nRejected, the nearest first:"
        for one in result.rejected[:8]:
            yield f"  {one.layout.label}: {one.rule}: {one.reason}"
    yield "\nIf something were different:"
    for change in sensitivity(result):
        own = "does not fit" if change.step is None else f"{change.step:.3f} s"
        if change.winner is None:
            other = "nor does another of the layouts that fit now"
        elif change.winner == best.layout:
            other = "stays the best"
        else:
            other = f"{change.winner.label} would be: {change.winner_step:.3f} s"
        yield f"  {change.change}: {own}; {other}"

"""`python -m pyparallel plan`: which layout, how much memory, how fast, and why.

Needs neither torch nor the native core: it plans any cluster on any machine.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from pyparallel import plan_files
from pyparallel.planner import PRECISIONS, Job, Layout, Plan, PlanError, cluster_named, evaluate
from pyparallel.planner.candidates import Space
from pyparallel.planner.clusters import GIB, ClusterSpec
from pyparallel.planner.describe import describe, formulas
from pyparallel.planner.explain import (
    decision_tree,
    improved,
    per_device_parameters,
    sensitivity,
)
from pyparallel.planner.hugging_face import model_from
from pyparallel.planner.layout import CP_KINDS, OFFLOADS, RECOMPUTES
from pyparallel.planner.measured import calibrated, cluster_from_doctor, in_file, read_json
from pyparallel.planner.search import OBJECTIVES, SearchResult, by_rule, fewest_devices, search
from pyparallel.schedule import FAMILIES

__all__ = ["main", "parser"]

_DESCRIPTION = """Looks at every way to spread a model over so many devices (data, tensor, pipeline
and context parallelism, ZeRO, recomputation, micro batch, schedule), and prints the best ones with
memory and time of a step. Sizes that you give (--tp 4) are kept; with dp, tp, pp and cp all given,
that one layout is worked out. Figures are predictions: docs/validation.md compares them with
published measurements."""
_EXAMPLE = """example:
  pyparallel plan --model llama-3-70b --gpus 64 --gpu a100-80 --seq 8192 --explain
"""
_DIMENSIONS = {
    "dp": "data parallel: replicas, each with its own sequences",
    "tp": "tensor parallel: devices that share every layer's matrices",
    "pp": "pipeline parallel: devices in a row, each with some layers",
    "cp": "context parallel: devices that share each sequence",
    "ep": "expert parallel: devices that share a layer's experts, of the dp x cp",
    "replicas": "hybrid sharding (HSDP, MiCS): copies of what --zero shards, each over "
    "neighbouring dp cp / N devices (default 1; no other is searched)",
}
_SIZES = ("dp", "tp", "pp", "cp", "ep", "replicas", "micro_batch", "zero", "schedule", "chunks",
          "recompute", "offload", "cp_kind", "sequence_parallel")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    out = argparse.ArgumentParser(
        prog="pyparallel plan",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    job = out.add_argument_group("what to train")
    job.add_argument(
        "--model",
        help="a name (llama-3-70b), a Hugging Face config.json, or layers=..,hidden=..,heads=..,"
        "vocab=..",
    )
    job.add_argument("--seq", type=int, help="tokens of a sequence (default: the model's, to 8192)")
    job.add_argument("--global-batch", type=int, help="sequences of a step (default 512)")
    job.add_argument("--precision", choices=tuple(PRECISIONS), help="default bf16")
    job.add_argument("--attention", choices=("flash", "unfused"), help="default flash")
    job.add_argument("--dropout", action="store_true", help="dropout's masks are kept")
    where = out.add_argument_group("where")
    where.add_argument("--gpus", type=int, metavar="N", help="how many devices there are")
    where.add_argument("--gpu", help="a100-80, h100 (default), h200, b200, mi300x, l40s, ..., cpu")
    where.add_argument(
        "--cluster", type=Path, metavar="FILE", help="what `doctor --json` wrote on a machine"
    )
    where.add_argument("--node-size", type=int, metavar="N", help="devices of a node")
    where.add_argument("--memory", type=float, metavar="GIB", help="of a device")
    where.add_argument("--intra", type=float, metavar="GB/S", help="of a device inside its node")
    where.add_argument("--inter", type=float, metavar="GB/S", help="of a device between nodes")
    where.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="bench.json of python -m bench, run there"
    )
    given = out.add_argument_group("what is already chosen")
    for name, what in _DIMENSIONS.items():
        given.add_argument(f"--{name}", type=int, metavar="N", help=what)
    given.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="sequences of a microbatch (default: 1, 2, 4, 8 and 16 are tried)",
    )
    given.add_argument(
        "--zero",
        type=int,
        choices=(0, 1, 2, 3),
        help="what replicas share: 1 the optimizer, 2 gradients too, 3 weights too (default: 1, "
        "and 3 where that does not fit, are tried)",
    )
    given.add_argument(
        "--schedule",
        choices=tuple(FAMILIES),
        metavar="NAME",
        help=f"of a pipeline: {', '.join(FAMILIES)}",
    )
    given.add_argument("--chunks", type=int, metavar="N", help="stages per pipeline rank")
    given.add_argument(
        "--recompute",
        choices=RECOMPUTES,
        help="what the backward computes again: nothing, attention's core, or every layer",
    )
    given.add_argument("--offload", choices=OFFLOADS, help="what is kept in the host's memory")
    given.add_argument(
        "--cp-kind", choices=CP_KINDS, help="how attention sees the other parts of a sequence"
    )
    given.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_const",
        const=False,
        help="activations outside of the GEMMs are whole on every tp rank",
    )
    goal = out.add_argument_group("goal")
    goal.add_argument(
        "--objective", choices=(*OBJECTIVES, "devices"), default="time", help="default time"
    )
    goal.add_argument(
        "--deadline", type=float, metavar="DAYS", help="objective devices: for --tokens"
    )
    goal.add_argument("--tokens", type=float, help="of the training run; says how long it takes")
    show = out.add_argument_group("output")
    show.add_argument("--top", type=int, default=8, metavar="N", help="layouts to list (8)")
    show.add_argument(
        "--explain", action="store_true", help="why: decision tree, memory, time, what would change"
    )
    show.add_argument("--json", action="store_true", help="all of it as JSON")
    plan_files.add_arguments(out)
    return out


def main(arguments: Sequence[str]) -> int:
    """Runs the command with these arguments and gives its exit status: 0 planned; 1 nothing fits;
    2 the request cannot be."""
    options = parser().parse_args(arguments)
    try:
        _check_numbers(options)
        cluster = _cluster(options)
        said: list[str] = []
        if options.calibrate is not None:
            cluster, said = calibrated(cluster, read_json(options.calibrate))
        if options.source is not None:
            return plan_files.show_imported(options, cluster, said, _show_one)
        job = _job(options)
        fixed = _fixed(options)
        if {"dp", "tp", "pp", "cp"} <= set(fixed) or _one_layout(options, fixed):
            return _show_one(options, job, cluster, _layout(options, fixed), said)
        return _show_search(options, _searched(options, job, cluster, fixed), said)
    except PlanError as error:
        print(f"pyparallel plan: {error}", file=sys.stderr)
        return 2


def _check_numbers(options: argparse.Namespace) -> None:
    """Figures that cannot be, and options that would change nothing."""
    for name in ("memory", "intra", "inter", "tokens", "deadline"):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise PlanError(f"--{name} {value:g}: more than 0 is expected, and finite")
        if value is not None and not 1e-9 <= value <= 1e15:
            raise PlanError(f"--{name} {value:g}: 1e-9 to 1e15 is expected")
    if options.top < 1:
        raise PlanError(f"--top {options.top}: 1 or more is expected")
    if options.source is None and options.pp == 1 and options.schedule is not None:
        raise PlanError(f"--schedule {options.schedule} has no effect with --pp 1: pp 2 or more")
    if options.source is None and options.cp == 1 and options.cp_kind is not None:
        raise PlanError(f"--cp-kind {options.cp_kind} has no effect with --cp 1: cp 2 or more")


def _fixed(options: argparse.Namespace) -> dict[str, Any]:
    """What of a layout is given."""
    fixed = {name: getattr(options, name) for name in _SIZES}
    return {name: value for name, value in fixed.items() if value is not None}


def _job(options: argparse.Namespace) -> Job:
    if not options.model:
        raise PlanError("--model is missing: a name, a config.json, or sizes; see plan --help")
    model = model_from(options.model)
    return Job(
        model,
        seq=options.seq if options.seq is not None else min(model.max_seq, 8192),
        global_batch=options.global_batch if options.global_batch is not None else 512,
        precision=options.precision or "bf16",
        attention=options.attention or "flash",
        dropout=options.dropout,
    )


def _cluster(options: argparse.Namespace) -> ClusterSpec:
    if options.cluster is not None and options.gpu is not None:
        raise PlanError("--gpu has no effect beside --cluster: the file says which device")
    if options.cluster is not None:
        document = read_json(options.cluster)
        if "intra" in document:
            try:
                cluster = ClusterSpec.from_json(document)
            except PlanError as error:
                raise PlanError(in_file(options.cluster, str(error))) from None
        else:
            cluster = cluster_from_doctor(document, str(options.cluster))
    else:
        cluster = cluster_named("h100" if options.gpu is None else options.gpu)
    if options.node_size is not None:
        cluster = replace(cluster, node_size=options.node_size)
    if options.memory is not None:
        cluster = replace(cluster, gpu=replace(cluster.gpu, memory_gib=options.memory))
    for name in ("intra", "inter"):
        value = getattr(options, name)
        if value is not None:
            link = replace(getattr(cluster, name), gbps=value, source=f"--{name}")
            cluster = replace(cluster, **{name: link})
    return cluster


def _one_layout(options: argparse.Namespace, fixed: dict[str, Any]) -> bool:
    """Whether the sizes given multiply to the devices, those left out being 1."""
    if options.gpus is None or not {"dp", "tp", "pp"} <= set(fixed):
        return False
    return bool(fixed["dp"] * fixed["tp"] * fixed["pp"] == options.gpus)


def _layout(options: argparse.Namespace, fixed: dict[str, Any]) -> Layout:
    chosen = dict(fixed)
    if chosen.get("chunks", 1) > 1:
        chosen.setdefault("schedule", "interleaved-1f1b")
    if chosen.get("schedule") in FAMILIES and "chunks" not in chosen:
        chosen["chunks"] = FAMILIES[chosen["schedule"]].default_chunks()
    layout = Layout(**chosen)
    if options.gpus is not None and options.gpus != layout.devices:
        raise PlanError(
            f"dp {layout.dp} x cp {layout.cp} x pp {layout.pp} x tp {layout.tp} = "
            f"{layout.devices} devices, but --gpus {options.gpus}"
        )
    return layout


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
        fitting = plan_files.emittable(options.emit, _fixed(options), result)
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

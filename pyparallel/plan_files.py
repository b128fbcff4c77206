"""What `plan` reads and writes: other frameworks' configurations, the HTML page, figures."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Any

from pyparallel.planner import Layout, Plan, PlanError, evaluate, violations
from pyparallel.planner.candidates import Space
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.emitters import EMITTERS, SPACES, Emitted, emit
from pyparallel.planner.hugging_face import model_from
from pyparallel.planner.importers import Imported, import_configuration
from pyparallel.planner.quick import Estimate
from pyparallel.planner.search import SearchResult, search
from pyparallel.planner.stages import even_layers

__all__ = ["add_arguments", "emittable", "read", "show_imported", "unlike", "write"]

# What a configuration's own values give way to: by reading it (all else follows), or afterwards.
_SIZES = {"dp": "dp", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep",
          "replicas": "replicas", "micro_batch": "microbatch"}  # fmt: skip
_CHOICES = ("zero", "schedule", "chunks", "recompute", "offload", "cp_kind", "sequence_parallel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--from, --emit, --out, --html, --figures."""
    files = parser.add_argument_group("files")
    files.add_argument(
        "--from",
        dest="source",
        metavar="FILE|FLAGS",
        help="work out what you already have: a DeepSpeed JSON, a Megatron-LM script, torchtitan "
        "TOML, nanotron, picotron or FSDP file, or flags in quotes; other options win over it",
    )
    files.add_argument(
        "--emit",
        choices=tuple(EMITTERS),
        metavar="NAME",
        help="write the best layout that this framework can do as its configuration: "
        f"{', '.join(EMITTERS)}",
    )
    files.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where --emit writes (default: its usual name here)",
    )
    files.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page: overview, flow, compare, trend"
    )
    files.add_argument(
        "--figures", type=Path, metavar="DIR", help="write the same as PNG and SVG, by matplotlib"
    )


def read(options: argparse.Namespace) -> Imported:
    """What --from names, with the command's other options in place of its own values.

    Raises:
        PlanError: it cannot be read; line and key are named.
    """
    sizes = {theirs: getattr(options, ours) for ours, theirs in _SIZES.items()}
    found = import_configuration(
        options.source,
        options.gpus,
        None if options.model is None else model_from(options.model),
        options.seq,
        batch=options.global_batch,
        **sizes,
    )
    chosen = {name: getattr(options, name) for name in _CHOICES}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    job = found.job
    if job is not None:
        job = replace(
            job,
            precision=options.precision or job.precision,
            attention=options.attention or job.attention,
            dropout=options.dropout or job.dropout,
            loss=options.loss or job.loss,
        )
    return replace(found, job=job, layout=found.layout.with_(**chosen))


def show_imported(
    options: argparse.Namespace,
    cluster: ClusterSpec,
    said: list[str],
    show: Callable[..., int],
) -> int:
    """Says what was read, and works it out with `show`, where it can be.

    Returns:
        0 where it fits and keeps its framework's rules, 1 where not, 2 where it cannot be.
    """
    for name, default in (("objective", "time"), ("deadline", None)):
        if getattr(options, name) != default:
            raise PlanError(f"--{name} has no effect: the layout is what --from has")
    found = read(options)
    broken = [] if found.job is None else violations(found.job, cluster, found.layout)
    if options.json:
        plan = None if found.job is None or broken else evaluate(found.job, cluster, found.layout)
        document: dict[str, Any] = {
            "import": found.to_json(),
            "cannot_be": [{"rule": rule.rule, "text": rule.text} for rule in broken],
            "plan": None if plan is None else plan.to_json(),
        }
        if plan is not None:
            write(options, plan)
        print(json.dumps(document, indent=1))
        good = plan is not None and plan.memory.fits and not found.violations
        return 0 if good else 1 if plan is not None else 2
    print(found.text())
    print()
    if found.job is None:
        raise PlanError(f"{found.source}: it does not say {', '.join(found.missing)}")
    if broken:
        raise PlanError(
            "it cannot be: " + "; ".join(f"{rule.rule}: {rule.text}" for rule in broken)
        )
    status = show(options, found.job, cluster, found.layout, said)
    return max(status, 1 if found.violations else 0)


def write(
    options: argparse.Namespace,
    plan: Plan,
    others: Sequence[Plan] = (),
    layouts: Iterable[Layout] = (),
) -> None:
    """Writes the files that were asked for, and says so on standard error.

    Args:
        others: for comparison.
        layouts: what may be written by --emit where the framework cannot do the plan's, best first.

    Raises:
        PlanError: no such layout, or a file cannot be written.
    """
    try:
        if options.emit is not None:
            emitted, layout = _emitted(options.emit, plan, layouts)
            path = options.out or Path(emitted.filename)
            if options.out is None and path.exists():
                raise PlanError(f"{path} exists: name another file, or the same, with --out")
            path.write_text(emitted.text, encoding="utf-8")
            _say(path, f"{emitted.framework}, {layout.label}")
            for note in emitted.notes:
                print(f"  note: {note}", file=sys.stderr)
        elif options.out is not None:
            raise PlanError("--out has no effect: only --emit writes there")
        if options.html is not None or options.figures is not None:
            _draw(options, plan, others)
    except OSError as error:
        raise PlanError(f"{error.filename}: cannot be written: {error.strerror}") from None
    except ImportError as error:
        raise PlanError(str(error)) from None


def _emitted(framework: str, plan: Plan, layouts: Iterable[Layout]) -> tuple[Emitted, Layout]:
    first: PlanError | None = None
    for layout in chain((plan.layout,), layouts):
        spelled = [layout]
        if layout.layers_per_stage is None and plan.job.model.layers % layout.stages:
            counts = even_layers(plan.job.model.layers, layout.stages)
            spelled.append(layout.with_(layers_per_stage=counts))
        for one in spelled:
            try:
                return emit(framework, plan.job, one, plan.cluster.node_size), one
            except PlanError as error:
                first = first or error
    assert first is not None
    raise first


def emittable(framework: str, fixed: Mapping[str, Any], result: SearchResult) -> Iterator[Layout]:
    """Layouts that fit, best first: those of a search, and of one among what the framework does
    otherwise (ZeRO-2 and 3 of torchtitan), beside what is fixed."""
    own = SPACES.get(framework)
    more: Sequence[Estimate] = ()
    if own is not None:
        space = Space(**{**own, "fixed": {**own.get("fixed", {}), **fixed}})
        found = search(
            result.job, result.cluster, result.devices, objective=result.objective, space=space
        )
        more = found.estimates
    first = (lambda e: e.peak) if result.objective == "memory" else (lambda e: e.step)
    yield from (e.layout for e in merge(result.estimates, more, key=first))


def unlike(result: SearchResult, count: int = 5) -> list[Plan]:
    """Plans to compare the best one with: of each way to cut the model the best, and not five with
    other stages per rank alone."""
    seen = {_cut(result.best.layout)}
    found: list[Plan] = []
    for estimate in result.estimates:
        if len(found) == count:
            break
        if _cut(estimate.layout) in seen:
            continue
        seen.add(_cut(estimate.layout))
        plan = evaluate(result.job, result.cluster, estimate.layout)
        if plan.memory.fits:
            found.append(plan)
    return found or list(result.plans[1 : count + 1])


def _cut(layout: Layout) -> tuple[int, int, int, int]:
    return layout.tp, layout.pp, layout.ep, layout.zero


def _draw(options: argparse.Namespace, plan: Plan, others: Sequence[Plan]) -> None:
    from pyparallel import viz

    if options.html is not None:
        options.html.write_text(viz.plan_page(plan, others), encoding="utf-8")
        _say(options.html, "open it in a browser")
    if options.figures is not None:
        options.figures.mkdir(parents=True, exist_ok=True)
        for view in viz.VIEWS:
            for form in ("png", "svg"):
                path = options.figures / f"{view}.{form}"
                path.write_bytes(viz.plan_figure(view, plan, others, form))
        _say(options.figures, f"{', '.join(viz.VIEWS)} as PNG and SVG")


def _say(path: Path, what: str) -> None:
    print(f"written: {path} ({what})", file=sys.stderr)

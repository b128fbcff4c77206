"""What `plan` is told: its options, and the job, cluster and layout that they mean."""

import argparse
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from pyparallel import plan_files
from pyparallel.help_text import Paragraphs
from pyparallel.planner import PRECISIONS, Job, Layout, PlanError, cluster_named
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.hugging_face import model_from
from pyparallel.planner.layout import CP_KINDS, LOSSES, OFFLOADS, RECOMPUTES
from pyparallel.planner.measured import cluster_from_doctor, in_file, read_json
from pyparallel.planner.search import OBJECTIVES
from pyparallel.schedule import FAMILIES

__all__ = ["check_numbers", "cluster_of", "given_sizes", "job_of", "layout_of", "parser"]

_USAGE = "pyparallel plan --model NAME --gpus N [--gpu NAME] [OPTION ...]"
_DESCRIPTION = """
Looks at every way to spread a model over so many devices (data, tensor, pipeline and context
parallelism, ZeRO, recomputation, micro batch, schedule), and prints the best ones with memory and
time of a step. Needs no GPU. Sizes that you give (--tp 4) are kept; with dp, tp and pp given that
make up --gpus, that one layout is worked out.
"""
_EXAMPLES = """
examples:

  pyparallel plan --model llama-3-8b --gpus 8
  pyparallel plan --model llama-3-70b --gpus 64 --gpu a100-80 --explain
  pyparallel plan --model llama-3-8b --gpus 8 --dp 4 --tp 2 --pp 1
  pyparallel plan --from ds_config.json --gpus 64 --model llama-3-8b
  pyparallel plan --model llama-3-8b --gpus 16 --emit torchtitan

Exit status: 0 it fits; 1 nothing fits, or a rule of --from's framework is broken; 2 what is asked
cannot be. Figures are predictions: docs/validation.md compares them with published measurements;
docs/choosing.md is a guide to the words.
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
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Paragraphs,
    )
    _add_what_and_where(out)
    _add_chosen(out)
    goal = out.add_argument_group("goal")
    goal.add_argument(
        "--objective",
        choices=(*OBJECTIVES, "devices"),
        default="time",
        metavar="GOAL",
        help="best is the least time (default), memory, or devices: the fewest that train --tokens "
        "within --deadline",
    )
    goal.add_argument("--deadline", type=float, metavar="DAYS", help="of --objective devices")
    goal.add_argument(
        "--tokens", type=float, metavar="N", help="of the training run; says how long it takes"
    )
    show = out.add_argument_group("output")
    show.add_argument("--top", type=int, default=8, metavar="N", help="layouts to list (8)")
    show.add_argument(
        "--explain", action="store_true", help="why: decision tree, memory, time, what would change"
    )
    show.add_argument("--json", action="store_true", help="all of it as JSON")
    plan_files.add_arguments(out)
    return out


def _add_what_and_where(out: argparse.ArgumentParser) -> None:
    job = out.add_argument_group("what to train")
    job.add_argument(
        "--model",
        metavar="NAME",
        help="a name (llama-3-70b), a Hugging Face config.json, or sizes as "
        "layers=32,hidden=4096,heads=32,vocab=32000; a wrong name lists those there are",
    )
    job.add_argument(
        "--seq", type=int, metavar="N", help="tokens of a sequence (default: the model's, to 8192)"
    )
    job.add_argument(
        "--global-batch", type=int, metavar="N", help="sequences of a step (default 512)"
    )
    job.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        metavar="NAME",
        help=f"{', '.join(PRECISIONS)} (default bf16: gradients are summed in fp32)",
    )
    job.add_argument(
        "--attention",
        choices=("flash", "unfused"),
        metavar="KIND",
        help="flash (default) keeps no scores, unfused writes and keeps them",
    )
    job.add_argument("--dropout", action="store_true", help="dropout's masks are kept")
    job.add_argument(
        "--loss",
        choices=LOSSES,
        metavar="KIND",
        help="fused (default; Megatron's, compiled ones) or plain (PyTorch's operations one by "
        "one: 14 bytes a logit, not 6)",
    )
    where = out.add_argument_group("where")
    where.add_argument("--gpus", type=int, metavar="N", help="how many devices there are")
    where.add_argument(
        "--gpu",
        metavar="NAME",
        help="a100-80, h100 (default), h200, b200, mi300x, l40s, ..., cpu; a wrong name lists them",
    )
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


def _add_chosen(out: argparse.ArgumentParser) -> None:
    given = out.add_argument_group("what is already chosen (otherwise searched)")
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
        metavar="STAGE",
        help="what replicas share: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too "
        "(default: 1, and 3 where that does not fit, are tried)",
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
        metavar="WHAT",
        help="what the backward computes again: none, selective (attention's core), op (every "
        "second matrix product and all between), or full (every layer)",
    )
    given.add_argument(
        "--offload",
        choices=OFFLOADS,
        metavar="WHAT",
        help="what is kept in the host's memory: none, the optimizer, or all states",
    )
    given.add_argument(
        "--cp-kind",
        choices=CP_KINDS,
        metavar="KIND",
        help=f"how attention sees the other parts of a sequence: {', '.join(CP_KINDS)}",
    )
    given.add_argument(
        "--no-sequence-parallel",
        dest="sequence_parallel",
        action="store_const",
        const=False,
        help="activations outside of the GEMMs are whole on every tp rank",
    )


def check_numbers(options: argparse.Namespace) -> None:
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


def given_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """What of a layout is given."""
    fixed = {name: getattr(options, name) for name in _SIZES}
    return {name: value for name, value in fixed.items() if value is not None}


def job_of(options: argparse.Namespace) -> Job:
    """What to train."""
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
        loss=options.loss or "fused",
    )


def cluster_of(options: argparse.Namespace) -> ClusterSpec:
    """Where to train it."""
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


def layout_of(options: argparse.Namespace, fixed: dict[str, Any]) -> Layout:
    """The one layout that the sizes given are."""
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

"""Other frameworks' configurations as a job and a layout of the planner.

    found = import_configuration("ds.json", gpus=64)
    print(found.text())

Every value taken by default, every key left unread, every value that is filled in later and every
rule broken is told.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

from pyparallel.planner.errors import PlanError, named
from pyparallel.planner.importers import deepspeed, megatron, others, torchtitan
from pyparallel.planner.importers.own import read_own
from pyparallel.planner.importers.reader import BrokenRule, Note, Reader
from pyparallel.planner.importers.settings import Settings, complete, nearest_divisors
from pyparallel.planner.importers.source import ConfigError, Source, read_source
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.models import ModelSpec

__all__ = ["FRAMEWORKS", "BrokenRule", "ConfigError", "Imported", "Note", "import_configuration"]

_READERS: dict[str, Callable[[Reader], Settings]] = {
    "deepspeed": deepspeed.read,
    "megatron": megatron.read,
    "torchtitan": torchtitan.read,
    "nanotron": others.read_nanotron,
    "picotron": others.read_picotron,
    "fsdp": others.read_fsdp,
}
FRAMEWORKS = ("pyparallel", *_READERS)
_PRECISIONS = {
    ("bf16", 4): "bf16",
    ("bf16", 2): "bf16-grads",
    ("fp8", 4): "fp8",
    ("fp8", 2): "fp8-grads",
    ("fp16", 4): "fp16",
    ("fp16", 2): "fp16-zero",
    ("fp32", 4): "fp32",
}


@dataclass(frozen=True)
class Imported:
    """A configuration, read.

    Attributes:
        framework: a member of `FRAMEWORKS`.
        source: the file, or "the flags".
        job: what is trained; None where neither the configuration nor the caller says which model
            or sequence length (`missing` names them).
        layout: how it is spread.
        missing: what the caller has to say for a job.
        defaults: keys that were not given, with the framework's own value.
        ignored: keys that a plan does not need.
        undetermined: "auto", and variables without a value, with what was assumed.
        violations: rules of the framework that are broken.
        assumptions: what was taken to be otherwise than it is written.
    """

    framework: str
    source: str
    job: Job | None
    layout: Layout
    missing: tuple[str, ...] = ()
    defaults: tuple[Note, ...] = ()
    ignored: tuple[Note, ...] = ()
    undetermined: tuple[Note, ...] = ()
    violations: tuple[BrokenRule, ...] = ()
    assumptions: tuple[str, ...] = ()

    def text(self) -> str:
        """All that was noted, a line each."""
        lines = [f"{self.source}: {self.framework}, {self.layout.label}"]
        groups = (
            ("rules broken", [str(violation) for violation in self.violations]),
            ("undetermined", [str(note) for note in self.undetermined]),
            ("assumed", list(self.assumptions)),
            ("missing", list(self.missing)),
            ("defaults taken", [f"{note.key} {note.text}" for note in self.defaults]),
            ("keys ignored", [_ignored(note) for note in self.ignored]),
        )
        for title, entries in groups:
            if entries:
                lines += [f"{title}:", *(f"  {entry}" for entry in entries)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "framework": self.framework,
            "source": self.source,
            "job": None if self.job is None else self.job.to_json(),
            "layout": self.layout.to_json(),
            "missing": list(self.missing),
            "defaults": {note.key: note.text for note in self.defaults},
            "ignored": {note.key: note.text for note in self.ignored},
            "undetermined": {note.key: note.text for note in self.undetermined},
            "violations": [vars(violation) for violation in self.violations],
            "assumptions": list(self.assumptions),
        }


def _ignored(note: Note) -> str:
    return note.key if note.text == "not needed for a plan" else str(note)


def import_configuration(
    argument: str,
    gpus: int | None = None,
    model: ModelSpec | None = None,
    seq: int | None = None,
    **sizes: int | None,
) -> Imported:
    """Reads a configuration of another framework.

    Args:
        argument: a file (.json, .toml, .yaml, or shell commands under any other name), or flags.
        gpus: devices in all; by default what the configuration starts or its sizes multiply to.
        model, seq: take the place of what the configuration says.
        sizes: tp, pp, cp, ep, dp, replicas, microbatch or batch, where they take the place of its
            own.

    Raises:
        PlanError: a number that was passed is below 1.
        ConfigError: the file cannot be read, or holds a value that cannot be; it names line and
            key. Rules broken between values are no error: they are in `violations`.
    """
    given = {name: value for name, value in sizes.items() if value is not None}
    for name, value in (("gpus", gpus), ("seq", seq), *given.items()):
        if value is not None and value < 1:
            raise PlanError(f"{name} is {value}: 1 or more is expected")
    source = read_source(argument)
    framework = _framework(source)
    job: Job | None
    if framework == "pyparallel":
        job, layout = read_own(source)
        return Imported(framework, source.name, job, layout)
    reader = Reader(torchtitan.nested(source) if framework == "torchtitan" else source)
    settings = _READERS[framework](reader)
    if model is not None:
        settings.model = model
    if seq is not None:
        settings.sequence = seq
    for name, value in given.items():
        setattr(settings, name, value)
    if "replicas" in given:
        settings.shard = None
    if given and settings.batch is not None:
        settings.accumulation = None  # follows from the others
    if framework == "deepspeed":
        deepspeed.check_pipeline(reader, settings)
    complete(reader, settings, gpus)
    _shards(reader, settings)
    _some_layers(settings)
    job, missing = _job(settings, reader)
    return Imported(
        framework,
        source.name,
        job,
        _layout(settings),
        missing,
        tuple(reader.defaults),
        tuple(reader.unread()),
        tuple(reader.undetermined),
        tuple(reader.violations),
        (*source.notes, *reader.assumptions),
    )


def _framework(source: Source) -> str:
    """Whose configuration it is, by keys that only it has."""
    keys = set(source.values)
    if source.kind == "flags":
        sections = {key.split(".")[0] for key in keys if "." in key}
        if sections & {"parallelism", "training", "model", "activation_checkpoint"}:
            return "torchtitan"
        return "megatron"
    if source.kind == "toml":
        return "torchtitan"
    if "pyparallel" in keys:
        return "pyparallel"
    if "distributed" in keys and "training" in keys:
        return "picotron"
    if "parallelism" in keys:
        return "nanotron"
    if keys & {"fsdp", "fsdp_config"}:
        return "fsdp"
    if keys & {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}:
        return "deepspeed"
    if keys & {"hidden_size", "num_hidden_layers", "n_layer"}:
        raise ConfigError(
            f"{source.name}: a model's sizes, without a layout: give it to --model instead"
        )
    some = ", ".join(named(key) for key in sorted(map(str, keys))[:8])
    raise ConfigError(
        f"{source.name}: keys {some}: of none of "
        f"{', '.join(FRAMEWORKS)}; DeepSpeed has train_micro_batch_size_per_gpu or "
        "zero_optimization, nanotron parallelism, picotron distributed and training, FSDP "
        "fsdp_config"
    )


def _some_layers(s: Settings) -> None:
    """Of a stage's layers, those that are recomputed, once the model and its stages are known."""
    if s.recompute_every == 1 or s.model is None:
        return
    s.recompute_layers = s.model.layers // (s.pp * s.chunks) // s.recompute_every
    if not s.recompute_layers:
        s.recompute, s.recompute_layers = "none", None


def _shards(reader: Reader, s: Settings) -> None:
    """Hybrid sharding: replicas and shards make up dp x cp."""
    data = (s.dp or 1) * s.cp
    size, what = s.replicas, "replicas"
    if s.shard is not None:
        size, what = min(s.shard, data), "ranks that share shards"
    if s.zero and data % size:
        reader.violations.append(
            reader.broken(
                "replicas x shards is dp x cp",
                f"{size} {what}, of dp {s.dp or 1} x cp {s.cp} = {data}",
                f"take {nearest_divisors(size, data)}",
            )
        )
        size = gcd(size, data)
    s.replicas = data // size if s.shard is not None else size
    if s.zero == 0:
        s.replicas = 1
    shards = data // s.replicas
    if s.secondary and shards % s.secondary:
        reader.violations.append(
            reader.broken(
                "zero_hpz_partition_size divides the ranks that share shards",
                f"{s.secondary}, of {shards} ranks",
                f"take {nearest_divisors(s.secondary, shards)}",
            )
        )
        s.secondary = gcd(s.secondary, shards)
    if s.replicas == data > 1:
        s.replicas, s.zero = 1, 0  # one shard is none
    if s.stored == "fp32" and s.precision != "fp32":
        s.gradient_bytes = 4 if s.zero == 1 else 2
        reader.assumptions.append(
            "weights gathered in 16 bits, whole gradients in fp32, 12 bytes of a shard in fp32"
            if s.zero == 1
            else "parameters, gradients and two moments in fp32: 16 bytes each, as the plan's "
            "2 + 2 + 12"
        )


def _job(s: Settings, reader: Reader) -> tuple[Job | None, tuple[str, ...]]:
    missing = []
    if s.model is None:
        missing.append("the model (--model)")
    if s.sequence is None:
        missing.append("the sequence length (--seq)")
    if s.model is None or s.sequence is None or s.batch is None:
        return None, tuple(missing)
    precision = _PRECISIONS[s.precision, 4 if s.precision == "fp32" else s.gradient_bytes]
    if precision == "fp16-zero" and s.main_gradients:
        precision = "fp16-megatron"
    attention = "unfused" if s.unfused else "flash"
    loss = "plain" if s.plain_loss else "fused"
    return Job(s.model, s.sequence, s.batch, precision, attention, s.dropout, loss), ()


def _layout(s: Settings) -> Layout:
    offload = "all" if s.offload_parameters else "optimizer" if s.offload_optimizer else "none"
    return Layout(
        dp=s.dp or 1,
        tp=s.tp,
        pp=s.pp,
        cp=s.cp,
        ep=s.ep,
        sequence_parallel=s.sequence_parallel,
        micro_batch=s.microbatch or 1,
        zero=s.zero,
        replicas=s.replicas,
        secondary=s.secondary,
        schedule=s.schedule,
        chunks=s.chunks,
        group_size=s.group_size,
        recompute=s.recompute,
        recompute_layers=s.recompute_layers,
        offload=offload,
        cp_kind=s.context,
        layers_per_stage=s.layers_per_stage,
        overlap_dp=s.overlap_dp,
        overlap_tp=s.overlap_tp,
        overlap_pp=s.overlap_pp,
    )

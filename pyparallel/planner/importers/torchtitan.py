"""torchtitan's TOML, or its flags (--parallelism.tensor_parallel_degree): defaults and rules of its
JobConfig, release 0.2; of release 0.3, whose configurations are Python, the flags."""

from math import ceil
from typing import Any

from pyparallel.planner.errors import shown
from pyparallel.planner.importers.reader import Reader
from pyparallel.planner.importers.settings import Settings, nearest_divisors
from pyparallel.planner.importers.source import Source
from pyparallel.planner.presets import known_model

__all__ = ["SCHEDULES", "nested", "read"]

# torch.distributed.pipelining's names -> ours, and how many stages a rank holds by default.
SCHEDULES = {
    "1F1B": ("1f1b", 1),
    "GPipe": ("gpipe", 1),
    "Interleaved1F1B": ("interleaved-1f1b", 2),
    "LoopedBFS": ("looped-bfs", 2),
    "InterleavedZeroBubble": ("interleaved-1f1b", 2),
    "ZBVZeroBubble": ("zb-v", 2),
    "DualPipeV": ("dualpipev", 2),
}


def nested(source: Source) -> Source:
    """Flags as the sections they name, so that both forms read alike."""
    if source.kind != "flags":
        return source
    values: dict[str, Any] = {}
    lines = {}
    for key, value in source.values.items():
        path = tuple(key.replace("-", "_").split("."))
        inner = values
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise source.fail((key,), f"{part} has a value already")
        inner[path[-1]] = value
        if (key,) in source.lines:
            lines[path] = source.lines[(key,)]
    return Source(source.name, "toml", values, lines)


def read(reader: Reader) -> Settings:
    s = Settings(stored="fp32")
    s.tp = reader.whole("parallelism.tensor_parallel_degree", 1) or 1
    s.pp = reader.whole("parallelism.pipeline_parallel_degree", 1) or 1
    s.cp = reader.whole("parallelism.context_parallel_degree", 1) or 1
    s.ep = reader.whole("parallelism.expert_parallel_degree", 1) or 1
    s.sequence_parallel = s.tp > 1
    if reader.has("parallelism.enable_sequence_parallel"):  # release 0.3
        s.sequence_parallel &= reader.truth("parallelism.enable_sequence_parallel", True)
    newer = "compile.enable_async_tensor_parallel"
    s.overlap_tp = reader.truth(
        newer if reader.has(newer) else "parallelism.enable_async_tensor_parallel"
    )
    older = "training.compile"  # before release 0.2
    compiled = reader.truth(older if reader.has(older) else "compile.enable")
    if s.overlap_tp and not compiled:
        s.overlap_tp = False
        reader.breaks(
            "parallelism.enable_async_tensor_parallel",
            "it works in compiled models alone",
            "compile.enable false",
            "set compile.enable = true, or remove it",
        )
    parts = [str(part) for part in reader.words("compile.components")] or ["model", "loss"]
    s.plain_loss = not compiled or "loss" not in parts
    _model(reader, s)
    _data_parallel(reader, s)
    _precision(reader, s)
    _pipeline_and_batch(reader, s)
    _sequence(reader, s)
    mode = reader.word(
        "activation_checkpoint.mode", "selective", ("selective", "full", "memory_budget", "none")
    )
    s.recompute = "full" if mode == "full" else "none"
    if mode == "memory_budget":
        reader.assumptions.append("recompute by memory budget is planned as none")
    if mode == "selective":
        _selective(reader, s)
    return s


def _selective(reader: Reader, s: Settings) -> None:
    """By operation, or of every n-th layer."""
    option = reader.word("activation_checkpoint.selective_ac_option", "2") or "2"
    if option == "op":
        s.recompute = "op"
        return
    if not option.isdecimal() or int(option) < 1:
        raise reader.source.fail(
            reader.path("activation_checkpoint.selective_ac_option"),
            f"{shown(option)}; allowed are op, 1, 2, ...",
        )
    s.recompute, s.recompute_every = "full", int(option)


def _model(reader: Reader, s: Settings) -> None:
    module, config = reader.word("module"), reader.word("config")
    if module is not None and config is not None:  # release 0.3: a function in Python
        name, flavor = module, config.removeprefix(f"{module}_").upper()
        reader.assumptions.append(
            f"what {config} sets in Python is not seen: where flags say nothing, the defaults of "
            "torchtitan's own classes are taken"
        )
    else:
        name = reader.word("model.name", "llama3") or ""
        flavor = reader.word("model.flavor", "debugmodel") or ""
    family = {"llama3": ("llama-3", "llama-3.1"), "qwen3": ("qwen-3", "qwen3"),
              "deepseek_v3": ("deepseek-v3",)}.get(name, (name,))  # fmt: skip
    for stem in family:
        s.model = known_model(f"{stem}-{flavor}") or (
            known_model(stem) if flavor == "671B" else None
        )
        if s.model is not None:
            return
    reader.assumptions.append(
        f"model {name}, flavor {flavor}, is not among the planner's: name one with --model"
    )


def _data_parallel(reader: Reader, s: Settings) -> None:
    replicate = reader.whole("parallelism.data_parallel_replicate_degree", 1) or 1
    shard = reader.whole("parallelism.data_parallel_shard_degree", -1, least=-1)
    policy = reader.word(
        "parallelism.fsdp_reshard_after_forward", "default", ("default", "always", "never")
    )
    again = policy == "always" or (policy == "default" and s.pp == 1)
    # A pipeline sums whole gradients of its microbatches, and reduces them after the last.
    s.zero = 3 if again else 2 if s.pp == 1 else 1
    if shard == 0:
        raise reader.source.fail(
            reader.path("parallelism.data_parallel_shard_degree"),
            "0; allowed are -1 (what is left), 1, 2, ...",
        )
    if shard is not None and shard > 0:
        s.dp = replicate * shard
    s.replicas = replicate  # shards over all that is left where shard is -1
    s.offload_optimizer = s.offload_parameters = reader.truth("training.enable_cpu_offload")


def _precision(reader: Reader, s: Settings) -> None:
    kinds = ("bfloat16", "float32")
    stored = reader.word("training.dtype", "float32", kinds)
    passes = reader.word("training.mixed_precision_param", "bfloat16", kinds)
    s.precision = "bf16" if passes == "bfloat16" or stored == "bfloat16" else "fp32"
    s.gradient_bytes = 2 if stored == "bfloat16" else 4
    if any("float8" in name for name in reader.words("model.converters")):
        s.precision = "fp8"
    if stored == "bfloat16":
        reader.assumptions.append(
            "training.dtype bfloat16 keeps parameters and moments in 16 bits; the plan counts an "
            "fp32 copy and moments"
        )


def _pipeline_and_batch(reader: Reader, s: Settings) -> None:
    older = "training.batch_size"  # before release 0.1
    local = reader.whole(older if reader.has(older) else "training.local_batch_size", 8) or 8
    s.batch = reader.whole("training.global_batch_size", -1, least=-1)
    s.batch = s.batch if s.batch is not None and s.batch > 0 else None
    s.microbatch = local
    if s.batch is None:
        s.accumulation = 1
    name = reader.word("parallelism.pipeline_parallel_schedule", "1F1B", SCHEDULES) or "1F1B"
    first = reader.whole("parallelism.pipeline_parallel_first_stage_less_layers", 1, least=0) or 0
    last = reader.whole("parallelism.pipeline_parallel_last_stage_less_layers", 1, least=0) or 0
    per_stage = reader.whole("parallelism.pipeline_parallel_layers_per_stage")
    size = reader.whole("parallelism.pipeline_parallel_microbatch_size", 1) or 1
    if s.pp == 1:
        return
    s.schedule, s.chunks = SCHEDULES[name]
    if name == "InterleavedZeroBubble":
        reader.assumptions.append(
            "InterleavedZeroBubble is planned as interleaved-1f1b, whose bubble is larger"
        )
    if per_stage is not None and s.model is not None:
        stages = ceil((s.model.layers + first + last) / per_stage)
        least = SCHEDULES[name][1]
        if stages % s.pp or stages // s.pp < least or (least == 1 and stages != s.pp):
            reader.breaks(
                "parallelism.pipeline_parallel_layers_per_stage",
                f"the stages are a multiple of pp, {least} per rank"
                + (" or more" if least > 1 else ""),
                f"{s.model.layers} + {first + last} layers by {per_stage} are {stages} stages, "
                f"pp {s.pp}",
                f"take {ceil((s.model.layers + first + last) / (s.pp * least))}",
            )
        else:
            s.chunks = stages // s.pp
    parts = reader.lists("parallelism.module_fqns_per_model_part")
    if parts:
        s.layers_per_stage = _listed(reader, s, parts)
        s.chunks = max(len(parts) // s.pp, 1)
    elif s.model is not None:
        s.layers_per_stage = _stages(s.model.layers, s.pp * s.chunks, first, last)
    if local % size:
        reader.breaks(
            "parallelism.pipeline_parallel_microbatch_size",
            "it divides the local batch",
            f"{size}, local batch {local}",
            f"take {nearest_divisors(size, local)}",
        )
        return
    s.microbatch = size
    if s.batch is None:
        s.accumulation = local // size
    else:
        reader.assumptions.append(
            f"a pipeline of {local // size} microbatches for each local batch of {local}; where "
            "a step has several, the plan joins them into one"
        )


def _stages(layers: int, stages: int, first: int, last: int) -> tuple[int, ...] | None:
    """Layers of each stage where the embedding counts as `first` layers and the head as `last`;
    what is left over goes to the first stages, one each."""
    if stages > layers + first + last:
        return None
    each, more = divmod(layers + first + last, stages)
    counts = [each + (stage < more) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts) if min(counts) >= 0 and len(set(counts)) > 1 else None


def _listed(reader: Reader, s: Settings, parts: list[list[str]]) -> tuple[int, ...]:
    """Layers of stages whose modules are listed by name."""
    if len(parts) % s.pp:
        reader.breaks(
            "parallelism.module_fqns_per_model_part",
            "its stages are a multiple of pp",
            f"{len(parts)}, pp {s.pp}",
            f"take pp {nearest_divisors(s.pp, len(parts))}",
        )
    return tuple(sum(name.startswith("layers.") for name in part) for part in parts)


def _sequence(reader: Reader, s: Settings) -> None:
    s.sequence = reader.whole("training.seq_len", 2048)
    method = reader.word(
        "parallelism.context_parallel_rotate_method", "allgather", ("allgather", "alltoall")
    )
    s.context = "all-gather" if method == "allgather" else "ring"
    step = s.tp * 2 * s.cp if s.tp * s.cp > 1 else 1
    if s.sequence and s.sequence % step:
        reader.breaks(
            "training.seq_len",
            "the sequence is a multiple of tp x 2 cp",
            f"{s.sequence}, tp {s.tp}, cp {s.cp}",
            f"take {s.sequence // step * step or step} or {(s.sequence // step + 1) * step}",
        )

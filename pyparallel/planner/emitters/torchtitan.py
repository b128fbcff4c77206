"""torchtitan's TOML, as release 0.2 reads it."""

import json

from pyparallel.planner.emitters.form import Emission

__all__ = ["torchtitan_toml"]

# Ours -> torchtitan's name and flavor.
_MODELS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
# Its attention keeps no scores: of the core alone there is nothing to recompute.
_RECOMPUTE = {"none": "none", "selective": "none", "op": "selective", "full": "full"}
_ROTATE = {"all-gather": "allgather", "ring": "alltoall"}
Table = dict[str, object]


def torchtitan_toml(e: Emission) -> str:
    job, layout = e.job, e.layout
    e.cannot(e.model.name not in _MODELS, f"model {e.model.name}", f"it has {', '.join(_MODELS)}")
    name, flavor = _MODELS.get(e.model.name, ("", ""))
    pipeline = layout.pp > 1
    tables: dict[str, Table] = {
        "model": {"name": name, "flavor": flavor},
        "training": {
            "local_batch_size": layout.micro_batch * (e.microbatches if pipeline else 1),
            "global_batch_size": job.global_batch,
            "seq_len": job.seq,
            **_precision(e),
        },
        "parallelism": {**_shards(e), **_axes(e), **(_pipeline(e) if pipeline else {})},
        "activation_checkpoint": {"mode": _RECOMPUTE[layout.recompute]},
    }
    if layout.recompute == "op":
        tables["activation_checkpoint"]["selective_ac_option"] = "op"
    e.cannot(layout.recompute_layers is not None, "recompute of some layers", "all, or none")
    fused, pieces = job.loss == "fused", layout.overlap_tp and layout.tp > 1
    if pieces:
        tables["parallelism"]["enable_async_tensor_parallel"] = True
    if fused or pieces:
        parts = ["model", "loss"] if fused else ["model"]
        tables["compile"] = {"enable": True, "components": parts}
    e.notes.append(
        f"start it on {layout.devices} devices with --job.config_file; the tokenizer and data set "
        "are yours to add"
    )
    return (
        "\n\n".join(
            "\n".join(
                [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in rows.items())]
            )
            for table, rows in tables.items()
        )
        + "\n"
    )


def _precision(e: Emission) -> Table:
    kind = e.job.bytes
    e.cannot(kind.compute not in ("bf16", "fp32"), kind.name, "take bf16")
    if kind.compute == "bf16" and kind.gradient == 4:
        e.notes.append(
            "torchtitan keeps 16 bytes per parameter (all in fp32), where the plan counts 18"
        )
    compute = "bfloat16" if kind.compute == "bf16" else "float32"
    offload = e.layout.offload
    whole = e.layout.zero == 0 or e.layout.shards == 1
    e.cannot(offload != "none" and whole, "offload without shards", "take zero 3 and dp above 1")
    e.cannot(offload == "optimizer", "the optimizer alone on the host", "take offload all or none")
    return {
        "mixed_precision_param": compute,
        **({"enable_cpu_offload": True} if offload == "all" else {}),
    }


def _shards(e: Emission) -> Table:
    layout = e.layout
    if layout.zero == 0:
        e.cannot(layout.cp > 1, "context parallelism without shards", "take zero 3 or 2")
        return {"data_parallel_replicate_degree": layout.dp, "data_parallel_shard_degree": 1}
    e.cannot(layout.zero == 1 and layout.pp == 1, "ZeRO-1 without a pipeline", "take zero 2 or 3")
    e.cannot(layout.zero == 2 and layout.pp > 1, "ZeRO-2 with a pipeline", "take zero 1 or 3")
    e.cannot(layout.secondary > 0, "a second copy of the weights", "take secondary 0")
    e.cannot(
        layout.dp % layout.replicas != 0,
        f"{layout.replicas} replicas of dp {layout.dp}, cut by cp {layout.cp}",
        "take replicas that divide dp",
    )
    return {
        "data_parallel_replicate_degree": layout.replicas,
        "data_parallel_shard_degree": layout.dp // layout.replicas,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
    }


def _axes(e: Emission) -> Table:
    layout = e.layout
    e.cannot(
        layout.tp > 1 and not layout.sequence_parallel,
        "tensor parallelism without sequence parallelism",
        "take sequence_parallel=True",
    )
    axes: Table = {
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.cp > 1:
        axes["context_parallel_rotate_method"] = e.choice("cp by", layout.cp_kind, _ROTATE)
    if layout.ep > 1:
        axes["expert_parallel_degree"] = layout.ep
    return axes


def _pipeline(e: Emission) -> Table:
    layout = e.layout
    least = 1 if layout.schedule in ("1f1b", "gpipe") else 2
    e.cannot(
        (layout.chunks > 1) != (least > 1),
        f"{layout.schedule} with {layout.chunks} chunks",
        f"{least} chunks",
    )
    rows: Table = {
        "pipeline_parallel_schedule": e.choice("schedule", layout.schedule, _SCHEDULES),
        "pipeline_parallel_microbatch_size": layout.micro_batch,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    counts = layout.layers_per_stage
    if counts is None:
        e.cannot(
            e.model.layers % layout.stages != 0,
            f"{e.model.layers} layers evenly over {layout.stages} stages",
            "give layers_per_stage",
        )
        rows["pipeline_parallel_layers_per_stage"] = -(-e.model.layers // layout.stages)
        return rows
    parts, at = [], 0
    for count in counts:
        parts.append([f"layers.{layer}" for layer in range(at, at + count)])
        at += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    rows["module_fqns_per_model_part"] = parts
    return rows

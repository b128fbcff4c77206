"""DeepSpeed's JSON: keys, defaults and rules as DeepSpeed 0.19 reads them.

The file says nothing of the model, nor of pipeline stages, which a script builds in Python.
"""

from typing import Any

from pyparallel.planner.importers.reader import BYTES, Reader
from pyparallel.planner.importers.settings import Settings

__all__ = ["CLOSED_GROUPS", "check_pipeline", "read"]

_DEVICES = ("none", "cpu", "nvme")
_OFFLOAD = {"device", "nvme_path", "buffer_count", "pin_memory"}
# Groups in which DeepSpeed refuses keys it does not know.
CLOSED_GROUPS: dict[str, set[str]] = {
    "zero_optimization": {
        *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"),
        *("use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size"),
        *("overlap_comm", "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint"),
        *("offload_param", "offload_optimizer", "zenflow", "sub_group_size"),
        *("cpu_offload_param", "cpu_offload_use_pin_memory", "cpu_offload"),
        *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
        *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
        *("module_granularity_threshold", "use_all_reduce_for_fetch_params"),
        *("allgather_sequential", "stage3_gather_fp16_weights_on_model_save"),
        *("ignore_unused_parameters", "legacy_stage1", "round_robin_gradients"),
        *("parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights"),
        *("zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
        *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
        *("log_trace_cache_warnings", "enable_sanity_checks", "leaf_module"),
        *("save_muon_momentum_buffer_in_memory", "mics_shard_size"),
        *("mics_hierarchical_params_gather", "stage3_prefetch_bucket_size"),
        *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
        *("stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold"),
        *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
    },
    "zero_optimization.offload_optimizer": _OFFLOAD
    | {"pipeline_read", "pipeline_write", "fast_init", "ratio", "super_offload"}
    | {"cpuadam_cores_perc"},
    "zero_optimization.offload_param": _OFFLOAD | {"buffer_size", "max_in_cpu"},
    "fp16": {
        *("enabled", "auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window"),
        *("hysteresis", "consecutive_hysteresis", "min_loss_scale"),
        "fp16_master_weights_and_grads",
    },
    "bf16": {
        *("enabled", "immediate_grad_update", "check_grad_overflow"),
        *("bf16_master_weights_and_grads", "bf16_optimizer_states"),
    },
}


def read(reader: Reader) -> Settings:
    s = Settings()
    s.batch = reader.whole("train_batch_size")
    s.microbatch = reader.whole("train_micro_batch_size_per_gpu")
    s.accumulation = reader.whole("gradient_accumulation_steps")
    if s.batch is None and s.microbatch is None and not reader.undetermined:
        reader.breaks(
            "train_batch_size",
            "train_batch_size or train_micro_batch_size_per_gpu is given",
            "neither",
            'add "train_micro_batch_size_per_gpu": 1',
        )
    s.cp = reader.whole("sequence_parallel_size", 1) or 1
    s.context = "ulysses"
    s.tp = (
        reader.whole("tensor_parallel.autotp_size", 0, least=0)
        or reader.whole("tensor_parallel.tp.tp_size", 1)
        or 1
    )
    _tensor_ranks(reader, s)
    _precision(reader, s)
    _zero(reader, s)
    _closed_groups(reader)
    reader.number("gradient_clipping", 1.0)
    s.plain_loss = True
    reader.assumptions.append(
        "the loss is PyTorch's, in 32 bits: 14 bytes a logit (--loss fused says otherwise)"
    )
    if not reader.has("activation_checkpointing"):
        reader.assumptions.append(
            "no recompute, no pipeline: DeepSpeed's file does not hold them, the script does "
            "(--recompute and --pp say otherwise)"
        )
    return s


def _tensor_ranks(reader: Reader, s: Settings) -> None:
    """Without an mpu of the caller's, DeepSpeed counts tensor parallel ranks as replicas in
    train_batch_size (runtime/config.py), though they see the same samples."""
    if s.tp == 1 or s.batch is None:
        return
    if s.batch % s.tp:
        reader.breaks(
            "train_batch_size",
            "autotp ranks are counted in train_batch_size, so it is a multiple of autotp_size",
            f"{s.batch}, autotp_size {s.tp}",
            f"take {s.batch // s.tp * s.tp or s.tp} or {(s.batch // s.tp + 1) * s.tp}",
        )
        return
    reader.assumptions.append(
        f"train_batch_size {s.batch} counts every sample {s.tp} times (autotp_size {s.tp}): "
        f"{s.batch // s.tp} samples"
    )
    s.batch //= s.tp


def _precision(reader: Reader, s: Settings) -> None:
    # "auto" is filled in by who starts it: nobody has a section of 16 bits to train in 32.
    later = reader.is_auto("bf16.enabled"), reader.is_auto("fp16.enabled")
    fp16 = reader.truth("fp16.enabled", later == (False, True))
    bf16 = reader.truth("bf16.enabled", later[0] and not fp16)
    if any(later) and fp16 != bf16:
        reader.assumptions.append(
            f'passes in {"fp16" if fp16 else "bf16"}: "auto" leaves it to the script '
            "(--precision says otherwise)"
        )
    if fp16 and bf16:
        reader.breaks(
            "fp16.enabled", "fp16 and bf16 exclude each other", "both true", "switch one off"
        )
    s.precision = "fp16" if fp16 and not bf16 else "bf16" if bf16 else "fp32"
    kept = reader.word("data_types.grad_accum_dtype", s.precision, ("fp32", "fp16", "bf16"))
    s.gradient_bytes = 4 if kept == "fp32" else 2


def _zero(reader: Reader, s: Settings) -> None:
    z = "zero_optimization"
    stage = reader.whole(f"{z}.stage", 0, least=0) or 0
    if stage > 3:
        raise reader.source.fail(
            reader.path(f"{z}.stage"), f"{stage}; allowed are 0, 1, 2, 3; nearest 3"
        )
    s.zero = stage
    optimizer = reader.word(f"{z}.offload_optimizer.device", "none", _DEVICES)
    parameters = reader.word(f"{z}.offload_param.device", "none", _DEVICES)
    ratio = reader.number(f"{z}.offload_optimizer.ratio", 1.0)
    if optimizer != "none" and stage == 0:
        reader.breaks(
            f"{z}.offload_optimizer.device",
            "the optimizer is offloaded from stage 1, 2 or 3",
            f"stage {stage}",
            'set "stage": 1 or remove offload_optimizer',
        )
    if ratio is not None and ratio < 1 and stage != 3:
        reader.breaks(
            f"{z}.offload_optimizer.ratio",
            "a ratio below 1 works in stage 3 alone",
            f"ratio {ratio}, stage {stage}",
            'set "stage": 3 or "ratio": 1.0',
        )
    if parameters != "none" and stage != 3:
        reader.breaks(
            f"{z}.offload_param.device",
            "parameters are offloaded in stage 3 alone",
            f"stage {stage}",
            'set "stage": 3 or remove offload_param',
        )
    s.offload_optimizer = optimizer != "none" and stage > 0
    s.offload_parameters = parameters != "none" and stage == 3
    s.overlap_dp = reader.truth(f"{z}.overlap_comm", stage == 3)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if reader.whole(f"{z}.{key}", 500_000_000, least=0, most=BYTES) == 0:
            reader.breaks(f"{z}.{key}", "a bucket holds something", "0", "take 500000000")
    if stage == 3:
        reader.whole(f"{z}.sub_group_size", 1_000_000_000, most=BYTES)
        reader.whole(f"{z}.stage3_prefetch_bucket_size", 50_000_000, least=0, most=BYTES)
        reader.whole(f"{z}.stage3_param_persistence_threshold", 100_000, least=0, most=BYTES)
        reader.whole(f"{z}.stage3_max_live_parameters", 1_000_000_000, least=0, most=BYTES)
    hpz = reader.whole(f"{z}.zero_hpz_partition_size", 1) or 1
    mics = reader.whole(f"{z}.mics_shard_size", -1, least=-1) or -1
    if mics > 0 and stage == 3:
        s.shard = mics
    elif mics > 0:
        reader.assumptions.append(f"mics_shard_size {mics} has no effect with stage {stage}")
    for what, key in (
        ("weights", "zero_quantized_weights"),
        ("gradients", "zero_quantized_gradients"),
    ):
        if reader.truth(f"{z}.{key}") and stage == 3:
            reader.assumptions.append(
                f"{key}: {what} travel in 8 bits or fewer; the plan counts them as they are kept"
            )
    if hpz > 1 and stage == 3:
        s.secondary = hpz
    elif hpz > 1:
        reader.assumptions.append(f"zero_hpz_partition_size {hpz} has no effect with stage {stage}")


def check_pipeline(reader: Reader, s: Settings) -> None:
    """The script's pipeline, which the caller names, against the file's ZeRO."""
    if s.pp > 1 and s.zero > 1:
        reader.breaks(
            "zero_optimization.stage",
            "ZeRO-2 and ZeRO-3 do not go with a pipeline",
            f"stage {s.zero}, pp {s.pp}",
            'set "stage": 1, or pp 1',
        )


def _closed_groups(reader: Reader) -> None:
    for group, known in CLOSED_GROUPS.items():
        values: Any = reader.source.values
        for part in group.split("."):
            values = values.get(part, {}) if isinstance(values, dict) else {}
        for key in values if isinstance(values, dict) else ():
            if key not in known:
                reader.breaks(
                    f"{group}.{key}",
                    f"DeepSpeed refuses keys it does not know in {group}",
                    key,
                    reader.nearest(key, known),
                )

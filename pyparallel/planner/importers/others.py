"""nanotron's YAML, picotron's JSON and FSDP settings (accelerate's YAML, transformers' JSON)."""

from dataclasses import replace

from pyparallel.planner.errors import PlanError
from pyparallel.planner.importers.reader import Reader
from pyparallel.planner.importers.settings import Settings
from pyparallel.planner.models import Experts, ModelSpec
from pyparallel.planner.presets import known_model

__all__ = ["read_fsdp", "read_nanotron", "read_picotron"]


def read_nanotron(reader: Reader) -> Settings:
    """nanotron: engine "afab" is GPipe; tp_mode REDUCE_SCATTER is sequence parallelism."""
    s = Settings()
    s.dp = reader.whole("parallelism.dp")
    for key in ("dp", "pp", "tp"):
        if not reader.has(f"parallelism.{key}"):
            reader.lacks(f"parallelism.{key}", f"add {key}: 1")
    s.pp = reader.whole("parallelism.pp", 1) or 1
    s.tp = reader.whole("parallelism.tp", 1) or 1
    s.cp = reader.whole("parallelism.context_parallel_size", 1) or 1
    s.ep = reader.whole("parallelism.expert_parallel_size", 1) or 1
    engine = reader.word("parallelism.pp_engine", "afab", ("afab", "1f1b"))
    s.schedule = "gpipe" if engine == "afab" and s.pp > 1 else "1f1b"
    mode = reader.word("parallelism.tp_mode", "all_reduce", ("all_reduce", "reduce_scatter"))
    s.sequence_parallel = mode == "reduce_scatter" and s.tp > 1
    s.overlap_tp = reader.truth("parallelism.tp_linear_async_communication") and s.tp > 1
    s.recompute = "full" if reader.truth("parallelism.recompute_layer") else "none"
    s.microbatch = reader.whole("tokens.micro_batch_size", 1)
    s.accumulation = reader.whole("tokens.batch_accumulation_per_replica", 1)
    s.sequence = reader.whole("tokens.sequence_length")
    zero = reader.whole("optimizer.zero_stage", 0, least=0) or 0
    if zero > 1:
        reader.breaks(
            "optimizer.zero_stage", "nanotron has stages 0 and 1", str(zero), "take zero_stage: 1"
        )
    s.zero = min(zero, 1)
    dtype = reader.word("model.dtype", "float32", ("bfloat16", "float16", "float32"))
    s.precision = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype or "", "fp32")
    in_fp32 = reader.truth("optimizer.accumulate_grad_in_fp32")
    s.gradient_bytes = 4 if in_fp32 or s.precision == "fp32" else 2
    multiple = reader.whole("model.make_vocab_size_divisible_by", 1) or 1
    if reader.has("model.model_config"):
        s.model = _nanotron_model(reader, multiple)
    return s


def _nanotron_model(reader: Reader, multiple: int) -> ModelSpec:
    """Llama's and Qwen's sizes by default; Starcoder's where the file says so."""

    def size(key: str, default: int | None = None) -> int:
        value = reader.whole(f"model.model_config.{key}", default)
        if value is None:
            raise reader.source.fail(reader.path(f"model.model_config.{key}"), "missing; add it")
        return value

    starcoder = reader.truth("model.model_config.is_starcoder2_config")
    qwen = reader.truth("model.model_config.is_qwen2_config")
    heads = size("num_attention_heads", 16 if starcoder else 32)
    hidden = size("hidden_size", 2048 if starcoder else 4096)
    kv_key = "num_kv_heads" if starcoder else "num_key_value_heads"
    experts = None
    if reader.has("model.model_config.moe_config"):
        shared = reader.truth("model.model_config.moe_config.enable_shared_expert")
        experts = Experts(
            size("moe_config.num_experts"),
            size("moe_config.top_k"),
            size("moe_config.moe_intermediate_size"),
            size("moe_config.shared_expert_intermediate_size") if shared else 0,
        )
    biased = qwen and reader.truth("model.model_config.attention_bias")
    try:
        return ModelSpec(
            "of the file",
            size("num_hidden_layers", 24 if starcoder else 32),
            hidden,
            heads,
            size("vocab_size", 49280 if starcoder else 32000),
            ffn=size("intermediate_size", 4 * hidden if starcoder else 11008),
            kv_heads=size(kv_key, heads),
            max_seq=size("max_position_embeddings", 4096 if starcoder else 2048),
            gated=not starcoder,
            tied=reader.truth("model.model_config.tie_word_embeddings"),
            biases="all" if starcoder else "qkv" if biased else "none",
            norm="layer" if starcoder else "rms",
            experts=experts,
            pad_vocab_to=multiple,
        )
    except PlanError as error:
        raise reader.source.fail(reader.path("model.model_config"), str(error)) from None


def read_picotron(reader: Reader) -> Settings:
    """picotron: gradients in fp32, neither ZeRO nor sequence parallelism."""
    s = Settings(gradient_bytes=4)
    for axis in ("tp", "cp", "pp"):
        setattr(s, axis, reader.whole(f"distributed.{axis}_size", 1) or 1)
    s.dp = reader.whole("distributed.dp_size", 1)
    engine = reader.word("distributed.pp_engine", "1f1b", ("1f1b", "afab"))
    s.schedule = "gpipe" if engine == "afab" and s.pp > 1 else "1f1b"
    s.microbatch = reader.whole("training.micro_batch_size", 1)
    s.accumulation = reader.whole("training.gradient_accumulation_steps", 1)
    s.sequence = reader.whole("training.seq_length", 1024)
    name = reader.word("model.name")
    changed = {
        key: value
        for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        if (value := reader.whole(f"model.{key}")) is not None
    }
    known = known_model(name) if name else None
    if known is None:
        reader.assumptions.append(f"model {name} is not among the planner's: name one with --model")
    else:
        s.model = _changed(reader, known, changed)
    if s.sequence and s.sequence % s.cp:
        reader.breaks(
            "training.seq_length",
            "cp divides the sequence",
            f"{s.sequence}, cp {s.cp}",
            f"take {(s.sequence // s.cp + 1) * s.cp}",
        )
    reader.assumptions.append(
        "moments in fp32 with an fp32 copy of the parameters; picotron's AdamW keeps bf16 ones"
    )
    return s


def _changed(reader: Reader, model: ModelSpec, changed: dict[str, int]) -> ModelSpec:
    heads = changed.get("num_attention_heads", model.heads)
    try:
        return replace(
            model,
            layers=changed.get("num_hidden_layers", model.layers),
            heads=heads,
            kv_heads=changed.get("num_key_value_heads", model.kv_heads),
            head_dim=model.head_dim if heads == model.heads else model.hidden // heads,
        )
    except PlanError as error:
        raise reader.source.fail(reader.path("model"), str(error)) from None


_RESHARD = "fsdp_config.fsdp_reshard_after_forward"
_STRATEGIES = {
    # FSDP 1: sharding strategy -> ZeRO stage and whether only inside a node
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}


def read_fsdp(reader: Reader) -> Settings:
    """FSDP by accelerate (fsdp_config with fsdp_* keys) or transformers ("fsdp": "full_shard")."""
    s = Settings(stored="fp32")
    s.gpus = reader.whole("num_processes")
    if s.gpus is None:
        nodes, each = reader.whole("nnodes"), reader.whole("nproc_per_node")
        s.gpus = (nodes or 1) * each if each else None
    words = reader.words("fsdp")
    words = words[0].replace(",", " ").split() if len(words) == 1 else words
    named = [word.upper() for word in words if word.upper() in _STRATEGIES]
    version = reader.whole("fsdp_config.fsdp_version") or reader.whole("fsdp_config.version", 1)
    strategy = named[0] if named else _strategy(reader)
    again = reader.word(_RESHARD) if version == 1 else None
    if version == 2:
        strategy = ("SHARD_GRAD_OP", "FULL_SHARD")[reader.truth(_RESHARD, True)]
    elif again is not None and again.upper() in _STRATEGIES:
        strategy = again.upper()
    s.zero, hybrid = _STRATEGIES[strategy]
    if hybrid:
        s.shard = reader.whole("nproc_per_node")
        if s.shard is None:
            s.shard = 8
            reader.assumptions.append("hybrid sharding inside nodes of 8 devices is assumed")
    offload = reader.truth("fsdp_config.fsdp_offload_params") or "offload" in words
    s.offload_optimizer = s.offload_parameters = offload
    recompute = reader.truth("fsdp_config.fsdp_activation_checkpointing") or reader.truth(
        "fsdp_config.activation_checkpointing"
    )
    s.recompute = "full" if recompute or reader.truth("gradient_checkpointing") else "none"
    mixed = reader.word("mixed_precision", "no", ("no", "fp16", "bf16", "fp8"))
    bf16, fp16 = reader.truth("bf16"), reader.truth("fp16")
    if mixed in ("fp16", "bf16", "fp8"):
        s.precision = mixed
    else:
        s.precision = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if s.precision == "fp32":
        s.gradient_bytes = 4
    s.plain_loss = True
    reader.assumptions.append(
        "the loss is PyTorch's, in 32 bits: 14 bytes a logit (--loss fused says otherwise)"
    )
    s.microbatch = reader.whole("per_device_train_batch_size")
    s.accumulation = reader.whole("gradient_accumulation_steps")
    if not reader.has("fsdp_config") and not reader.has("fsdp"):
        reader.breaks("fsdp_config", "FSDP settings are given", "none", "add fsdp_config")
    return s


def _strategy(reader: Reader) -> str:
    """By name, or by the number that older files hold."""
    numbers = {str(i): name for i, name in enumerate(_STRATEGIES, 1)}
    value = reader.source.values.get("fsdp_config") or {}
    raw = value.get("fsdp_sharding_strategy") if isinstance(value, dict) else None
    if str(raw) in numbers:
        reader.whole("fsdp_config.fsdp_sharding_strategy")
        return numbers[str(raw)]
    return (
        reader.word("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD", _STRATEGIES) or "FULL_SHARD"
    )

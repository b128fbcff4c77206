"""A shell script that starts Megatron-LM's pretrain_gpt.py on mock data (core 0.12 to 0.16)."""

from math import ceil

from pyparallel.planner.emitters.form import Emission

__all__ = ["megatron_script"]

_SCHEDULES = {"1f1b": "", "interleaved-1f1b": ""}
_CONTEXT = {"ring": "p2p", "ulysses": "a2a", "all-gather": "allgather"}
_SHARDS = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_script(e: Emission) -> str:
    layout = e.layout
    groups = {
        "MODEL_ARGS": _model(e),
        "LAYOUT_ARGS": _layout(e),
        "TRAINING_ARGS": _training(e),
        "DATA_ARGS": ["--mock-data", "--tokenizer-type NullTokenizer"],
    }
    lines = [
        "#!/usr/bin/env bash",
        f"# {e.model.name}: {layout.label}",
        "# Run it in a checkout of Megatron-LM, on every node with its own NODE_RANK.",
        "set -euo pipefail",
    ]
    sharded = layout.zero > 1
    if (layout.tp > 1 or layout.cp > 1) and not sharded:
        lines.append("export CUDA_DEVICE_MAX_CONNECTIONS=1  # tp and cp ask for it")
    per_node = min(e.node_size, layout.devices)
    launch = [
        f"--nproc_per_node {per_node}",
        f"--nnodes {ceil(layout.devices / per_node)}",
        '--node_rank "${NODE_RANK:-0}"',
        '--master_addr "${MASTER_ADDR:-localhost}"',
        '--master_port "${MASTER_PORT:-6000}"',
    ]
    for name, flags in {"LAUNCH_ARGS": launch, **groups}.items():
        lines += ["", f"{name}=(", *(f"    {flag}" for flag in flags), ")"]
    used = " ".join(f'"${{{name}[@]}}"' for name in groups)
    lines += ["", f'torchrun "${{LAUNCH_ARGS[@]}}" pretrain_gpt.py {used} "$@"']
    e.notes.append(
        "the script trains on mock data: put your --data-path and tokenizer into DATA_ARGS, your "
        "learning rate and length into TRAINING_ARGS"
    )
    return "\n".join(lines) + "\n"


def _model(e: Emission) -> list[str]:
    m = e.model
    e.cannot(e.job.loss != "fused", "a plain loss", "take loss fused")
    e.cannot(e.layout.secondary > 0, "a second copy of the weights", "take secondary 0")
    e.cannot(m.embedding_norm, "a norm after the embedding", "none")
    e.cannot(
        m.positions == "learned" and e.job.seq > m.max_seq,
        f"{e.job.seq} tokens with {m.max_seq} learned positions",
        f"take seq {m.max_seq}",
    )
    positions = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}[m.positions]
    flags = [
        f"--num-layers {m.layers}",
        f"--hidden-size {m.hidden}",
        f"--ffn-hidden-size {m.ffn}",
        f"--num-attention-heads {m.heads}",
        f"--kv-channels {m.head_dim}",
        f"--seq-length {e.job.seq}",
        f"--max-position-embeddings {max(m.max_seq, e.job.seq)}",
        f"--position-embedding-type {positions}",
        f"--normalization {'RMSNorm' if m.norm == 'rms' else 'LayerNorm'}",
        f"--vocab-size {m.vocab}",
        f"--make-vocab-size-divisible-by {m.pad_vocab_to}",
    ]
    if m.kv_heads != m.heads:
        flags += ["--group-query-attention", f"--num-query-groups {m.kv_heads}"]
    switches = {
        "--swiglu": m.gated,
        "--untie-embeddings-and-output-weights": not m.tied,
        "--disable-bias-linear": m.biases != "all",
        "--add-qkv-bias": m.biases == "qkv",
        "--qk-layernorm": m.head_norms,
    }
    flags += [flag for flag, on in switches.items() if on]
    if m.experts is not None:
        x = m.experts
        flags += [
            f"--num-experts {x.count}",
            f"--moe-router-topk {x.active}",
            f"--moe-ffn-hidden-size {x.ffn}",
        ]
        if x.shared_ffn:
            flags.append(f"--moe-shared-expert-intermediate-size {x.shared_ffn}")
        if x.dense_layers:
            pattern = f"([0]*{x.dense_layers}+[1]*{m.layers - x.dense_layers})"
            flags.append(f'--moe-layer-freq "{pattern}"')
    if m.latent is not None:
        flags += ["--multi-latent-attention", f"--kv-lora-rank {m.latent.key_value_rank}"]
        if m.latent.query_rank:
            flags.append(f"--q-lora-rank {m.latent.query_rank}")
        flags += [
            f"--qk-head-dim {m.latent.plain}",
            f"--qk-pos-emb-head-dim {m.latent.rotary}",
            f"--v-head-dim {m.latent.value}",
        ]
    return flags


def _layout(e: Emission) -> list[str]:
    layout = e.layout
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
    ]
    if layout.ep > 1:
        e.cannot(
            layout.tp > 1 and not layout.sequence_parallel,
            "experts and tensor parallelism without sequence parallelism",
            "take sequence_parallel=True",
        )
        flags.append(f"--expert-model-parallel-size {layout.ep}")
    if layout.sequence_parallel and layout.tp > 1:
        flags.append("--sequence-parallel")
        if layout.overlap_tp:
            flags.append("--tp-comm-overlap")
    elif layout.overlap_tp and layout.tp > 1:
        e.cannot(True, "overlapped tensor parallelism alone", "take sequence_parallel=True")
    if layout.cp > 1:
        flags.append(f"--cp-comm-type {e.choice('cp by', layout.cp_kind, _CONTEXT)}")
    if layout.pp > 1:
        flags += _pipeline(e)
    flags += _sharding(e)
    e.cannot(layout.recompute == "op", "recompute of every second product", "none or full")
    if layout.recompute == "selective":
        flags.append("--recompute-granularity selective")
    if layout.recompute == "full":
        flags += ["--recompute-granularity full"]
        count = layout.recompute_layers
        method = "uniform" if count is None else "block"
        flags += [f"--recompute-method {method}", f"--recompute-num-layers {count or 1}"]
    return flags


def _pipeline(e: Emission) -> list[str]:
    layout = e.layout
    e.choice("schedule", layout.schedule, _SCHEDULES)
    flags = []
    if layout.overlap_pp and layout.chunks == 1:
        e.notes.append("Megatron's 1F1B waits for its messages: overlap_pp is planned, not done")
    if not layout.overlap_pp and layout.chunks > 1:
        flags.append("--no-overlap-p2p-communication")
        e.cannot(
            layout.pp < 3,
            "interleaving over 2 ranks without overlapped messages",
            "take overlap_pp=True, or pp 4",
        )
    if layout.layers_per_stage is not None:
        stages = ["t" * count for count in layout.layers_per_stage]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        flags.append(f'--pipeline-model-parallel-layout "{"|".join(stages)}"')
    elif layout.chunks > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.chunks}")
        stages_ = layout.stages
        e.cannot(
            e.model.layers % stages_ != 0,
            f"{e.model.layers} layers evenly over {stages_} stages",
            "give layers_per_stage",
        )
    else:
        e.cannot(
            e.model.layers % layout.pp != 0,
            f"{e.model.layers} layers evenly over {layout.pp} stages",
            "give layers_per_stage",
        )
    if layout.chunks > 1 and layout.group_size not in (0, layout.pp):
        flags.append(f"--microbatch-group-size-per-virtual-pipeline-stage {layout.group_size}")
    return flags


def _sharding(e: Emission) -> list[str]:
    layout = e.layout
    flags = ["--overlap-grad-reduce"] if layout.overlap_dp else []
    if layout.zero == 1:
        flags.append("--use-distributed-optimizer")
    elif layout.zero:
        flags += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {_SHARDS[layout.zero]}",
            "--ckpt-format fsdp_dtensor",
        ]
        e.cannot(layout.pp > 1, f"ZeRO-{layout.zero} with a pipeline", "take zero 1")
    if layout.replicas > 1:
        flags.append(f"--num-distributed-optimizer-instances {layout.replicas}")
    if layout.zero and layout.overlap_dp:
        flags.append("--overlap-param-gather")
    if layout.offload == "optimizer":
        flags += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
        e.cannot(not layout.zero, "the optimizer on the host without ZeRO", "take zero 1")
    e.cannot(layout.offload == "all", "weights on the host", "take offload optimizer")
    return flags


def _training(e: Emission) -> list[str]:
    job = e.job
    flags = [
        f"--micro-batch-size {e.layout.micro_batch}",
        f"--global-batch-size {job.global_batch}",
        "--train-iters 100",
        "--lr 3e-4",
        "--lr-decay-style cosine",
    ]
    kind = job.bytes
    if kind.compute in ("bf16", "fp8"):
        flags.append("--bf16")
        if kind.gradient == 2:
            flags.append("--grad-reduce-in-bf16")
        if kind.compute == "fp8":
            flags.append("--fp8-format hybrid")
    elif kind.compute == "fp16":
        flags.append("--fp16")
        if kind.name == "fp16-zero":
            e.notes.append(
                "Megatron-LM keeps an fp32 copy of fp16 gradients too: 20 bytes per parameter, "
                "where the plan counts 16 (--precision fp16-megatron counts 20)"
            )
        if kind.gradient == 4:
            flags.append("--accumulate-allreduce-grads-in-fp32")
    if not job.dropout:
        flags += ["--hidden-dropout 0.0", "--attention-dropout 0.0"]
    flags.append(f"--attention-backend {'flash' if job.attention == 'flash' else 'unfused'}")
    return flags

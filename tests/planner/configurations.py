"""Configurations of other frameworks, right ones, for the importers' tests to read and to break."""

import json

DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
}
MEGATRON = """#!/bin/bash
GPUS_PER_NODE=8
NNODES=${NNODES:-8}
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))
TP=4   # inside a node

MODEL_ARGS=(--num-layers 80 --hidden-size 8192   # 70B
    --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --vocab-size 128256 --make-vocab-size-divisible-by 1
)
TRAIN="--micro-batch-size 1 --bf16 \\
       --global-batch-size $((WORLD_SIZE * 8)) --hidden-dropout 0 --attention-dropout=0.0"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    "${MODEL_ARGS[@]}" $TRAIN \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --sequence-parallel \\
    --num-layers-per-virtual-pipeline-stage 10 \\
    --use-distributed-optimizer --overlap-grad-reduce --lr 3e-4 2>&1 | tee log
"""
TORCHTITAN = """
[model]
name = "llama3"
flavor = "70B"

[training]
local_batch_size = 8
seq_len = 8192

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
enable_async_tensor_parallel = true

[activation_checkpoint]
mode = "full"

[compile]
enable = true
"""
NANOTRON = """
general:
  project: x
parallelism:
  dp: 4
  pp: 2
  tp: 2
  pp_engine: 1f1b
  tp_mode: REDUCE_SCATTER
  recompute_layer: true
model:
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config:
    is_llama_config: true
    hidden_size: 2048
    intermediate_size: 8192
    num_attention_heads: 32
    num_hidden_layers: 24
    num_key_value_heads: 8
    vocab_size: 49152
    max_position_embeddings: 4096
    tie_word_embeddings: true
    rope_scaling: null
optimizer:
  zero_stage: 1
  accumulate_grad_in_fp32: true
tokens:
  sequence_length: 4096
  micro_batch_size: 2
  batch_accumulation_per_replica: 8
"""
PICOTRON = {
    "distributed": {"tp_size": 2, "cp_size": 2, "pp_size": 2, "dp_size": 2, "pp_engine": "afab"},
    "model": {"name": "meta-llama/Llama-2-7b-hf", "num_hidden_layers": 16},
    "training": {"seq_length": 2048, "micro_batch_size": 4, "gradient_accumulation_steps": 8},
    "logging": {"use_wandb": False},
}
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
  fsdp_offload_params: false
"""
SCRIPT = r"""#!/bin/bash
NNODES=${SLURM_NNODES:-"2"}
CHECKPOINT=${1:-"checkpoints/x"}
mkdir -p "$(dirname "$CHECKPOINT")"
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--bf16"
        "--fp8-format hybrid"
        "--split '99,1,0'"
    )
else
    DTYPE_ARGS+=( "--bf16" )
fi
MODEL_ARGS=(
    --num-layers 2
    --hidden-size 256  # it's small
#    --moe-grouped-gemm
    --num-attention-heads 2
  #  --log-interval 1 \
    --seq-length 256 \
    --no-load-optim \
    --micro-batch-size 1
)
TRAINING_ARGS+=("${MODEL_ARGS[@]}" --global-batch-size 32)
torchrun --nproc_per_node 8 --nnodes $NNODES train.py ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]}
set +x
"""


def expect(found, **values):
    assert found.violations == (), found.text()
    wrong = {
        k: getattr(found.layout, k) for k, v in values.items() if getattr(found.layout, k) != v
    }
    assert not wrong, f"{wrong}, expected {values}"


def changed(document, path, value):
    """A copy with one value changed; None takes the key away."""
    document = json.loads(json.dumps(document))
    inner = document
    *above, last = path.split(".")
    for part in above:
        inner = inner.setdefault(part, {})
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return document

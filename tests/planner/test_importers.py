"""Other frameworks' configurations: right files give the layout they describe.

Layers of proof: text in, data out; all of it runs in CI.
"""

import json

import pytest

from pyparallel.planner import PlanError, preset
from pyparallel.planner.importers import import_configuration
from tests.planner.configurations import (
    ACCELERATE,
    DEEPSPEED,
    MEGATRON,
    NANOTRON,
    PICOTRON,
    SCRIPT,
    TORCHTITAN,
    expect,
)


@pytest.mark.parametrize(
    ("written", "layout", "loss"),
    [
        ({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
         {"recompute": "op", "recompute_layers": None}, "plain"),
        ({"activation_checkpoint": {"mode": "selective"}, "compile": {"enable": True}},
         {"recompute": "full", "recompute_layers": 16}, "fused"),
        ({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "1"},
          "compile": {"enable": True, "components": ["model"]}},
         {"recompute": "full", "recompute_layers": None}, "plain"),
        ({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "64"}},
         {"recompute": "none", "recompute_layers": None}, "plain"),
    ],
)  # fmt: skip
def test_torchtitan_recomputes_by_operation_or_every_nth_layer(read, written, layout, loss):
    """And its loss is fused where it is compiled."""
    lines = ["[model]", 'name = "llama3"', 'flavor = "8B"']
    for table, rows in written.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in rows.items())]
    found = read("\n".join(lines), ".toml", gpus=8)
    assert {key: getattr(found.layout, key) for key in layout} == layout
    assert found.job.loss == loss


def test_deepspeed(read):
    found = read(DEEPSPEED, ".json", gpus=8, model=preset("llama-3-8b"), seq=4096)
    expect(found, dp=8, tp=1, zero=3, micro_batch=2, offload="optimizer", overlap_dp=True)
    assert (found.job.global_batch, found.job.precision) == (256, "bf16-grads")
    assert found.layout.microbatches(found.job) == 16
    defaults = {note.key: note.text for note in found.defaults}
    assert defaults["zero_optimization.offload_param.device"] == "none"
    assert defaults["zero_optimization.stage3_prefetch_bucket_size"] == "50000000"
    assert {note.key for note in found.ignored} == {"steps_per_print", "wall_clock_breakdown"}
    assert found.job.model == preset("llama-3-8b")


def test_deepspeed_without_a_model_says_what_is_missing(read):
    found = read(DEEPSPEED, ".json", gpus=8)
    assert found.job is None
    assert found.missing == ("the model (--model)", "the sequence length (--seq)")
    assert found.layout.zero == 3


@pytest.mark.parametrize("left_out", ["train_batch_size", "train_micro_batch_size_per_gpu",
                                      "gradient_accumulation_steps"])  # fmt: skip
def test_one_of_the_batch_triangle_is_derived(read, left_out):
    document = {key: value for key, value in DEEPSPEED.items() if key != left_out}
    found = read(document, ".json", gpus=8, model=preset("llama-3-8b"), seq=4096)
    expect(found, micro_batch=2)
    assert (found.job.global_batch, found.layout.microbatches(found.job)) == (256, 16)


def test_megatron_script(read):
    found = read(MEGATRON, ".sh")
    expect(
        found, dp=8, tp=4, pp=2, cp=1, sequence_parallel=True, micro_batch=1, zero=1, chunks=4,
        schedule="interleaved-1f1b", overlap_dp=True, overlap_pp=True, recompute="none",
    )  # fmt: skip
    assert found.job.global_batch == 512
    assert (found.job.precision, found.job.dropout, found.job.attention) == ("bf16", False, "flash")
    ours = preset("llama-3-70b")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated", "tied", "norm"):
        assert getattr(found.job.model, name) == getattr(ours, name), name
    assert found.job.model.parameters() == ours.parameters()
    assert [note.key for note in found.ignored] == ["--lr"]


def test_megatron_flags_and_their_defaults():
    found = import_configuration(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
        "--micro-batch-size 4 --fp16 --max-position-embeddings 2048",
        gpus=8,
    )
    expect(found, dp=8, zero=0, micro_batch=4)
    model = found.job.model
    assert (model.ffn, model.gated, model.tied, model.norm) == (4096, False, True, "layer")
    assert (model.pad_vocab_to, model.biases, model.positions) == (128, "all", "learned")
    assert (found.job.precision, found.job.dropout) == ("fp16-megatron", True)
    assert found.job.global_batch == 32
    defaults = {note.key: note.text for note in found.defaults}
    assert defaults["--ffn-hidden-size"] == "4096"
    assert defaults["--make-vocab-size-divisible-by"] == "128"
    assert "--num-query-groups" not in defaults  # no flag asks for groups
    assert any("50257" in line for line in found.assumptions)


def test_megatron_swiglu_width():
    """int(4 h x 2/3 / 64) x 64 (megatron/training/arguments.py)."""
    found = import_configuration(
        "--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --swiglu --seq-length 128 "
        "--micro-batch-size 1",
        gpus=1,
    )
    assert found.job.model.ffn == 10880


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4",
         (4, 8, 8, 4)),
        ("--pipeline-model-parallel-layout Et*5|(t*7|)*2t*5L", (5, 7, 7, 5)),
        ("--account-for-embedding-in-pipeline-split", None),
    ],
)  # fmt: skip
def test_megatron_uneven_stages(flags, expected):
    layers = 24 if expected else 23
    found = import_configuration(
        f"--num-layers {layers} --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        f"--micro-batch-size 1 --pipeline-model-parallel-size 4 {flags}",
        gpus=4,
    )
    expect(found, layers_per_stage=expected or (5, 6, 6, 6), pp=4, overlap_pp=False)


def test_megatron_experts_and_latent_attention():
    found = import_configuration(
        "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --seq-length 4096 "
        "--micro-batch-size 1 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
        "--ffn-hidden-size 18432 --expert-model-parallel-size 8 --multi-latent-attention "
        "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --swiglu --disable-bias-linear --normalization RMSNorm --vocab-size "
        "129280 --untie-embeddings-and-output-weights --position-embedding-type rope "
        "--kv-channels 192 --make-vocab-size-divisible-by 1 --bf16",
        gpus=64,
    )
    expect(found, ep=8, dp=64)
    assert found.job.model.parameters() == preset("deepseek-v3").parameters()


def test_torchtitan(read):
    found = read(TORCHTITAN, ".toml", gpus=256)
    # 80 + 1 + 1 layers over 8 stages: 11 11 10 10 10 10 10 10 less one at each end.
    expect(
        found, dp=8, tp=8, pp=4, sequence_parallel=True, schedule="interleaved-1f1b", chunks=2,
        zero=1, micro_batch=1, recompute="full", overlap_tp=True,
        layers_per_stage=(10, 11, 10, 10, 10, 10, 10, 9),
    )  # fmt: skip
    assert (found.job.global_batch, found.job.seq) == (64, 8192)
    assert found.layout.microbatches(found.job) == 8
    assert found.job.model.name in ("llama-3-70b", "llama-3.1-70b")


def test_torchtitan_flags():
    found = import_configuration(
        "--parallelism.tensor_parallel_degree 2 --training.local_batch_size=4 --model.flavor 8B "
        "--parallelism.data-parallel-replicate-degree 2 --training.seq_len 4096",
        gpus=16,
    )
    expect(found, tp=2, dp=8, zero=3, micro_batch=4)
    assert found.layout.replicas == 2


def test_torchtitan_three():
    """Release 0.3: the model by a Python function, other switches in other places."""
    found = import_configuration(
        "--module llama3 --config llama3_8b --parallelism.tensor_parallel_degree 4 "
        "--parallelism.enable_sequence_parallel false --training.seq_len 8192 "
        "--compile.enable_async_tensor_parallel --compile.enable --model.converters float8",
        gpus=8,
    )
    expect(found, tp=4, dp=2, sequence_parallel=False, overlap_tp=True)
    assert found.job.model.name in ("llama-3-8b", "llama-3.1-8b")
    assert found.job.bytes.compute == "fp8"
    assert any("llama3_8b sets in Python" in line for line in found.assumptions)


def test_deepspeed_pipeline_with_zero_three(read):
    """Case 25: forbidden, with what would work."""
    found = read(DEEPSPEED, ".json", gpus=8, pp=2, model=preset("llama-3-8b"), seq=4096)
    text = str(found.violations[0])
    assert "line 9, zero_optimization.stage: ZeRO-2 and ZeRO-3 do not go with a pipeline" in text
    assert 'set "stage": 1, or pp 1' in text


def test_deepspeed_counts_tensor_ranks_in_the_batch(read):
    """8 devices, autotp 2: 2 x 16 x 8 = 256 in its own sum, 128 samples in truth."""
    document = {**DEEPSPEED, "tensor_parallel": {"autotp_size": 2}}
    found = read(document, ".json", gpus=8, model=preset("llama-3-8b"), seq=4096)
    expect(found, tp=2, dp=4, micro_batch=2)
    assert (found.job.global_batch, found.layout.microbatches(found.job)) == (128, 16)
    assert any("counts every sample 2 times" in line for line in found.assumptions)
    odd = read({**document, "train_batch_size": 255}, ".json", gpus=8)
    assert "255, autotp_size 2; take 254 or 256" in odd.text()


def test_nanotron(read):
    found = read(NANOTRON, ".yaml")
    expect(
        found, dp=4, pp=2, tp=2, schedule="1f1b", sequence_parallel=True, recompute="full", zero=1,
        micro_batch=2,
    )  # fmt: skip
    assert (found.job.precision, found.job.global_batch, found.job.seq) == ("bf16", 64, 4096)
    assert found.job.model.layers == 24
    assert found.job.model.tied
    assert {note.key for note in found.ignored} == {
        "general.project", "model.model_config.is_llama_config",
        "model.model_config.rope_scaling",
    }  # fmt: skip


def test_picotron(read):
    found = read(PICOTRON, ".json")
    expect(found, dp=2, tp=2, cp=2, pp=2, schedule="gpipe", sequence_parallel=False, zero=0)
    assert found.layout.devices == 16
    assert (found.job.model.layers, found.job.model.hidden) == (16, 4096)
    assert found.job.global_batch == 64


def test_fsdp_of_accelerate(read):
    found = read(ACCELERATE, ".yaml", model=preset("llama-3-8b"), seq=4096)
    expect(found, dp=16, zero=2, recompute="full", offload="none")
    assert found.job.precision == "bf16-grads"


def test_fsdp_of_transformers(read):
    document = {"fsdp": "full_shard auto_wrap offload", "bf16": True,
                "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}  # fmt: skip
    found = read(document, ".json", gpus=8, model=preset("llama-3-8b"), seq=4096)
    expect(found, dp=8, zero=3, offload="all", micro_batch=2)
    assert found.job.global_batch == 64


@pytest.mark.parametrize(
    ("settings", "zero"),
    [({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, 2), ({"fsdp_sharding_strategy": 3}, 0),
     ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, 3), ({"fsdp_version": 2}, 3), ({}, 3),
     ({"fsdp_version": 2, "fsdp_reshard_after_forward": "false"}, 2)],
)  # fmt: skip
def test_fsdp_strategies(read, settings, zero):
    document = {"num_processes": 16, "mixed_precision": "bf16", "fsdp_config": settings}
    found = read(document, ".json", model=preset("llama-3-8b"), seq=4096)
    expect(found, dp=16, zero=zero)
    hybrid = settings.get("fsdp_sharding_strategy") == "HYBRID_SHARD"
    assert found.layout.replicas == (2 if hybrid else 1)


def test_a_script_as_people_write_them(read):
    """Flags quoted with their values, arrays that grow, conditions, comments that end in a
    backslash, defaults in quotes."""
    found = read(SCRIPT, ".sh")
    expect(found, dp=16, tp=1, micro_batch=1)
    assert (found.job.global_batch, found.job.seq, found.job.precision) == (32, 256, "fp8")
    assert {note.key for note in found.ignored} == {"--split", "--no-load-optim"}
    assert any("every branch is read" in line for line in found.assumptions)


def test_torchtitan_of_old(read):
    """Names of the first releases, and a converter given as one word."""
    text = TORCHTITAN.replace("local_batch_size", "batch_size").replace("[compile]\nenable", "#")
    text = text.replace("[training]", "[training]\ncompile = true")
    text = text.replace('flavor = "70B"', 'flavor = "70B"\nconverters = "float8"')
    found = read(text, ".toml", gpus=256)
    expect(found, dp=8, tp=8, pp=4, micro_batch=1, overlap_tp=True)
    assert found.job.precision.startswith("fp8")


@pytest.mark.parametrize("name", ["gpus", "seq", "tp", "pp", "dp", "cp", "microbatch", "batch"])
def test_what_is_asked_beside_it_is_1_or_more(name):
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128"
    with pytest.raises(PlanError, match=f"{name} is 0: 1 or more is expected"):
        import_configuration(flags, **{name: 0})

"""Emitted configurations: accepted by the frameworks' own parsers where these are installed, made
of keys that they have, and read back by our importers to the layout they were made from.

Layers of proof: text out and in again (CI); DeepSpeed's and torchtitan's own parsers (only where
installed: neither is a requirement of this project, so CI skips them).
"""

import json
import random
import re
import subprocess
from dataclasses import replace

import pytest

from pyparallel.plan import main
from pyparallel.planner import Job, Layout, PlanError, preset
from pyparallel.planner.emitters import EMITTERS, emit
from pyparallel.planner.importers import import_configuration
from pyparallel.planner.importers.deepspeed import CLOSED_GROUPS
from pyparallel.planner.importers.source import read_source
from pyparallel.schedule import generate, validate

JOB = Job(preset("llama-3-8b"), 8192, 256)
# Of torchtitan 0.2.2's JobConfig, the keys that we write.
TORCHTITAN_KEYS = {
    "model": {"name", "flavor"},
    "training": {
        *("local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param"),
        "enable_cpu_offload",
    },
    "parallelism": {
        *("data_parallel_replicate_degree", "data_parallel_shard_degree"),
        *("fsdp_reshard_after_forward", "tensor_parallel_degree", "context_parallel_degree"),
        *("context_parallel_rotate_method", "expert_parallel_degree", "pipeline_parallel_degree"),
        *("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"),
        *("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"),
        *("pipeline_parallel_layers_per_stage", "module_fqns_per_model_part"),
        "enable_async_tensor_parallel",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
    "compile": {"enable", "components"},
}
# Of DeepSpeed 0.19.8, outside of the groups that it closes.
DEEPSPEED_KEYS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "zero_optimization", "bf16", "fp16", "data_types"),
    *("tensor_parallel", "sequence_parallel_size"),
}
# Of megatron/training/arguments.py (core 0.12 to 0.16) and torchrun.
MEGATRON_FLAGS = set(
    re.findall(
        r"[\w-]+",
        """nproc_per_node nnodes node_rank master_addr master_port
    num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels seq-length
    max-position-embeddings position-embedding-type normalization vocab-size
    make-vocab-size-divisible-by group-query-attention num-query-groups swiglu
    untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias qk-layernorm
    num-experts moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size
    moe-layer-freq multi-latent-attention kv-lora-rank q-lora-rank qk-head-dim
    qk-pos-emb-head-dim v-head-dim tensor-model-parallel-size pipeline-model-parallel-size
    context-parallel-size expert-model-parallel-size sequence-parallel tp-comm-overlap
    cp-comm-type num-virtual-stages-per-pipeline-rank pipeline-model-parallel-layout
    microbatch-group-size-per-virtual-pipeline-stage no-overlap-p2p-communication
    overlap-grad-reduce use-distributed-optimizer use-megatron-fsdp
    data-parallel-sharding-strategy ckpt-format overlap-param-gather optimizer-cpu-offload
    use-precision-aware-optimizer
    recompute-granularity recompute-method recompute-num-layers micro-batch-size
    global-batch-size train-iters lr lr-decay-style bf16 grad-reduce-in-bf16 fp8-format fp16
    accumulate-allreduce-grads-in-fp32 hidden-dropout attention-dropout attention-backend
    mock-data tokenizer-type""",
    )
)


def random_layout(rng: random.Random, framework: str) -> tuple[Job, Layout]:
    """Any layout that the planner could choose, with what the framework has more likely."""
    pick = rng.choice
    model = preset(pick(["llama-3-8b", "llama-3-70b", "llama-3.1-405b", "mixtral-8x7b",
                         "qwen2.5-7b", "megatron-22b", "deepseek-v3", "bloom-176b"]))  # fmt: skip
    pp = pick([1, 1, 2, 4, 8])
    schedule = pick(["1f1b", "gpipe", "interleaved-1f1b", "zb-v"]) if pp > 1 else "1f1b"
    chunks = {"interleaved-1f1b": pick([2, 4]), "zb-v": 2}.get(schedule, 1)
    stages = pp * chunks
    even = model.layers % stages == 0 and rng.random() < 0.7
    each, more = divmod(model.layers, stages)
    layout = Layout(
        dp=pick([1, 2, 8]), tp=pick([1, 2, 4]), pp=pp, cp=pick([1, 1, 2]),
        ep=pick([1, 2]) if model.experts else 1, sequence_parallel=rng.random() < 0.5,
        micro_batch=pick([1, 2, 4]), zero=pick([0, 1, 2, 3]), schedule=schedule, chunks=chunks,
        recompute=pick(["none", "selective", "op", "full"]),
        offload=pick(["none", "none", "optimizer", "all"]),
        cp_kind=pick(["ring", "ulysses", "all-gather"]),
        layers_per_stage=None if even or stages == 1 else tuple(
            each + (stage < more) for stage in range(stages)),
        overlap_dp=rng.random() < 0.5, overlap_tp=rng.random() < 0.2,
        overlap_pp=rng.random() < 0.5,
    )  # fmt: skip
    precision = pick(["bf16", "bf16-grads", "fp16", "fp16-zero", "fp32", "fp8"])
    batch = layout.dp * layout.micro_batch * pick([1, 4, 16])
    return Job(model, pick([4096, 8192]), batch, precision), layout


def comparable(framework: str, layout: Layout) -> Layout:
    """Without what has no meaning in this layout, or no word in this framework (docs say so)."""
    without = {}
    if layout.tp == 1:
        without.update(sequence_parallel=False, overlap_tp=False)
    if layout.cp == 1:
        without["cp_kind"] = "ring"
    if layout.pp == 1:
        without["overlap_pp"] = True
    if layout.layers_per_stage is not None and len(set(layout.layers_per_stage)) == 1:
        without["layers_per_stage"] = None
    if framework == "torchtitan" and layout.shards == 1:
        without["zero"] = 0
    if framework == "torchtitan" and layout.recompute == "selective":
        without["recompute"] = "none"
    if framework == "megatron" and layout.pp > 1 and layout.chunks == 1:
        without["overlap_pp"] = False
    if framework in ("deepspeed", "torchtitan"):
        without["overlap_pp"] = True
        if framework == "torchtitan":
            without["overlap_dp"] = True
        else:
            without.update(recompute="none", ep=1, overlap_tp=False)
            if not layout.zero:
                without["overlap_dp"] = False
    return replace(layout, **without)


def emissions(framework, seed, count):
    """Jobs and layouts that the framework can do, with what is emitted for them."""
    rng = random.Random(seed)
    for _ in range(20000):
        job, layout = random_layout(rng, framework)
        try:
            emitted = emit(framework, job, layout)
        except PlanError:
            continue
        yield job, layout, emitted
        count -= 1
        if not count:
            return
    raise AssertionError(f"{framework}: too few layouts that it can do")


def written(tmp_path, made):
    path = tmp_path / made.filename
    path.write_text(made.text)
    return str(path)


def given(framework, job, layout):
    """What a framework's file does not hold."""
    if framework != "deepspeed":
        return {}
    return {"gpus": layout.devices, "pp": layout.pp, "model": job.model, "seq": job.seq}


@pytest.mark.parametrize("framework", sorted(EMITTERS))
def test_what_is_emitted_reads_back_to_the_same_layout(tmp_path, framework):
    for job, layout, emitted in emissions(framework, 11, 60):
        arguments = {"gpus": layout.devices} | given(framework, job, layout)
        if framework == "pyparallel":
            arguments = {}
        back = import_configuration(written(tmp_path, emitted), **arguments)
        assert back.violations == (), f"{layout.label}\n{emitted.text}\n{back.text()}"
        assert comparable(framework, back.layout) == comparable(framework, layout), emitted.text
        assert (back.job.global_batch, back.job.seq) == (job.global_batch, job.seq)
        assert back.layout.microbatches(back.job) == layout.microbatches(job)
        assert back.job.model.parameters() == job.model.parameters()
        assert back.job.bytes.compute == job.bytes.compute
        if framework != "torchtitan":  # which keeps everything in fp32
            assert back.job.bytes.gradient == job.bytes.gradient


@pytest.mark.parametrize("framework", sorted(EMITTERS))
def test_only_keys_that_the_framework_has(tmp_path, framework):
    for _job, _layout, emitted in emissions(framework, 13, 60):
        if framework == "megatron":
            words = {line.split()[0] for line in emitted.text.splitlines() if "    --" in line}
            assert {word[2:] for word in words} <= MEGATRON_FLAGS
        elif framework == "deepspeed":
            document = json.loads(emitted.text)
            assert set(document) <= DEEPSPEED_KEYS
            assert set(document["zero_optimization"]) <= CLOSED_GROUPS["zero_optimization"]
        elif framework == "torchtitan":
            (tmp_path / "x.toml").write_text(emitted.text)
            for table, rows in read_source(str(tmp_path / "x.toml")).values.items():
                assert set(rows) <= TORCHTITAN_KEYS[table], table


def test_a_megatron_script_is_a_script(tmp_path):
    """bash reads it; torchrun, which stands in its place, gets the flags as they were meant."""
    layout = Layout(dp=2, tp=2, pp=2, cp=2, layers_per_stage=(15, 17))
    emitted = emit("megatron", JOB, layout)
    stand_in = tmp_path / "torchrun"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho "max $CUDA_DEVICE_MAX_CONNECTIONS"\n')
    stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", written(tmp_path, emitted), "--extra"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\n")
    assert words[words.index("--nproc_per_node") + 1] == "8"
    assert words[words.index("--nnodes") + 1] == "2"
    stages = "E" + "t" * 15 + "|" + "t" * 17 + "L"
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == stages
    assert words[-3:-1] == ["--extra", "max 1"]
    assert "pretrain_gpt.py" in words


def test_our_own_file_drives_the_schedule(tmp_path):
    layout = Layout(dp=2, tp=1, pp=4, schedule="interleaved-1f1b", chunks=2)
    arguments = json.loads(emit("pyparallel", JOB, layout).text)["schedule"]
    schedule = generate(arguments.pop("name"), **arguments)
    validate(schedule)
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (4, 8, 128)


@pytest.mark.parametrize(
    ("change", "other", "message"),
    [
        ('"pyparallel": 1', '"pyparallel": 2',
         "line 2, pyparallel: format 2; this version reads 1"),
        ('"layout": {', '"layuot": {', "layout: keys with values"),
        ('"tp": 1,', '"tp": 1, "chunk": 2,',
         "layout.chunk: unknown key; nearest: chunks"),
        ('"tp": 1,', '"tp": "1",', "layout.tp: '1'; a whole number up to 16777216 is expected"),
        ('"tp": 1,', '"tp": true,', "layout.tp: True; a whole number"),
        ('"tp": 1,', '"tp": 1e30,', "layout.tp: 1e+30; a whole number"),
        ('"experts": null', '"experts": {"count": [8], "active": 2, "ffn": 8}',
         "job.model.experts.count: [8]; a whole number"),
        ('"layers_per_stage": null', '"layers_per_stage": [1, "a"]',
         "layout.layers_per_stage: 'a'; a whole number"),
        ('"overlap_dp": true', '"overlap_dp": 1', "layout.overlap_dp: 1; true or false"),
        ('"heads": 32,', '"heads": 0,', "heads=0: 1 or more is expected"),
        ('"seq": 8192,', "", "job.seq: the key is missing"),
    ],
)  # fmt: skip
def test_our_own_file_broken(tmp_path, change, other, message):
    text = emit("pyparallel", JOB, Layout()).text
    assert change in text
    path = tmp_path / "plan.json"
    path.write_text(text.replace(change, other))
    with pytest.raises(PlanError) as caught:
        import_configuration(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("framework", "layout", "job", "message"),
    [
        ("deepspeed", Layout(pp=2, zero=3, sequence_parallel=False), JOB,
         r"ZeRO-3 with a pipeline \(take zero 1 or 0, or pp 1\)"),
        ("deepspeed", Layout(tp=2, cp=2), JOB, "sequence parallelism beside.*; cp by ring"),
        ("megatron", Layout(pp=2, schedule="zb-v", chunks=2), JOB,
         r"schedule zb-v \(it has 1f1b, interleaved-1f1b\)"),
        ("megatron", Layout(pp=3), JOB, r"32 layers evenly over 3 stages \(give layers_per_stage"),
        ("torchtitan", Layout(zero=1), JOB, r"ZeRO-1 without a pipeline \(take zero 2 or 3\)"),
        ("torchtitan", Layout(pp=2, zero=2), JOB, r"ZeRO-2 with a pipeline \(take zero 1 or 3\)"),
        ("torchtitan", Layout(zero=3), replace(JOB, model=preset("bloom-176b")), "it has llama-3"),
        ("torchtitn", Layout(), JOB, "there are pyparallel, deepspeed, megatron, torchtitan; near"),
    ],
)  # fmt: skip
def test_what_a_framework_cannot_do_is_refused(framework, layout, job, message):
    """Case 25: ZeRO-2 and 3 with a pipeline are forbidden, not counted as if they were free."""
    with pytest.raises(PlanError, match=message):
        emit(framework, job, layout)


def test_deepspeed_itself_accepts_it(tmp_path, monkeypatch):
    """ZeRO's group refuses keys that it does not know, and the batch is checked."""
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    for job, layout, emitted in emissions("deepspeed", 17, 20):

        class Mpu:
            """The ranks that DeepSpeed divides the batch by."""

            def get_data_parallel_world_size(self, dp=layout.dp):
                return dp

        read = config.DeepSpeedConfig(written(tmp_path, emitted), mpu=Mpu())
        assert read.train_batch_size == job.global_batch
        assert read.gradient_accumulation_steps == layout.microbatches(job)
        assert int(read.zero_optimization_stage) == layout.zero


def test_torchtitan_itself_accepts_it(tmp_path):
    manager = pytest.importorskip("torchtitan.config.manager")
    for job, layout, emitted in emissions("torchtitan", 19, 20):
        read = manager.ConfigManager().parse_args(
            [f"--job.config_file={written(tmp_path, emitted)}"]
        )
        assert read.parallelism.tensor_parallel_degree == layout.tp
        assert read.training.global_batch_size == job.global_batch


@pytest.mark.parametrize(
    ("framework", "arguments", "says"),
    [
        ("torchtitan", "--model llama-3-8b --gpus 64 --seq 2048", "zero-3"),
        ("torchtitan", "--model llama-3-8b --gpus 8 --seq 2048 --tp 8", "dp 1 tp 8"),
        ("deepspeed", "--model llama-3-70b --gpus 64 --seq 2048 --tp 8 --pp 1", "tp 8"),
        ("megatron", "--model deepseek-v3 --gpus 256 --seq 4096 --pp 8", "pp 8"),
    ],
)
def test_a_search_finds_what_the_framework_can_do(framework, arguments, says, tmp_path, capsys):
    """Where none of the best layouts is one of the framework's: its own are searched."""
    path = tmp_path / {"torchtitan": "t.toml", "deepspeed": "d.json", "megatron": "m.sh"}[framework]
    given = [*arguments.split(), "--gpu", "h100", "--global-batch", "256"]
    assert main([*given, "--emit", framework, "--out", str(path)]) == 0
    said = capsys.readouterr().err
    assert f"written: {path} ({framework}" in said
    assert says in said
    beside = given[:2] + given[4:6] if framework == "deepspeed" else []
    assert main(["--from", str(path), "--gpus", given[3], "--gpu", "h100", *beside, "--json"]) < 2
    layout = json.loads(capsys.readouterr().out)["plan"]["layout"]
    assert re.sub("zero-.", "", layout["label"]) in re.sub("zero-.|, full recompute", "", said)

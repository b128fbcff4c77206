"""Models and clusters as data. Layers of proof: pure numbers only; all of it runs in CI."""

import json

import pytest

from pyparallel.planner import (
    CLUSTERS,
    PRESETS,
    ClusterSpec,
    Experts,
    Job,
    Layout,
    ModelSpec,
    PlanError,
    cluster_named,
    preset,
)

# Billions of parameters as the publishers' own counts of the weights have them.
PUBLISHED = {
    "gpt3-175b": 174.6, "megatron-22b": 22.0, "megatron-530b": 529.6, "megatron-1t": 1008.0,
    "llama-2-7b": 6.738, "llama-2-13b": 13.016, "llama-2-70b": 68.977, "llama-3-8b": 8.030,
    "llama-3-70b": 70.554, "llama-3.1-405b": 405.853, "llama-3.2-1b": 1.236,
    "qwen2.5-7b": 7.616, "qwen2.5-72b": 72.706, "qwen3-8b": 8.191, "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094, "mistral-7b": 7.242, "mixtral-8x7b": 46.703,
    "mixtral-8x22b": 140.630, "bloom-176b": 176.247, "deepseek-v2": 235.741,
    "deepseek-v3": 671.026, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086,
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "smollm-135m": 0.1345,
    "smollm-360m": 0.3618, "smollm-1.7b": 1.711, "mistral-nemo-12b": 12.248,
    "mistral-large-123b": 122.61,
}  # fmt: skip
ACTIVE = {"mixtral-8x7b": 12.88, "qwen3-235b-a22b": 22.19, "deepseek-v3": 37.55}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name):
    assert preset(name).parameters() / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_active_parameters_of_experts(name):
    assert preset(name).active_parameters() / 1e9 == pytest.approx(ACTIVE[name], rel=0.005)


def test_a_dense_model_is_all_active():
    assert preset("llama-3-8b").active_parameters() == preset("llama-3-8b").parameters()


def test_the_vocabulary_is_padded_for_every_rank():
    model = preset("gpt3-175b")
    assert ModelSpec("m", 2, 64, 4, 50257, pad_vocab_to=128).padded_vocab(4) == 50688
    assert model.padded_vocab(8) == 51200
    assert ModelSpec("m", 2, 64, 4, 50257).padded_vocab(4) == 50260


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_models_survive_json(name):
    assert ModelSpec.from_json(json.loads(json.dumps(PRESETS[name].to_json()))) == PRESETS[name]


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_clusters_survive_json_and_name_their_sources(name):
    cluster = CLUSTERS[name]
    assert ClusterSpec.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster
    assert cluster.gpu.sources
    assert cluster.intra.source
    assert cluster.inter.source


def test_jobs_and_layouts_survive_json():
    job = Job(preset("mixtral-8x7b"), seq=4096, global_batch=64)
    layout = Layout(dp=4, tp=2, pp=2, layers_per_stage=(15, 17))
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Llama3-70B", "llama-3-70b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("HuggingFaceTB/SmolLM-1.7B", "smollm-1.7b"),
    ],
)
def test_a_model_s_name_as_hubs_write_it(written, name):
    assert preset(written) is PRESETS[name]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("H100-80GB", "h100"), ("H100-SXM", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100", "a100-80"), ("a100-80gb", "a100-80"), ("NVIDIA L40S", "l40s"),
        ("V100", "v100-32"), ("mi300", "mi300x"),
    ],
)  # fmt: skip
def test_a_gpu_s_name_as_drivers_write_it(written, name):
    assert cluster_named(written) is CLUSTERS[name]


@pytest.mark.parametrize(
    "other", ["H800", "GH200 480GB", "H100 NVL", "RTX A1000", "V100-16GB", "H100-96GB"]
)
def test_a_gpu_whose_rates_are_others_is_not_taken_for_a_preset(other):
    with pytest.raises(PlanError, match=f"no GPU '{other}'"):
        cluster_named(other)


@pytest.mark.parametrize("wrong", ["lama-3-70b", "llama3-70", "gpt-175b"])
def test_an_unknown_model_lists_near_names(wrong):
    with pytest.raises(PlanError, match=r"nearest: .*(llama-3-70b|gpt3-175b)"):
        preset(wrong)


@pytest.mark.parametrize(("wrong", "near"), [("a100-60", "a100-80"), ("h10", "h100")])
def test_an_unknown_gpu_lists_near_names(wrong, near):
    with pytest.raises(PlanError, match=f"no GPU '{wrong}'; nearest: .*{near}"):
        cluster_named(wrong)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers=0: 1 or more"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=8; nearest 2 and 4"),
        ({"norm": "batch"}, "norm='batch' is not one of layer, rms"),
        ({"experts": Experts(4, 5, 64)}, "experts.active=5 of experts.count=4"),
        ({"hidden": 64.0}, "hidden=64.0"),
    ],
)
def test_a_model_that_cannot_be_is_refused(sizes, message):
    given = {"name": "m", "layers": 2, "hidden": 64, "heads": 8, "vocab": 100}
    with pytest.raises(PlanError, match=message):
        ModelSpec(**{**given, **sizes})


def test_unknown_keys_are_named():
    with pytest.raises(PlanError, match="unknown keys \\['colour'\\], missing keys \\['vocab'\\]"):
        ModelSpec.from_json({"name": "m", "layers": 1, "hidden": 8, "heads": 1, "colour": 3})
    with pytest.raises(PlanError, match="unknown keys colour"):
        Layout.from_json({"colour": 3})
    with pytest.raises(PlanError, match="cluster: keys missing: gpu, node_size, intra, inter"):
        ClusterSpec.from_json({"name": "c"})

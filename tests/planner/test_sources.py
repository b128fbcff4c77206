"""Models from Hugging Face configurations, clusters from doctor, efficiencies from bench.json.
Layers of proof: pure data; all of it runs in CI."""

import json

import pytest

from pyparallel.plan import main
from pyparallel.planner import CLUSTERS, PRESETS, PlanError
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.hugging_face import from_config, model_from
from pyparallel.planner.importers import import_configuration
from pyparallel.planner.measured import calibrated, cluster_from_doctor, read_json

# The sizes of config.json files, by the names that these have there.
CONFIGS = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
    },
    "bloom-176b": {
        "model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112,
        "vocab_size": 250880, "seq_length": 2048,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_configuration_is_the_preset(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    ours = PRESETS[name]
    found = from_config(CONFIGS[name], name)
    assert found == ours
    assert model_from(str(path)).parameters() == ours.parameters()
    assert model_from(str(tmp_path)).layers == ours.layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "lama"}, "key model_type: 'lama' is not known; nearest: llama"),
        ({"hidden_size": "big"}, "key hidden_size: 'big': a whole number"),
        ({"num_hidden_layers": None}, "key num_hidden_layers is missing"),
        ({"num_local_experts": 8}, "key num_experts_per_tok is missing beside num_local_experts"),
        ({"kv_lora_rank": 8}, "keys qk_nope_head_dim, .* are missing beside kv_lora_rank"),
    ],
)
def test_a_configuration_that_is_wrong_names_the_key(change, message):
    with pytest.raises(PlanError, match=message):
        from_config({**CONFIGS["llama-3-8b"], **change}, "m")


def _config(model_type, layers, hidden, heads, ffn, vocab, kv=None, **more):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
             "intermediate_size": ffn, "vocab_size": vocab}  # fmt: skip
    if kv is not None:
        sizes["num_key_value_heads"] = kv
    return {"model_type": model_type, "tie_word_embeddings": False, **sizes, **more}


TIED = {"tie_word_embeddings": True}
# Parameters as transformers counts its own model of this configuration.
COUNTED = {
    "olmo2-7b": (_config("olmo2", 32, 4096, 32, 11008, 100352, 32), 7_298_617_344),
    "olmoe-7b": (_config("olmoe", 16, 2048, 16, 2048, 50304, 16, num_experts=64,
                         num_experts_per_tok=8), 13_361_612_800),
    "gemma2-9b": (_config("gemma2", 42, 3584, 16, 14336, 256000, 8, head_dim=256, **TIED),
                  9_241_705_984),
    "gemma3-4b": (_config("gemma3_text", 34, 2560, 8, 10240, 262208, 4, head_dim=256, **TIED),
                  3_880_263_168),
    "starcoder2-3b": (_config("starcoder2", 30, 3072, 24, 12288, 49152, 2, **TIED), 3_030_371_328),
    "smollm3-3b": (_config("smollm3", 36, 2048, 16, 11008, 128256, 4, **TIED), 3_075_098_624),
    "glm4-9b": (_config("glm4", 40, 4096, 32, 13696, 151552, 2, head_dim=128, attention_bias=True),
                9_400_279_040),
    "gpt-oss-20b": (_config("gpt_oss", 24, 2880, 64, 2880, 201088, 8, head_dim=64,
                            num_local_experts=32, num_experts_per_tok=4), 20_914_757_184),
    "exaone4": (_config("exaone4", 32, 4096, 32, 16384, 102400, 32), 9_429_069_824),
    "qwen2-7b": (_config("qwen2", 28, 3584, 28, 18944, 152064, 4), 7_615_616_512),
    "gpt-neox-20b": (_config("gpt_neox", 44, 6144, 64, 24576, 50432), 20_554_567_680),
    "mpt-7b": ({"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32,
                "vocab_size": 50432, "max_seq_len": 2048}, 6_649_286_656),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_a_family_has_the_parameters_that_transformers_counts(name):
    config, count = COUNTED[name]
    assert from_config(config, name).parameters() == pytest.approx(count, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim: 512: .*4096 is expected"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0, 3]},
            r"mlp_only_layers: \[0, 3\]: .*\[\] is expected",
        ),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: 2: layers that take turns"),
    ],
)
def test_what_sizes_alone_do_not_say_is_refused(family, change, message):
    with pytest.raises(PlanError, match=message):
        from_config(_config(family, 32, 4096, 32, 11008, 50000, **change), "m")


def test_a_cluster_file_names_line_and_key(tmp_path, capsys):
    document = CLUSTERS["h100"].to_json()
    document["inter"]["gbps"] = -1  # intra has such a key too, and stands before it
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(document, indent=1))
    line = path.read_text().splitlines().index('  "gbps": -1,') + 1
    assert main(["--model", "llama-3-8b", "--gpus", "8", "--cluster", str(path)]) == 2
    assert f"cluster.json, line {line}: inter: key gbps: -1" in capsys.readouterr().err
    document["intra"] = {"name": "x"}
    path.write_text(json.dumps(document, indent=1))
    assert main(["--model", "llama-3-8b", "--gpus", "8", "--cluster", str(path)]) == 2
    assert "intra: keys missing: gbps, share, latency_us" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": }', "line 2, column"),
        (b"[1]", "line 1: an object"),
        (b"\xff\xfe", "byte 0"),
        (b"[" * 100_000, "nested too deeply|line 1"),
    ],
)
def test_a_broken_file_names_its_line(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (lambda: model_from(str(path)), lambda: read_json(path)):
        with pytest.raises(PlanError, match=message):
            read()
    with pytest.raises(PlanError, match="No such file"):
        read_json(tmp_path / "none.json")


def test_sizes_on_the_command_line():
    model = model_from("layers=2,hidden=64,heads=4,vocab=100,gated=false,norm=layer,tied=true")
    assert (model.layers, model.gated, model.norm, model.tied) == (2, False, "layer", True)
    with pytest.raises(PlanError, match="gated=perhaps: true or false"):
        model_from("layers=2,hidden=64,heads=4,vocab=100,gated=perhaps")


def _report(devices, links):
    return {
        "gpus": {"devices": devices, "links": links},
        "memory": {"total_bytes": 2**40},
        "cpu": {"usable": 16, "simd": ["avx2", "avx512f"]},
    }


def test_a_cluster_of_what_doctor_found():
    gpus = [{"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85520809984}] * 4
    links = [{"a": 0, "b": b, "link": "NV18"} for b in (1, 2, 3)]
    cluster = cluster_from_doctor(_report(gpus, links), "node7")
    assert cluster.node_size == 4
    assert cluster.gpu.memory_gib == pytest.approx(79.6, abs=0.1)
    assert cluster.intra.gbps == 450
    assert cluster.host_gib == 256
    slow = cluster_from_doctor(_report(gpus, [{"a": 0, "b": 1, "link": "PHB"}]))
    assert slow.intra.gbps < 60
    with pytest.raises(PlanError, match="GPU 'Voodoo 2' is not known"):
        cluster_from_doctor(_report([{"name": "Voodoo 2"}], []))
    with pytest.raises(PlanError, match="no report of `doctor --json`"):
        cluster_from_doctor({"gpus": {}})


def test_a_machine_without_gpus_is_a_cpu_host():
    cluster = cluster_from_doctor(_report([], []))
    assert cluster.gpu.peak("fp32") * cluster.node_size == pytest.approx(16 * 64 * 2.5e9)


def _row(**changes):
    return {
        "suite": "gemm", "op": "matmul_all_reduce", "dtype": "float32", "verified": True,
        "flops": 8e9, "parts": {"gemm": 100_000.0}, "world_size": 2, "bytes": 0,
        "ours_us": {"median": 1.0}, **changes,
    }  # fmt: skip


def test_efficiencies_are_those_of_the_benchmark():
    reduce = _row(
        suite="collectives", op="all_reduce", bytes=1 << 26, ours_us={"median": 1e4}, parts={}
    )
    cluster, said = calibrated(CLUSTERS["cpu"], {"rows": [_row(), reduce]})
    assert cluster.gpu.peak("fp32") * cluster.gpu.share("fp32") == pytest.approx(8e10)
    assert cluster.intra.rate == pytest.approx((1 << 26) / 1e-2)
    assert len(said) == 2
    assert "calibrated" in cluster.gpu.sources


@pytest.mark.parametrize(
    ("bench", "message"),
    [
        ({}, "key rows is missing"),
        ({"rows": [_row()], "meta": {"options": {"device": "cuda"}, "machine": {"cpu": "EPYC"}}},
         "measured on cuda .*, the plan is for cpu"),
        ({"rows": [_row(verified=False)]}, "no verified row"),
        ({"rows": [_row(flops="many")]}, "no verified row"),
    ],
)  # fmt: skip
def test_a_benchmark_that_says_nothing(bench, message):
    with pytest.raises(PlanError, match=message):
        calibrated(CLUSTERS["cpu"], bench)


def test_a_broken_configuration_names_file_line_and_key(tmp_path):
    path = tmp_path / "config.json"
    for changed, message in (
        ({"hidden_size": "wide"}, r"config.json, line 3: key hidden_size: 'wide': a whole number"),
        (
            {"hidden_size": 4100},
            r"config.json, line 3: key hidden_size: hidden=4100 over heads=32 leaves 4",
        ),
        ({"model_type": "lama"}, r"config.json, line 2: key model_type: 'lama' .*nearest: llama"),
        (
            {"num_key_value_heads": 5},
            r"line 7: key num_key_value_heads: kv_heads=5 does not divide heads=32",
        ),
    ):
        path.write_text(json.dumps(CONFIGS["llama-3-8b"] | changed, indent=1))
        with pytest.raises(PlanError, match=message):
            model_from(str(path))
    path.write_text("{}")
    with pytest.raises(PlanError, match=r"config.json: key model_type is missing"):
        model_from(str(path))


@pytest.mark.parametrize(
    ("where", "key", "value", "message"),
    [
        ("gpu", "memory_gib", "80", "gpu: key memory_gib: '80': a number, more than 0, expected"),
        ("gpu", "peak_tflops", {}, "gpu: key peak_tflops: {}: numbers by dtype, bf16 among them"),
        ("gpu", "attention_share", [0.5], "gpu: key attention_share: .*two numbers"),
        ("intra", "gbps", 0, "intra: key gbps: 0: a number, more than 0"),
        ("inter", "latency_us", float("nan"), "inter: key latency_us: nan"),
        (None, "node_size", 8.5, "cluster: key node_size: 8.5: a whole number"),
        (None, "gpu", None, "key gpu: None: keys with values"),
    ],
)
def test_a_cluster_file_with_a_figure_that_cannot_be(where, key, value, message):
    document = CLUSTERS["h100"].to_json()
    (document if where is None else document[where])[key] = value
    with pytest.raises(PlanError, match=message):
        ClusterSpec.from_json(document)


def test_every_preset_cluster_can_be_written_and_read():
    for cluster in CLUSTERS.values():
        assert ClusterSpec.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-pcie"),
        ("NVIDIA GB200", 186, "gb200"),
        ("NVIDIA B200", 180, "b200"),
    ],
)
def test_a_driver_s_name_is_its_own_preset(name, gib, preset):
    cluster = cluster_from_doctor(_report([{"name": name, "memory_bytes": gib * 2**30}] * 4, []))
    assert cluster.gpu.name == CLUSTERS[preset].gpu.name
    assert cluster.gpu.memory_gib == gib


H100_GPU = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * 2**30}


@pytest.mark.parametrize(
    ("devices", "links", "message"),
    [
        ([H100_GPU, {"name": "NVIDIA A100-SXM4-40GB"}], [], "2 kinds of GPU, .*equal devices"),
        ([H100_GPU], [{"link": "NVx"}], "link 'NVx': NV and a number"),
        (["H100"], [], "no report of `doctor --json`"),
        ([H100_GPU], ["NV18"], "no report of `doctor --json`"),
        ([{"name": "NVIDIA H100", "memory_bytes": "big"}], [], "no report of .*'big'"),
        ([{}], [], "key name is missing"),
    ],
)
def test_a_report_that_cannot_be_is_told(devices, links, message):
    with pytest.raises(PlanError, match=message):
        cluster_from_doctor(_report(devices, links))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.sh", "A=aaaaaaaaaa\n" + 'A="$A$A"\n' * 60 + "torchrun --x $A\n", "A has grown to more"),
     ("c.json", '{"train_batch_size": ' + "9" * 5000 + "}", "cannot be read")],
)  # fmt: skip
def test_what_grows_without_end_is_refused(tmp_path, name, text, message):
    """A text that doubles on every line, a number of 5000
    digits."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        import_configuration(str(path), 8)


def test_a_model_of_too_many_layers_is_refused():
    with pytest.raises(PlanError, match=r"layers=100000000: at most 10000 are expected"):
        model_from("layers=100000000,hidden=64,heads=4,vocab=9")


def test_a_name_longer_than_a_path_is_refused():
    with pytest.raises(PlanError, match="model 'xxxx.*File name too long"):
        model_from("x" * 5000)

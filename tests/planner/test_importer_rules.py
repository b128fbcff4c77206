"""Other frameworks' configurations that are wrong: broken rules are told with a mend, broken files
with line and key, whatever is in them.

Layers of proof: text in, data out; all of it runs in CI.
"""

import json
import random

import pytest

from pyparallel.planner import Layout, preset
from pyparallel.planner.importers import ConfigError, import_configuration
from tests.planner.configurations import (
    ACCELERATE,
    DEEPSPEED,
    MEGATRON,
    NANOTRON,
    PICOTRON,
    TORCHTITAN,
    changed,
)


@pytest.mark.parametrize(
    ("path", "value", "rule", "found", "mend"),
    [
        ("train_batch_size", 250, "batch = microbatch x accumulation x dp",
         "250, and 2 x 16 x 8 = 256", "256"),
        ("fp16.enabled", True, "exclude each other", "both", "switch one off"),
        ("zero_optimization.offload_param", {"device": "cpu"}, None, None, None),
        ("zero_optimization.stage", 2, "offloaded", None, None),
        ("zero_optimization.stgae", 3, "refuses keys", "stgae", "did you mean stage?"),
        ("zero_optimization.offload_optimizer.devcie", "cpu", "refuses keys", "devcie", "device"),
        ("zero_optimization.offload_optimizer.ratio", 0.5, None, None, None),
        ("sequence_parallel_size", 3, "multiple of tp x pp x cp", "8 devices", "6 or 9"),
    ],
)  # fmt: skip
def test_deepspeed_rules(read, path, value, rule, found, mend):
    """Case 39: the batch triangle's message has its three numbers."""
    document = changed(DEEPSPEED, path, value)
    if rule == "offloaded":
        document["zero_optimization"]["offload_param"] = {"device": "cpu"}
    violations = read(document, ".json", gpus=8).violations
    if rule is None:
        assert violations == ()
        return
    text = "\n".join(map(str, violations))
    for part in (rule, found, mend):
        assert part is None or part in text, text
    if "." in path and path.split(".")[-1] not in ("stage", "enabled"):
        line = next(n for n, t in enumerate(json.dumps(document, indent=1).splitlines(), 1)
                    if f'"{path.split(".")[-1]}"' in t)  # fmt: skip
        assert f"line {line}, {path}" in text


@pytest.mark.parametrize(
    ("change", "rule", "mend"),
    [
        (("--num-layers 80", "--num-layers 81"), "pp divides the layers", "take pp 1 or 3"),
        (("virtual-pipeline-stage 10", "virtual-pipeline-stage 12"), "it divides the layers of a",
         "take 10 or 20"),
        (("TP=4", "TP=6"), "query groups and tp", "take tp 4 or 8"),
        (("TP=4", "TP=3"), "tp divides the heads", "take tp 2 or 4"),
        (("TP=4", "TP=3"), "multiple of tp x pp x cp", "take 60 or 66 devices"),
        (("--seq-length 8192", "--seq-length 8200 --context-parallel-size 8"), "multiple of 2 x cp",
         "take 8192 or 8208"),
        (("--seq-length 8192", "--seq-length 9000"), "positions reach", "9000"),
        (("--micro-batch-size 1", "--fp16 --micro-batch-size 1"), "exclude each other", "remove"),
        (("--micro-batch-size 1", ""), "the key is required", "--micro-batch-size 1"),
        (("--sequence-parallel", "--tp-comm-overlap"), "it needs --sequence-parallel", "add"),
        (("--overlap-grad-reduce", "--overlap-param-gather"), "--overlap-grad-reduce", "add them"),
        (("WORLD_SIZE * 8", "7 + 0"), "batch = microbatch x accumulation x dp", "a batch of 8"),
        (("--use-distributed-optimizer", "--use-torch-fsdp2"), "does not go with pp 2", "pp 1"),
        (("--lr 3e-4", "--recompute-granularity full"), "full needs --recompute-method", "uniform"),
        (("--lr 3e-4", "--recompute-granularity selective --recompute-method block"),
         "selective takes no method", "remove"),
        (("--lr 3e-4", "--distribute-saved-activations"), "needs full recompute", "remove"),
        (("--lr 3e-4", "--rampup-batch-size 16 16"), "three numbers", "give three"),
        (("--lr 3e-4", "--expert-model-parallel-size 2"), "experts are spread", "remove"),
        (("--lr 3e-4", "--num-virtual-stages-per-pipeline-rank 4"), "at most one of", "keep one"),
        (("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"),
         "at least 2 pipeline ranks", "take pp 2"),
        (("--lr 3e-4", "--no-overlap-p2p-communication"), "at least 3 pipeline ranks", "take pp 3"),
        (("--lr 3e-4", "--microbatch-group-size-per-virtual-pipeline-stage 1"), "at least pp",
         "take 2"),
        (("--lr 3e-4", "--optimizer-cpu-offload"), "needs --use-precision-aware", "add --use-p"),
        (("--use-distributed-optimizer", "--use-precision-aware-optimizer"), "a sharded optimizer",
         "--use-distributed-optimizer"),
        (("--sequence-parallel", "--num-experts 8 --expert-model-parallel-size 2"),
         "need --sequence-parallel", "add --sequence-parallel"),
        (("--lr 3e-4", "--async-save --ckpt-format torch"), "needs --ckpt-format", "torch_dist"),
    ],
)  # fmt: skip
def test_megatron_rules(read, change, rule, mend):
    """Cases 23 and 40: groups against tp, allowed virtual stages, with what would work."""
    assert change[0] in MEGATRON
    found = read(MEGATRON.replace(*change), ".sh")
    text = "\n".join(map(str, found.violations))
    assert rule in text, text
    assert mend is None or mend in text, text


@pytest.mark.parametrize(
    ("change", "rule", "mend"),
    [
        (("tensor_parallel_degree = 8", "tensor_parallel_degree = 7"), "multiple of tp x pp x cp",
         "take 252 or 280"),
        (("shard_degree = -1", "shard_degree = 4"), "dp x tp x pp x cp", "take dp 8"),
        (("seq_len = 8192", "seq_len = 8200"), "multiple of tp x 2 cp", "8192 or 8208"),
        (("enable = true", "enable = false"), "compiled models alone", "compile.enable"),
        (("local_batch_size = 8", "local_batch_size = 9\nglobal_batch_size = 100"),
         "batch = microbatch", None),
        (('schedule = "Inter', 'layers_per_stage = 21\npipeline_parallel_schedule = "Inter'),
         "the stages are a multiple of pp", "take 11"),
    ],
)  # fmt: skip
def test_torchtitan_rules(read, change, rule, mend):
    assert change[0] in TORCHTITAN
    text = "\n".join(map(str, read(TORCHTITAN.replace(*change), ".toml", gpus=256).violations))
    assert rule in text, text
    assert mend is None or mend in text, text


def test_nanotron_rules(read):
    text = str(read(NANOTRON.replace("zero_stage: 1", "zero_stage: 2"), ".yaml").violations[0])
    assert "line 26, optimizer.zero_stage" in text
    assert "stages 0 and 1" in text
    lacking = read(NANOTRON.replace("  dp: 4\n", ""), ".yaml", gpus=16)
    assert "parallelism.dp: the key is required" in str(lacking.violations[0])


@pytest.mark.parametrize(
    ("fp16", "bf16", "precision"),
    [("auto", "auto", "bf16-grads"), ("auto", None, "fp16-zero"), (None, "auto", "bf16-grads"),
     ("auto", False, "fp16-zero"), (True, "auto", "fp16-zero"), (False, False, "fp32")],
)  # fmt: skip
def test_16_bits_left_to_the_script_are_not_taken_for_32(read, fp16, bf16, precision):
    document = changed(DEEPSPEED, "train_batch_size", 256)
    for key, value in (("fp16", fp16), ("bf16", bf16)):
        document.pop(key, None)
        if value is not None:
            document[key] = {"enabled": value}
    document.pop("data_types", None)
    found = read(document, ".json", gpus=8, model=preset("llama-3-8b"), seq=4096)
    assert found.job.precision == precision
    said = any("auto" in line and "--precision" in line for line in found.assumptions)
    assert said == ("auto" in (fp16, bf16))


def test_auto_is_undetermined(read):
    """Case 39 and the format's table: "auto" is filled in by somebody else, later."""
    document = changed(DEEPSPEED, "train_batch_size", "auto")
    document["zero_optimization"]["stage"] = "auto"
    found = read(document, ".json", gpus=8)
    keys = {note.key for note in found.undetermined}
    assert keys == {"train_batch_size", "zero_optimization.stage"}
    assert '"auto", which is filled in later; 0 is assumed' in found.text()


def test_a_variable_without_a_value_is_undetermined(read):
    found = read(MEGATRON.replace("TP=4", "TP=$1"), ".sh")
    assert [note.key for note in found.undetermined] == ["--tensor-model-parallel-size"]
    assert found.layout.tp == 1


@pytest.mark.parametrize(
    ("content", "ending", "message"),
    [
        ('{"a": 1,\n "zero_optimization": {"stage": }}', ".json",
         "line 2, column 33, after key stage: no JSON"),
        ('{"bf16": {},\n "fp16": {},\n "bf16": {}}', ".json", "line 3, bf16: the key stands twice"),
        ('{\n"train_batch_size": "many"}', ".json",
         "line 2, train_batch_size: 'many'; a whole number is expected"),
        ('{"train_batch_size": 1,\n"zero_optimization": {\n "stage": 5}}', ".json",
         "line 3, zero_optimization.stage: 5; allowed are 0, 1, 2, 3; nearest 3"),
        ('{"zero_optimization": {"offload_optimizer": {\n"device": "gpu"}}}',
         ".json", "line 2, zero_optimization.offload_optimizer.device: 'gpu'; allowed are none"),
        ('{"train_batch_size": 1,\n"zero_optimization": 3}', ".json",
         "line 2, zero_optimization: 3; keys with values"),
        ('{"train_batch_size": 0}', ".json", "line 1, train_batch_size: 0; allowed are 1, 2"),
        ('{"train_batch_size": 1.5}', ".json", "train_batch_size: 1.5; a whole number"),
        ("[model]\nname = 'llama3'\n[parallelism]\ntensor_parallel_degree = \n", ".toml",
         "line 4, tensor_parallel_degree: no TOML"),
        ("[parallelism]\npipeline_parallel_schedule = 'ZBV'\n", ".toml",
         "line 2, parallelism.pipeline_parallel_schedule: 'ZBV'; allowed are 1F1B, GPipe"),
        ("[parallelism]\ncontext_parallel_degree = true\n", ".toml",
         "line 2, parallelism.context_parallel_degree: True; a whole number"),
        ("parallelism:\n  dp: 1\n  tp: [1\n  pp: 1\n", ".yaml", "line 4"),
        ("parallelism:\n  dp: 1\n  dp: 2\n", ".yaml", "line 3, dp: the key stands twice"),
        ("parallelism:\n  dp: 1\n  tp: 1\n  pp: 1\n  pp_engine: zb\n", ".yaml",
         "line 5, parallelism.pp_engine: 'zb'; allowed are afab, 1f1b"),
        ("MODEL=(\n --num-layers 8\n --hidden-size big\n)", ".sh",
         "line 3, --hidden-size: 'big'; a whole number"),
        ("echo hello", ".sh", "no flag in it"),
        ("A=1\n--num-layers '2\n\n", ".sh", "line 2: a quote begins here and never ends"),
        ("--num-layers 1e999", ".sh", "line 1, --num-layers: '1e999'; a whole number"),
        ("--num-layers 99999999999", ".sh", "'99999999999'; at most 16777216 is expected"),
        ("[]", ".json", "a list; keys with values are expected"),
        ('{"hidden_size": 64, "num_hidden_layers": 2}', ".json", "give it to --model"),
        ('{"lr": 1}', ".json", "keys lr: of none of pyparallel, deepspeed"),
        ("[" * 100000, ".json", "config.json"),
        ("\x00\xff", ".json", "config.json"),
    ],
)  # fmt: skip
def test_a_broken_file_names_line_and_key(read, content, ending, message):
    with pytest.raises(ConfigError) as caught:
        read(content, ending)
    assert message in str(caught.value)


def test_what_is_neither_a_file_nor_flags():
    with pytest.raises(ConfigError, match="nowhere.json: no such file"):
        import_configuration("nowhere.json")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe\x00garbage")
    with pytest.raises(ConfigError, match="cannot be read"):
        import_configuration(str(path))


def test_nothing_in_a_script_is_executed(tmp_path):
    mark = tmp_path / "mark"
    script = tmp_path / "run.sh"
    script.write_text(f'X=$(touch {mark})\nY=$((__import__("os").getpid()))\n--num-layers $Y\n')
    found = import_configuration(str(script), gpus=1)
    assert not mark.exists()
    assert [note.key for note in found.undetermined] == ["--num-layers"]


def test_no_mangled_file_gives_anything_but_a_configuration_error(read):
    """Bytes cut, doubled and swapped: a layout or a ConfigError, nothing else."""
    rng = random.Random(7)
    originals = [(json.dumps(DEEPSPEED), ".json"), (TORCHTITAN, ".toml"), (NANOTRON, ".yaml"),
                 (MEGATRON, ".sh"), (json.dumps(PICOTRON), ".json"),
                 (ACCELERATE, ".yaml")]  # fmt: skip
    refused = 0
    for turn in range(300):
        text, ending = originals[turn % len(originals)]
        for _ in range(rng.randint(1, 4)):
            at, size = rng.randrange(len(text)), rng.randint(1, 12)
            piece = text[at : at + size]
            other = rng.choice(["", piece * 2, piece[::-1], "auto", "-1", '"', "[", "="])
            text = text[:at] + other + text[at + size :]
        try:
            found = read(text, ending, gpus=rng.choice([None, 1, 7, 64]))
        except ConfigError as error:
            refused += "config" + ending in str(error)
        else:
            assert isinstance(found.layout, Layout)
            found.text()
            json.dumps(found.to_json())
    assert 50 < refused < 290


_LONG = "k" * 5000


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        (".json", f'{{"{_LONG}": 1}}'),
        (".json", f'{{"train_batch_size": 8, "{_LONG}": {{"a": 1}}}}'),
        (".json", f'{{"train_batch_size": 8, "zero_optimization": {{"{_LONG}": 1}}}}'),
        (".json", f'{{"train_batch_size": 8, "{_LONG}": 1, "{_LONG}": 2}}'),
        (".json", f'{{"train_batch_size": 8, "{_LONG}": '),
        (".toml", f"{_LONG} = 1"),
        (".toml", f"{_LONG} = ="),
        (".toml", f"[parallelism]\ntensor_parallel_degree = '{_LONG}'"),
        (".yaml", f"parallelism:\n  {_LONG}: 1\n  {_LONG}: 2"),
        (".yaml", f"{_LONG}: ["),
        (".sh", f"train --num-layers ${_LONG} --{_LONG} 1"),
    ],
)
def test_a_long_key_is_cut_wherever_it_is_told(read, ending, content):
    try:
        told = read(content, ending, gpus=8).text()
    except ConfigError as error:
        told = str(error)
    assert "k" * 70 in told
    assert max(map(len, told.splitlines())) < 600

"""`python -m pyparallel plan`: what it prints, and what it refuses. Layers of proof: in process,
and once as a process without torch; all of it runs in CI."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyparallel.plan import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = "layers=8,hidden=1024,heads=16,vocab=32000,kv_heads=8"
BASE = ["--model", SMALL, "--seq", "4096", "--global-batch", "64", "--gpu", "a100-80"]


def test_the_issues_own_line_lists_layouts(capsys):
    arguments = "--model llama-3-70b --gpus 64 --gpu a100-80 --seq 8192 --global-batch 512"
    assert main([*arguments.split(), "--explain"]) == 0
    text = capsys.readouterr().out
    assert "70.55B parameters" in text
    for word in ("Does it fit on one device?", "Does a replica cross hosts?", "fast links",
                 "Pareto front", "Rejected, the nearest first", "links between nodes half as fast",
                 "MFU by convention", "silently assumes"):  # fmt: skip
        assert word in text


def test_a_plan_that_only_the_margin_makes_too_large_says_so(capsys):
    """81.1 GiB, of which 76.5 are tensors."""
    arguments = "--model llama-3-8b --gpu a100-80 --dp 8 --tp 1 --pp 1 --cp 1 --seq 4096"
    assert main([*arguments.split(), "--global-batch", "64"]) == 1
    assert "81.1 of 80 GiB, of which 4.6 are margin" in capsys.readouterr().out
    assert main([*arguments.split(), "--global-batch", "64", "--memory", "76"]) == 1
    assert "does not fit: 81.1 of 76 GiB.\n" in capsys.readouterr().out


def test_one_layout_is_worked_out_and_what_to_change(capsys):
    arguments = "--model llama-3-70b --gpus 64 --gpu a100-80 --dp 8 --tp 4 --pp 2"
    assert main(arguments.split()) == 1
    text = capsys.readouterr().out
    assert "8.82B per device" in text
    assert "It does not fit" in text
    assert "full recompute" in text
    assert "best of all 64" in text
    assert main([*arguments.split(), "--recompute", "full"]) == 0
    assert "It fits." in capsys.readouterr().out


def test_json_is_all_of_it(capsys):
    assert main([*BASE, "--gpus", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plans"][0]["time"]["step"] > 0
    assert document["decision_tree"][0]["question"] == "Does it fit on one device?"
    assert document["sensitivity"]
    assert main([*BASE, "--dp", "2", "--tp", "2", "--pp", "2", "--cp", "1", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["layout"]["devices"] == 8
    assert len(one["memory"]["stages"]) == 2


def test_json_has_no_infinity_where_a_change_leaves_nothing_that_fits(capsys):
    tight = ["--model", "llama-3.2-1b", "--gpus", "2", "--gpu", "h100", "--seq", "131072"]
    tight += ["--global-batch", "63", "--pp", "1", "--objective", "memory"]
    assert main([*tight, "--json"]) == 0
    changes = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["sensitivity"]
    less = next(c for c in changes if c["change"] == "a fifth less memory")
    assert less["step"] is less["winner"] is less["winner_step"] is None
    assert main([*tight, "--explain"]) == 0
    assert "a fifth less memory: does not fit; nor does another" in capsys.readouterr().out


def test_tokens_say_how_long_it_takes(capsys):
    assert main([*BASE, "--gpus", "8", "--tokens", "1e9"]) == 0
    assert "1e+09 tokens take 3815 steps" in capsys.readouterr().out
    assert main([*BASE, "--gpus", "8", "--tokens", "1e9", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert run["tokens"] == 1e9
    assert round(run["steps"]) == 3815
    assert run["device_hours"] == pytest.approx(run["days"] * 24 * 8)
    goal = ["--objective", "devices", "--tokens", "1e9", "--deadline", "1"]
    assert main([*BASE, *goal]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model is missing"),
        (["--model", "lama-3-8b", "--gpus", "8"], "no model 'lama-3-8b'; nearest: llama-3-8b"),
        (["--model", "llama-3-8b"], "--gpus is missing"),
        ([*BASE, "--gpus", "8", "--gpu", "a10"], "no GPU 'a10'; nearest"),
        ([*BASE, "--gpus", "8", "--dp", "3", "--tp", "1", "--pp", "1", "--cp", "1"],
         "dp 3 x cp 1 x pp 1 x tp 1 = 3 devices, but --gpus 8"),
        ([*BASE, "--dp", "1", "--tp", "3", "--pp", "1", "--cp", "1"],
         "heads: 16 heads over tp 3 leave 1; nearest tp 2 and 4"),
        ([*BASE, "--gpus", "8", "--deadline", "3"], "--deadline has no effect"),
        ([*BASE, "--objective", "devices"], "needs --deadline DAYS and --tokens N"),
        ([*BASE, "--gpus", "8", "--memory", "0"], "--memory 0: more than 0"),
        ([*BASE, "--gpus", "8", "--cluster", "x.json"], "--gpu has no effect beside --cluster"),
        ([*BASE, "--gpus", "8", "--memory", "inf"], "--memory inf: more than 0 is expected, and"),
        ([*BASE, "--gpus", "8", "--tokens", "nan"], "--tokens nan: more than 0"),
        ([*BASE, "--gpus", "8", "--tokens", "-1"], "--tokens -1: more than 0"),
        ([*BASE, "--gpus", "8", "--memory", "1e308"], "--memory 1e+308: 1e-9 to 1e15"),
        ([*BASE, "--gpus", "8", "--top", "0"], "--top 0: 1 or more"),
        ([*BASE, "--gpus", "8", "--cp", "0"], "cp=0; allowed are 1, 2, 3, ...; nearest 1"),
        ([*BASE, "--gpus", "8", "--tp", "-1"], "tp=-1; allowed are 1, 2"),
        ([*BASE, "--gpus", "8", "--micro-batch", "0"], "micro_batch=0; allowed are 1, 2"),
        ([*BASE, "--gpus", "64", "--pp", "5"],
         "pp 5 does not divide 64 devices; nearest --gpus 60 and 65, or pp 2 and 4"),
        ([*BASE, "--gpus", "64", "--dp", "64", "--tp", "2"],
         "dp 64 x tp 2 = 128 does not divide 64 devices; nearest --gpus 128, or tp 1"),
        ([*BASE, "--gpus", "8", "--pp", "1", "--schedule", "zb-v"], "has no effect with --pp 1"),
        ([*BASE, "--gpus", "8", "--cp", "1", "--cp-kind", "ring"], "has no effect with --cp 1"),
        ([*BASE[2:], "--gpus", "8", "--gpu", "", "--model", SMALL], "no GPU ''"),
        (["--model", "", "--gpus", "8"], "--model is missing"),
        (["--model", "layers=2,hidden=65,heads=8,vocab=9", "--gpus", "1"],
         "hidden=65 over heads=8 leaves 1; nearest hidden 64 and 72, or give head_dim"),
        (["--model", "layers=2,hiden=8", "--gpus", "1"], "no size 'hiden'; nearest: hidden"),
        (["--model", "layers=2,hidden=8", "--gpus", "1"], "sizes missing: heads, vocab"),
        (["--model", f"{SMALL},layers=4", "--gpus", "1"], "layers is given twice: layers=8, then"),
        (["--model", f"{SMALL},ffn=0", "--gpus", "1"], "ffn=0: 1 or more is expected"),
        ([*BASE, "--gpus", "9" * 26], "at most 16777216 are planned"),
        ([*BASE, "--gpus", "8", "--seq", "9" * 26], "at most 1099511627776 are expected"),
        (["--model", "layers=2,hidden=999999999999,heads=999999999999,vocab=9", "--gpus", "8"],
         "heads=999999999999: at most 65536 are expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_nothing_fits_says_what_came_nearest(capsys):
    arguments = "--model llama-3.1-405b --gpus 8 --gpu a100-40 --global-batch 8"
    assert main(arguments.split()) == 1
    assert "no layout fits; nearest" in capsys.readouterr().err


def test_it_starts_without_torch():
    code = (
        "import sys, pyparallel.plan as p; "
        f"s = p.main({[*BASE, '--gpus', '4']!r}); "
        "assert 'torch' not in sys.modules; sys.exit(s)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "tok/s/gpu" in done.stdout


@pytest.mark.parametrize("option", ["--html", "--emit"])
def test_a_file_that_cannot_be_written_is_told(option, tmp_path, capsys):
    path = str(tmp_path / "none" / "x.html")
    one = [*BASE, "--dp", "2", "--tp", "1", "--pp", "1", "--cp", "1"]
    write = [option, path] if option == "--html" else [option, "pyparallel", "--out", path]
    assert main([*one, *write]) == 2
    assert f"{path}: cannot be written: No such file or directory" in capsys.readouterr().err


LONG = "x" * 20000
CONFIG = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 9,
          "num_attention_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_hidden_layers": LONG}, "num_hidden_layers: 'xxx"),
        ({"text_config": 5}, "text_config: 5"),
        ({"n_shared_experts": "2"}, "n_shared_experts: '2'"),
        ({"first_k_dense_replace": 1.5}, "first_k_dense_replace: 1.5"),
        ({"shared_expert_intermediate_size": [3]}, "shared_expert_intermediate_size: [3]"),
    ],
)
def test_odd_values_of_a_config_are_told_with_their_key_and_cut(change, key, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, **change}))
    assert main(["--model", str(file), "--gpus", "8"]) == 2
    said = capsys.readouterr().err
    assert f"key {key}" in said
    assert len(said) < 1000


def test_a_long_value_of_a_yaml_file_is_cut(tmp_path, capsys):
    file = tmp_path / "nanotron.yaml"
    file.write_text(f"parallelism:\n  tp: {LONG}\n")
    assert main([*BASE, "--gpus", "8", "--from", str(file)]) == 2
    said = capsys.readouterr().err
    assert "line 2, parallelism.tp: 'xxx" in said
    assert "... (20002 characters); a whole number" in said


@pytest.mark.parametrize(
    ("memory", "lanes", "total", "said"),
    [(-5, "NV18", 1e12, "a GPU's memory_bytes"), (85e9, "NV0", 1e12, "link 'NV0'"),
     (85e9, "NV18", 0, "memory.total_bytes 0")],
)  # fmt: skip
def test_a_report_with_nothing_in_it_is_refused(memory, lanes, total, said, tmp_path, capsys):
    device = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": memory}
    report = {"gpus": {"devices": [device], "links": [{"link": lanes}]},
              "memory": {"total_bytes": total}, "cpu": {"usable": 2}}  # fmt: skip
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(report))
    assert main(["--model", "llama-3-8b", "--gpus", "8", "--cluster", str(file)]) == 2
    assert said in capsys.readouterr().err

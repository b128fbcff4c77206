"""`plan --from`, `--emit`, `--html`, `--figures`: the command's files. Layers of proof: in process;
all of it runs in CI."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from pyparallel.plan import main

SMALL = "layers=8,hidden=1024,heads=16,vocab=32000,kv_heads=8"
BASE = ["--model", SMALL, "--seq", "4096", "--global-batch", "64", "--gpu", "a100-80"]
FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --swiglu "
    "--group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--micro-batch-size 1 --global-batch-size 128 --bf16 --tensor-model-parallel-size 2 "
    "--sequence-parallel --use-distributed-optimizer --vocab-size 128256 --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    "--normalization RMSNorm --position-embedding-type rope --lr 1e-4"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_compares_layouts_that_cut_the_model_otherwise(tmp_path, capsys):
    page = tmp_path / "plan.html"
    arguments = "--model llama-3-8b --gpus 32 --gpu a100-80 --seq 8192 --global-batch 128"
    assert main([*arguments.split(), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]
    labels = [one["label"] for one in json.loads(text)["compare"]]
    cuts = [re.search(r"tp (\d+) pp (\d+).*zero-(\d)", label).groups() for label in labels]
    assert len(cuts) == len(set(cuts)) == 6


def test_from_flags_gives_memory_time_and_notes(capsys):
    assert main(["--from", FLAGS, "--gpus", "16", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    assert "the flags: megatron, dp 8 tp 2 pp 1, zero-1, mbs 1" in text
    for part in ("defaults taken:", "--context-parallel-size 1", "keys ignored:", "--lr",
                 "memory per device", "a step takes", "It fits."):  # fmt: skip
        assert part in text, part


def test_from_a_file_that_breaks_a_rule(capsys, folder):
    """The rule with its mend is told, and the layout is worked out all the same."""
    document = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 2, "bf16": {
        "enabled": True}, "zero_optimization": {"stage": 2, "stgae": 1},
        "gradient_accumulation_steps": 8}  # fmt: skip
    (folder / "ds.json").write_text(json.dumps(document, indent=1))
    arguments = ["--from", "ds.json", "--gpus", "8", "--model", "llama-3-8b", "--seq", "4096"]
    assert main([*arguments, "--gpu", "h100"]) == 2
    done = capsys.readouterr()
    assert "100, and 2 x 8 x 8 = 128" in done.out
    assert "ds.json, line 9, zero_optimization.stgae" in done.out
    assert "did you mean stage?" in done.out
    assert "batch: global batch 100" in done.err
    assert main([*arguments, "--gpu", "h100", "--global-batch", "128"]) == 1
    assert "a step takes" in capsys.readouterr().out


def test_from_as_json_and_with_other_options(capsys):
    arguments = ["--from", FLAGS, "--gpus", "16", "--gpu", "h100", "--json"]
    other = ["--recompute", "full", "--precision", "bf16-grads", "--no-sequence-parallel"]
    assert main([*arguments, "--tp", "4", *other]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["import"]["framework"] == "megatron"
    layout = document["plan"]["layout"]
    assert (layout["tp"], layout["dp"], layout["recompute"]) == (4, 4, "full")
    assert layout["sequence_parallel"] is False
    assert document["plan"]["job"]["precision"] == "bf16-grads"
    assert document["cannot_be"] == []
    assert main([*arguments, "--tp", "3"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["plan"] is None
    assert document["cannot_be"][0]["rule"] == "heads"


def test_the_issue_of_a_missing_model(capsys, folder):
    (folder / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    assert main(["--from", "ds.json", "--gpus", "8"]) == 2
    assert "it does not say the model (--model), the sequence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("framework", "name"),
    [("pyparallel", "pyparallel.json"), ("deepspeed", "deepspeed.json"),
     ("megatron", "megatron.sh")],
)  # fmt: skip
def test_emitted_files_are_read_back(capsys, folder, framework, name):
    assert main([*BASE, "--gpus", "8", "--emit", framework, "--top", "2"]) == 0
    done = capsys.readouterr()
    assert f"written: {name} ({framework}, " in done.err
    label = done.err.split(f"({framework}, ")[1].split(")\n")[0]
    assert main(["--from", name, "--gpus", "8", "--model", SMALL, "--seq", "4096"]) == 0
    assert label in capsys.readouterr().out
    assert main([*BASE, "--gpus", "8", "--emit", framework]) == 2
    assert f"{name} exists: name another file" in capsys.readouterr().err
    assert main([*BASE, "--gpus", "8", "--emit", framework, "--out", name]) == 0


def test_emit_of_what_no_layout_can_be(capsys):
    """torchtitan has no such model: nothing is written, and its models are listed."""
    assert main([*BASE, "--gpus", "8", "--emit", "torchtitan"]) == 2
    assert "it has llama-3-8b" in capsys.readouterr().err


def test_the_page_and_the_figures(capsys, folder):
    pytest.importorskip("matplotlib")
    one = ["--dp", "2", "--tp", "2", "--pp", "2", "--cp", "1"]
    assert main([*BASE, *one, "--html", "plan.html", "--figures", "figures"]) == 0
    page = (folder / "plan.html").read_text(encoding="utf-8")
    assert "dp 2 tp 2 pp 2" in page
    names = sorted(path.name for path in (folder / "figures").iterdir())
    assert len(names) == 8
    for name in names:
        if name.endswith(".svg"):
            ElementTree.parse(folder / "figures" / name)
    err = capsys.readouterr().err
    assert "written: plan.html" in err
    assert "written: figures" in err
    assert main([*BASE, *one, "--html", "nowhere/plan.html"]) == 2
    assert "nowhere/plan.html" in capsys.readouterr().err


def test_a_goal_beside_a_given_layout_has_no_effect(capsys):
    assert main(["--from", FLAGS, "--gpus", "16", "--objective", "memory"]) == 2
    assert "--objective has no effect" in capsys.readouterr().err


def test_out_alone_has_no_effect(capsys):
    assert main([*BASE, "--gpus", "8", "--out", "x"]) == 2
    assert "--out has no effect" in capsys.readouterr().err

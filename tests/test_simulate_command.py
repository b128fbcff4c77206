"""`python -m pyparallel simulate`: the demonstration, its options, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pyparallel import simulate as command
from pyparallel.schedule import FAMILIES

ROOT = Path(__file__).resolve().parents[1]


def run(capsys, *arguments):
    status = command.main([str(a) for a in arguments])
    return status, *capsys.readouterr()


def test_the_demonstration(capsys):
    status, out, _ = run(capsys, "--dp", 2, "--tp", 2, "--pp", 2, "--microbatches", 4)
    assert status == 0
    assert out.startswith(
        """\
8 ranks: dp 2 x pp 2 x tp 2; numbered tp fastest, then pp, dp outermost

rank  (dp, pp, tp)  gradient group  downstream
0     (0, 0, 0)     0 4             2
1     (0, 0, 1)     1 5             3
2     (0, 1, 0)     2 6             -
3     (0, 1, 1)     3 7             -
4     (1, 0, 0)     0 4             6
5     (1, 0, 1)     1 5             7
6     (1, 1, 0)     2 6             -
7     (1, 1, 1)     3 7             -

1f1b, 2 stages, 4 microbatches: 5 forward time steps (m + p - 1 = 4 + 2 - 1)
step  active ranks
0     0 1 4 5
1     0 1 2 3 4 5 6 7
2     0 1 2 3 4 5 6 7
3     0 1 2 3 4 5 6 7
4     2 3 6 7

a step takes 15; idle 20.0 %
"""
    )


def test_it_needs_neither_torch_nor_the_core():
    code = (
        "import sys; from pyparallel.simulate import main;"
        "main(['--pp', '2', '--microbatches', '2', '--json']);"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('torch', 'matplotlib')]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step_time"] == 9


@pytest.mark.parametrize("order", ["tp,pp,dp", "dp,tp,pp", "pp,dp,tp", "dp,pp,tp"])
def test_groups_of_16_ranks_in_any_order(capsys, order):
    """training.md 36: rank order and group mistakes."""
    status, out, _ = run(
        capsys, "--dp", 2, "--pp", 4, "--tp", 2, "--microbatches", 3, "--json", "--order", order
    )
    assert status == 0
    ranks = json.loads(out)["ranks"]
    assert [r["rank"] for r in ranks] == list(range(16))
    strides, stride = {}, 1
    for axis in order.split(","):
        strides[axis] = stride
        stride *= {"dp": 2, "pp": 4, "tp": 2}[axis]
    for r in ranks:
        assert r["rank"] == sum(r[axis] * strides[axis] for axis in strides)
        group = [o["rank"] for o in ranks if (o["pp"], o["tp"]) == (r["pp"], r["tp"])]
        assert r["gradient_group"] == group
        below = [o["rank"] for o in ranks
                 if (o["dp"], o["pp"], o["tp"]) == (r["dp"], r["pp"] + 1, r["tp"])]  # fmt: skip
        assert r["downstream"] == below


@pytest.mark.parametrize("name", [*FAMILIES, "auto"])
def test_every_schedule(capsys, name):
    status, out, _ = run(capsys, "--pp", 4, "--microbatches", 6, "--schedule", name, "--json")
    assert status == 0
    document = json.loads(out)
    stages, forwards = document["stages"], sum(map(len, document["forward_steps"]))
    assert forwards == stages * 6
    assert document["critical_path"][-1]["end"] == document["step_time"]
    if name == "dualpipe":  # ranks 0 and 3 hold the same stages
        assert document["ranks"][0]["gradient_group"] == [0, 3]
    if stages == 4 and name != "dualpipe":
        assert len(document["forward_steps"]) == 6 + 4 - 1
    if name == "interleaved-1f1b":
        assert document["ranks"][3]["downstream"] == [0]


def test_files(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    svg, png, trace = (tmp_path / name for name in ("a.svg", "a.png", "a.json"))
    status, _, _ = run(
        capsys, "--pp", 2, "--microbatches", 3, "--svg", svg, "--png", png, "--trace", trace
    )
    assert status == 0
    assert svg.read_text().startswith("<svg ")
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"passes", "messages"} <= {e["args"].get("name") for e in events if "args" in e}


def test_times(capsys, tmp_path):
    arguments = ("--pp", 2, "--microbatches", 1, "--json", "--times")
    assert json.loads(run(capsys, *arguments, "2,3,4")[1])["step_time"] == 2 * (2 + 3 + 4)
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"forward": [2, 5], "latency": 1, "activation_bytes": 7}))
    document = json.loads(run(capsys, *arguments, file)[1])
    assert document["step_time"] == 2 + 1 + 5 + 2 + 1 + 2
    assert document["pipeline_ranks"][0]["peak_bytes"] == 7
    file.write_text(json.dumps({"overlapped": False, "latency": 1}))
    assert json.loads(run(capsys, *arguments, file)[1])["step_time"] == 6 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pp", 0], "--pp 0: allowed are 1, 2, 3"),
        (["--dp", -1, "--tp", 0], "--dp -1, --tp 0: allowed are"),
        (["--microbatches", 0], "0 microbatches: allowed are 1, 2, 3"),
        (["--schedule", "1f2b"], "no schedule '1f2b'; there are gpipe"),
        (["--pp", 3, "--schedule", "dualpipe"], "nearest 2 and 4"),
        (["--chunks", 2], "2 chunks a rank: it has 1; for 2 take 'zb-v'"),
        (["--memory-limit", 3], "--memory-limit has no effect"),
        (["--schedule", "auto", "--group-size", 3], "--group-size has no effect"),
        (["--schedule", "auto", "--memory-limit", 0.5], "memory_limit is too small"),
        (["--order", "tp,pp"], "--order tp,pp: it names each of tp, pp, dp once"),
        (["--times", "1,2"], "--times 1,2: neither three numbers nor a file"),
        (["--times", "1,2,x"], "three numbers are expected"),
        (["--times", "1,2,-3"], "is not finite and >= 0"),
        (["--times", "/"], "--times /: neither three numbers nor a file"),
        (["--dp", 10**9], "at most 16384 ranks are listed"),
        (["--microbatches", 10**9], "at most 1048576 passes are played, here 1048576 microb"),
        (
            ["--pp", 64, "--microbatches", 512, "--schedule", "auto"],
            "8192 passes are played with --schedule auto, here 128 microbatches; a named",
        ),
        (["--schedule", "auto", "--memory-limit", "nan"], "--memory-limit nan: a number"),
        (["--svg", "/dev/full"], "/dev/full: cannot be written: No space left on device"),
        (["--svg", "/nowhere/a.svg"], "--svg /nowhere/a.svg: there is no folder /nowhere"),
        (["--png", "/", "--trace", "/no/b"], "--trace /no/b: there is no folder /no; --png / is a"),
    ],
)
def test_what_cannot_be_done_is_said(capsys, arguments, message):
    status, out, err = run(capsys, "--microbatches", 4, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("pyparallel simulate: ")


def test_files_are_looked_at_before_the_work(capsys, monkeypatch, tmp_path):
    def work(*_, **__):
        raise AssertionError("the work began")

    monkeypatch.setattr("pyparallel.simulate.generate", work)
    for name in ("svg", "png", "trace"):
        assert run(capsys, "--microbatches", 4, f"--{name}", tmp_path / "a" / "b")[0] == 2
    with pytest.raises(AssertionError, match="the work began"):
        run(capsys, "--microbatches", 4, "--svg", tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "unknown; allowed are activation_bytes"),
        ('{"speed": 3}', "['speed'] unknown; allowed are activation_bytes"),
        ('{"forward": "fast"}', "is no number"),
        ('{"forward": [1, 2, 3]}', "forward has 3 values for 1 stages"),
        ('{"forward": {"a": 1}}', "is no number"),
        ('{"forward": [[1]]}', "is no number"),
        ('{"overlapped": 3}', "overlapped=3"),
        ('{"latency": [1]}', "latency"),
        ('{"forward": 1' + "0" * 320 + "}", "at most 1e+100"),
        ('{"forward": null}', "forward"),
    ],
)
def test_wrong_files_of_times_are_said(capsys, tmp_path, text, message):
    file = tmp_path / "times.json"
    file.write_text(text)
    status, _, err = run(capsys, "--microbatches", 4, "--times", file)
    assert status == 2
    assert message in err

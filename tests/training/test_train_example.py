"""examples/train_gpt.py: its data loses and repeats nothing at any number of ranks; a run that is
cut off goes on at another layout with the losses of one that was not; what it writes is read.

Layers: the data and the settings, in one process; three runs on two ranks.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pyparallel import profile
from tests.launch import ROOT, Rank, run_ranks

sys.path.insert(0, str(ROOT / "examples"))  # as where the example is started

from text import Batches, Corpus
from train_gpt import Settings, Training, read_settings


def test_no_sample_is_lost_or_repeated_when_the_ranks_change(tmp_path):
    path = tmp_path / "bytes"
    generator = torch.Generator().manual_seed(0)
    path.write_bytes(bytes(torch.randint(256, (641,), generator=generator).tolist()))
    data = Corpus.of_file(path).data
    rows, samples = 8, 6
    epoch = 640 // rows
    single = Batches(data, rows, samples, seed=3)
    seen = [tuple(row.tolist()) for _ in range(27) for row in single.next()[0]]
    first, second = seen[:epoch], seen[epoch : 2 * epoch]
    whole = {tuple(data[n * rows : (n + 1) * rows].tolist()) for n in range(epoch)}
    assert len(whole) == epoch
    assert set(first) == set(second) == whole, "each sample once an epoch"
    assert first != second
    found, state = [], None
    for ranks in (4, 4, 2, 1, 4, 3, 2):  # a job that changes its size after every few steps
        each = [Batches(data, rows, samples, seed=3) for _ in range(ranks)]
        for one in each:
            if state is not None:
                one.load_state_dict(state)
        for _ in range(3):
            for rank, one in enumerate(each):
                tokens, labels = one.next(rank, ranks)
                assert torch.equal(tokens[:, 1:], labels[:, :-1])
                found += [tuple(row.tolist()) for row in tokens]
        state = each[0].state_dict()
        assert all(one.state_dict() == state for one in each)
    assert found == seen[: len(found)]
    with pytest.raises(ValueError, match=r"is of seed=3, and this run has 4: samples would come"):
        Batches(data, rows, samples, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="641 bytes have 0 samples of 641 rows"):
        Batches(data, 641, 1, seed=0)


def test_the_library_is_a_corpus(tmp_path):
    corpus = Corpus.of_standard_library(tmp_path)
    again = Corpus.of_standard_library(tmp_path)
    assert len(corpus.data) == len(again.data) > 4_000_000
    assert b"def " in bytes(corpus.part("train")[:4000].tolist())
    assert len(list(tmp_path.iterdir())) == 1


def test_settings(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text("tp: 2\nlr: 1\nschedule: zb-h1\ntied: true\n")
    found = read_settings(["--config", str(path), "--tp", "4", "--no-tied"])
    assert (found.tp, found.lr, found.schedule, found.tied) == (4, 1, "zb-h1", False)
    for text, message in (("tpp: 2", "tpp: 2 is none of"), ("tp: two", "tp: 'two' is none of")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            read_settings(["--config", str(path)])
        assert message in capsys.readouterr().err
    for name, given in (("log-every", "0"), ("batch", "-1"), ("temperature", "0"), ("lr", "nan")):
        with pytest.raises(SystemExit):
            read_settings([f"--{name}", given])
        assert name.replace("-", "_") in capsys.readouterr().err.splitlines()[-1]
    assert read_settings(["--evaluate-every", "0"]).evaluate_every == 0


SMALL = {
    "layers": 2, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 2, "rows": 32,
    "batch": 4, "steps": 6, "log_every": 1, "evaluate_every": 6, "evaluate_batches": 1,
    "save_every": 3, "warmup": 0.2, "peak_gflops": 10.0, "generate": 3, "dropout": 0.1,
}  # fmt: skip


class Cut(Exception):
    """What ends a run early."""


def runs(rank: Rank, data: str, folder: str) -> None:
    """Straight; cut off behind step 3; resumed at another layout."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    common = {**SMALL, "data": data}
    Training(Settings(folder=f"{folder}/straight", tp=2, profile=True, **common)).run()
    cut = Training(Settings(folder=f"{folder}/cut", tp=2, **common | {"evaluate_every": 0}))
    step = cut.step

    def short(progress: float) -> dict[str, float]:
        if cut.batches.position == 4 * SMALL["batch"]:
            raise Cut
        return step(progress)

    cut.step = short
    with pytest.raises(Cut):
        cut.run()
    Training(Settings(folder=f"{folder}/cut", pp=2, microbatches=2, **common)).run()


def ten_lines(rank: Rank) -> None:
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    names = runpy.run_path(str(ROOT / "examples/four_ranks.py"))
    assert names["loss"] < 5.0  # log(256) = 5.5 before the first step


@pytest.mark.timeout(300)
def test_the_readmes_example():
    run_ranks(ten_lines, 4, timeout=250)


@pytest.mark.timeout(600)  # idle: 5 s
def test_a_run_goes_on_at_another_layout(tmp_path):
    data = tmp_path / "data"
    data.write_bytes((ROOT / "pyparallel/training/model.py").read_bytes())
    run_ranks(runs, 2, str(data), str(tmp_path), timeout=500)
    straight, cut = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "cut")
    )
    assert [line["step"] for line in straight] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in cut] == [1, 2, 3, 4, 4, 5, 6], "step 4 came twice"
    assert straight[-1]["loss"] < straight[0]["loss"] - 0.1
    resumed = {line["step"]: line for line in cut}
    for line in straight:
        other = resumed[line["step"]]
        for name in ("loss", "norm"):  # float32: sums in another order, six steps long
            assert abs(other[name] - line[name]) < 1e-5 * abs(line[name]), (line["step"], name)
        assert other["lr"] == line["lr"]
    assert abs(resumed[6]["evaluation"] - straight[-1]["evaluation"]) < 1e-5 * 6
    assert straight[-1]["mfu_convention"] == "full"
    assert straight[-1]["tokens_per_second"] > 0
    times = profile.read_traces([tmp_path / "straight" / "trace"])
    assert [time.rank for time in times] == [0, 1]
    assert all(time.exposed_by_group["tp"] > 0 for time in times), times
    trace = json.loads((tmp_path / "straight/trace/rank1.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"data", "forward and backward", "clip", "optimizer"} <= names
    text = Path(tmp_path / "straight/sample.txt").read_text()
    assert text.startswith("def ")

"""What lies on the disk: whole or not there, checked when read.

Layers: one process, no groups. Files are cut, changed and left half-written; their formats, and
forged ones, are in test_checkpoint_formats.py.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pyparallel.training.checkpoint import Checkpointer, CheckpointError, writing
from pyparallel.training.checkpoint.manifest import MANIFEST, SUMS
from pyparallel.training.checkpoint.plain import decoded, encoded
from tests.training.checkpoints import contents, flip, load, newest, same, trained


def test_what_was_saved_comes_back(tmp_path: Path, saved: dict[int, list[Any]]) -> None:
    for wanted in (None, 1, 2, 3):
        step, found, at = load(tmp_path, step=wanted)
        assert step == (wanted or 3)
        assert same(found, saved[step])
        assert at == {"n": step}
    assert not same(found, contents(*trained(9)))
    assert load(tmp_path / "nothing")[0] is None
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        load(tmp_path, step=7)


DAMAGE = {
    "a bit of the data": lambda folder: flip(folder / "rank-00000.safetensors"),
    "a bit of the manifest": lambda folder: flip(folder / MANIFEST),
    "a bit of the sums": lambda folder: flip(folder / SUMS),
    "data cut short": lambda folder: os.truncate(folder / "rank-00000.safetensors", 1000),
    "no data": lambda folder: (folder / "rank-00000.safetensors").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "no sums": lambda folder: (folder / SUMS).unlink(),
    "empty sums": lambda folder: os.truncate(folder / SUMS, 0),
    "sums cut short": lambda folder: os.truncate(folder / SUMS, 100),
    "an empty folder": lambda folder: [p.unlink() for p in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_taken(
    damage: str, tmp_path: Path, saved: dict[int, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[damage](newest(tmp_path))
    step, found, _ = load(tmp_path)
    assert step == 2
    assert same(found, saved[2])
    assert "checkpoint 000003-step-3 is damaged" in caplog.text
    assert "loaded 000002-step-2 instead" in caplog.text
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load(tmp_path, step=3)


def test_where_none_is_whole_nothing_is_loaded(tmp_path: Path, saved: Any) -> None:
    for folder in tmp_path.glob("0*"):
        flip(folder / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint.*step-3.*step-2.*step-1"):
        load(tmp_path)


def test_keep_counts_whole_ones_and_the_order_of_saving(tmp_path: Path, saved: Any) -> None:
    model, _ = trained()
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        flip(newest(tmp_path) / MANIFEST)
        assert checkpointer.load(model=model) == 2
        checkpointer.save(3, model=model)
        checkpointer.wait()
        assert names(tmp_path) == ["000002-step-2", "000004-step-3"]
        assert checkpointer.load(model=model, step=2) == 2
        checkpointer.save(1, model=model)  # a run that went back is the newest
        checkpointer.wait()
        assert names(tmp_path) == ["000004-step-3", "000005-step-1"]
        assert checkpointer.load(model=model) == 1
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(8, model=model)
    assert names(tmp_path) == ["000006-step-8"]
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name != ".lock")


def test_what_a_dead_job_left_is_not_read_and_goes(tmp_path: Path, saved: Any) -> None:
    half = tmp_path / ".writing-000004-step-4"
    shutil.copytree(newest(tmp_path), half)
    assert load(tmp_path)[0] == 3
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, model=trained()[0])
    assert names(tmp_path) == ["000002-step-2", "000003-step-3", "000004-step-4"]


def test_two_saves_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first: in order, and each what it was when it was called."""
    order: list[Any] = []
    publish = writing.publish

    def slowly(*arguments: Any) -> None:
        order.append("publishing")
        publish(*arguments)
        order.append("published")

    monkeypatch.setattr(writing, "publish", slowly)
    model, optimizer = trained(1)
    before = contents(model, optimizer)
    with Checkpointer(tmp_path) as checkpointer:
        first = checkpointer.save(1, model=model, optimizer=optimizer, at={"n": 1})
        model[0].weight.data.zero_()
        second = checkpointer.save(2, model=model, optimizer=optimizer, at={"n": 2})
        assert first.done()
        assert order[:2] == ["publishing", "published"]
        model[0].weight.data.fill_(7)
        assert second.result().ok
        third = checkpointer.save(3, model=model)
    assert third.done()
    assert same(load(tmp_path, step=1)[1], before)
    found = load(tmp_path, step=2)[1]
    assert torch.equal(found[0], torch.zeros(7, 5))
    assert same(found[1:], before[1:])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_ends_no_training(
    asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        small, _ = trained(1)
        large = nn.Linear(300, 300)
        with Checkpointer(tmp_path, keep=1, asynchronous=asynchronous) as checkpointer:
            assert checkpointer.save(1, model=small).result().ok
            result = checkpointer.save(2, model=large).result()
            assert not result.ok
            assert result.path is None
            assert "No space left" in result.error
            assert "bytes are free" in result.error
            assert "step 2 was not saved, training goes on" in caplog.text
            assert names(tmp_path) == ["000001-step-1"]
            assert checkpointer.load(model=small) == 1
            assert checkpointer.save(3, model=small).result().ok
            assert names(tmp_path) == ["000002-step-3"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_two_jobs_do_not_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PATIENCE", 0.3)
    model, _ = trained()
    with Checkpointer(tmp_path) as first, Checkpointer(tmp_path) as second:
        assert first.save(1, model=model).result().ok
        assert "another job saves" in second.save(1, model=model).result().error
        assert second.load(model=model) == 1


# --- what does not fit


def test_another_model_is_refused_and_nothing_changed(tmp_path: Path, saved: Any) -> None:
    def refusal(model: nn.Module, **more: Any) -> str:
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError) as caught:
            checkpointer.load(model=model, **more)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        return str(caught.value)

    right = trained()[0]
    wide = nn.Sequential(nn.Linear(6, 7), right[1], right[2])
    assert "model.0.weight is torch.float32 [7, 5]" in refusal(wide)
    assert "[7, 6] is wanted" in refusal(wide)
    assert "torch.bfloat16" in refusal(trained()[0].float())
    assert "model.3.weight is missing" in refusal(nn.Sequential(*right, nn.Linear(3, 3)))
    assert "tensors that the model has not: ['model.2.bias'" in refusal(right[:2])
    assert "no state 'scaler'; there are ['at']" in refusal(right, scaler={})
    assert "at is a int: expected load_state_dict(), or a dict" in refusal(right, at=3)
    stranger = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert "not the model's" in refusal(right, optimizer=stranger)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, model=right)
    assert "it holds no optimizer" in refusal(right, optimizer=torch.optim.SGD(right.parameters()))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"f": len}, "state['f'] is a builtins.builtin_function_or_method"),
        ({"a": [1, {2}]}, "state['a'][1] is a builtins.set"),
        (3, "state is a int"),
    ],
)
def test_what_is_no_plain_data_is_not_saved(state: Any, told: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(1, model=trained()[0], state=state)
        assert told in str(caught.value)
        with pytest.raises(CheckpointError, match="step is -1"):
            checkpointer.save(-1, model=trained()[0])
    assert names(tmp_path) == []


def test_plain_data_keeps_values_and_types() -> None:
    kept: list[torch.Tensor] = []
    value = {
        "a": [1, 2.5, True, None, "x", b"\x00\xff", (1, (2,))],
        3: {"$b": float("-inf"), (1, 2): [], "": {}},
        "t": (torch.arange(3), [torch.tensor(0.1, dtype=torch.bfloat16)]),
        "large": 2**200,
    }
    text = json.dumps(encoded(value, lambda t: kept.append(t) or len(kept) - 1, "it"))
    back = decoded(json.loads(text), kept.__getitem__)
    assert str(back) == str(value)
    nan = decoded(encoded([float("nan")], id, "it"), kept.__getitem__)
    assert nan[0] != nan[0]
    for wrong in ({"$eval": "1"}, {"$tensor": "x"}, {"$tuple": 3}, {"$float": "1e3"}):
        with pytest.raises(ValueError, match="unknown kind"):
            decoded(wrong, kept.__getitem__)
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(TypeError, match="levels deep"):
        encoded(deep, id, "it")

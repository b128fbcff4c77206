"""What lies on the disk: whole or not there, checked when read, and nothing in it is executed.

Layers: one process, no groups. Files are cut, changed, forged and left half-written.
"""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load as torch_load

from pyparallel.training.checkpoint import Checkpointer, CheckpointError, Reader, writing
from pyparallel.training.checkpoint.files import DTYPES, read_header, read_rows, write_tensors
from pyparallel.training.checkpoint.manifest import MANIFEST, SUMS
from pyparallel.training.checkpoint.plain import decoded, encoded


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [optimizer.state[p] for p in model.parameters()]
    return [
        *(t.clone() for t in model.state_dict().values()),
        *(s[name].clone() for s in states for name in sorted(s)),
        {k: v for k, v in optimizer.param_groups[0].items() if k != "params"},
    ]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        torch.equal(x, y) and x.dtype is y.dtype if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def saved(tmp_path: Path) -> dict[int, list[Any]]:
    """Steps 1 to 3, in tmp_path: what each holds."""
    found = {}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            model, optimizer = trained(step)
            result = checkpointer.save(step, model=model, optimizer=optimizer, at={"n": step})
            found[step] = contents(model, optimizer)
    assert result.result().ok
    return found


def load(directory: Path, **options: Any) -> tuple["int | None", list[Any], dict[str, Any]]:
    model, optimizer = trained(9)
    at: dict[str, Any] = {}
    with Checkpointer(directory) as checkpointer:
        step = checkpointer.load(model=model, optimizer=optimizer, at=at, **options)
    return step, contents(model, optimizer), at


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


def newest(directory: Path) -> Path:
    return max(p for p in directory.iterdir() if p.name[0].isdigit())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


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


# --- the files' formats


def test_files_are_read_by_others_and_theirs_here(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        name: torch.arange(12).reshape(3, 4).to(dtype)
        for name, dtype in DTYPES.items()
        if not name.startswith("C")
    }
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    described = [(name, t.dtype, t.shape) for name, t in tensors.items()]
    write_tensors(ours, described, tensors.values(), {"step": "3"})
    safetensors.save_file(tensors, theirs, {"step": "3"})
    read = safetensors.load_file(ours)
    found, metadata = read_header(theirs)
    assert metadata == {"step": "3"}
    with theirs.open("rb") as file:
        for name, tensor in tensors.items():
            assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))
            rows = read_rows(file.fileno(), found[name], 1, 2)
            assert torch.equal(rows.view(torch.uint8), tensor[1:].view(torch.uint8))
    with pytest.raises(FileExistsError):
        write_tensors(ours, [], [])


def test_a_header_that_cannot_be_is_refused(tmp_path: Path) -> None:
    def file(header: Any, data: bytes = bytes(8), length: "int | None" = None) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / "file"
        path.write_bytes(
            (len(text) if length is None else length).to_bytes(8, "little") + text + data
        )
        return path

    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert read_header(file({"x": good}))[0]["x"].shape == (2,)
    for header in (
        b"",
        b"{",
        b"[]",
        b"[" * 100_000,
        {"x": 3},
        {"x": {}},
        {"x": {**good, "dtype": "F99"}},
        {"x": {**good, "shape": [3]}},
        {"x": {**good, "shape": [-2], "data_offsets": [8, 0]}},
        {"x": {**good, "shape": [2.0]}},
        {"x": {**good, "shape": [2**62, 2**3]}},
        {"x": {**good, "data_offsets": [8, 16]}},
        {"x": {**good, "data_offsets": [0]}},
        {"__metadata__": 3},
    ):
        with pytest.raises(CheckpointError, match="file"):
            read_header(file(header))
    for length in (2**63, 50_000, 100):
        with pytest.raises(CheckpointError, match="truncated"):
            read_header(file({"x": good}, length=length))


def test_torch_reads_it_too(tmp_path: Path, saved: dict[int, list[Any]]) -> None:
    model, _ = trained(9)
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    torch_load(state, storage_reader=Reader(newest(tmp_path)), no_dist=True)
    assert same(list(model.state_dict().values()), saved[3][: len(state)])
    flip(newest(tmp_path) / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="sha256"):
        Reader(newest(tmp_path))


# --- hostile files: their sums are right


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def forge(folder: Path, change: Any) -> None:
    """Changes a checkpoint, and makes its checksums right again."""
    change(folder)
    sums = ""
    for path in sorted(folder.iterdir()):
        if path.name != SUMS:
            sums += f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
    (folder / SUMS).write_text(sums)


def edited(change: Any) -> Any:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return apply


def weight(manifest: Any) -> Any:
    return manifest["tensors"]["model.0.weight"]


HOSTILE = {
    "another format": lambda m: m.update(format="pyparallel checkpoint 2"),
    "a path": lambda m: weight(m)["boxes"][0].__setitem__(0, "../../../../etc/passwd"),
    "an absolute path": lambda m: weight(m)["boxes"][0].__setitem__(0, "/etc/passwd"),
    "past the file's end": lambda m: weight(m)["boxes"][0].__setitem__(1, 10**9),
    "before its begin": lambda m: weight(m)["boxes"][0].__setitem__(1, -8),
    "outside of the tensor": lambda m: weight(m)["boxes"][0].__setitem__(2, [1, 0]),
    "a negative size": lambda m: weight(m)["boxes"][0].__setitem__(3, [-7, -5]),
    "huge": lambda m: weight(m).update(shape=[2**40, 2**40]),
    "boxes twice": lambda m: weight(m)["boxes"].append(weight(m)["boxes"][0]),
    "no dtype": lambda m: weight(m).update(dtype="object"),
    "no number": lambda m: weight(m)["boxes"][0].__setitem__(2, ["0", "0"]),
    "no tensors": lambda m: m.update(tensors=[]),
    "no state": lambda m: m["state"].update(at=3),
    "no plain data": lambda m: m["state"]["at"]["values"][0].update(value={"$eval": "1"}),
    "a tensor that is not there": lambda m: m["state"]["at"]["values"][0].update(
        value={"n": {"$tensor": 7}}
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_forged_manifest_is_refused(what: str, tmp_path: Path, saved: Any) -> None:
    folder = newest(tmp_path)
    forge(folder, edited(HOSTILE[what]))
    with pytest.raises(CheckpointError):
        load(tmp_path, step=3)


def test_a_pickle_is_never_opened(tmp_path: Path, saved: Any) -> None:
    trap = tmp_path / "sprung"
    bomb = pickle.dumps(Bomb(trap))
    for name in (MANIFEST, "rank-00000.safetensors"):
        folder = newest(tmp_path)
        forge(folder, lambda at, name=name: (at / name).write_bytes(bomb))
        with pytest.raises(CheckpointError):
            load(tmp_path, step=3)
    (folder / ".metadata").write_bytes(bomb)  # where torch's own storage looks
    (folder / SUMS).write_bytes(bomb)
    with pytest.raises(CheckpointError):
        load(tmp_path, step=3)
    assert not trap.exists()
    pickle.loads(bomb)
    assert trap.exists(), "the trap does not work"

"""The files' formats: others read them, and nothing in a forged one is executed.

Layers: one process, no groups. The sums of forged files are right.
"""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load as torch_load

from pyparallel.training.checkpoint import CheckpointError, Reader
from pyparallel.training.checkpoint.files import DTYPES, read_header, read_rows, write_tensors
from pyparallel.training.checkpoint.manifest import MANIFEST, SUMS
from tests.training.checkpoints import flip, load, newest, same, trained


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

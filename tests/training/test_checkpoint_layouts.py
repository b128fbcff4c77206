"""Saved at one layout, loaded at another: the same bits, of all that is trained.

Layers: N processes save, other numbers of processes load, and save again. What every rank should
hold is cut by the layers' own state dicts (tests/layers), not by the code under test.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.training import ParallelConfig, ParallelMesh, build_mesh, data_parallel
from pyparallel.training.checkpoint import (
    Checkpointer,
    CheckpointError,
    export_hugging_face,
    import_hugging_face,
)
from pyparallel.training.checkpoint.pieces import local
from tests.launch import Rank, run_ranks
from tests.training import sharded_model

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = 17.0


class Streams:
    """Random numbers that differ by rank: it decides what other ranks than those that saved get."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.resharded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "kind": ("per", "rank")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["kind"] == ("per", "rank")
        self.generator.set_state(state["generator"])

    def load_resharded(self, states: Any, sizes: Any) -> None:
        self.resharded = len(states), sizes


def visit(rank: Rank, directory: Path, layout: dict[str, int], zero: int, first: bool) -> Any:
    """Loads (or makes, the first time), compares, saves."""
    mesh = started(rank, layout)
    stage = sharded_model.stage_of(mesh)
    expected = {what: sharded_model.fill(stage, what) for what in (*MOMENTS, "weights")}
    if not first:
        sharded_model.fill(stage, "something else")
    wrapped = data_parallel(stage, mesh, zero=zero)
    optimizer = wrapped.optimizer(
        lambda groups: torch.optim.AdamW(groups, lr=0.5 if first else 9.0, betas=(0.7, 0.75))
    )
    inner = getattr(optimizer, "optim", optimizer)
    streams = Streams(rank.rank)
    data = {"position": (3, 2**40), "nan": [float("inf")], b"key": None} if first else {}
    held = {id(p): n for n, p in enumerate(wrapped.module.parameters())}
    if first:
        for group in inner.param_groups:
            for p in group["params"]:
                states = {name: expected[name][held[id(p)]].clone() for name in MOMENTS}
                inner.state[p] = {"step": torch.tensor(STEP), **states}
    with Checkpointer(directory, mesh, asynchronous=bool(rank.world_size % 3)) as checkpointer:
        if not first:
            loaded = checkpointer.load(
                model=wrapped.module, optimizer=optimizer, data=data, streams=streams
            )
            assert loaded == 5
        compare(wrapped.module, inner, expected, held)
        assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.5
        assert inner.param_groups[0]["betas"] == (0.7, 0.75)
        assert data == {"position": (3, 2**40), "nan": [float("inf")], b"key": None}
        saved = checkpointer.save(
            5, model=wrapped.module, optimizer=optimizer, data=data, streams=streams
        )
        with torch.no_grad():
            for p in wrapped.module.parameters():
                p.mul_(2)  # what is saved is what there was
        result = saved.result()
    assert result.ok, result.error
    return result.bytes, streams.resharded


def compare(module: Any, optimizer: Any, expected: Any, held: dict[int, int]) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            n, state = held[id(p)], optimizer.state[p]
            assert state["step"].shape == ()
            assert state["step"] == STEP
            for what, tensor in [("weights", p), *((name, state[name]) for name in MOMENTS)]:
                found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                assert torch.equal(found, expected[what][n]), (what, n)
    for name, buffer in module.named_buffers():
        name = name.removeprefix("module.")
        assert torch.equal(buffer, sharded_model.whole("weights", name)), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_layout_reads_any_other(tmp_path: Path) -> None:
    layouts: list[tuple[dict[str, int], int]] = [
        ({"dp": 2, "tp": 2, "pp": 2}, 1),
        ({"dp": 3, "pp": 2}, 3),
        ({"tp": 4}, 0),
        ({"dp": 2, "tp": 3}, 2),
        ({}, 0),
        ({"dp": 2, "sp": 2, "pp": 2}, 3),
    ]
    sizes, worlds = [], []
    for n, (layout, zero) in enumerate(layouts):
        world = torch.Size(layout.values()).numel()
        results = run_ranks(visit, world, tmp_path, layout, zero, n == 0, timeout=300)
        sizes.append(results[0][0])
        worlds.append(world)
        before = worlds[n - 1] if n else 1
        states = {resharded and resharded[0] for _, resharded in results}
        assert states == {before if before > 1 else None}


# --- Hugging Face's files


def exported(rank: Rank, folder: Path, layout: dict[str, int]) -> list[str]:
    """Writes whole files, converted ones, and says what is refused."""
    mesh = started(rank, layout)
    stage = sharded_model.stage_of(mesh)
    sharded_model.fill(stage, "weights")
    export_hugging_face(stage, folder / "one")
    export_hugging_face(stage, folder / "several", dtype=torch.bfloat16, largest_file=1000)
    told = []
    for wrong in (stage, [stage, stage] if rank.rank else nn.Linear(2, 2)):
        with pytest.raises(CheckpointError) as caught:
            export_hugging_face(wrong, folder / ("one" if wrong is stage else "never"))
        told.append(str(caught.value))
    return told


def started(rank: Rank, layout: dict[str, int]) -> ParallelMesh:
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    return build_mesh(ParallelConfig(**layout))


def imported(rank: Rank, folder: Path, layout: dict[str, int]) -> list[str]:
    """Reads them at another layout; says what is refused, and that nothing is changed by it."""
    mesh = started(rank, layout)
    stage = sharded_model.stage_of(mesh)
    expected = sharded_model.fill(stage, "weights")
    tied = {"head.weight": "embed.weight"}
    for name, dtype in (("one", torch.float32), ("several", torch.bfloat16)):
        sharded_model.fill(stage, "something else")
        wrapped = data_parallel(stage, mesh, zero=2) if name == "several" else stage
        import_hugging_face(wrapped, folder / name, aliases=tied)
        for parameter, value in zip(stage.parameters(), expected, strict=True):
            found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            assert torch.equal(found, value.to(dtype).float())
    before = [p.detach().clone() for p in stage.parameters()]
    told = []
    for name in ("more", "less", "other", "cut", "lost", "pickle", "nothing"):
        with pytest.raises(CheckpointError) as caught:
            import_hugging_face(stage, folder / name, aliases=tied)
        told.append(str(caught.value))
    for parameter, value in zip(stage.parameters(), before, strict=True):
        assert torch.equal(local(parameter), local(value))
    return told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hugging_face_files_at_any_layout(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    told = run_ranks(exported, 4, tmp_path, {"tp": 2, "pp": 2}, timeout=300)
    assert all("it exists already" in texts[0] for texts in told)
    assert len({tuple(texts) for texts in told}) == 1, "ranks tell different things"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "several"]
    whole = {name: sharded_model.whole("weights", name) for name in sharded_model.whole_shapes()}
    whole |= {f"{n}.seen": sharded_model.whole("weights", f"{n}.seen") for n in ("first", "second")}
    one = safetensors.load_file(tmp_path / "one" / "model.safetensors")
    assert torch.equal(one.pop("head.weight"), whole["embed.weight"])
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    several = {}
    for name in set(index["weight_map"].values()):
        several |= safetensors.load_file(tmp_path / "several" / name)
    assert set(several) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in several.values())
    assert sorted(one) == sorted(whole)
    for name, tensor in whole.items():
        assert torch.equal(one[name], tensor), name
        half = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(several[name], half), name
    for name, tensors in {
        "more": {**whole, "extra.weight": torch.zeros(2)},
        "less": {k: v for k, v in whole.items() if "k_proj" not in k},
        "other": {**whole, "embed.weight": torch.zeros(42, 12)},
        "cut": whole,
        "lost": whole,
        "pickle": whole,
    }.items():
        (tmp_path / name).mkdir()
        safetensors.save_file(tensors, tmp_path / name / "model.safetensors")
    os.truncate(tmp_path / "cut" / "model.safetensors", 5000)
    (tmp_path / "lost" / "model.safetensors").unlink()
    lost = {"weight_map": {**dict.fromkeys(whole, "../one/model.safetensors")}}
    (tmp_path / "lost" / "model.safetensors.index.json").write_text(json.dumps(lost))
    torch.save(whole, tmp_path / "pickle" / "model.safetensors")
    for layout in ({"tp": 3}, {"dp": 2, "pp": 2}):
        world = torch.Size(layout.values()).numel()
        told = run_ranks(imported, world, tmp_path, layout, timeout=300)
        more, less, other, cut, lost, pickled, nothing = told[0]
        assert len({tuple(texts) for texts in told}) == 1, "ranks tell different things"
        assert "1 tensors that the model has not: ['extra.weight']" in more
        assert "first.attention.k_proj.weight is missing" in less
        assert "embed.weight has shape [42, 12], expected [41, 12]" in other
        assert "lies at" in cut
        assert "names ['../one/model.safetensors']" in lost
        assert "truncated, or no safetensors" in pickled
        assert "has no model.safetensors" in nothing

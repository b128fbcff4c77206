"""The composition: every axis alone and every pair of axes, against one process in float64.

Layers: what is refused, by one process; two ranks; four ranks, all kept for one call each. The
grids over eight ranks, ZeRO, precision and recomputation are in tests/equivalence.
"""

import copy
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from pyparallel.training import (
    HostOffload,
    ParallelConfig,
    ParallelModel,
    RandomStreams,
    build_mesh,
    place_dropouts,
)
from tests.launch import Rank, run_ranks
from tests.training.models import VOCAB, batch, llama, mean_loss

SAMPLES, ROWS = 4, 22  # of each dp rank
LIMIT = 1e-11  # float64: sums of a few thousand terms of size 1, in another order


def steps(rank: Rank, jobs: list[tuple[dict, dict, dict]]) -> None:
    """Two steps of each layout: losses, all parameters and logits are those of one process; a
    state dict of one process is taken back."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    for layout, options, sizes in jobs:
        where = f"{layout} {options} {sizes}"
        mesh = build_mesh(ParallelConfig(**layout))
        single = llama(**sizes)
        first = copy.deepcopy(single.state_dict())
        model = ParallelModel(copy.deepcopy(single), mesh, **options)
        tokens, labels = batch(SAMPLES * mesh.size("dp"), ROWS, seed=5)
        mine = slice(SAMPLES * mesh.coordinates.dp, SAMPLES * (mesh.coordinates.dp + 1))
        streams = RandomStreams(options.get("seed", 0))
        place_dropouts(single, streams)
        everything = range(len(tokens)), range(ROWS)
        plain = torch.optim.SGD(single.parameters(), lr=0.5)
        ours = model.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
        for step in range(2):
            plain.zero_grad()
            with streams.at(step=step, samples=everything[0], positions=everything[1]):
                loss = mean_loss(single, tokens, labels)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5)
            plain.step()
            ours.zero_grad()
            found = model.forward_backward(tokens[mine], labels[mine])
            assert abs(model.clip_grad_norm_(0.5) - float(norm)) < LIMIT, where
            assert model.step(ours), where
            assert abs(found - float(loss)) < LIMIT, where
        state, wanted = model.state_dict(), single.state_dict()
        assert list(state) == list(wanted), where
        for name, tensor in wanted.items():
            assert (state[name] - tensor).abs().max() < LIMIT, (where, name)
        moved = max(float((first[name] - wanted[name]).abs().max()) for name in wanted)
        assert moved > 1000 * LIMIT, "the steps are too small to show a wrong one"
        single.eval()
        logits = model.logits(tokens[:3])
        assert (logits - single(tokens[:3])).abs().max() < LIMIT, where
        loss = mean_loss(single, tokens, labels)
        assert abs(model.evaluate(tokens[mine], labels[mine]) - float(loss)) < LIMIT, where
        model.load_state_dict(first)
        again = model.state_dict()
        assert all(torch.equal(again[name], first[name]) for name in first), where


def names_of_layers(rank: Rank) -> list[str]:
    """Thirty layers on four stages: all are there."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    mesh = build_mesh(ParallelConfig(pp=4))
    model = ParallelModel(llama(num_hidden_layers=30, hidden_size=8), mesh, microbatches=2)
    return [name for name, _ in model.named_parameters()]


def on_meta(rank: Rank) -> None:
    """Built without memory: this rank's part is allocated, ties stay, and a step before it is
    loaded is refused; then it is the model that was built with values."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    for layout, tied in (
        ({"tp": 2}, True),
        ({"pp": 2}, True),
        ({"dp": 2}, True),
        ({"dp": 2, "zero": 3}, False),
    ):
        mesh = build_mesh(ParallelConfig(**layout))
        single = llama(tie_word_embeddings=tied)
        with torch.device("meta"):
            module = llama(tie_word_embeddings=tied)
        model = ParallelModel(module, mesh, microbatches=2)
        allocated = sum(
            p.to_local().numel() if mesh.config.zero else p.numel() for p in model.parameters()
        )
        wanted = sum(p.numel() for p in single.parameters())
        assert allocated < wanted or layout == {"dp": 2}
        samples = 4 * mesh.size("dp")
        tokens, labels = batch(samples, 6)
        mine = slice(4 * mesh.coordinates.dp, 4 * (mesh.coordinates.dp + 1))
        with pytest.raises(ValueError, match=r"no values yet .*: load_state_dict, "):
            model.forward_backward(tokens[mine], labels[mine])
        model.load_state_dict(single.state_dict())
        found = model.forward_backward(tokens[mine], labels[mine])
        assert abs(found - float(mean_loss(single, tokens, labels))) < LIMIT, layout
        if tied and mesh.size("pp") == 1:
            assert module.lm_head.weight is module.model.embed_tokens.weight, layout


class Away(HostOffload):
    """Its hooks, with the CPU in the device's part."""

    def __init__(self) -> None:
        super().__init__("cuda", least_bytes=1)
        self._kind = "cpu"


def on_the_host(rank: Rank) -> None:
    """What a forward keeps goes and comes back, in whole and in split backwards: the same bits."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    mesh = build_mesh(ParallelConfig(pp=2))
    data = batch(4, 6)
    for options in ({"recompute": "full"}, {"schedule": "zb-h1"}):
        found = []
        for offload in (None, Away()):
            model = ParallelModel(llama(), mesh, microbatches=2, offload=offload, **options)
            loss = model.forward_backward(*data)
            found.append([torch.tensor(loss), *(p.grad for p in model.parameters())])
        assert offload.moved > 0
        assert all(map(torch.equal, *found)), options


def loss_scale(rank: Rank) -> None:
    """fp16: a step that overflows on one rank is left out by all, and the scale backs off; an
    optimizer that steps past the scale is stopped."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    mesh = build_mesh(ParallelConfig(pp=2))
    module = llama().float()
    model = ParallelModel(module, mesh, microbatches=2, precision="fp16")
    optimizer = model.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    tokens, labels = batch(4, 6)
    model.forward_backward(tokens, labels)
    with pytest.raises(RuntimeError, match=r"ParallelModel.step\(optimizer\) in place"):
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    if rank.rank == 1:
        next(model.parameters()).grad.view(-1)[0] = float("inf")
    scale = model.scaler.scale_factor
    assert not model.step(optimizer)
    assert model.scaler.scale_factor == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    while True:
        optimizer.zero_grad()
        loss = model.forward_backward(tokens, labels)
        norm = model.clip_grad_norm_(1.0)
        if model.step(optimizer):
            break
    assert 0 < norm < 10
    assert model.evaluate(tokens, labels) < loss
    assert model.run_state.state_dict()["steps"] >= 2


def refusals(rank: Rank) -> None:
    """On all ranks, before anything runs, whichever rank has the fault."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    mesh = build_mesh(ParallelConfig(dp=2))
    model = ParallelModel(llama(), mesh, microbatches=2)
    tokens, labels = batch(4, 6)
    for theirs, message in (
        ((tokens[:3], labels[:3]), "3 samples .* no 2 microbatches .* dp = . x 2 x 2; .* make"),
        ((tokens.int(), labels), "tokens is torch.int32 of shape"),
        ((tokens, labels[:, :5]), r"tokens has shape \[4, 6\] and labels \[4, 5\]"),
        ((tokens[:0], labels[:0]), "it is empty"),
        (("text", labels), "tokens is a str"),
    ):
        given = (tokens, labels) if rank.rank == 0 else theirs
        with pytest.raises(ValueError, match=message if rank.rank else "rank 1 was given"):
            model.forward_backward(*given)
    with pytest.raises(ValueError, match="no label of the step"):
        model.forward_backward(tokens, torch.full_like(labels, -100))
    pipeline = ParallelModel(llama(), build_mesh(ParallelConfig(pp=2)))
    with pytest.raises(ValueError, match=r"ranks 0 and 1 share .* different tokens"):
        pipeline.forward_backward(tokens + rank.rank, labels)
    assert model.forward_backward(tokens, labels) > 0, "it goes on working"


ZERO = [({"dp": 2, "zero": zero}, {"microbatches": 2}, {}) for zero in (1, 2, 3)]
ALONE = [({axis: 2}, {"microbatches": m}, {}) for axis in ("dp", "tp", "sp", "pp") for m in (1, 2)]
TWO = [
    *ALONE,
    *ZERO,
    ({"tp": 2, "tp_sequence_parallel": True}, {}, {}),
    ({"tp": 2}, {}, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ({"pp": 2}, {"microbatches": 4}, {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    (
        {"pp": 2},
        {"schedule": "zb-v", "microbatches": 2, "layout": "E t | t | t | N L"},
        {"tie_word_embeddings": True},
    ),
    (
        {"tp": 2, "tp_sequence_parallel": True},
        {"microbatches": 2, "recompute": "full", "seed": 3},
        {"dropout": 0.5},
    ),
]
FOUR = [
    (
        {a: 2, b: 2, **({"tp_sequence_parallel": True} if tied and "tp" in (a, b) else {})},
        {"microbatches": 2},
        {"tie_word_embeddings": tied, "dropout": 0.3 if tied else 0.0},
    )
    for tied in (False, True)
    for a, b in combinations(("dp", "tp", "sp", "pp"), 2)
]
FOUR += [
    ({"pp": 4}, {"microbatches": 2}, {"num_hidden_layers": 2}),  # stages without a layer
    ({"dp": 2, "tp": 2, "zero": 3}, {}, {}),
    ({"sp": 2, "pp": 2, "zero": 2}, {"microbatches": 2}, {"tie_word_embeddings": True}),
    ({"dp": 2, "sp": 2, "zero": 3, "replicas": 2}, {}, {"tie_word_embeddings": True}),
]


@pytest.mark.timeout(600)  # idle: 8 s
def test_two_ranks():
    run_ranks(steps, 2, TWO, timeout=400)
    run_ranks(refusals, 2)
    run_ranks(loss_scale, 2)
    run_ranks(on_meta, 2)
    run_ranks(on_the_host, 2)


@pytest.mark.timeout(600)  # idle: 10 s
def test_four_ranks():
    run_ranks(steps, 4, FOUR, timeout=400)
    found = run_ranks(names_of_layers, 4)
    wanted = [name for name, _ in llama(num_hidden_layers=30, hidden_size=8).named_parameters()]
    assert [name for names in found for name in names] == wanted


class Plain(torch.nn.Module):
    """No structure that anything knows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


def test_refused_by_one():
    """What no mesh is needed for."""

    class Mesh:
        def __init__(self, **sizes: int) -> None:
            self.config = ParallelConfig(**sizes)
            self.device_type = "cpu"
            self.coordinates = self.config.coordinates(0)

        def size(self, *axes: str) -> int:
            return self.config.size(*axes)

        def group(self, *axes: str) -> None:
            return None

    for sizes, options, message in (
        ({}, {"schedule": "dualpipe"}, "two copies of each stage; expected one of gpipe, 1f1b"),
        ({}, {"schedule": "2f2b"}, "'2f2b' is not known"),
        ({}, {"microbatches": 0}, "microbatches is 0"),
        ({}, {"plan": {"**.up": "colwise"}}, "tp is 1"),
        ({}, {"counts": [1]}, "pp is 1"),
        ({"sp": 2}, {}, "Plain.forward takes no position_ids"),
        ({"tp": 2}, {}, "Plain has no config .* pass plan"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelModel(Plain(), Mesh(**sizes), **options)

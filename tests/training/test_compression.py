"""Gradient compression: codes, means over ranks, and training with them.

Layers: one process, codes against their bounds; two processes over TCP, whose sockets say what was
sent; pipeline stages and sharded gradients; refusals. Controls: without error feedback training
ends worse, and a gradient that is not finite is seen by all.
"""

import copy
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.pipeline import PipelineExecutor
from pyparallel.schedule import generate, with_transfers
from pyparallel.training import (
    Compression,
    ParallelConfig,
    ParallelModel,
    build_mesh,
    data_parallel,
)
from pyparallel.training.compressed_sums import CompressedSums, Part
from pyparallel.training.compression import codec_of, compression_of
from tests.launch import run_ranks
from tests.training.models import batch, llama
from tests.training.ranks import several

KINDS = ("fp16", "bf16", "int8", "fp8", "topk", "powersgd")


@pytest.mark.parametrize("block", [1, 6, 256])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_blocks_are_within_half_a_step(kind, block):
    """int8: half a step of 1/127 of the block's largest. fp8 (e4m3): half of 2^-3 of the element,
    and half of the smallest step, 2^-9 of 448, of the block's largest. Scales round: 2^-22 more."""
    codec = codec_of(compression_of(Compression(kind, block=block)))
    columns = codec.padded(1000)
    torch.manual_seed(block)
    rows = torch.randn(3, columns) * torch.logspace(-8, 8, columns)
    rows[1, : 4 * block] = 0.0
    packed = codec.encode(rows)
    assert packed.shape == (3, codec.row_bytes(columns))
    assert packed.dtype == torch.uint8
    found = codec.decode(packed)
    largest = rows.view(3, -1, block).abs().amax(-1, keepdim=True).expand(-1, -1, block)
    largest = largest.reshape(3, columns)
    steps = {"int8": largest / 127, "fp8": rows.abs() / 8 + largest / 448 * 2**-9}
    bound = steps[kind] / 2
    error = (found - rows).abs()
    assert (error <= bound + largest * 2**-22).all()
    if block > 1:
        assert (error > bound / 2).any(), "the bound bites"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_is_not_finite_spoils_its_block_only(kind):
    codec = codec_of(compression_of(kind))
    rows = torch.randn(1, 1024)
    rows[0, 300], rows[0, 700] = torch.inf, torch.nan
    found = codec.decode(codec.encode(rows)).view(-1, 256)
    assert [bool(b.isnan().all()) for b in found] == [False, True, True, False]
    assert found[0].isfinite().all()
    assert found[3].isfinite().all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": "zip"}, "not one of fp16, bf16, int8, fp8, topk, powersgd"),
        ({"kind": "int8", "ratio": 0.1}, "ratio is of topk, not of int8"),
        ({"kind": "fp16", "block": 8}, "block is of int8 and fp8, not of fp16"),
        ({"kind": "topk", "ratio": 0.0}, "more than 0 and at most 1"),
        ({"kind": "powersgd", "rank": 0}, "1 or more"),
        ({"kind": "powersgd", "warm_up": -1}, "0 or more"),
        ({"kind": "fp8", "error_feedback": None}, "True or False"),
    ],
)
def test_options_without_effect_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Compression(**options)
    assert compression_of("int8").block == 256
    assert compression_of("powersgd") == Compression("powersgd", rank=4, warm_up=10)


# --- two ranks over TCP

STEPS, ROWS = 40, 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh())
        self.head = nn.Linear(128, 96)

    def forward(self, x):
        return self.head(self.blocks(x))


def samples(rank, size):
    torch.manual_seed(7)
    teacher = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 96))
    x = torch.randn(ROWS * size, 64)
    with torch.no_grad():
        y = teacher(x)
    return x[rank::size], y[rank::size]


def received():
    """Bytes that this process's TCP sockets have taken in, by the kernel's own count."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == 1:
                    told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", told, 128)[0]  # tcpi_bytes_received
        except OSError:  # closed since it was listed
            continue
    return total


def train(mesh, kind, steps=STEPS, **options):
    """(loss at the end over all samples, bytes by the sockets, traffic, weights)"""
    torch.manual_seed(1)
    compression = kind and Compression(kind, **options)
    data = data_parallel(Net(), mesh, compression=compression)
    optimizer = data.optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    x, y = samples(dist.get_rank(), dist.get_world_size())
    before = received()
    for step in range(steps):
        if kind == "powersgd" and step == options["warm_up"]:
            before = received()
            data.traffic.clear()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(data.module(x), y)
        loss.backward()
        optimizer.step()
    moved = received() - before
    total = loss.detach().clone()
    dist.all_reduce(total)
    weights = nn.utils.parameters_to_vector(data.original.parameters()).detach()
    return float(total) / dist.get_world_size(), moved, data.traffic, weights


def compared(rank):
    """Over gloo and TCP: what the sockets say, what is counted, and where training ends."""
    dist.init_process_group("gloo", store=rank.store(), rank=rank.rank, world_size=2)
    mesh = build_mesh(ParallelConfig(dp=2))
    base, whole, none, _ = train(mesh, None)
    assert none is None
    found = {}
    for kind in KINDS:
        options = {"topk": {"ratio": 0.02}, "powersgd": {"rank": 4, "warm_up": 4}}.get(kind, {})
        loss, moved, traffic, weights = train(mesh, kind, **options)
        whole_steps = whole * (STEPS - options.get("warm_up", 0)) / STEPS
        found[kind] = (loss / base, moved / whole_steps, traffic.ratio, traffic.sent / moved)
        other = weights.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, weights), f"{kind}: replicas differ"
    plain, *_ = train(mesh, "topk", ratio=0.02, error_feedback=False)
    first, *_ = train(mesh, None, steps=1)
    return base / first, found, plain / base


def test_bytes_on_the_wire_and_losses():
    """By the sockets of a training over TCP, its last bytes, descriptions and headers included."""
    for learned, found, forgotten in run_ranks(compared, 2):
        check_bytes_and_losses(found)
        assert learned < 0.5, "the training that is compared learns something"
        assert forgotten > 1.05 * found["topk"][0], "error feedback has an effect"


def check_bytes_and_losses(found):
    for kind, most, loss in (
        ("fp16", 0.51, 1.01),
        ("bf16", 0.51, 1.01),
        ("int8", 0.27, 1.01),
        ("fp8", 0.27, 1.01),
        ("topk", 0.05, 1.5),
        ("powersgd", 0.1, 1.2),
    ):
        change, moved, counted, agreement = found[kind]
        assert moved <= most, (kind, moved)
        assert counted == pytest.approx(moved, rel=0.1), (kind, moved, counted)
        assert agreement == pytest.approx(1.0, rel=0.1), (kind, agreement)
        assert change <= loss, (kind, change)
        assert change >= 1 / loss or kind in ("topk", "powersgd")


# --- composed: four ranks, backend "pyparallel"


def gradients_of(module):
    return [getattr(p.grad, "_local_tensor", p.grad) for p in module.parameters()]


def staged(rank, kind):
    """Stages of a pipeline, two replicas each: once per step, alike on both, near the mean."""
    mesh = build_mesh(ParallelConfig(dp=2, pp=2))
    torch.manual_seed(2)
    net = Net()
    parts = [net.blocks, net.head]
    plan = with_transfers(generate("1f1b", 2, 3))
    x, y = samples(mesh.coordinates.dp, 2)
    at = mesh.coordinates.pp
    inputs, targets = list(x[:24].split(8)), list(y[:24].split(8))
    found = []
    for compression in (None, Compression(kind, **({"warm_up": 0} if kind == "powersgd" else {}))):
        data = data_parallel(parts[at], mesh, compression=compression)
        executor = PipelineExecutor(
            {at: data.module}, nn.functional.mse_loss, group=mesh.group("pp")
        )
        parts[at].zero_grad()
        executor.step(plan, inputs if at == 0 else None, targets if at == 1 else None)
        found.append(torch.cat([p.grad.flatten() for p in parts[at].parameters()]).clone())
    other = found[1].clone()
    dist.broadcast(other, group_src=0, group=mesh.data_group)
    assert torch.equal(other, found[1])
    bound = {"bf16": 2**-8, "int8": 0.02, "fp8": 0.06, "powersgd": 1.0}[kind]
    change = (found[1] - found[0]).norm() / found[0].norm()
    assert 0 < change < bound, (kind, float(change))
    return data.traffic.ratio


def scattered(rank, zero, kind):
    """fully_shard's reduce-scatter: training ends where it does without compression, in 1 %."""
    mesh = build_mesh(ParallelConfig(dp=2, sp=2))
    losses, weights = [], []
    for compression in (None, kind):
        torch.manual_seed(1)
        data = data_parallel(Net(), mesh, zero=zero, compression=compression)
        optimizer = data.optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        x, y = samples(rank.rank, 4)
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(data.module(x), y)
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(float(loss))
        weights.append(data.original.head.weight.to_local().detach())
    assert not torch.equal(*weights)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    return data.traffic.ratio


def overflow(rank):
    """A gradient that is infinite on one rank is seen by all of them, and by no later step."""
    mesh = build_mesh(ParallelConfig(dp=4))
    for kind in KINDS:
        torch.manual_seed(3)
        options = {"warm_up": 0} if kind == "powersgd" else {}
        data = data_parallel(Net(), mesh, compression=Compression(kind, **options))
        x, y = samples(rank.rank, 4)
        for step in range(4):
            data.module.zero_grad()
            factor = torch.inf if step == 1 and rank.rank == 2 else 1.0
            (nn.functional.mse_loss(data.module(x), y) * factor).backward()
            finite = all(bool(g.isfinite().all()) for g in gradients_of(data.original))
            assert finite == (step != 1), (kind, step)


def whole_model(rank, axes):
    """A Llama over two axes: the losses of a training whose gradients travel in 8 bits are those of
    one whose do not, within 1 %."""
    mesh = build_mesh(ParallelConfig(**axes))
    tokens, labels = batch(4, 12)
    mine = slice(None) if mesh.size("dp") == 1 else slice(mesh.coordinates.dp, None, 2)
    losses = {}
    for kind in (None, "int8"):
        model = ParallelModel(llama().float(), mesh, microbatches=2, compression=kind)
        optimizer = model.optimizer(lambda p: torch.optim.SGD(p, lr=0.5))
        losses[kind] = []
        for _ in range(6):
            optimizer.zero_grad()
            losses[kind].append(model.forward_backward(tokens[mine], labels[mine]))
            optimizer.step()
    assert losses["int8"] == pytest.approx(losses[None], rel=0.01)
    assert losses["int8"] != losses[None]
    assert losses[None][-1] < 0.9 * losses[None][0]
    (data,) = model.replicas.values()
    assert data.traffic.ratio <= 0.27


def fed_back(rank):
    """The same gradients in every step: what arrives in all steps together is off by what the last
    one lost, so the mean over steps comes ever nearer. Without feedback it stays where it is."""
    steps, shapes = 30, [torch.Size((40, 30)), torch.Size((7,))]
    torch.manual_seed(50 + rank.rank)
    own = torch.randn(sum(shape.numel() for shape in shapes))
    mean = own.clone()
    dist.all_reduce(mean)
    mean /= 4
    for kind in KINDS:
        off = {}
        for feedback in (True, False):
            options = {"topk": {"ratio": 0.2}, "powersgd": {"warm_up": 0}}.get(kind, {})
            chosen = compression_of(Compression(kind, error_feedback=feedback, **options))
            sums, part = CompressedSums(chosen, dist.group.WORLD), Part(torch.zeros_like(own))
            total = torch.zeros_like(own)
            for _ in range(steps):
                total += sums.mean(own, part, shapes)
            off[feedback] = float((total / steps - mean).norm() / mean.norm())
        # Codes lose twice in a step, on the way there and back; the others begin with most.
        part_left = 0.5 if kind in ("topk", "powersgd") else 4 / steps
        assert 0 < off[True] < part_left * off[False], (kind, off)


def resumed(rank, kind, zero):
    """A training that goes on in new objects from its states ends as if nothing had happened, in
    one bucket of one parameter bit for bit. Without what was not fed back it does not."""
    mesh = build_mesh(ParallelConfig(dp=4))
    x, y = samples(rank.rank, 4)

    def begin(weights):
        net = nn.Linear(64, 96, bias=False)
        with torch.no_grad():
            net.weight.copy_(weights)
        options = {"powersgd": {"warm_up": 2}, "topk": {"ratio": 0.05}}.get(kind, {})
        return net, data_parallel(net, mesh, zero=zero, compression=Compression(kind, **options))

    def steps(net, data, count):
        for _ in range(count):
            net.zero_grad()
            nn.functional.mse_loss(data.module(x), y).backward()
            with torch.no_grad():
                net.weight -= 20.0 * net.weight.grad
        weight = net.weight.detach()
        return (weight.full_tensor() if zero else weight).clone()

    torch.manual_seed(4)
    first = torch.randn(96, 64) / 8
    straight = steps(*begin(first), 7)
    net, data = begin(first)
    half = steps(net, data, 4)
    state = copy.deepcopy(data.feedback.state_dict())
    net, data = begin(half)
    data.feedback.load_state_dict(state)
    assert torch.equal(steps(net, data, 3), straight)
    assert not torch.equal(steps(*begin(half), 3), straight)
    other = {"steps": 0, "residuals": {"x": half}, "factors": {}, "units": {"x": half}}
    with pytest.raises(ValueError, match="not here"):
        data.feedback.load_state_dict(other)
    with pytest.warns(UserWarning, match="what compression had not fed back yet is left out"):
        data.feedback.load_resharded([], {"dp": 2})


def refused(rank):
    mesh = build_mesh(ParallelConfig(dp=4, zero=3, replicas=2))
    for options, text in (
        ({"zero": 3, "compression": "topk"}, "zero=3 scatters gradients, and compression topk"),
        ({"zero": 3, "compression": "int8"}, "replicas=1 can"),
        ({"zero": 0, "compression": 8}, "a Compression, or one of fp16"),
    ):
        with pytest.raises(ValueError, match=text):
            data_parallel(Net(), mesh, **options)


def test_composed_with_pipelines_shards_and_overflow():
    jobs = [(staged, kind) for kind in ("bf16", "int8", "fp8", "powersgd")]
    jobs += [(scattered, 2, "int8"), (scattered, 3, "bf16"), (overflow,), (refused,), (fed_back,)]
    jobs += [(resumed, kind, 0) for kind in ("int8", "topk", "powersgd")] + [(resumed, "fp8", 3)]
    jobs += [(whole_model, {"dp": 2, other: 2}) for other in ("tp", "pp")]
    jobs += [(whole_model, {"sp": 2, "tp": 2})]
    for found in run_ranks(several, 4, *jobs):
        assert found[1] <= 0.27
        assert found[4] <= 0.27
        assert found[5] <= 0.51

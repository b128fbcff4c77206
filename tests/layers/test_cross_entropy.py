"""Vocabulary-parallel cross entropy against torch's on whole logits.

Layers of proof: N processes on a CPU, world sizes 1 to 4, vocabularies that do not divide, that are
smaller than the group, padded ones. Float64 to 1e-12. In fp32, fp16 and bf16 element by element:
|ours - ref| <= |stock - ref| + 8 eps32 (max|x| + log V) size, stock being torch's loss of the
logits in fp32 and its gradient rounded once; exp and log pass on an error of at most a few
roundings of numbers no larger than max|x| + log V, `size` is the sum of the terms' magnitudes.
The loss is the same bits on all ranks. All of it runs in CI.
"""

import math
import re

import pytest
import torch
from torch.nn import functional

from tests.launch import run_ranks
from tests.ops.reference import assert_close64, assert_within

WORLDS = [1, 2, 3, 4]
EPS32 = torch.finfo(torch.float32).eps
ROWS = 9
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# vocabulary, dtype, multiple_of, options
CASES = [
    (53, F64, 1, {}),
    (53, F64, 1, {"label_smoothing": 0.2, "reduction": "none"}),
    (53, F64, 8, {"z_loss": 0.05, "reduction": "sum"}),
    (53, F64, 64, {"z_loss": 0.05, "label_smoothing": 1.0, "reduction": "none"}),
    (3, F64, 1, {"label_smoothing": 0.1}),
    (53, F64, 1, {"ignore_index": 7, "z_loss": 1e-3}),
    (53, F32, 1, {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "none"}),
    (53, BF16, 1, {"label_smoothing": 0.1, "z_loss": 1e-2}),
    (1000, BF16, 64, {"reduction": "none"}),
    (53, F16, 1, {}),
    (50257, F32, 64, {}),
]


def draw_case(i):
    vocab, dtype, _, options = CASES[i]
    generator = torch.Generator().manual_seed(i)
    logits = (torch.randn(ROWS, vocab, generator=generator, dtype=F64) * 5).to(dtype)
    target = torch.randint(vocab, (ROWS,), generator=generator)
    target[2] = options.get("ignore_index", -100)
    wide = F64 if dtype is F64 else F32
    upstream = torch.randn(ROWS, generator=generator, dtype=F64).to(wide)
    return logits, target, upstream if options.get("reduction") == "none" else upstream[0]


def stock_loss(logits, target, reduction="mean", z_loss=0.0, **options):
    loss = functional.cross_entropy(logits, target, reduction="none", **options)
    counted = target != options.get("ignore_index", -100)
    loss = loss + z_loss * logits.logsumexp(-1).square() * counted
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / counted.sum()}[reduction]


def stock(i, dtype):
    """Loss and gradient by torch's own function, in dtype."""
    logits, target, upstream = draw_case(i)
    whole = logits.to(dtype).requires_grad_()
    loss = stock_loss(whole, target, **CASES[i][3])
    loss.backward(upstream.to(dtype))
    return loss.detach(), whole.grad


def run_cases(rank):
    from pyparallel.comm import Communicator
    from pyparallel.layers import Partition, VocabParallelCrossEntropy, cross_entropy

    sent = []
    plain = cross_entropy.ops.all_gather

    def counting(x, *args, **options):
        sent.append(x.numel())
        return plain(x, *args, **options)

    found = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        for i, (vocab, dtype, multiple_of, options) in enumerate(CASES):
            partition = Partition.even(vocab, rank.world_size, multiple_of=multiple_of)
            classes = partition.contiguous(rank.rank)
            logits, target, upstream = draw_case(i)
            local = partition.local_size(rank.rank)
            # Padded classes hold values that must not count; every other column: not contiguous.
            mine = torch.full((3, ROWS // 3, 2 * local), 77.0, dtype=dtype)[..., ::2]
            mine[..., : len(classes)] = logits.view(3, -1, vocab)[..., classes.start : classes.stop]
            mine.requires_grad_()
            cross_entropy.BLOCK = 1 << 20 if i % 2 else 2 * local  # two rows at a time
            whole = vocab if multiple_of == 1 else partition
            loss_of = VocabParallelCrossEntropy(whole, group, **options)
            cross_entropy.ops.all_gather = counting
            try:
                loss = loss_of(mine, target.view(3, -1))
            finally:
                cross_entropy.ops.all_gather = plain
            loss.backward(upstream.view(loss.shape))
            assert mine.grad[..., len(classes) :].count_nonzero() == 0
            found.append(
                (loss.detach().flatten(), mine.grad[..., : len(classes)].reshape(ROWS, -1))
            )
    assert sent == [4 * ROWS] * len(CASES)  # and no logits
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_loss_and_gradient_equal_torchs(world):
    ranks = run_ranks(run_cases, world)
    for i, (vocab, dtype, _, options) in enumerate(CASES):
        loss = ranks[0][i][0]
        assert all(torch.equal(loss, found[i][0]) for found in ranks)
        grad = torch.cat([found[i][1] for found in ranks], -1)
        assert grad.dtype is dtype
        ref, ref_grad = stock(i, F64)
        ref = ref.flatten()
        if dtype is F64:
            assert_close64(loss, ref, f"loss {i}")
            assert_close64(grad, ref_grad, f"gradient {i}")
            continue
        assert loss.dtype is F32
        theirs, their_grad = stock(i, F32)
        logits, target, upstream = draw_case(i)
        x = logits.double()
        unit = 8 * EPS32 * (x.abs().max() + math.log(vocab))
        z, e = options.get("z_loss", 0.0), options.get("label_smoothing", 0.0)
        slope = 1 + 2 * z * x.logsumexp(-1).abs().max()
        assert_within(
            loss, ref, (theirs.double().flatten() - ref).abs() + unit * slope, f"loss {i}"
        )
        weight = upstream.double().abs().reshape(-1, 1)
        weight = weight if len(weight) > 1 else weight / (target != -100).sum()
        label = functional.one_hot(target.clamp_min(0), vocab)
        size = weight * (x.softmax(-1) * slope + (1 - e) * label + e / vocab)
        limit = (their_grad.to(dtype).double() - ref_grad).abs() + unit * size
        assert_within(grad, ref_grad, limit, f"gradient {i}")
        wrong = stock_loss(x, target, **{**options, "label_smoothing": 0.11, "z_loss": 0.0})
        assert ((wrong.flatten() - ref).abs() > unit * slope).any()  # the bound bites


def edges(rank):
    """What a single fp32 softmax survives: huge logits, masked classes, no row that counts."""
    from pyparallel.comm import Communicator
    from pyparallel.layers import vocab_parallel_cross_entropy

    me, world = rank.rank, rank.world_size
    with Communicator.from_file(rank.rendezvous, me, world) as group:

        def ours(logits, target, **options):
            mine = logits.tensor_split(world, -1)[me].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(mine, target, logits.shape[-1], group, **options)
            loss.backward()
            return loss.detach(), mine.grad

        generator = torch.Generator().manual_seed(5)
        x = torch.randn(4, 12, generator=generator)
        target = torch.tensor([0, 3, 1, 11])
        x[0] = x[0] * 1e30  # exp of it overflows
        x[1, 6:] = -torch.inf  # classes of whole ranks masked
        x[2] -= 1e4
        for options in ({}, {"z_loss": 1e-9}):
            loss, grad = ours(x[1:], target[1:], **options)
            whole = x[1:].double().requires_grad_()
            ref = stock_loss(whole, target[1:], **options)
            ref.backward()
            assert abs(loss - ref) <= 8 * EPS32 * 1e4
            error = grad - whole.grad.tensor_split(world, -1)[me]
            assert error.abs().max() <= 8 * EPS32 * 1e4
        loss, grad = ours(x[:1], target[:1])
        whole = x[:1].double().requires_grad_()
        ref = stock_loss(whole, target[:1])
        ref.backward()
        assert abs(loss - ref) <= 8 * EPS32 * ref.abs()
        assert torch.equal(grad.double(), whole.grad.tensor_split(world, -1)[me])
        nothing = torch.full((4,), -100)
        loss, grad = ours(x, nothing)
        assert loss.isnan()  # as torch: a mean of no row
        loss, grad = ours(x[1:], nothing[1:], reduction="sum")
        assert loss == 0
        assert not grad.any()
        loss, _ = ours(x[:0], target[:0], reduction="sum")
        assert loss == 0
        with torch.no_grad():
            value = vocab_parallel_cross_entropy(
                x[1:].tensor_split(world, -1)[me], target[1:], 12, group, reduction="none"
            )
        assert value.shape == (3,)
        assert not value.requires_grad
    return True


@pytest.mark.parametrize("world", [1, 3])
def test_edges(world):
    run_ranks(edges, world)


WRONG = [
    ({"logits": (4, 5)}, r"logits has shape \[4, 5\]; expected \[..., {local}\]"),
    ({"target": torch.zeros(4)}, "target has dtype torch.float32; expected torch.int64"),
    ({"target": torch.zeros(3, dtype=torch.int64)}, r"target has shape \[3\]; expected \[4\]"),
    ({"target": torch.tensor([0, 1, 12, 2])}, "target holds class 12; expected 0 to 11"),
    ({"target": torch.tensor([0, -1, 0, 2])}, "target holds class -1"),
    ({"vocab": 0}, "vocab is 0; expected a size"),
    ({"label_smoothing": 1.5}, "label_smoothing is 1.5; expected 0 to 1"),
    ({"z_loss": -1.0}, "z_loss is -1.0"),
    ({"reduction": "average"}, "reduction is 'average'; expected one of"),
]


def wrong(rank):
    """Rank 0 alone makes the mistake; every rank must raise, and the group go on."""
    from pyparallel.comm import Communicator
    from pyparallel.layers import vocab_parallel_cross_entropy

    texts = []
    with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as group:
        group.timeout = 20
        local = 12 // rank.world_size
        good = torch.randn(4, local), torch.tensor([0, 1, 11, -100])
        for change, _ in WRONG:
            given = {"logits": (4, local), "target": good[1], "vocab": 12}
            given |= change if rank.rank == 0 else {}
            logits = torch.randn(given.pop("logits"))
            with pytest.raises(ValueError, match="vocab_parallel_cross_entropy") as caught:
                vocab_parallel_cross_entropy(logits, given.pop("target"), group=group, **given)
            texts.append(str(caught.value))
        assert vocab_parallel_cross_entropy(*good, 12, group) > 0
        logits = good[0].requires_grad_()
        loss = vocab_parallel_cross_entropy(logits, good[1], 12, group)
        (first,) = torch.autograd.grad(loss, logits, create_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            torch.autograd.grad(first.square().sum(), logits)  # it has none, and says so
    return texts


@pytest.mark.parametrize("world", [1, 2])
def test_a_mistake_of_one_rank_raises_on_all(world):
    ranks = run_ranks(wrong, world)
    for i, (_, says) in enumerate(WRONG):
        for texts in ranks:
            assert re.search(says.format(local=12 // world), texts[i]), texts[i]

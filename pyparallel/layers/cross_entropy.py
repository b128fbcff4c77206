"""Cross entropy of logits whose vocabulary is sharded: every rank gets the loss, none the logits.

    logits   rank 0 [rows, V_0]   rank 1 [rows, V_1]  ...       target [rows], alike on all ranks
    pass 1      m_0 s_0 x_0 u_0      m_1 s_1 x_1 u_1            one read of the local logits
    exchange    all_gather of these four numbers per row: 16 bytes x ranks, whatever V is
    loss        from all ranks' numbers, in rank order: the same bits everywhere
    pass 2      d logits_0           d logits_1                 one read, one write; no exchange

Why two passes: a softmax needs the sum over the whole vocabulary before its first element can be
given, and other ranks hold most of that sum. So pass 1 reads for the sum, pass 2 for the elements.
A third, over maxima before the sums, is not needed: each rank sums relative to its own maximum, and
the exchange rescales the sums. Pass 2 runs in the backward and recomputes exp from the logits, for
what it would store instead is as large as they are; nothing of that size lives between the passes.

Per row with logits x over V classes, target t, smoothing e, z-loss weight z:

    m_r = max x,  s_r = sum exp(x - m_r),  x_r = x[t] if rank r holds t else 0,  u_r = sum x
    m = max_r m_r,   lse = m + log sum_r s_r exp(m_r - m)
    loss   = lse - (1 - e) x[t] - e/V sum_r u_r + z lse^2          (e: torch's label_smoothing)
    dx[j]  = exp(x[j] - lse) (1 + 2 z lse) - (1 - e) [j = t] - e/V

Rows whose target is ignore_index have loss 0 and gradient 0, and "mean" divides by the other rows.
z-loss: PaLM (arXiv 2204.02311, section 5), there with z = 1e-4. 16-bit logits are computed on in
fp32, a block of rows at a time, and their gradient is rounded once.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pyparallel import ops
from pyparallel.errors import InvalidArgument
from pyparallel.layers.partition import Partition
from pyparallel.layers.place import Place
from pyparallel.ops.library import rows_of

__all__ = ["VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"]

BLOCK = 1 << 20  # logits of a block of rows: 4 MB in fp32, which a core's caches about hold
REDUCTIONS = ("none", "mean", "sum")


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    vocab: "int | Partition",
    group: Any,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy as torch's, over logits of which each rank holds the shard of its classes.

    logits: [..., V_local], this rank's shard; float64, float32, float16 or bfloat16, any strides.
    target: [...] of int64, alike on all ranks: class indices of the whole vocabulary.
    vocab: the whole vocabulary's size, or its `Partition` if it is not the even one (a layer's
    `partition`). Padded classes take no part: their probability and their gradient are zero.
    Gives the loss in fp32 (float64 for float64): [...] for "none", else []. "mean" of no row at all
    is NaN, as in torch. All ranks of `group` must call, with alike options; all get the same bits.
    Raises ValueError on all ranks if shapes, dtypes, options or targets cannot be. In a compiled
    graph use the module below, which has looked its group up before.
    """
    place = group if isinstance(group, Place) else Place(group)
    try:
        partition = vocab if isinstance(vocab, Partition) else _even(vocab, place.size)
        _check(logits, target, partition, place.rank, place.size)
        _check_options(label_smoothing, z_loss, reduction)
        if not torch.compiler.is_compiling():
            _check_targets(target, partition.size, ignore_index)
    except Exception as error:
        raise place.refused("vocab_parallel_cross_entropy", error) from None
    labels = target.reshape(-1)
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows_of(logits),
        labels,
        partition.size,
        partition.contiguous(place.rank),
        place.name,
        place.size,
        ignore_index,
        label_smoothing,
        z_loss,
    )
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (labels != ignore_index).sum()


class VocabParallelCrossEntropy(nn.Module):
    """`vocab_parallel_cross_entropy` with its options, for logits as a column-parallel head gives.

    forward(logits [..., V_local], target [...]): the loss; errors and callers as there.
    """

    def __init__(
        self,
        vocab: "int | Partition",
        group: Any,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        _check_options(label_smoothing, z_loss, reduction)
        self.place = Place(group)
        self.partition = vocab if isinstance(vocab, Partition) else _even(vocab, self.place.size)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.reduction = reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits,
            target,
            self.partition,
            self.place,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
        )


class _CrossEntropy(torch.autograd.Function):
    """Losses of rows [rows] from logits [rows, V_local] and labels [rows]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        vocab: int,
        classes: range,
        group: str,
        ranks: int,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        wide = _wide(logits.dtype)
        local = labels - classes.start
        inside = (local >= 0) & (local < len(classes))
        mine = torch.zeros((4, len(labels)), dtype=wide, device=logits.device)
        mine[0] = -torch.inf
        if len(classes):
            for rows in _blocks(logits):
                x = logits[rows, : len(classes)].to(wide)
                top = x.amax(1)
                mine[0, rows] = top
                # A row of -inf alone (masked classes) has no maximum to subtract.
                top = torch.where(top == -torch.inf, 0.0, top)
                mine[1, rows] = (x - top[:, None]).exp_().sum(1)
                index = local[rows].clamp(0, len(classes) - 1)
                at_label = x.gather(1, index[:, None]).squeeze(1)
                mine[2, rows] = torch.where(inside[rows], at_label, 0.0)
                if smoothing:  # else -inf * 0 of a masked class would make it NaN
                    mine[3, rows] = x.sum(1)
        top, total, at_label, sums = (
            ops.all_gather(mine, group, dim=0).view(ranks, 4, len(labels)).unbind(1)
        )
        highest = top.amax(0)
        lse = highest + (total * (top - highest).exp()).sum(0).log()
        losses = lse - (1 - smoothing) * at_label.sum(0)
        if smoothing:
            losses = losses - smoothing / vocab * sums.sum(0)
        if z_loss:
            losses = losses + z_loss * lse.square()
        ctx.save_for_backward(logits, local, inside, lse, labels == ignore_index)
        ctx.classes, ctx.vocab, ctx.smoothing, ctx.z_loss = classes, vocab, smoothing, z_loss
        return losses.masked_fill(labels == ignore_index, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, inside, lse, ignored = ctx.saved_tensors
        n = len(ctx.classes)
        dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
        dx[:, n:] = 0.0
        on_exp = grad * (1 + 2 * ctx.z_loss * lse)
        on_label = torch.where(inside, grad * (1 - ctx.smoothing), 0.0)
        on_all = grad * (ctx.smoothing / ctx.vocab)
        if n:
            for rows in _blocks(logits):
                d = (logits[rows, :n].to(lse.dtype) - lse[rows, None]).exp_()
                d.mul_(on_exp[rows, None])
                if ctx.smoothing:
                    d.sub_(on_all[rows, None])
                index = local[rows].clamp(0, n - 1)
                d.scatter_add_(1, index[:, None], -on_label[rows, None])
                dx[rows, :n] = d.masked_fill_(ignored[rows, None], 0.0)
        return dx, None, None, None, None, None, None, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK // max(1, logits.shape[1]))
    return (slice(start, start + rows) for start in range(0, logits.shape[0], rows))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _even(vocab: int, ranks: int) -> Partition:
    if isinstance(vocab, bool) or not isinstance(vocab, int) or vocab < 1:
        raise InvalidArgument(f"vocab is {vocab!r}; expected a size of 1 or more, or a Partition")
    return Partition.even(vocab, ranks)


def _check(logits: Tensor, target: Tensor, partition: Partition, rank: int, ranks: int) -> None:
    misfits = []
    if partition.world_size != ranks:
        misfits.append(f"vocab is split over {partition.world_size} ranks, the group has {ranks}")
    elif logits.dim() < 1 or logits.shape[-1] != partition.local_size(rank):
        misfits.append(
            f"logits has shape {list(logits.shape)}; expected [..., {partition.local_size(rank)}], "
            f"rank {rank}'s classes of {partition.size} over {ranks} ranks"
        )
    if not logits.is_floating_point():
        misfits.append(f"logits has dtype {logits.dtype}; expected a floating-point one")
    if target.dtype is not torch.int64:
        misfits.append(f"target has dtype {target.dtype}; expected torch.int64 (class indices)")
    if target.shape != logits.shape[:-1]:
        misfits.append(
            f"target has shape {list(target.shape)}; expected {list(logits.shape[:-1])}, one class "
            f"per row of logits (shape {list(logits.shape)})"
        )
    if target.device != logits.device:
        misfits.append(f"target is on {target.device}, logits on {logits.device}")
    if misfits:
        raise InvalidArgument("; ".join(misfits))


def _check_options(label_smoothing: float, z_loss: float, reduction: str) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise InvalidArgument(f"label_smoothing is {label_smoothing}; expected 0 to 1")
    if not z_loss >= 0.0:
        raise InvalidArgument(f"z_loss is {z_loss}; expected 0 or more")
    if reduction not in REDUCTIONS:
        raise InvalidArgument(f"reduction is {reduction!r}; expected one of {REDUCTIONS}")


def _check_targets(target: Tensor, vocab: int, ignore_index: int) -> None:
    wrong = ((target < 0) | (target >= vocab)) & (target != ignore_index)
    if target.is_cuda:  # a look at the values would wait for the device
        torch._assert_async(~wrong.any(), f"target: a class that is none of the {vocab}")
    elif target.numel() and bool(wrong.any()):
        value = target[wrong][0].item()
        raise InvalidArgument(
            f"target holds class {value}; expected 0 to {vocab - 1}, or ignore_index={ignore_index}"
        )

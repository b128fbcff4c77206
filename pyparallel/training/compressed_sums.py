"""Means over a group in fewer bytes, with error feedback: all calls are made in one order on all
ranks, and every rank gets the same bits.

Bytes are counted where they are handed to the group: what this rank sends to others, by the least
that each collective can do (all-to-all and all-gather: its part to every other rank; all-reduce: 2
(n - 1) / n of the tensor).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel.training.compression import Codec, Compression, codec_of

__all__ = ["CompressedSums", "Traffic"]


@dataclass
class Traffic:
    """Bytes that this rank has sent for gradients.

    Attributes:
        sent: in fact.
        uncompressed: what the same gradients would have taken in float32.
    """

    sent: int = 0
    uncompressed: int = 0

    @property
    def ratio(self) -> float:
        """Sent, of uncompressed."""
        return self.sent / self.uncompressed if self.uncompressed else 1.0

    def clear(self) -> None:
        """Counts from here."""
        self.sent = self.uncompressed = 0


@dataclass
class Part:
    """Some gradients that travel together: a bucket, or a unit of fully_shard.

    Attributes:
        residual: float32, what earlier steps lost, as long as the part.
        factors: PowerSGD's right factors, by index of the matrix.
    """

    residual: Tensor
    factors: dict[int, Tensor] = field(default_factory=dict)


class CompressedSums:
    """Collectives of one group for one kind of compression."""

    def __init__(self, compression: Compression, group: dist.ProcessGroup) -> None:
        self.compression, self.group = compression, group
        self.size, self.rank = group.size(), group.rank()
        self.traffic = Traffic()
        self._codec = codec_of(compression)

    # --- counted collectives

    def _all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        self.traffic.sent += 2 * (self.size - 1) * x.nbytes // self.size
        return x.div_(self.size)

    def _all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x, group=self.group)
        self.traffic.sent += (self.size - 1) * x.nbytes
        return out

    def _all_to_all(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        self.traffic.sent += x.nbytes * (self.size - 1) // self.size
        return out

    # --- means

    def mean(
        self, flat: Tensor, part: Part, shapes: Sequence[torch.Size] = (), whole: bool = False
    ) -> Tensor:
        """The mean over ranks of a flat gradient. Every rank of the group calls.

        Args:
            part: of the same gradients; changed.
            shapes: of the gradients, one behind the other in `flat` (powersgd needs them).
            whole: without loss (a step of PowerSGD's warm-up).
        """
        self.traffic.uncompressed += 2 * (self.size - 1) * 4 * flat.numel() // self.size
        x = flat.float() + part.residual
        if whole:
            part.residual.zero_()
            return self._all_reduce(x)
        if self._codec is not None:
            return self._coded_mean(x, part, self._codec)
        if self.compression.kind == "topk":
            return self._sparse_mean(x, part)
        return self._low_rank_mean(x, part, shapes)

    def _keep(self, part: Part, lost: Tensor) -> None:
        """What is not finite is not fed back: it would spoil every later step."""
        if self.compression.error_feedback:
            part.residual.copy_(torch.where(lost.isfinite(), lost, 0.0))

    def _coded_mean(self, x: Tensor, part: Part, codec: Codec) -> Tensor:
        """Each rank adds the part that it owns, in rank order in float32, and sends the mean back
        in the same code; what that loses it adds to its own next gradient, times the ranks."""
        total, lost = self._coded_shard(x, codec)
        packed = codec.encode(total)
        mine = codec.decode(packed)
        columns = total.shape[1]
        rows = lost.view(self.size, columns)
        rows[self.rank] += (total - mine).squeeze(0) * self.size
        self._keep(part, lost[: x.numel()])
        return codec.decode(self._all_gather(packed)).flatten()[: x.numel()]

    def _coded_shard(self, x: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
        """(the mean of this rank's shard [1, columns], what this rank's sending lost, padded)."""
        columns = codec.padded(-(-x.numel() // self.size))
        rows = x.new_zeros(self.size * columns)
        rows[: x.numel()] = x
        rows = rows.view(self.size, columns)
        packed = codec.encode(rows)
        lost = (rows - codec.decode(packed)).flatten()
        total = codec.decode(self._all_to_all(packed)).sum(0, keepdim=True).div_(self.size)
        return total, lost

    def reduce_scatter(self, out: Tensor, whole: Tensor, part: Part, average: bool) -> None:
        """out = this rank's shard of the sum (or mean) of `whole`, equal shards. Collective.

        Only for kinds that send every element.
        """
        assert self._codec is not None
        self.traffic.uncompressed += (self.size - 1) * 4 * whole.numel() // self.size
        x = (whole.float() + part.residual).view(self.size, -1)
        columns = self._codec.padded(x.shape[1])
        rows = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
        packed = self._codec.encode(rows)
        self._keep(part, (rows - self._codec.decode(packed))[:, : x.shape[1]].flatten())
        total = self._codec.decode(self._all_to_all(packed)).sum(0)[: out.numel()]
        out.copy_(total.div_(self.size) if average else total)

    def _sparse_mean(self, x: Tensor, part: Part) -> Tensor:
        """The largest elements of every rank, added in rank order."""
        ratio = self.compression.ratio or 0.0
        count = max(1, min(x.numel(), round(ratio * x.numel())))
        where = x.abs().topk(count).indices.int()
        values = x[where.long()]
        self._keep(part, x.index_fill(0, where.long(), 0.0))
        pairs = torch.cat([where.view(torch.float32), values])
        every = self._all_gather(pairs).view(self.size, 2, count)
        mean = torch.zeros_like(x)
        for indices, found in every:
            mean.index_add_(0, indices.contiguous().view(torch.int32).long(), found)
        return mean.div_(self.size)

    def _low_rank_mean(self, x: Tensor, part: Part, shapes: Sequence[torch.Size]) -> Tensor:
        """Matrices as P Q^T, one step of the power method a call, from the last call's Q; what a
        product would not make smaller goes whole, beside the Ps."""
        rank = self.compression.rank or 0
        low: dict[int, Tensor] = {}
        plain: list[Tensor] = []
        at = 0
        for number, shape in enumerate(shapes):
            piece = x[at : at + shape.numel()]
            at += shape.numel()
            rows = shape[0] if len(shape) > 1 else 0
            columns = piece.numel() // rows if rows else 0
            if rank * (rows + columns) < rows * columns:
                low[number] = piece.view(rows, columns)
            else:
                plain.append(piece)
        for number, matrix in low.items():
            if number not in part.factors:  # the same on all ranks
                generator = torch.Generator().manual_seed(number)
                first = torch.randn(matrix.shape[1], rank, generator=generator)
                part.factors[number] = first.to(matrix.device)
        left = [matrix @ part.factors[n] for n, matrix in low.items()]
        left = _in_one(self._all_reduce, [*left, *plain])
        whole = left[len(low) :]
        left = [torch.linalg.qr(p).Q for p in left[: len(low)]]
        pairs = zip(low.values(), left, strict=True)
        right = _in_one(self._all_reduce, [matrix.T @ p for matrix, p in pairs])
        # A gradient that is not finite spoils this step, on every rank, and no later one.
        usable = all(bool(q.isfinite().all()) for q in right)
        mean = torch.empty_like(x)
        found, missing = iter(zip(left, right, strict=True)), iter(whole)
        at = 0
        for number, shape in enumerate(shapes):
            piece = mean[at : at + shape.numel()]
            at += shape.numel()
            if number in low:
                p, q = next(found)
                if usable:
                    part.factors[number] = q
                piece.copy_((p @ q.T).flatten())
            else:
                piece.copy_(next(missing))
        self._keep(part, self._lost_by_products(x, mean, low, shapes))
        return mean

    def _lost_by_products(
        self, x: Tensor, mean: Tensor, low: dict[int, Tensor], shapes: Sequence[torch.Size]
    ) -> Tensor:
        """Of matrices what the product lacks of this rank's own; of the rest nothing."""
        lost = torch.zeros_like(x)
        at = 0
        for number, shape in enumerate(shapes):
            span = slice(at, at + shape.numel())
            if number in low:
                lost[span] = x[span] - mean[span]
            at += shape.numel()
        return lost


def _in_one(reduce: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Several tensors by one call."""
    if not tensors:
        return []
    flat = reduce(torch.cat([t.flatten() for t in tensors]))
    split = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(split, tensors, strict=True)]

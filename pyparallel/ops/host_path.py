"""The CPU path of a group whose ranks share a host: GEMMs to and from symmetric memory.

    symmetric   the product is written into symmetric memory, where the reduction reads those of
                all ranks; a gather is pushed: each rank writes its rows into every rank's memory
    chunked     as symmetric, by chunks of rows that stay in a core's cache between GEMM and
                reduction (or while several weights are multiplied with them)

Protocol "alternate" of the workspace (two halves; p counts its calls, half p % 2 is call p's)
    writer    each rank writes half p % 2 of its own memory, or of its peers' (gather)
    reader    after a collective of call p that all ranks entered when they had written
    reuse     half p % 2 is written again by call p + 2: every rank has then entered a collective of
              call p + 1, and that it does after its last read of call p
    progress  a collective waits only for ranks to enter the same call
Only rows can be shared in place: the dim that ranks share must be the first.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyparallel.comm import Communicator, SymmetricMemory
from pyparallel.comm.products import times_weight, times_weight_into

__all__ = ["HostPath"]

# Of a product: half a second-level cache, where the reduction still finds what the GEMM wrote.
CHUNK_BYTES = 512 << 10
_FIRST_BYTES = 1 << 20


class HostPath:
    """The workspace of one group, and the three ops on it. Every rank makes the same calls.

    The workspace grows when a call needs more, which is collective like the call itself; it is the
    group's alone, and goes with it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._memory: SymmetricMemory | None = None
        self._half_bytes = 0
        self._calls = 0

    # --- the ops. `xs` and `weights` are 2-D; products of several pairs are added

    def matmul_all_reduce(self, x: Tensor, weight: Tensor, note: str, chunk_rows: int) -> Tensor:
        """The sum over ranks of x @ weight^T, a tensor of its own."""
        shape = (x.shape[0], weight.shape[0])
        partial = self._half(shape, x.dtype, note)
        y = x.new_empty(shape)
        for rows in _chunks(shape[0], chunk_rows):
            times_weight_into(partial[rows], x[rows], weight)
            self._communicator.note(note)
            self._communicator.all_reduce(partial[rows])
            y[rows].copy_(partial[rows])
        return y

    def matmul_reduce_scatter(
        self,
        xs: Sequence[Tensor],
        weights: Sequence[Tensor],
        addend: Tensor | None,
        sizes: Sequence[int],
        note: str,
        chunk_rows: int,
    ) -> Tensor:
        """This rank's rows (of `sizes`) of the sum over ranks of sum_i xs[i] @ weights[i]^T."""
        rank = self._communicator.rank
        starts = [sum(sizes[:r]) for r in range(len(sizes))]
        shape = (sum(sizes), weights[0].shape[0])
        partial = self._half(shape, xs[0].dtype, note)
        shard = xs[0].new_empty((sizes[rank], shape[1]))
        # A chunk has some rows of every rank's shard. They lie one after another in the workspace,
        # so that one reduce_scatter takes them.
        at = 0
        for piece in _chunks(max(sizes), max(1, chunk_rows // len(sizes))):
            counts = [max(0, min(piece.stop, n) - piece.start) for n in sizes]
            begin = at
            for start, count in zip(starts, counts, strict=True):
                rows = slice(start + piece.start, start + piece.start + count)
                out = partial[at : at + count]
                _products(xs, weights, addend, rows, out)
                at += count
            target = shard[piece.start : piece.start + counts[rank]]
            self._communicator.note(note)
            self._communicator.reduce_scatter(partial[begin:at], sizes=counts, out=target)
        return shard

    def all_gather_matmul(
        self, x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int], note: str, chunk_rows: int
    ) -> tuple[list[Tensor], Tensor]:
        """all_gather(x) @ w^T for each weight; and the gathered x, valid until the next call."""
        rank, world = self._communicator.rank, self._communicator.world_size
        start = sum(sizes[:rank])
        rows = sum(sizes)
        whole = self._half((rows, x.shape[1]), x.dtype, note)
        memory = self._memory
        assert memory is not None
        for step in range(world):
            peer = (rank + step) % world
            memory.peer(peer, whole)[start : start + sizes[rank]].copy_(x)
        self._communicator.note(note)
        self._communicator.barrier()
        results = [x.new_empty((rows, w.shape[0])) for w in weights]
        for part in _chunks(rows, chunk_rows):
            for w, y in zip(weights, results, strict=True):
                times_weight_into(y[part], whole[part], w)
        return results, whole

    # --- the workspace

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace on each rank, both halves together."""
        return 2 * self._half_bytes

    def _half(self, shape: tuple[int, int], dtype: torch.dtype, note: str) -> Tensor:
        """This call's half, as a tensor of this shape, at the same place on every rank."""
        needed = max(shape[0] * shape[1], 1) * dtype.itemsize
        if needed > self._half_bytes:
            self._grow(needed, note)
        memory = self._memory
        assert memory is not None
        self._calls += 1
        flat = self._flat[self._calls % 2][: shape[0] * shape[1] * dtype.itemsize]
        return flat.view(dtype).view(shape)

    def _grow(self, needed: int, note: str) -> None:
        half = max(_FIRST_BYTES, 1 << (needed - 1).bit_length())
        self._communicator.note(note)
        # Enters a collective before anything is freed: no rank still reads the old workspace.
        memory = SymmetricMemory(
            self._communicator, 2 * half, channels=1, name=f"ops of {self._communicator.name}"
        )
        self._flat = [memory.empty(half, dtype=torch.uint8) for _ in range(2)]
        if self._memory is not None:
            self._memory.close()
        self._memory = memory
        self._half_bytes = half


def chunk_rows_of(columns: int, dtype: torch.dtype) -> int:
    """Rows of a chunk: CHUNK_BYTES of them, and at least 16, which a GEMM takes at once."""
    return max(16, CHUNK_BYTES // max(1, columns * dtype.itemsize))


def _chunks(rows: int, chunk_rows: int) -> Iterator[slice]:
    """At least one, so that every call enters its collective."""
    for start in range(0, max(rows, 1), max(1, chunk_rows)):
        yield slice(start, min(start + chunk_rows, rows))


def _products(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    addend: Tensor | None,
    rows: slice,
    out: Tensor,
) -> None:
    times_weight_into(out, xs[0][rows], weights[0])
    for x, w in zip(xs[1:], weights[1:], strict=True):
        if out.dtype is torch.float32:
            out += times_weight(x[rows], w)
        else:  # torch adds before it rounds
            out.addmm_(x[rows], w.t())
    if addend is not None:
        out += addend[rows]

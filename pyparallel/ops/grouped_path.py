"""GEMM kernels that flag groups of tiles, with the group's own collective behind each: "signal".

For machines whose kernels cannot write into each other's memory. Needs no symmetric memory; what is
kept here is scratch of this rank alone, which grows without the others.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyparallel.ops.device_path import DevicePath, shards_on
from pyparallel.ops.engines import Engine

__all__ = ["GroupedPath"]

_GROUPS = 4  # more hide more and cost more collectives


class GroupedPath:
    """The scratch of one group on one device, and the two ops on it."""

    def __init__(self, path: DevicePath, engine: Engine) -> None:
        self._path = path
        self._engine = engine
        self._scratch: dict[tuple[Any, ...], Any] = {}

    def matmul_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], note: str
    ) -> Tensor:
        """This rank's rows of the sum, bias added once."""
        from pyparallel.triton_kernels.gemm_then_collective import (
            OP,
            STEPS,
            Scratch,
            gemm_then_reduce_scatter,
            groups_of,
        )

        n, world, rank = weight.shape[0], self._engine.world_size, self._engine.rank
        k, _, fits = self._path.agree(note, x.shape[1], n, (x, weight))
        config = self._path.config(OP, tuple(sizes), n, k, x.dtype, fits)
        groups = groups_of(sizes, config, _GROUPS)
        rows = groups.count * world * groups.chunk
        key = ("scatter", n, x.dtype)
        scratch = self._scratch.get(key)
        if (
            scratch is None
            or rows > scratch.buffer.size(0)
            or groups.chunk > scratch.received.size(0)
        ):
            scratch = self._scratch[key] = Scratch.make(
                _GROUPS, x.device, rows=max(rows, 1), chunk=max(groups.chunk, 1), n=n, dtype=x.dtype
            )
        out = x.new_empty((sizes[rank], n))

        def reduce_scatter(received: Tensor, sent: Tensor) -> None:
            self._engine.note(note)
            received.copy_(self._engine.reduce_scatter(sent, 0, [groups.chunk] * world))

        self._path.raise_failure(scratch, "matmul_reduce_scatter", STEPS)
        gemm_then_reduce_scatter(
            out,
            x,
            weight,
            shards_on(tuple(sizes), str(x.device)),
            groups,
            scratch,
            config,
            rank,
            reduce_scatter,
            bias=None if bias is None else bias.contiguous(),
            stream=self._path.stream("collectives"),
            timeout_us=self._path.timeout_us,
        )
        self._path.raise_failure(scratch, "matmul_reduce_scatter", STEPS)
        return out

    def matmul_all_reduce(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, note: str
    ) -> Tensor:
        """The sum, bias added once."""
        from pyparallel.triton_kernels.gemm_then_collective import (
            OP,
            STEPS,
            Scratch,
            gemm_then_all_reduce,
            groups_of,
        )

        m, n, rank = x.shape[0], weight.shape[0], self._engine.rank
        k, _, fits = self._path.agree(note, x.shape[1], n, (x, weight))
        config = self._path.config(OP, (m,), n, k, x.dtype, fits)
        scratch = self._scratch.get(("reduce",))
        if scratch is None:
            scratch = self._scratch[("reduce",)] = Scratch.make(_GROUPS, x.device)
        out = x.new_empty((m, n))

        def all_reduce(band: Tensor) -> None:
            self._engine.note(note)
            self._engine.all_reduce(band, "sum")

        self._path.raise_failure(scratch, "matmul_all_reduce", STEPS)
        gemm_then_all_reduce(
            out,
            x,
            weight,
            shards_on((m,), str(x.device)),
            groups_of((m,), config, _GROUPS),
            scratch,
            config,
            rank,
            all_reduce,
            bias=None if bias is None else bias.contiguous(),
            stream=self._path.stream("collectives"),
            timeout_us=self._path.timeout_us,
        )
        self._path.raise_failure(scratch, "matmul_all_reduce", STEPS)
        return out

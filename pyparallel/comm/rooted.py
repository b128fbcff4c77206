"""The collectives of `Communicator` that have a root. They go the way of collectives.py."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from pyparallel.comm.announced import announced
from pyparallel.comm.arguments import Arguments, blocks_of
from pyparallel.comm.reductions import DTYPES, Reduction, reduction_of
from pyparallel.comm.shards import FIRST, axis_of, shards_of_whole, to_front, whole_from_shard
from pyparallel.comm.tensors import check_like, checked, checked_output, is_plain
from pyparallel.errors import InvalidArgument

# With async_op=True a call gives its Work, else its result.
Ran = Any
Seconds = float | timedelta | None


class Rooted(Arguments):
    """reduce, broadcast, scatter and gather; `Collectives` says what their parameters are."""

    @announced
    def reduce(
        self,
        x: Tensor,
        op: str | Reduction = "sum",
        *,
        root: int = 0,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Ran:
        """Reduces `x` over the ranks on the root, in place or into `out`; gives that tensor.

        Elsewhere nothing is written, and `x` is given back (or `out`, as it was).
        """
        if timeout is None and not async_op:
            done = self._fast.reduce(x, op, root, out)
            if done is not None:
                return done
        try:
            reduction = reduction_of(op)
            self._check_root(root)
            x = checked_output(x, "x") if out is None else checked(x, "x")
            if out is not None:
                out = checked_output(out, "out")
                check_like(out, "out", x.shape, x.dtype)
            ms = self._ms(timeout)
        except Exception as error:
            raise self._refused("reduce", error) from None
        dtype, count = DTYPES[x.dtype], x.numel()
        target = x if out is None else out
        on_root = root == self._rank

        def call(ins: list[int], outs: list[int], queued: bool) -> Any:
            where = outs[0] if on_root else 0
            return self._core.reduce(
                ins[0], where, count, dtype, reduction.code, reduction.factor, root, ms, queued
            )

        return self._start(call, [x], [target] if on_root else [], target, async_op)

    @announced
    def broadcast(
        self, x: Tensor, root: int = 0, *, async_op: bool = False, timeout: Seconds = None
    ) -> Ran:
        """Gives every rank the root's `x`, in place; gives `x`."""
        if timeout is None and not async_op:
            done = self._fast.broadcast(x, root)
            if done is not None:
                return done
        try:
            self._check_root(root)
            if not is_plain(x):
                x = checked(x, "x") if root == self._rank else checked_output(x, "x")
            ms = self._ms(timeout)
        except Exception as error:
            raise self._refused("broadcast", error) from None
        dtype, count, broadcast = DTYPES[x.dtype], x.numel(), self._core.broadcast
        return self._start_in_place(
            lambda p, queued: broadcast(p, count, dtype, root, ms, queued),
            x,
            async_op,
            writes=root != self._rank,
        )

    @announced
    def scatter(
        self,
        x: Tensor | Sequence[Tensor] | None,
        out: Tensor,
        *,
        root: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Ran:
        """Gives each rank its shard of the root's `x` along `dim`, in `out`; gives `out`.

        `x` is None except on the root, and may be a list: x[r] goes to rank r. Uneven: `sizes[r]`
        is the size of rank r's shard.
        """
        if dim is FIRST and sizes is None and timeout is None and not async_op:
            done = self._fast.scatter(x, out, root)
            if done is not None:
                return done
        ins: list[Tensor] = []
        counts: list[int] = []
        try:
            self._check_root(root)
            ms = self._ms(timeout)
            target = checked_output(out, "out")
            axis = 0
            if root == self._rank:
                if isinstance(x, Sequence):
                    ins, counts, shape = self._list_in(x, dim, sizes)
                else:
                    whole = checked(x, "x")
                    shards = shards_of_whole(whole.shape, dim, sizes, self._world_size)
                    axis, counts, shape = shards.dim, shards.counts, shards.shard_shape(root)
                    ins = [to_front(whole, axis)]
                check_like(target, "out", shape, ins[0].dtype)
            else:
                if x is not None:
                    raise InvalidArgument(f"x is for the root (rank {root}); pass None elsewhere")
                axis = axis_of(target.shape, dim, "out") if target.dim() else 0
        except Exception as error:
            raise self._refused("scatter", error) from None
        code, count = DTYPES[target.dtype], target.numel()

        def call(p: list[int], q: list[int], queued: bool) -> Any:
            blocks = blocks_of(p, counts) if p else []
            return self._core.scatter(code, root, blocks, counts, q[0], count, ms, queued)

        return self._start(call, ins, [to_front(target, axis)], out, async_op)

    @announced
    def gather(
        self,
        x: Tensor,
        *,
        root: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Ran:
        """As `all_gather`, on the root only; elsewhere an empty tensor is given."""
        if dim is FIRST and sizes is None and timeout is None and not async_op:
            done = self._fast.gather(x, out, root)
            if done is not None:
                return done
        outs: list[Tensor] = []
        counts: list[int] = []
        try:
            self._check_root(root)
            x = checked(x, "x")
            ms = self._ms(timeout)
            if isinstance(out, Sequence):
                result: Any = out
                outs, counts = self._list_out(x, out, dim, sizes)
                source = x
            else:
                whole = whole_from_shard(x.shape, dim, sizes, self._rank, self._world_size)
                source = to_front(x, whole.dim) if x.dim() else x
                if root == self._rank:
                    result = self._out(out, whole.shape, x.dtype)
                    outs, counts = [to_front(result, whole.dim)], whole.counts
                else:
                    result = x.new_empty(
                        (*whole.shape[: whole.dim], 0, *whole.shape[whole.dim + 1 :])
                    )
            if root != self._rank and out is not None:
                raise InvalidArgument(f"out is for the root (rank {root}); pass None elsewhere")
        except Exception as error:
            raise self._refused("gather", error) from None
        code, count = DTYPES[x.dtype], x.numel()

        def call(p: list[int], q: list[int], queued: bool) -> Any:
            blocks = blocks_of(q, counts) if q else []
            return self._core.gather(code, root, p[0], count, blocks, counts, ms, queued)

        return self._start(call, [source], outs, result, async_op)

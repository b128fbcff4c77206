"""The collectives of `Communicator`: arguments checked on this rank, then one call of the core.

Every method goes the same way. The common case (plain tensors, shards along dimension 0) is
checked and called in C++ (`_torch.FastCalls`, which gives None for any other). Else: check and
shape the arguments; when that fails, refuse, so that the other ranks raise too; else run the core's
call on plain arrays, through copies where a tensor is none (`Base._start`). Values of a wrong type
are refused like any other, and so is a call that does not fit the signature (`announced`).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pyparallel.comm.announced import announced
from pyparallel.comm.arguments import blocks_of
from pyparallel.comm.reductions import DTYPES, Reduction, reduction_of
from pyparallel.comm.rooted import Ran, Rooted, Seconds
from pyparallel.comm.shards import FIRST, shards_of_whole, to_front, whole_from_shard
from pyparallel.comm.tensors import (
    check_like,
    checked,
    checked_output,
    is_plain,
    tensor_list,
)
from pyparallel.errors import InvalidArgument


class Collectives(Rooted):
    """The collective half of `Communicator`.

    Common parameters:
      async_op  start the call and give its `Work`; started calls run in order, after one another
      timeout   seconds this call may take; None: the communicator's
      out       where the result goes; without it a new tensor is made (or the call works in place,
                where it says so)
    Reductions `op`: "sum", "avg", "min", "max", "product", "band", "bor", "bxor", or
    premul_sum(factor).
    Integers wrap around as torch's do (int8: 120 + 100 gives -36).
    """

    @announced
    def all_reduce(
        self,
        x: Tensor,
        op: str | Reduction = "sum",
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Ran:
        """Reduces `x` over the ranks, in place, or into `out`; gives the tensor that was written.

        All ranks get the same bits.
        """
        if timeout is None and not async_op:
            done = self._fast.all_reduce(x, op, out)
            if done is not None:
                return done
        try:
            reduction = reduction_of(op)
            if not is_plain(x):
                x = checked_output(x, "x") if out is None else checked(x, "x")
            if out is not None:
                out = out if is_plain(out) else checked_output(out, "out")
                check_like(out, "out", x.shape, x.dtype)
            ms = self._ms(timeout)
        except Exception as error:
            raise self._refused("all_reduce", error) from None
        all_reduce, code, factor = self._core.all_reduce, reduction.code, reduction.factor
        dtype, count = DTYPES[x.dtype], x.numel()
        if out is None:
            return self._start_in_place(
                lambda p, queued: all_reduce(p, p, count, dtype, code, factor, ms, queued),
                x,
                async_op,
            )
        return self._start(
            lambda ins, outs, queued: all_reduce(
                ins[0], outs[0], count, dtype, code, factor, ms, queued
            ),
            [x],
            [out],
            out,
            async_op,
        )

    @announced
    def all_gather(
        self,
        x: Tensor,
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Ran:
        """Gives every rank the `x` of all ranks, in rank order: joined along `dim`, or as a list.

        Uneven: `sizes[r]` is rank r's size of `dim`. With a list of tensors as `out`, out[r]
        receives rank r's `x` and may have any shape of as many elements. A 0-dimensional `x` counts
        as one row.
        """
        if dim is FIRST and timeout is None and not async_op:
            fast = self._fast
            done = (
                fast.all_gather(x, out) if sizes is None else fast.all_gather_uneven(x, out, sizes)
            )
            if done is not None:
                return done
        counts: int | list[int]
        try:
            x = x if is_plain(x) else checked(x, "x")
            ms = self._ms(timeout)
            if isinstance(out, Sequence):
                result: Any = out
                outs, counts = self._list_out(x, out, dim, sizes)
                ins = [x]
            else:
                whole = whole_from_shard(x.shape, dim, sizes, self._rank, self._world_size)
                result = self._out(out, whole.shape, x.dtype)
                ins = [to_front(x, whole.dim) if x.dim() else x]
                outs, counts = [to_front(result, whole.dim)], whole.counts
        except Exception as error:
            raise self._refused("all_gather", error) from None
        code, gather = DTYPES[x.dtype], self._core.all_gather
        return self._start(
            lambda p, q, queued: gather(code, p[0], blocks_of(q, counts), counts, ms, queued),
            ins,
            outs,
            result,
            async_op,
            self._own(counts, x) if len(outs) == 1 else None,
        )

    @announced
    def reduce_scatter(
        self,
        x: Tensor | Sequence[Tensor],
        op: str | Reduction = "sum",
        *,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Ran:
        """Reduces `x` over the ranks and gives each rank its own shard along `dim`.

        Uneven: `sizes[r]` is the size of rank r's shard; without it `dim` must divide by the number
        of ranks. `x` may be a list: x[r] is what is reduced for rank r.
        """
        if dim is FIRST and timeout is None and not async_op:
            done = (
                self._fast.reduce_scatter(x, op, out)
                if sizes is None
                else self._fast.reduce_scatter_uneven(x, op, out, sizes)
            )
            if done is not None:
                return done
        try:
            reduction = reduction_of(op)
            ms = self._ms(timeout)
            if isinstance(x, Sequence):
                ins, counts, shape = self._list_in(x, dim, sizes)
                axis, dtype = 0, ins[0].dtype
            else:
                x = x if is_plain(x) else checked(x, "x")
                shards = shards_of_whole(x.shape, dim, sizes, self._world_size)
                axis, dtype, counts = shards.dim, x.dtype, shards.counts
                ins, shape = [to_front(x, axis)], shards.shard_shape(self._rank)
            result = self._out(out, shape, dtype)
        except Exception as error:
            raise self._refused("reduce_scatter", error) from None

        def call(p: list[int], q: list[int], queued: bool) -> Any:
            return self._core.reduce_scatter(
                DTYPES[dtype],
                blocks_of(p, counts),
                counts,
                q[0],
                reduction.code,
                reduction.factor,
                ms,
                queued,
            )

        own = -self._own(counts, result) if len(ins) == 1 else None
        return self._start(call, ins, [to_front(result, axis)], result, async_op, own)

    @announced
    def all_to_all(
        self,
        x: Tensor | Sequence[Tensor],
        *,
        dim: int = 0,
        in_sizes: Sequence[int] | None = None,
        out_sizes: Sequence[int] | None = None,
        out: Tensor | Sequence[Tensor] | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Ran:
        """Sends shard r of `x` to rank r and joins what comes from the ranks, along `dim`.

        Uneven: `in_sizes[r]` go to rank r, `out_sizes[r]` come from it. With lists `x` and `out`,
        x[r] goes to rank r and out[r] receives from it.
        """
        if dim is FIRST and timeout is None and not async_op:
            done = (
                self._fast.all_to_all(x, out)
                if in_sizes is None and out_sizes is None
                else self._fast.all_to_all_uneven(x, out, in_sizes, out_sizes)
            )
            if done is not None:
                return done
        try:
            ms = self._ms(timeout)
            if isinstance(x, Sequence):
                if not isinstance(out, Sequence) or in_sizes or out_sizes:
                    raise InvalidArgument(
                        "with a list x, pass a list out, and no in_sizes, out_sizes"
                    )
                ins, in_counts, _ = self._list_in(x, dim, None)
                result: Any = out
                dtype = ins[0].dtype
                outs = tensor_list(out, "out", self._world_size, checked_output, dtype)
                out_counts = [t.numel() for t in outs]
            else:
                x = x if is_plain(x) else checked(x, "x")
                sent, received = self._exchange(x, dim, in_sizes, out_sizes)
                if isinstance(out, Sequence):
                    raise InvalidArgument("with a tensor x, pass a tensor out (or a list for both)")
                result = self._out(out, received.shape, x.dtype)
                dtype, in_counts, out_counts = x.dtype, sent.counts, received.counts
                ins, outs = [to_front(x, sent.dim)], [to_front(result, received.dim)]
        except Exception as error:
            raise self._refused("all_to_all", error) from None
        code, exchange = DTYPES[dtype], self._core.all_to_all
        return self._start(
            lambda p, q, queued: exchange(
                code,
                blocks_of(p, in_counts),
                in_counts,
                blocks_of(q, out_counts),
                out_counts,
                ms,
                queued,
            ),
            ins,
            outs,
            result,
            async_op,
        )

    @announced
    def barrier(self, *, async_op: bool = False, timeout: Seconds = None) -> Ran:
        """Returns when every rank has called it."""
        if timeout is None and not async_op:
            self._core.barrier(self._timeout_ms, False)
            return None
        try:
            ms = self._ms(timeout)
        except Exception as error:
            raise self._refused("barrier", error) from None
        return self._start(
            lambda p, q, queued: self._core.barrier(ms, queued), [], [], None, async_op
        )

"""Data calls of `NcclCommunicator`: arrays are checked here, then handed to the core."""

import threading
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import torch

from pyparallel._core import nccl as core
from pyparallel.comm.nccl_arrays import (
    View,
    external_stream,
    stream_handle,
    view_of,
    wait_for_producer,
)
from pyparallel.comm.reductions import REDUCTIONS, Reduction
from pyparallel.errors import InvalidArgument

__all__ = ["Calls", "group"]

A = TypeVar("A")
Op = str | Reduction
_NOTHING: Final = 0, 0  # address and count of what another rank has


class _Held(threading.local):
    """What the calls of this thread's open group still need: arrays, and how deep we are."""

    def __init__(self) -> None:
        self.depth = 0
        self.owners: list[Any] = []


_held = _Held()


class group:
    """Launches the calls of a `with` block as one, when it ends.

    Sends and receives that depend on each other must be in one group. Blocks nest; the outermost
    launches. A block that is left by an exception launches none of its calls. With `simulate=True`
    none is launched at all: `estimated_us` is then NCCL's estimate of the time, in microseconds.
    """

    def __init__(self, *, simulate: bool = False) -> None:
        self._core = core.Group()
        self._simulate = simulate
        self.estimated_us: float | None = None

    def __enter__(self) -> "group":
        self._core.__enter__()
        _held.depth += 1
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _held.depth -= 1
        try:
            if self._simulate and kind is None:
                self.estimated_us = self._core.simulate()
            else:
                self._core.__exit__(kind, error, traceback)
        finally:
            if _held.depth == 0:
                _held.owners.clear()


class Calls:
    """Arrays: CUDA tensors of torch, `__cuda_array_interface__` or DLPack objects, RawArrays.

    They must be contiguous and stay alive until the work is done. The stream is the argument, else
    torch's current one, else the one that the array names; for addresses it must be passed.
    """

    _core: Any

    # --- reductions

    def all_reduce(self, x: A, op: Op = "sum", *, out: A | None = None, stream: Any = None) -> A:
        """In place, or into `out`. Returns the array that holds the result."""
        result = x if out is None else out
        call = _Call(self, "all_reduce", stream, x, result)
        source, target = call.views
        call.same_count(source, target)
        code, premul = call.reduction(op, source)
        self._core.all_reduce(
            *(source.pointer, target.pointer, source.count, source.element, code, premul),
            call.stream,
        )
        return result

    def reduce(
        self, x: A, root: int, op: Op = "sum", *, out: A | None = None, stream: Any = None
    ) -> A | None:
        """The result is on `root` only, in `out` or in place. Returns it there, None elsewhere."""
        mine = self._core.rank == root
        result = x if out is None else out
        call = _Call(self, "reduce", stream, x, result if mine else None)
        source, target = call.views[0], call.views[-1]
        call.same_count(source, target)
        code, premul = call.reduction(op, source)
        self._core.reduce(
            *(source.pointer, target.pointer if mine else 0, source.count, source.element),
            *(code, premul, root, call.stream),
        )
        return result if mine else None

    def reduce_scatter(
        self,
        x: A,
        out: A,
        op: Op = "sum",
        *,
        sizes: Sequence[int] | None = None,
        stream: Any = None,
    ) -> A:
        """Rank r gets part r of the sum of all `x`. `sizes`: elements per rank, if they differ."""
        call = _Call(self, "reduce_scatter", stream, x, out)
        source, target = call.views
        code, premul = call.reduction(op, source)
        if sizes is None:
            call.whole_is_parts(source, target, "x", "out")
            self._core.reduce_scatter(
                *(source.pointer, target.pointer, target.count, target.element, code, premul),
                call.stream,
            )
        else:
            blocks = call.blocks(source, sizes, "x", target.count)
            self._core.reduce_scatter_blocks(
                blocks, target.pointer, target.element, code, premul, call.stream
            )
        return out

    # --- movement

    def broadcast(self, x: A, root: int, *, out: A | None = None, stream: Any = None) -> A:
        """Everyone gets `root`'s array, in place or in `out`."""
        result = x if out is None else out
        call = _Call(self, "broadcast", stream, x, result)
        source, target = call.views
        call.same_count(source, target)
        self._core.broadcast(
            source.pointer, target.pointer, source.count, source.element, root, call.stream
        )
        return result

    def bcast(self, x: A, root: int, *, stream: Any = None) -> A:
        """`broadcast` in place by NCCL's older call of that name."""
        call = _Call(self, "bcast", stream, x, x)
        view = call.views[0]
        self._core.bcast(view.pointer, view.count, view.element, root, call.stream)
        return x

    def all_gather(
        self, x: A, out: A, *, sizes: Sequence[int] | None = None, stream: Any = None
    ) -> A:
        """`out` gets every `x` in rank order. `sizes`: elements per rank, if they differ."""
        call = _Call(self, "all_gather", stream, x, out)
        source, target = call.views
        if sizes is None:
            call.whole_is_parts(target, source, "out", "x")
            self._core.all_gather(
                source.pointer, target.pointer, source.count, source.element, call.stream
            )
        else:
            blocks = call.blocks(target, sizes, "out", source.count)
            self._core.all_gather_blocks(source.pointer, blocks, source.element, call.stream)
        return out

    def all_to_all(
        self,
        x: A,
        out: A,
        *,
        in_sizes: Sequence[int] | None = None,
        out_sizes: Sequence[int] | None = None,
        stream: Any = None,
    ) -> A:
        """Part r of `x` goes to rank r, part r of `out` comes from it. Sizes: elements per rank."""
        call = _Call(self, "all_to_all", stream, x, out)
        source, target = call.views
        if in_sizes is None and out_sizes is None:
            call.same_count(source, target)
            if source.count % self._core.size:
                raise call.error(f"x has {source.count} elements, no multiple of {self._core.size}")
            self._core.all_to_all(
                *(source.pointer, target.pointer, source.count // self._core.size),
                *(source.element, call.stream),
            )
            return out
        if in_sizes is None or out_sizes is None:
            raise call.error("in_sizes and out_sizes go together")
        self._core.all_to_all_blocks(
            call.blocks(source, in_sizes, "x"),
            call.blocks(target, out_sizes, "out"),
            source.element,
            call.stream,
        )
        return out

    def gather(
        self,
        x: A,
        root: int,
        out: A | None = None,
        *,
        sizes: Sequence[int] | None = None,
        stream: Any = None,
    ) -> A | None:
        """`out` on `root` gets every rank's `x`. Returns it there, None elsewhere."""
        mine = self._core.rank == root
        call = _Call(self, "gather", stream, x, out if mine else None)
        if mine and out is None:
            raise call.error("the root needs out=")
        source, target = call.views[0], call.views[-1]
        if sizes is None:
            if mine:
                call.whole_is_parts(target, source, "out", "x")
            self._core.gather(
                *(source.pointer, target.pointer if mine else 0, source.count, source.element),
                *(root, call.stream),
            )
        else:
            blocks = call.blocks(target, sizes, "out", source.count) if mine else []
            call.own_size(sizes, source.count)
            self._core.gather_blocks(
                (source.pointer, source.count), blocks, source.element, root, call.stream
            )
        return out if mine else None

    def scatter(
        self,
        x: A | None,
        root: int,
        out: A,
        *,
        sizes: Sequence[int] | None = None,
        stream: Any = None,
    ) -> A:
        """Part r of `root`'s `x` goes to rank r's `out`; `x` is None elsewhere."""
        mine = self._core.rank == root
        call = _Call(self, "scatter", stream, x if mine else None, out)
        if mine and x is None:
            raise call.error("the root needs x")
        source, target = call.views[0], call.views[-1]
        if sizes is None:
            if mine:
                call.whole_is_parts(source, target, "x", "out")
            self._core.scatter(
                *(source.pointer if mine else 0, target.pointer, target.count, target.element),
                *(root, call.stream),
            )
        else:
            blocks = call.blocks(source, sizes, "x", target.count) if mine else []
            call.own_size(sizes, target.count)
            self._core.scatter_blocks(
                blocks, (target.pointer, target.count), target.element, root, call.stream
            )
        return out

    # --- point to point

    def send(self, x: Any, peer: int, *, stream: Any = None) -> None:
        """Matched with `recv` of the same count on `peer`, in order."""
        call = _Call(self, "send", stream, x, None)
        view = call.views[0]
        self._core.send(view.pointer, view.count, view.element, peer, call.stream)

    def recv(self, out: A, peer: int, *, stream: Any = None) -> A:
        call = _Call(self, "recv", stream, None, out)
        view = call.views[0]
        self._core.recv(view.pointer, view.count, view.element, peer, call.stream)
        return out


class _Call:
    """The arrays of one call, looked at and checked against each other and the communicator."""

    def __init__(self, owner: Calls, op: str, stream: Any, x: Any, out: Any) -> None:
        self.core = owner._core
        self.op = op
        explicit = None if stream is None else stream_handle(stream)
        self.views: list[View] = []
        if x is not None:
            self.views.append(view_of(x, f"{op}, x", explicit, written=False))
        if out is not None and out is x:
            self.views.append(self._writable(self.views[0]))
        elif out is not None:
            self.views.append(view_of(out, f"{op}, out", explicit, written=True))
        self._agree()
        self.stream = self._choose_stream(explicit)
        for view in self.views[:1] if x is out else self.views:
            wait_for_producer(view, self.stream)
            if explicit is not None and isinstance(view.owner, torch.Tensor):
                _record(view, explicit)
        if _held.depth > 0:
            _held.owners.append(self.views)

    def error(self, text: str) -> InvalidArgument:
        c = self.core
        return InvalidArgument(
            f"communicator {c.name} (rank {c.rank} of {c.size}): {self.op}: {text}"
        )

    def _writable(self, view: View) -> View:
        if view.read_only:
            raise self.error("works in place, and the array is read-only; pass out=")
        return view

    def _agree(self) -> None:
        elements = {view.element.name for view in self.views}
        if len(elements) > 1:
            raise self.error(
                f"x is {self.views[0].element.name}, out is {self.views[1].element.name}"
            )
        for view in self.views:
            if view.device is not None and view.device != self.core.device:
                raise self.error(
                    f"the array is on GPU {view.device}, the communicator on {self.core.device}"
                )

    def _choose_stream(self, explicit: int | None) -> int:
        if explicit is not None:
            return explicit
        for view in self.views:
            if view.stream is not None:
                return view.stream
        raise self.error("the array names no stream; pass stream= (0 is the default stream)")

    # --- counts

    def same_count(self, x: View, out: View) -> None:
        if x.count != out.count:
            raise self.error(f"x has {x.count} elements, out has {out.count}")

    def whole_is_parts(self, whole: View, part: View, whole_name: str, part_name: str) -> None:
        size = self.core.size
        if whole.count != part.count * size:
            raise self.error(
                f"{whole_name} has {whole.count} elements, {part_name} has {part.count}; for "
                f"{size} ranks it must be {part.count} * {size} = {part.count * size}. For uneven "
                "parts pass sizes="
            )

    def own_size(self, sizes: Sequence[int], count: int) -> None:
        if len(sizes) != self.core.size or sizes[self.core.rank] != count:
            raise self.error(f"sizes={list(sizes)} do not give this rank its {count} elements")

    def blocks(
        self, whole: View, sizes: Sequence[int], name: str, own: int | None = None
    ) -> list[tuple[int, int]]:
        """Address and count of each rank's part."""
        if len(sizes) != self.core.size or min(sizes) < 0:
            raise self.error(f"sizes={list(sizes)} for {self.core.size} ranks")
        if sum(sizes) != whole.count:
            raise self.error(f"sizes={list(sizes)} make {sum(sizes)}, {name} has {whole.count}")
        if own is not None:
            self.own_size(sizes, own)
        address, parts = whole.pointer, []
        for count in sizes:
            parts.append((address, count) if count else _NOTHING)
            address += count * whole.element.itemsize
        return parts

    # --- reductions

    def reduction(self, op: Op, x: View) -> tuple[int, Any]:
        """The code, and the premultiplied sum where one is asked for."""
        found = REDUCTIONS.get(op) if isinstance(op, str) else op
        if not isinstance(found, Reduction):
            names = ", ".join(REDUCTIONS)
            raise self.error(f"reduction {op!r}; known are {names} and premul_sum(factor)")
        if found.name != "premul_sum":
            return found.code, None
        return found.code, core.PreMulSum(self.core, found.factor, x.element)


def _record(view: View, stream: int) -> None:
    """Tells torch's allocator that another stream than the current one uses the tensor."""
    if view.stream != stream:
        view.owner.record_stream(external_stream(stream, view.owner.device))

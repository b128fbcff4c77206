"""Keys that peers fetch themselves, by copy engine on a stream beside the kernels.

On CUDA, where all ranks of a group share a host and reach each other's memory, no keys are sent:
each rank lays its own on its shelf of symmetric memory, and copies from the others' shelves what it
needs (triton_kernels/key_shelf.py has the protocol). Two buffers of the largest rank's keys and
values are kept for each group, and grow with the calls. Elsewhere keys are messages.

In Triton's interpreter the same code runs on CPU tensors, where a test asks a group's shelf to.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyparallel.attention.needs import Part
from pyparallel.errors import CudaError, NoMemory, SystemCallError, Unsupported
from pyparallel.ops.groups import Seat

__all__ = ["Laid", "Shelf"]

OP = "sequence_parallel_attention"
Shapes = tuple[tuple[int, ...], ...]


class Shelf:
    """One group's. Every rank makes the same calls."""

    def __init__(self, seat: Seat | None = None) -> None:
        """Without a seat: one to ask about."""
        self._seat = (lambda: None) if seat is None else weakref.ref(seat)
        self.on_cpu = False  # the kernels are interpreted
        self.reason: str | None = None  # why there is none; None: not asked yet; empty: there is

    def lay(
        self, tensors: Sequence[Tensor], shapes: Sequence[Shapes], facts: tuple[Any, ...]
    ) -> "Laid | None":
        """This rank's tensors where peers can fetch them; None: there is no shelf. Collective.

        Args:
            tensors: of one dtype, any strides.
            shapes: of every rank's tensors, in rank order.
            facts: what else ranks must agree on.
        """
        seat, device = self._seat(), tensors[0].device
        if seat is None or not self._is_there(seat, device):
            return None
        from pyparallel.triton_kernels import key_shelf
        from pyparallel.triton_kernels.signals import signature_of

        path, dtype = seat.device_path(device), tensors[0].dtype
        most = max(key_shelf.bytes_of(of_rank, dtype) for of_rank in shapes)
        rounded = 1 << max(most - 1, 0).bit_length()
        try:
            workspace = path.space(
                ("keys",),
                lambda made: made.row_bytes >= most,
                lambda: key_shelf.ShelfLayout(seat.world_size, rounded),
                f"{OP}: memory for {most} bytes of keys",
            )
        except (CudaError, NoMemory, SystemCallError, Unsupported) as error:  # on all ranks
            self.reason = f"no memory that peers reach: {error}"
            return None
        path.raise_failure(workspace, OP, key_shelf.WAITS)
        stream = path.stream("keys")
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
            for x in tensors:
                x.record_stream(stream)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            signature = signature_of("keys", tuple(shapes), str(dtype), *facts)
            buffer = key_shelf.lay(workspace, tensors, signature, path.timeout_us)
        path.raise_failure(workspace, OP, key_shelf.WAITS)
        return Laid(path, workspace, buffer, tuple(shapes), dtype, stream)

    def told(self, device: str) -> str:
        """How keys travel, as far as it is known; asks nobody."""
        if device == "cpu" and not self.on_cpu:
            return "sent"
        if self.reason:
            return f"sent: {self.reason}"
        fetched = "fetched from symmetric memory by copy engine, on a stream beside the kernels"
        asked = (
            ""
            if self.reason == ""
            else "; sent where ranks are on several hosts or cannot "
            "reach each other's memory, which the first call finds"
        )
        return fetched + asked

    def _is_there(self, seat: Seat, device: torch.device) -> bool:
        """Alike on all ranks. Collective until it is known."""
        if device.type != "cuda" and not self.on_cpu:
            return False
        if self.reason is None:
            meeting = seat.engine.meeting
            spans = meeting is None or meeting.spans_hosts()
            self.reason = "the group's ranks are on several hosts" if spans else ""
        return not self.reason


@dataclass(frozen=True)
class Laid:
    """One call's tensors on all ranks' shelves."""

    path: Any  # ops.device_path.DevicePath
    workspace: Any
    buffer: int
    shapes: tuple[Shapes, ...]
    dtype: torch.dtype
    stream: "torch.cuda.Stream | None"

    def fetch(self, source: int, part: Part, into: Sequence[Tensor]) -> Callable[[], None]:
        """Starts to copy the part's rows of each tensor of `source`; what it gives waits.

        `into` [batch, part.count, ...] are free once all that the current stream has been given is
        done.
        """
        from pyparallel.triton_kernels import key_shelf

        stream, workspace, path = self.stream, self.workspace, self.path
        shelf = key_shelf.on_shelf(workspace, source, self.buffer, self.shapes[source], self.dtype)
        pairs = list(zip(shelf, into, strict=True))
        if stream is None:
            if part.count:
                key_shelf.fetch(workspace, source, pairs, part.rows, path.timeout_us)
            return lambda: path.raise_failure(workspace, OP, key_shelf.WAITS)
        device = into[0].device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if part.count:
                key_shelf.fetch(workspace, source, pairs, part.rows, path.timeout_us)
            done = torch.cuda.Event()
            done.record(stream)

        def wait() -> None:
            torch.cuda.current_stream(device).wait_event(done)
            path.raise_failure(workspace, OP, key_shelf.WAITS)

        return wait

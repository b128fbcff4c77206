"""Rows that other ranks fetch: each rank lays its own on a shelf of symmetric memory.

    lay      the own rows onto the shelf, and a flag at every peer
    fetch    waits for the source's flag, then copies some of its rows from its shelf

Both belong on a stream beside the one that computes. Nothing but one program of a kernel at a time
needs a multiprocessor: contiguous rows are moved by copy engine.
"""

# Protocol "keys here": a 64-bit flag per (source, reader) in the reader's memory, set to
# call number << 32 | signature, never cleared, by one writer; p = number of this call
#   writer    the source waits until the buffer is free (reuse), copies its rows there, and then, in
#             stream order, publishes ready p at every reader
#   reader    in stream order: consumes ready >= p of a source; then copies what it wants
#   reuse     call p writes buffer b only when every reader's done flag >= p', the last call that
#             wrote b. Done p' is published by the reader's next opening, behind its copies of call
#             p' in stream order; with two buffers in turn that has come long before
#   progress  done >= p' needs that the reader began call p' + 1, ready >= p that the source began
#             call p: neither waits for a copy of another rank, nor for a kernel that computes
# After a failed wait the rows of calls under way are undefined.

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .all_gather_plan import ALIGNMENT, USED, WORD
from .all_gather_rows import OPENING_WARPS, open_call
from .signals import LINE_BYTES, consume, has_failed, peer_pointer, publish
from .tile_order import nearest_first
from .workspace import Workspace

__all__ = ["WAITS", "ShelfLayout", "await_rows", "fetch", "lay", "on_shelf", "publish_rows"]

# What each wait is, by its number on the status page.
WAITS = ("wait for readers of a shelf", "wait for keys")
_ROWS = tl.constexpr(1)
_LINE = tl.constexpr(LINE_BYTES)


# --- 1 what lies where


@dataclass(frozen=True)
class ShelfLayout:
    """Offsets in bytes.

    field      written by     read by          what
    control    own opening    own kernels      CALL, WORD, USED of all_gather_plan.py
    failed     own kernels    own kernels      not 0: a wait has failed
    ready      source         own waits        [source]: its rows of that call may be copied
    done       reader         own opening      [reader]: its calls that ended
    rows       own launcher   peers' copies    [buffer]: tensors one after another
    """

    world: int
    row_bytes: int  # that one buffer holds
    buffers: int = 2

    def __post_init__(self) -> None:
        if self.world < 1 or self.row_bytes < 0 or not 1 <= self.buffers <= 16 - USED.value:
            raise ValueError(f"{self} is none: 1 rank, 0 bytes, 1 to 14 buffers are the limits")

    control = 0
    failed = LINE_BYTES
    ready = 2 * LINE_BYTES

    @property
    def done(self) -> int:
        return self.ready + self.world * LINE_BYTES

    def rows(self, buffer: int) -> int:
        return _aligned(self.done + self.world * LINE_BYTES) + buffer * _aligned(self.row_bytes)

    @property
    def nbytes(self) -> int:
        return self.rows(self.buffers)


def bytes_of(shapes: "Sequence[Sequence[int]]", dtype: torch.dtype) -> int:
    """What tensors of these shapes take of a buffer."""
    return sum(_aligned(torch.Size(shape).numel() * dtype.itemsize) for shape in shapes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# --- 3 kernels


@triton.jit(do_not_specialize=["rank"])
def publish_rows(
    table,  # int64 [world]: workspaces
    rank,
    world,
    FAILED: tl.constexpr,
    READY: tl.constexpr,
):
    """One program, behind the copies of the own rows: tells every peer of them."""
    word = tl.load(peer_pointer(table, rank, 0, tl.int64) + WORD)
    go_on = has_failed(peer_pointer(table, rank, FAILED, tl.int64)) == 0
    for step in range(1, world):
        if go_on:
            peer = nearest_first(step, rank, world)
            publish(peer_pointer(table, peer, READY + rank * _LINE, tl.int64), word)


@triton.jit(do_not_specialize=["rank", "source", "timeout_us"])
def await_rows(
    table,  # int64 [world]: workspaces
    status,  # int64: status page
    rank,
    source,
    timeout_us,
    FAILED: tl.constexpr,
    READY: tl.constexpr,
):
    """One program, before copies from the shelf of `source`: waits for its rows of this call."""
    word = tl.load(peer_pointer(table, rank, 0, tl.int64) + WORD)
    failed = peer_pointer(table, rank, FAILED, tl.int64)
    if has_failed(failed) == 0:
        ready = peer_pointer(table, rank, READY + source * _LINE, tl.int64)
        consume(ready, word, failed, status, _ROWS, source, timeout_us)


# --- 4 launchers


def lay(
    workspace: "Workspace[ShelfLayout]",
    tensors: "Sequence[torch.Tensor]",
    signature: int,
    timeout_us: int,
) -> int:
    """Begins a call: the tensors on this rank's shelf, told to all. Collective; gives the buffer.

    Args:
        tensors: of one dtype, any strides; shapes may differ between ranks, and fit the layout.
        signature: of what ranks must agree on (signals.signature_of).
    """
    layout = workspace.layout
    buffer = workspace.turn % layout.buffers
    workspace.turn += 1
    open_call[(1,)](
        *workspace.seat, signature, buffer, timeout_us,
        FAILED=layout.failed, DONE=layout.done, num_warps=OPENING_WARPS,
    )  # fmt: skip
    shapes = [x.shape for x in tensors]
    places = on_shelf(workspace, workspace.rank, buffer, shapes, tensors[0].dtype)
    for place, x in zip(places, tensors, strict=True):
        place.copy_(x, non_blocking=True)
    publish_rows[(1,)](
        workspace.table, workspace.rank, workspace.world,
        FAILED=layout.failed, READY=layout.ready, num_warps=OPENING_WARPS,
    )  # fmt: skip
    return buffer


def on_shelf(
    workspace: "Workspace[ShelfLayout]",
    rank: int,
    buffer: int,
    shapes: "Sequence[Sequence[int]]",
    dtype: torch.dtype,
) -> "list[torch.Tensor]":
    """Tensors of these shapes, where `rank` lays or has laid them; views of its memory.

    Raises:
        ValueError: they do not fit.
    """
    layout = workspace.layout
    if bytes_of(shapes, dtype) > _aligned(layout.row_bytes):
        raise ValueError(
            f"key_shelf: {bytes_of(shapes, dtype)} bytes for a shelf of {layout.row_bytes}"
        )
    found, at = [], layout.rows(buffer)
    for shape in shapes:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        flat = workspace.peers[rank].narrow(0, at, nbytes)
        found.append(flat.view(dtype).view(*shape))
        at += _aligned(nbytes)
    return found


def fetch(
    workspace: "Workspace[ShelfLayout]",
    source: int,
    pairs: "Sequence[tuple[torch.Tensor, torch.Tensor]]",
    rows: "Sequence[tuple[int, int]]",
    timeout_us: int,
) -> None:
    """Copies rows of `source`, once it has laid them: of each (on its shelf, here).

    Args:
        pairs: [batch, its rows, ...] on the shelf, and packed [batch, as many as `rows`, ...];
            contiguous.
        rows: (first, last + 1), ascending.
    """
    layout = workspace.layout
    await_rows[(1,)](
        workspace.table, workspace.status, workspace.rank, source, timeout_us,
        FAILED=layout.failed, READY=layout.ready, num_warps=OPENING_WARPS,
    )  # fmt: skip
    for shelf, here in pairs:
        for laid, got in zip(shelf, here, strict=True):  # of one batch element rows are neighbours
            at = 0
            for begin, end in rows:
                got[at : at + end - begin].copy_(laid[begin:end], non_blocking=True)
                at += end - begin

"""How rows get to the ranks that multiply them (protocol "rows here" of all_gather_gemm.py).

A call is opened; then rows are pushed by copies that the host starts, or pulled by programs of the
reader's kernel.
"""

import torch
import triton
import triton.language as tl

from .all_gather_plan import CALL, USED, WORD, AllGatherLayout, Shards
from .signals import LINE_BYTES, consume, flag_word, has_failed, peer_pointer, publish
from .tile_order import chunk_count, farthest_first, first_of_program, nearest_first, on_host
from .workspace import Workspace

COPY_BYTES = 32 * 1024  # in flight per pulling program
OPENING_WARPS = 1  # with more of them ptxas spills on sm_80
_READERS = tl.constexpr(0)  # the number of its wait on the status page
_LINE = tl.constexpr(LINE_BYTES)


def gathered_rows(
    workspace: "Workspace[AllGatherLayout]",
    shards: Shards,
    depth: int,
    dtype: torch.dtype,
    buffer: int,
) -> torch.Tensor:
    """[M, depth]: this rank's copy of all shards."""
    nbytes = shards.rows * depth * dtype.itemsize
    flat = workspace.memory.narrow(0, workspace.layout.rows(buffer), nbytes)
    return flat.view(dtype).view(shards.rows, depth)


def gathered_scales(
    workspace: "Workspace[AllGatherLayout]", shards: Shards, buffer: int
) -> torch.Tensor:
    """fp32 [M]: the scales of all rows."""
    flat = workspace.memory.narrow(0, workspace.layout.scales(buffer), shards.rows * 4)
    return flat.view(torch.float32)


def push(
    workspace: "Workspace[AllGatherLayout]",
    shards: Shards,
    chunk_rows: int,
    row_bytes: int,
    buffer: int,
    scaled: bool,
) -> None:
    """Copies this rank's rows to every peer, chunk by chunk, each chunk's flag word behind it.

    The peer that reads us first comes first: rank - 1. All copies are of contiguous bytes, so on
    CUDA a copy engine does them, in stream order, and needs no multiprocessor.
    """
    layout, rank, world = workspace.layout, workspace.rank, workspace.world
    own = workspace.memory
    chunks = shards.chunks(rank, chunk_rows)
    regions = [(layout.rows(buffer), row_bytes)]
    if scaled:
        regions.append((layout.scales(buffer), 4))
    for step in range(world - 1):
        peer = on_host(farthest_first)(step, rank, world)
        for number, (first, end) in enumerate(chunks):
            for start, nbytes in regions:
                part = slice(start + first * nbytes, start + end * nbytes)
                workspace.peers[peer][part].copy_(own[part], non_blocking=True)
            word = workspace.word(rank, layout.control + 8 * WORD.value)
            flag = workspace.word(peer, layout.pushed(rank, number))
            flag.copy_(word, non_blocking=True)  # 8 bytes at once, never byte by byte


@triton.jit(do_not_specialize=["rank", "signature", "buffer", "timeout_us"])
def open_call(
    table,  # int64 [world]: workspaces
    status,  # int64: status page
    rank,
    world,
    signature,
    buffer,
    timeout_us,
    FAILED: tl.constexpr,
    DONE: tl.constexpr,
):
    """One program: ends the calls before for all readers, waits for `buffer`, begins the call."""
    failed = peer_pointer(table, rank, FAILED, tl.int64)
    go_on = has_failed(failed) == 0
    control = peer_pointer(table, rank, 0, tl.int64)
    ended = tl.load(control + CALL)
    for step in range(1, world):
        if go_on:
            peer = nearest_first(step, rank, world)
            publish(peer_pointer(table, peer, DONE + rank * _LINE, tl.int64), flag_word(ended, 0))
    used = tl.load(control + USED + buffer)
    for step in range(1, world):
        if go_on:
            peer = nearest_first(step, rank, world)
            done = peer_pointer(table, rank, DONE + peer * _LINE, tl.int64)
            go_on = consume(done, flag_word(used, 0), failed, status, _READERS, peer, timeout_us)
    if go_on:
        tl.store(control + CALL, ended + 1)
        tl.store(control + USED + buffer, ended + 1)
        tl.store(control + WORD, flag_word(ended + 1, signature))


@triton.jit
def pull(
    table,
    starts,
    status,
    rows_offset,
    scales_offset,
    SCALED: tl.constexpr,
    rank,
    world,
    chunk_rows,
    K,
    word,
    go_on,
    timeout_us,
    STEP: tl.constexpr,  # the number of this wait on the status page
    PULLERS: tl.constexpr,
    ITEM: tl.constexpr,
    COPY: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FAILED: tl.constexpr,
    FLAGS: tl.constexpr,
    READY: tl.constexpr,
):
    """What the first PULLERS programs of a launch do; arguments as all_gather_gemm_kernel's.

    Chunks are dealt to them in the order in which tiles want them.
    """
    program = tl.program_id(0)
    failed = peer_pointer(table, rank, FAILED, tl.int64)
    if program == 0:  # the rows were stored by an earlier launch
        for step in range(1, world):
            if go_on:
                peer = nearest_first(step, rank, world)
                publish(peer_pointer(table, peer, READY + rank * _LINE, tl.int64), word)
    before = 0
    for step in range(1, world):
        source = nearest_first(step, rank, world)
        start = tl.load(starts + source)
        size = tl.load(starts + source + 1) - start
        chunks = chunk_count(size, chunk_rows)
        mine = first_of_program(before, program, PULLERS)
        if go_on & (mine < chunks):
            ready = peer_pointer(table, rank, READY + source * _LINE, tl.int64)
            go_on = consume(ready, word, failed, status, STEP, source, timeout_us)
        for chunk in range(mine, chunks, PULLERS):
            if go_on:
                first = start + chunk * chunk_rows
                count = tl.minimum(chunk_rows, size - chunk * chunk_rows)
                _copy(
                    peer_pointer(table, rank, rows_offset, ITEM),
                    peer_pointer(table, source, rows_offset, ITEM),
                    first.to(tl.int64) * K,
                    count.to(tl.int64) * K,
                    COPY,
                )
                if SCALED:
                    _copy(
                        peer_pointer(table, rank, scales_offset, tl.float32),
                        peer_pointer(table, source, scales_offset, tl.float32),
                        first.to(tl.int64),
                        count.to(tl.int64),
                        1024,
                    )
                offset = FLAGS + (source * MAX_CHUNKS + chunk) * _LINE
                publish(peer_pointer(table, rank, offset, tl.int64), word)
        before += chunks


@triton.jit
def _copy(to, source, start, count, COPY: tl.constexpr):
    for at in range(0, count, COPY):
        lane = at + tl.arange(0, COPY).to(tl.int64)
        tl.store(to + start + lane, tl.load(source + start + lane, lane < count), lane < count)

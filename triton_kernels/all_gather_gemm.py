"""out_i = all_gather(x) @ w_i^T for several weights by one gather.

    x_rows [m_r, K] of rank r, m_r as `shards` says (uneven and empty ones too); x = all x_rows
    w_i [N_i, K], each rank's own; out_i [M, N_i], M = sum of m_r

Rows arrive in chunks while tiles of the rank's own rows are multiplied; then come the shards in
ring order from rank + 1, and a tile waits only for the chunks it reads. Rows are pushed by the copy
engine, or pulled by programs of the kernel itself.
"""

# Protocol "rows here": a 64-bit flag per (source, chunk) and way of moving, set to
# call number << 32 | signature, never cleared, by one writer; p = number of this call
#   writer    push: the source's copies in stream order, the chunk and then the word of its flag.
#             pull: the source stores its rows before the launch and publishes "ready" to every
#             peer; a puller of the reader consumes ready >= p, fetches the chunk, publishes its
#             flag to its own rank
#   reader    a tile consumes the flags (source, chunk) of the rows it reads, >= p; then loads
#   reuse     call p writes buffer b only when every reader's done flag >= p', the last call that
#             wrote b. Done p' is published at the start of the reader's next call, so gathered rows
#             may be read until then; with two buffers in turn that has come long before
#   progress  done >= p' needs that the reader began call p' + 1, not that it is scheduled now; a
#             push waits for nothing more, a puller for the source's opening of call p, a tile for
#             pushes, or for pullers of its own grid, which are its first programs
# Pushes must not need a multiprocessor: waiting tiles may hold them all. Rows are contiguous, so
# that a copy engine moves them. After a failed wait the rows of calls under way are undefined.

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .all_gather_plan import WORD, AllGatherLayout, AllGatherPlan, Shards
from .all_gather_rows import (
    COPY_BYTES,
    OPENING_WARPS,
    gathered_rows,
    gathered_scales,
    open_call,
    pull,
    push,
)
from .epilogue import write_tile
from .gemm import multiply_tile, must_upcast, operand, scale_stride
from .signals import (
    LINE_BYTES,
    consume,
    fence_descriptor_reads,
    has_failed,
    peer_pointer,
)
from .tile_order import (
    chunk_count,
    first_of_program,
    grouped_tile,
    nearest_first,
    tile_count,
)
from .workspace import Workspace

# What each wait is, by its number on the status page.
WAITS = (
    "wait for readers of a buffer",
    "wait for rows to pull",
    "wait for rows",
)
_PULL = tl.constexpr(1)
_ROWS = tl.constexpr(2)
_LINE = tl.constexpr(LINE_BYTES)


# --- 2 device helpers


@triton.jit
def _consume_rows(
    table,
    rank,
    source,
    first,  # rows [first, end) of the source's shard
    end,
    chunk_rows,
    arrived,  # the last chunk of this source that was waited for, or -1
    go_on,
    word,
    status,
    timeout_us,
    MAX_CHUNKS: tl.constexpr,
    FAILED: tl.constexpr,
    FLAGS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """(the last chunk waited for, whether to go on)."""
    failed = peer_pointer(table, rank, FAILED, tl.int64)
    for chunk in range(first // chunk_rows, chunk_count(end, chunk_rows)):
        if go_on & (chunk != arrived):
            offset = FLAGS + (source * MAX_CHUNKS + chunk) * _LINE
            flag = peer_pointer(table, rank, offset, tl.int64)
            go_on = consume(flag, word, failed, status, _ROWS, source, timeout_us)
            arrived = chunk
            if DESCRIPTORS:
                fence_descriptor_reads()
    return arrived, go_on


# --- 3 kernels


@triton.jit(do_not_specialize=["rank", "chunk_rows", "timeout_us"])
def all_gather_gemm_kernel(
    outs,  # tuple of [M, N_i], any strides
    gathered,  # [M, K] in this rank's workspace: pointer or descriptor
    weights,  # tuple of [N_i, K]: pointers or descriptors
    biases,  # tuple of [N_i] or None
    row_scale,  # fp32 [M] in this rank's workspace, or None
    column_scales,  # tuple of fp32 [N_i] or [1], or None
    columns,  # tuple of N_i
    K,
    strides_om,  # tuples
    strides_on,
    strides_wn,
    strides_wk,
    column_scale_strides,
    starts,  # int32 [world + 1]: first row of each shard
    rows_offset,  # of the buffer, in workspaces
    scales_offset,
    table,  # int64 [world]: workspaces
    status,  # int64: status page
    rank,
    world,
    chunk_rows,
    timeout_us,
    PULLERS: tl.constexpr,  # the first programs fetch rows from peers; 0: rows are pushed
    ITEM: tl.constexpr,  # an integer type as wide as an element of x
    COPY: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FAILED: tl.constexpr,
    FLAGS: tl.constexpr,  # pushed, or pulled
    READY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: PULLERS programs that pull, then those that multiply."""
    failed = peer_pointer(table, rank, FAILED, tl.int64)
    word = tl.load(peer_pointer(table, rank, 0, tl.int64) + WORD)
    go_on = has_failed(failed) == 0
    program = tl.program_id(0)

    if PULLERS > 0:  # noqa: SIM102  (a constant: without pullers their code must not be compiled)
        if program < PULLERS:
            pull(
                table,
                starts,
                status,
                rows_offset,
                scales_offset,
                row_scale is not None,
                rank,
                world,
                chunk_rows,
                K,
                word,
                go_on,
                timeout_us,
                _PULL,
                PULLERS,
                ITEM,
                COPY,
                MAX_CHUNKS,
                FAILED,
                FLAGS,
                READY,
            )
    if program >= PULLERS:
        worker = program - PULLERS
        workers = tl.num_programs(0) - PULLERS
        before = 0
        for step in range(world):
            source = nearest_first(step, rank, world)
            start = tl.load(starts + source)
            end = tl.load(starts + source + 1)
            tiles_m = tile_count(end - start, BLOCK_M)
            arrived = tl.full((), -1, tl.int32)
            for i in tl.static_range(len(outs)):
                tiles_n = tile_count(columns[i], BLOCK_N)
                mine = first_of_program(before, worker, workers)
                for index in range(mine, tiles_m * tiles_n, workers):
                    tile_m, tile_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
                    row = start + tile_m * BLOCK_M
                    column = tile_n * BLOCK_N
                    if source != rank:
                        first = tile_m * BLOCK_M
                        arrived, go_on = _consume_rows(
                            table,
                            rank,
                            source,
                            first,
                            tl.minimum(first + BLOCK_M, end - start),
                            chunk_rows,
                            arrived,
                            go_on,
                            word,
                            status,
                            timeout_us,
                            MAX_CHUNKS,
                            FAILED,
                            FLAGS,
                            DESCRIPTORS,
                        )
                    if go_on:
                        acc = multiply_tile(
                            gathered,
                            weights[i],
                            row,
                            column,
                            end,
                            columns[i],
                            K,
                            K,
                            1,
                            strides_wn[i],
                            strides_wk[i],
                            BLOCK_M,
                            BLOCK_N,
                            BLOCK_K,
                            UPCAST,
                            DESCRIPTORS,
                        )
                        write_tile(
                            outs[i],
                            acc,
                            row,
                            column,
                            end,
                            columns[i],
                            strides_om[i],
                            strides_on[i],
                            row_scale,
                            1,
                            column_scales[i],
                            column_scale_strides[i],
                            biases[i],
                            None,
                            0,
                            0,
                            ACTIVATION,
                            BLOCK_M,
                            BLOCK_N,
                        )
                before += tiles_m * tiles_n
        # Without a tile nothing was waited for, and the gathered rows must be here all the same.
        if (before == 0) & (worker == 0):
            for step in range(1, world):
                source = nearest_first(step, rank, world)
                size = tl.load(starts + source + 1) - tl.load(starts + source)
                _, go_on = _consume_rows(
                    table,
                    rank,
                    source,
                    0,
                    size,
                    chunk_rows,
                    tl.full((), -1, tl.int32),
                    go_on,
                    word,
                    status,
                    timeout_us,
                    MAX_CHUNKS,
                    FAILED,
                    FLAGS,
                    False,
                )


# --- 4 launcher


def all_gather_gemm(
    outs: "Sequence[torch.Tensor]",
    x: torch.Tensor,
    weights: "Sequence[torch.Tensor]",
    workspace: "Workspace[AllGatherLayout]",
    shards: Shards,
    plan: AllGatherPlan,
    *,
    biases: "Sequence[torch.Tensor | None] | None" = None,
    x_scale: "torch.Tensor | None" = None,
    column_scales: "Sequence[torch.Tensor | None] | None" = None,
    activation: str = "none",
    timeout_s: float = 600.0,
    copy_stream: "torch.cuda.Stream | None" = None,
) -> torch.Tensor:
    """outs[i] = activation(all_gather(x) @ weights[i]^T * scales + biases[i]). Collective.

    Args:
        outs: [M, N_i], fp32, fp16 or bf16, any strides.
        x: this rank's rows [m_r, K]; fp32, fp16, bf16 or float8_e4m3fn, any strides.
        weights: [N_i, K] of x's dtype, any strides.
        workspace, shards, plan: equal on all ranks, but for plan.tiles.
        biases: [N_i] each, contiguous, or None.
        x_scale: fp32 [m_r], gathered with the rows; all ranks pass one, or none does.
        column_scales: fp32 [N_i] or [1] each, or None.
        timeout_s: seconds that one wait may take.
        copy_stream: on CUDA, where pushes run; not the current one.

    Returns:
        The gathered rows [M, K], inside the workspace: valid until its next call begins.

    Raises:
        ValueError: the call does not fit the workspace, alike on all ranks.

    A wait that fails is told by `signals.raise_failure(workspace.status, ..., WAITS)`.
    """
    layout, rank = workspace.layout, workspace.rank
    row_bytes = x.size(1) * x.element_size()
    reason = layout.why_not(shards.sizes, row_bytes, plan.chunk_rows)
    if reason:
        raise ValueError(f"all_gather_gemm: {reason}")
    if not plan.pullers and x.is_cuda and copy_stream is None and workspace.world > 1:
        raise ValueError("all_gather_gemm: pushes on CUDA need copy_stream, a stream of their own")
    buffer = workspace.turn % layout.buffers
    gathered = gathered_rows(workspace, shards, x.size(1), x.dtype, buffer)
    if shards.rows == 0:
        return gathered
    workspace.turn += 1
    timeout_us = min(int(timeout_s * 1e6), 2**31 - 1)
    scaled = x_scale is not None
    signature = plan.signature(shards.sizes, x.size(1), str(x.dtype), scaled, buffer)
    open_call[(1,)](
        *(*workspace.seat, signature, buffer, timeout_us),
        FAILED=layout.failed,
        DONE=layout.done,
        num_warps=OPENING_WARPS,
    )
    own = slice(shards.starts[rank], shards.starts[rank + 1])
    gathered[own].copy_(x)
    scales = gathered_scales(workspace, shards, buffer) if scaled else None
    if scales is not None:
        scales[own].copy_(x_scale)
    pushed = (workspace, shards, plan.chunk_rows, row_bytes, buffer, scaled)
    if not plan.pullers and copy_stream is not None:
        copy_stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(copy_stream):
            push(*pushed)
    elif not plan.pullers:
        push(*pushed)

    config = plan.tiles
    count = len(outs)
    scale_columns = tuple(column_scales or (None,) * count)
    all_gather_gemm_kernel[(plan.pullers + config.programs,)](
        tuple(outs),
        operand(gathered, config.block_m, config),
        tuple(operand(weight, config.block_n, config) for weight in weights),
        tuple(biases or (None,) * count),
        scales,
        scale_columns,
        tuple(weight.size(0) for weight in weights),
        x.size(1),
        tuple(out.stride(0) for out in outs),
        tuple(out.stride(1) for out in outs),
        tuple(weight.stride(0) for weight in weights),
        tuple(weight.stride(1) for weight in weights),
        tuple(scale_stride(scale) for scale in scale_columns),
        shards.table,
        layout.rows(buffer),
        layout.scales(buffer),
        *workspace.seat,
        plan.chunk_rows,
        timeout_us,
        PULLERS=plan.pullers,
        ITEM={1: tl.int8, 2: tl.int16, 4: tl.int32}[x.element_size()],
        COPY=COPY_BYTES // x.element_size(),
        ACTIVATION=activation,
        UPCAST=must_upcast(x.dtype),
        **layout.constants(plan.mode),
        **config.constants(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if not plan.pullers and copy_stream is not None:
        torch.cuda.current_stream(x.device).wait_stream(copy_stream)
    return gathered

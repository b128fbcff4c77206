"""What ends a GEMM + all-reduce: the sum in the switch, the collection of tiles, RMSNorm of rows.

The protocol is in slots.py; the launches are put together in gemm_all_reduce.py.
"""

import torch
import triton
import triton.language as tl

from .epilogue import finish_tile, store_tile
from .gemm import TileConfig
from .multicast import fence_multicast, store_to_all, sum_of_all
from .partial_sums import LANES, MOST_REGISTERS, SUM_OFFSETS, WARPS, programs_of, step_of
from .signals import consume, consume_all, flag_word, has_failed, peer_pointer, publish
from .slots import (
    FAILED,
    PUSH_CALL,
    SUM_CALL,
    TYPES,
    WAIT_READY,
    SlotLayout,
    consume_tiles,
    flag_of,
    own_word,
)
from .tile_order import farthest_first, first_of_program, nearest_first, tile_count
from .workspace import Workspace

LARGEST_NORM = 16384  # columns that one program holds: 32 registers of each of 512 threads


# --- 3 kernels


@triton.jit(do_not_specialize=["rank", "rows", "first_row", "signature", "timeout_us"])
def switch_kernel(
    bias,  # [N] or None: added once, here
    multicast,  # address of all workspaces at once
    table,
    status,
    rank,
    world,
    rows,  # of the part that this rank sums
    first_row,  # of that part
    N,
    signature,
    timeout_us,
    PUSHED: tl.constexpr,  # offsets of the layout
    READY: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    RESULTS: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP_M: tl.constexpr,
    THREADS: tl.constexpr,
    RESULT: tl.constexpr,
):
    """results of all ranks = sum over slot 0 of all ranks (fp32, the switch adds) + bias."""
    failed = own_word(table, rank, FAILED)
    call = tl.load(own_word(table, rank, SUM_CALL))
    word = flag_word(call, signature)
    buffer = SLOTS + (call % 2) * world * SLOT_BYTES
    finished = RESULTS + (call % 2) * RESULT_BYTES
    tiles_n = tile_count(N, BLOCK_N)
    count = tile_count(rows, BLOCK_M) * tiles_n
    go_on = not has_failed(failed)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        if go_on:
            go_on = consume_tiles(
                *(table, rank, world, PUSHED, tile, 1, TILES),
                *(word, failed, status, timeout_us, THREADS),
            )
            fence_multicast()
        if go_on:
            fours = tile % tiles_n * (BLOCK_N // 4) + tl.arange(0, BLOCK_N // 4)
            top = tile // tiles_n * BLOCK_M
            for step in range(0, BLOCK_M, STEP_M):
                lines = top + step + tl.arange(0, STEP_M)
                inside = (lines < rows)[:, None] & (fours * 4 < N)[None, :]
                places = (first_row + lines).to(tl.int64)[:, None] * (N // 4) + fours[None, :]
                a, b, c, d = sum_of_all(multicast, table, world, buffer, places, inside)
                if bias is not None:
                    here = fours * 4 < N
                    at = bias + fours * 4
                    a += tl.load(at, mask=here, other=0.0).to(tl.float32)[None, :]
                    b += tl.load(at + 1, mask=here, other=0.0).to(tl.float32)[None, :]
                    c += tl.load(at + 2, mask=here, other=0.0).to(tl.float32)[None, :]
                    d += tl.load(at + 3, mask=here, other=0.0).to(tl.float32)[None, :]
                store_to_all(multicast, table, world, finished, places, inside, a, b, c, d, RESULT)
            fence_multicast()
            for place in range(world):
                peer = farthest_first(place, rank, world)
                publish(flag_of(table, peer, READY, rank, tile, TILES), word)


@triton.jit(do_not_specialize=["rank", "signature", "timeout_us"])
def collect_kernel(
    out,  # [M, N]
    residual,  # [M, N] or None
    row_starts,  # int32 [world + 1]: rows by owner
    table,
    status,
    rank,
    world,
    N,
    signature,
    timeout_us,
    stride_om,
    stride_on,
    stride_rm,
    stride_rn,
    READY: tl.constexpr,  # offsets of the layout
    RESULTS: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP_M: tl.constexpr,
    RESULT: tl.constexpr,
):
    """out = finished tiles of all owners, our own first, + residual."""
    failed = own_word(table, rank, FAILED)
    call = tl.load(own_word(table, rank, SUM_CALL))
    program = tl.program_id(0)
    if program == 0:
        tl.store(own_word(table, rank, PUSH_CALL), call)
    word = flag_word(call, signature)
    tiles_n = tile_count(N, BLOCK_N)
    go_on = not has_failed(failed)
    before = 0
    for part in range(world):
        owner = nearest_first(part, rank, world)
        start = tl.load(row_starts + owner)
        end = tl.load(row_starts + owner + 1)
        count = tile_count(end - start, BLOCK_M) * tiles_n
        first = first_of_program(before, program, tl.num_programs(0))
        for tile in range(first, count, tl.num_programs(0)):
            if go_on:
                flag = flag_of(table, rank, READY, owner, tile, TILES)
                go_on = consume(flag, word, failed, status, WAIT_READY, owner, timeout_us)
                fence_multicast()
            if go_on:
                columns = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
                top = start + tile // tiles_n * BLOCK_M
                for step in range(0, BLOCK_M, STEP_M):
                    lines = top + step + tl.arange(0, STEP_M)
                    offsets = lines.to(tl.int64)[:, None] * N + columns[None, :]
                    inside = (lines < end)[:, None] & (columns < N)[None, :]
                    finished = RESULTS + (call % 2) * RESULT_BYTES
                    result = peer_pointer(table, rank, finished, RESULT)
                    values = tl.load(result + offsets, mask=inside, other=0.0).to(tl.float32)
                    values = finish_tile(
                        values,
                        lines,
                        columns,
                        end,
                        N,
                        None,
                        0,
                        None,
                        0,
                        None,
                        residual,
                        stride_rm,
                        stride_rn,
                        "none",
                    )
                    store_tile(out, values, lines, columns, end, N, stride_om, stride_on)
        before += count


@triton.jit(do_not_specialize=["rank", "signature", "timeout_us"])
def norm_kernel(
    out,  # [M, N]: normalised
    hidden,  # [M, N]: the sum with bias and residual, rounded
    weight,  # [N]
    bias,  # [N] or None
    residual,  # [M, N] or None
    row_starts,  # int32 [parts + 1]
    table,
    status,
    rank,
    world,
    parts,
    N,
    eps,
    signature,
    timeout_us,
    stride_om,
    stride_on,
    stride_hm,
    stride_hn,
    stride_rm,
    stride_rn,
    PUSHED: tl.constexpr,  # offsets of the layout
    READY: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    RESULTS: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, N or more
    THREADS: tl.constexpr,
    FROM: tl.constexpr,  # dtype of slots, or of results
    FROM_SLOTS: tl.constexpr,  # sums the slots of all sources; else takes finished rows
):
    """RMSNorm row by row; a row waits for all tiles that hold part of it."""
    failed = own_word(table, rank, FAILED)
    call = tl.load(own_word(table, rank, SUM_CALL))
    program = tl.program_id(0)
    if program == 0:
        tl.store(own_word(table, rank, PUSH_CALL), call)
    word = flag_word(call, signature)
    tiles_n = tile_count(N, BLOCK_N)
    columns = tl.arange(0, COLUMNS)
    inside = columns < N
    go_on = not has_failed(failed)
    before = 0
    for part in range(parts):
        owner = nearest_first(part, rank, world) % parts
        start = tl.load(row_starts + owner)
        count = tl.load(row_starts + owner + 1) - start
        first = first_of_program(before, program, tl.num_programs(0))
        for line in range(first, count, tl.num_programs(0)):
            tile = line // BLOCK_M * tiles_n
            if go_on:
                if FROM_SLOTS:
                    go_on = consume_tiles(
                        *(table, rank, world, PUSHED, tile, tiles_n, TILES),
                        *(word, failed, status, timeout_us, THREADS),
                    )
                else:
                    flags = flag_of(table, rank, READY, owner, tile, TILES)
                    go_on = consume_all(
                        *(flags, 1, 0, tiles_n, word, failed, status),
                        *(WAIT_READY, owner, timeout_us, THREADS),
                    )
                    fence_multicast()
            if go_on:
                row = (start + line).to(tl.int64)
                h = tl.zeros((COLUMNS,), tl.float32)
                if FROM_SLOTS:
                    buffer = SLOTS + (call % 2) * world * SLOT_BYTES
                    for source in range(world):
                        slot = peer_pointer(table, rank, buffer + source * SLOT_BYTES, FROM)
                        partial = tl.load(slot + row * N + columns, mask=inside, other=0.0)
                        h += partial.to(tl.float32)
                else:
                    finished = RESULTS + (call % 2) * RESULT_BYTES
                    result = peer_pointer(table, rank, finished, FROM)
                    h += tl.load(result + row * N + columns, mask=inside, other=0.0).to(tl.float32)
                if bias is not None:
                    h += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
                if residual is not None:
                    at = residual + row * stride_rm + columns.to(tl.int64) * stride_rn
                    h += tl.load(at, mask=inside, other=0.0).to(tl.float32)
                at = hidden + row * stride_hm + columns.to(tl.int64) * stride_hn
                tl.store(at, h.to(hidden.dtype.element_ty), mask=inside)
                scale = tl.rsqrt(tl.sum(h * h, axis=0) / N + eps)
                h *= scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
                at = out + row * stride_om + columns.to(tl.int64) * stride_on
                tl.store(at, h.to(out.dtype.element_ty), mask=inside)
        before += count


# --- 4 launchers


def sum_by_switch(
    workspace: "Workspace[SlotLayout]",
    rows: int,
    first_row: int,
    config: TileConfig,
    signature: int,
    timeout_us: int,
    bias: "torch.Tensor | None",
    multicast: int,
) -> None:
    """Launches the sum of this rank's part into everyone's results."""
    layout = workspace.layout
    switch_kernel[(programs_of(rows, config, layout),)](
        bias,
        multicast,
        *workspace.seat,
        rows,
        first_row,
        layout.n,
        signature,
        timeout_us,
        **layout.constants(*SUM_OFFSETS),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STEP_M=step_of(config),
        THREADS=LANES,
        RESULT=TYPES[layout.result_dtype],
        num_warps=WARPS,
        maxnreg=MOST_REGISTERS,
    )


def collect(
    out: torch.Tensor,
    workspace: "Workspace[SlotLayout]",
    row_starts: torch.Tensor,
    config: TileConfig,
    signature: int,
    timeout_us: int,
    residual: "torch.Tensor | None",
) -> None:
    """Launches the collection of all owners' results into out."""
    layout = workspace.layout
    collect_kernel[(programs_of(out.size(0), config, layout),)](
        out,
        residual,
        row_starts,
        *workspace.seat,
        layout.n,
        signature,
        timeout_us,
        *out.stride(),
        *(residual.stride() if residual is not None else (0, 0)),
        **layout.constants("ready", "results", "result_bytes", "tiles"),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STEP_M=step_of(config),
        RESULT=TYPES[layout.result_dtype],
        num_warps=WARPS,
        maxnreg=MOST_REGISTERS,
    )


def norm_rows(
    out: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    workspace: "Workspace[SlotLayout]",
    row_starts: torch.Tensor,
    parts: int,
    config: TileConfig,
    signature: int,
    timeout_us: int,
    bias: "torch.Tensor | None",
    residual: "torch.Tensor | None",
    from_slots: bool,
) -> None:
    """Launches RMSNorm over rows that are summed here, or were summed by their owners."""
    layout = workspace.layout
    columns = max(128, triton.next_power_of_2(layout.n))
    warps = norm_warps(columns)
    norm_kernel[(max(1, min(out.size(0), config.programs)),)](
        out,
        hidden,
        weight,
        bias,
        residual,
        row_starts,
        *workspace.seat,
        parts,
        layout.n,
        eps,
        signature,
        timeout_us,
        *out.stride(),
        *hidden.stride(),
        *(residual.stride() if residual is not None else (0, 0)),
        **layout.constants(*SUM_OFFSETS),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        COLUMNS=columns,
        THREADS=32 * warps,
        FROM=TYPES[layout.slot_dtype if from_slots else layout.result_dtype],
        FROM_SLOTS=from_slots,
        num_warps=warps,
        maxnreg=MOST_REGISTERS,
    )


def norm_warps(columns: int) -> int:
    """Warps of a program that holds rows of `columns`: up to 32 values for each thread."""
    return 4 if columns <= 4096 else 8 if columns <= 8192 else 16

"""Tiles multiplied and pushed into slots, and slots summed: what the kernels on slots.py share.

    push_kernel    multiplies tiles of x @ w^T in the order of their owners, farthest first, and
                   stores each where it will be summed
    sum_kernel     waits for a tile of every source, adds in rank order in fp32, rounds once

The protocol is in slots.py.
"""

import torch
import triton
import triton.language as tl

from .epilogue import finish_tile, store_tile
from .gemm import TileConfig, multiply_tile, must_upcast, operand, scale_stride
from .multicast import fence_multicast
from .signals import (
    consume,
    flag_word,
    has_failed,
    peer_pointer,
    publish,
)
from .slots import (
    FAILED,
    LINE_STEP,
    PUSH_CALL,
    SUM_CALL,
    TYPES,
    WAIT_STARTED,
    SlotLayout,
    consume_tiles,
    flag_of,
    own_word,
    tiles_of,
)
from .tile_order import farthest_first, first_of_program, grouped_tile, tile_count
from .workspace import Workspace

# Where a push stores a tile, and whom it tells.
TO_OWNER = tl.constexpr(0)  # this rank's slot at the owner; the owner
TO_ALL = tl.constexpr(1)  # this rank's slot at every rank; every rank
TO_SELF = tl.constexpr(2)  # this rank's own slot 0, for a sum by multicast; the owner

WARPS = 4  # of the kernels that sum
LANES = 32 * WARPS
# Of their threads. Left alone the assembler aims at more programs at once, and spills for that.
MOST_REGISTERS = 128
# What the kernels that sum take of the layout.
SUM_OFFSETS = ("pushed", "ready", "slots", "slot_bytes", "results", "result_bytes", "tiles")
SUM_ELEMENTS = 2048  # of a tile, summed at once: 16 registers of a thread


@triton.jit
def _store_slot(
    slot,
    values,
    rows,
    column,  # the tile's first
    row_end,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Stores a tile into a slot [*, N].

    In HALVES of its columns where a thread has 128 sums: with all addresses at once they do not fit
    its registers (128x256 with eight warps on sm_100, where sums come from tensor memory).
    """
    if HALVES:
        HALF: tl.constexpr = BLOCK_N // 2
        pair = tl.permute(tl.reshape(values, (BLOCK_M, 2, HALF)), (0, 2, 1))
        left, right = tl.split(pair)
        first = column + tl.arange(0, HALF)
        store_tile(slot, left, rows, first, row_end, N, N, 1)
        store_tile(slot, right, rows, first + HALF, row_end, N, N, 1)
    else:
        store_tile(slot, values, rows, column + tl.arange(0, BLOCK_N), row_end, N, N, 1)


@triton.jit(do_not_specialize=["rank", "signature", "timeout_us"])
def push_kernel(
    a,  # [M, K] pointer or descriptor: this rank's columns of x
    b,  # [N, K] pointer or descriptor: this rank's columns of the weight
    row_scale,  # fp32 [M], one value, or None: scale of a
    column_scale,  # fp32 [N], one value, or None: scale of b
    row_starts,  # int32 [parts + 1]: rows of the result by owner
    table,  # int64 [world], addresses of the workspaces
    status,
    rank,
    world,
    N,
    K,
    signature,
    timeout_us,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    row_scale_stride,
    column_scale_stride,
    STARTED: tl.constexpr,  # offsets of the layout
    PUSHED: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
    SLOT: tl.constexpr,  # dtype of partial sums
    TARGET: tl.constexpr,  # TO_OWNER, TO_ALL or TO_SELF
    HALVES: tl.constexpr,  # a tile leaves the registers in two halves
):
    """Multiplies, farthest owner first, and stores each tile where it will be summed."""
    failed = own_word(table, rank, FAILED)
    call = tl.load(own_word(table, rank, PUSH_CALL)) + 1
    program = tl.program_id(0)
    if program == 0:
        tl.store(own_word(table, rank, SUM_CALL), call)
        for peer in range(world):
            flag = peer_pointer(table, peer, STARTED + rank * LINE_STEP, tl.int64)
            publish(flag, flag_word(call, 0))
    word = flag_word(call, signature)
    buffer = SLOTS + (call % 2) * world * SLOT_BYTES
    tiles_n = tile_count(N, BLOCK_N)
    parts = world
    readers = 1
    if TARGET == TO_ALL:
        parts = 1
        readers = world
    go_on = not has_failed(failed)
    before = 0
    for part in range(parts):
        owner = farthest_first(part, rank, world)
        place = owner
        if TARGET == TO_ALL:
            place = owner * 0  # one part, all rows
        start = tl.load(row_starts + place)
        end = tl.load(row_starts + place + 1)
        for reader in range(readers):
            peer = farthest_first(part + reader, rank, world)
            if go_on:
                flag = peer_pointer(table, rank, STARTED + peer * LINE_STEP, tl.int64)
                begun = flag_word(call - 1, 0)
                go_on = consume(flag, begun, failed, status, WAIT_STARTED, peer, timeout_us)
        tiles_m = tile_count(end - start, BLOCK_M)
        count = tl.where(go_on, tiles_m * tiles_n, 0)
        first = first_of_program(before, program, tl.num_programs(0))
        for index in range(first, count, tl.num_programs(0)):
            tile_m, tile_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
            row = start + tile_m * BLOCK_M
            column = tile_n * BLOCK_N
            acc = multiply_tile(
                a,
                b,
                row,
                column,
                end,
                N,
                K,
                stride_am,
                stride_ak,
                stride_bn,
                stride_bk,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                UPCAST,
                DESCRIPTORS,
            )
            rows = row + tl.arange(0, BLOCK_M)
            columns = column + tl.arange(0, BLOCK_N)
            values = finish_tile(
                acc,
                rows,
                columns,
                end,
                N,
                row_scale,
                row_scale_stride,
                column_scale,
                column_scale_stride,
                None,
                None,
                0,
                0,
                "none",
            )
            tile = tile_m * tiles_n + tile_n
            if TARGET == TO_ALL:
                for step in range(world):
                    peer = farthest_first(step, rank, world)
                    slot = peer_pointer(table, peer, buffer + rank * SLOT_BYTES, SLOT)
                    _store_slot(
                        slot, values, rows - start, column, end - start, N, BLOCK_M, BLOCK_N, HALVES
                    )
                for step in range(world):
                    peer = farthest_first(step, rank, world)
                    publish(flag_of(table, peer, PUSHED, rank, tile, TILES), word)
            else:
                if TARGET == TO_SELF:
                    slot = peer_pointer(table, rank, buffer, SLOT)
                    _store_slot(slot, values, rows, column, end, N, BLOCK_M, BLOCK_N, HALVES)
                    fence_multicast()
                else:
                    slot = peer_pointer(table, owner, buffer + rank * SLOT_BYTES, SLOT)
                    _store_slot(
                        slot, values, rows - start, column, end - start, N, BLOCK_M, BLOCK_N, HALVES
                    )
                publish(flag_of(table, owner, PUSHED, rank, tile, TILES), word)
        before += count


@triton.jit(do_not_specialize=["rank", "rows", "first_row", "signature", "timeout_us"])
def sum_kernel(
    out,  # [rows, N] or None if SEND
    bias,  # [N] or None: added once, here
    residual,  # [rows, N] or None
    table,
    status,
    rank,
    world,
    rows,  # of the part that this rank sums
    first_row,  # of that part, in results
    N,
    signature,
    timeout_us,
    stride_om,
    stride_on,
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
    STEP_M: tl.constexpr,  # rows summed at once
    THREADS: tl.constexpr,
    SLOT: tl.constexpr,
    RESULT: tl.constexpr,
    SEND: tl.constexpr,  # finished tiles go to every rank's results, not to out
    ACTIVATION: tl.constexpr,
):
    """out or results = activation(sum over sources, in rank order, + bias) + residual."""
    failed = own_word(table, rank, FAILED)
    call = tl.load(own_word(table, rank, SUM_CALL))
    begins = own_word(table, rank, PUSH_CALL)
    tl.store(begins, call, mask=(tl.program_id(0) == 0) & (not SEND))
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
        if go_on:
            columns = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
            top = tile // tiles_n * BLOCK_M
            for step in range(0, BLOCK_M, STEP_M):
                lines = top + step + tl.arange(0, STEP_M)
                offsets = lines.to(tl.int64)[:, None] * N + columns[None, :]
                inside = (lines < rows)[:, None] & (columns < N)[None, :]
                total = tl.zeros((STEP_M, BLOCK_N), tl.float32)
                for source in range(world):
                    slot = peer_pointer(table, rank, buffer + source * SLOT_BYTES, SLOT)
                    total += tl.load(slot + offsets, mask=inside, other=0.0).to(tl.float32)
                values = finish_tile(
                    total,
                    lines,
                    columns,
                    rows,
                    N,
                    None,
                    0,
                    None,
                    0,
                    bias,
                    residual,
                    stride_rm,
                    stride_rn,
                    ACTIVATION,
                )
                if SEND:
                    for place in range(world):
                        peer = farthest_first(place, rank, world)
                        result = peer_pointer(table, peer, finished, RESULT)
                        below = lines + first_row
                        store_tile(result, values, below, columns, first_row + rows, N, N, 1)
                else:
                    store_tile(out, values, lines, columns, rows, N, stride_om, stride_on)
            if SEND:
                for place in range(world):
                    peer = farthest_first(place, rank, world)
                    publish(flag_of(table, peer, READY, rank, tile, TILES), word)


# --- launchers


def push(
    x: torch.Tensor,
    weight: torch.Tensor,
    workspace: Workspace[SlotLayout],
    row_starts: torch.Tensor,
    config: TileConfig,
    signature: int,
    timeout_us: int,
    target: int,
    row_scale: "torch.Tensor | None" = None,
    column_scale: "torch.Tensor | None" = None,
) -> None:
    """Launches the push; at least one program, which tells that this rank has begun."""
    layout = workspace.layout
    push_kernel[(max(config.programs, 1),)](
        operand(x, config.block_m, config),
        operand(weight, config.block_n, config),
        row_scale,
        column_scale,
        row_starts,
        *workspace.seat,
        weight.size(0),
        x.size(1),
        signature,
        timeout_us,
        *x.stride(),
        *weight.stride(),
        scale_stride(row_scale),
        scale_stride(column_scale),
        **layout.constants("started", "pushed", "slots", "slot_bytes", "tiles"),
        **config.constants(),
        UPCAST=must_upcast(x.dtype),
        SLOT=TYPES[layout.slot_dtype],
        TARGET=target,
        HALVES=config.halves,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def sum_slots(
    out: "torch.Tensor | None",
    workspace: Workspace[SlotLayout],
    rows: int,
    first_row: int,
    config: TileConfig,
    signature: int,
    timeout_us: int,
    bias: "torch.Tensor | None" = None,
    residual: "torch.Tensor | None" = None,
    activation: str = "none",
) -> None:
    """Launches the sum of this rank's part: into out, or with out None into everyone's results."""
    layout = workspace.layout
    sum_kernel[(programs_of(rows, config, layout),)](
        out,
        bias,
        residual,
        *workspace.seat,
        rows,
        first_row,
        layout.n,
        signature,
        timeout_us,
        *(out.stride() if out is not None else (0, 0)),
        *(residual.stride() if residual is not None else (0, 0)),
        **layout.constants(*SUM_OFFSETS),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STEP_M=step_of(config),
        THREADS=LANES,
        SLOT=TYPES[layout.slot_dtype],
        RESULT=TYPES[layout.result_dtype],
        SEND=out is None,
        ACTIVATION=activation,
        num_warps=WARPS,
        maxnreg=MOST_REGISTERS,
    )


def step_of(config: TileConfig) -> int:
    """Rows of a tile that are summed at once."""
    return max(1, min(config.block_m, SUM_ELEMENTS // config.block_n))


def programs_of(rows: int, config: TileConfig, layout: SlotLayout) -> int:
    """Programs for a part of `rows` rows; one even without rows, for the count of calls."""
    tiles = tiles_of(rows, layout.n, config.block_m, config.block_n)
    return max(1, min(config.programs, tiles))

"""x @ w^T in groups of tiles; an ordinary collective of each while the next are multiplied.

For machines where kernels cannot write into each other's memory: no peer access, PCIe cards,
several nodes. Only flags of this rank are set and waited for; what crosses ranks is the caller's
collective, NCCL's for instance, on a stream of its own.

    reduce-scatter    the buffer lies in the order of groups, [group, owner, chunk, N]: group g has
                      rows [g * chunk, (g + 1) * chunk) of every owner, so one collective of equal
                      parts takes it; rows that an owner does not have are sent and ignored
    all-reduce        groups are bands of `chunk` rows of the result itself
"""

# Protocol "group done": flags of this rank alone, number << 32, only grow, never cleared; p = how
# often the group was used
#   writer    each program takes a ticket of the group after it has stored a tile; whoever takes
#             the last of the call sets the group's flag to p: release
#   reader    one program on the collective's stream waits until the flag is p, acquire; what
#             follows it on that stream sees the whole group
#   reuse     the next call multiplies into the same buffer: its stream must wait for the end of the
#             collectives, as whoever reads their result does anyway
#   progress  the waiting program holds one multiprocessor and waits for the launch before it; the
#             launch waits for nothing

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .all_gather_plan import Shards
from .epilogue import finish_tile, store_tile
from .gemm import TileConfig, multiply_tile, must_upcast, operand, scale_stride
from .signals import LINE, consume, flag_word, new_status, publish, take_ticket
from .tile_order import first_of_program, grouped_tile, tile_count

OP = "gemm_then_collective"
STEPS = ("tiles of a group",)

# Words of a group, a line each.
TICKETS = tl.constexpr(0)  # taken since the beginning
BASE = tl.constexpr(1)  # of those, taken by calls before
FLAG = tl.constexpr(2)
WAITED = tl.constexpr(3)  # waits made
_FIELDS = tl.constexpr(4)
_LINE = tl.constexpr(LINE)


# --- 1 problem and choice


@dataclass(frozen=True)
class Groups:
    """How rows are grouped. chunk: rows of one owner in a group, a multiple of config.block_m."""

    chunk: int
    count: int


def groups_of(sizes: Sequence[int], config: TileConfig, at_most: int = 4) -> Groups:
    """Up to `at_most` groups of whole tiles for owners of these sizes; alike on all ranks.

    More groups hide more and cost more collectives; each is a launch of some 10 us.
    """
    tiles = -(-max(sizes, default=0) // config.block_m)
    per_group = max(1, -(-tiles // at_most))
    return Groups(per_group * config.block_m, -(-tiles // per_group))


@dataclass(frozen=True)
class Scratch:
    """Memory of one rank, made once: `Scratch.make`. Calls on it are ordered, on one stream.

    buffer: of at least count * owners * chunk rows of N, for reduce-scatter. received: of at least
    chunk rows of N. words: zeroed once. status: of signals.new_status().
    """

    words: torch.Tensor
    status: torch.Tensor
    buffer: "torch.Tensor | None" = None
    received: "torch.Tensor | None" = None

    @classmethod
    def make(
        cls,
        groups: int,
        device: "torch.device | str",
        *,
        rows: int = 0,
        chunk: int = 0,
        n: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "Scratch":
        """For up to `groups` groups; rows (count * owners * chunk) and chunk for scattering."""
        words = torch.zeros((groups + 1) * _FIELDS.value * LINE, dtype=torch.int64, device=device)
        buffer = torch.empty(rows, n, dtype=dtype, device=device) if rows else None
        received = torch.empty(chunk, n, dtype=dtype, device=device) if rows else None
        return cls(words, new_status(device), buffer, received)

    @property
    def groups(self) -> int:
        return self.words.numel() // (_FIELDS.value * LINE) - 1


# --- 3 kernels


@triton.jit
def _word(words, group, field):
    """A word of a group; those of group 0 are the failed flag's."""
    return words + ((group + 1) * _FIELDS + field) * _LINE


@triton.jit(do_not_specialize=["chunk", "groups"])
def grouped_kernel(
    out,  # [groups * owners * chunk, N], or [M, N] for one owner
    a,  # [M, K] pointer or descriptor
    b,  # [N, K] pointer or descriptor
    row_scale,
    column_scale,
    bias,  # [N] or None
    words,
    row_starts,  # int32 [owners + 1]
    owners,
    groups,
    chunk,
    N,
    K,
    stride_om,
    stride_on,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    row_scale_stride,
    column_scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tiles group by group, each group's owner by owner."""
    tiles_n = tile_count(N, BLOCK_N)
    before = 0
    for group in range(groups):
        total = 0
        for owner in range(owners):
            rows = tl.load(row_starts + owner + 1) - tl.load(row_starts + owner)
            here = tl.minimum(tl.maximum(rows - group * chunk, 0), chunk)
            total += tile_count(here, BLOCK_M) * tiles_n
        for owner in range(owners):
            first_row = tl.load(row_starts + owner)
            rows = tl.load(row_starts + owner + 1) - first_row
            here = tl.minimum(tl.maximum(rows - group * chunk, 0), chunk)
            start = first_row + group * chunk
            place = (group * owners + owner) * chunk
            tiles_m = tile_count(here, BLOCK_M)
            count = tiles_m * tiles_n
            first = first_of_program(before, tl.program_id(0), tl.num_programs(0))
            for index in range(first, count, tl.num_programs(0)):
                tile_m, tile_n = grouped_tile(index, tiles_m, tiles_n, GROUP_M)
                row = tile_m * BLOCK_M
                column = tile_n * BLOCK_N
                acc = multiply_tile(
                    a,
                    b,
                    start + row,
                    column,
                    start + here,
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
                lines = row + tl.arange(0, BLOCK_M)
                columns = column + tl.arange(0, BLOCK_N)
                values = finish_tile(
                    acc,
                    start + lines,
                    columns,
                    start + here,
                    N,
                    row_scale,
                    row_scale_stride,
                    column_scale,
                    column_scale_stride,
                    bias,
                    None,
                    0,
                    0,
                    "none",
                )
                store_tile(
                    out, values, place + lines, columns, place + here, N, stride_om, stride_on
                )
                taken = tl.load(_word(words, group, BASE))
                last = taken + total - 1
                if take_ticket(_word(words, group, TICKETS)) == last:
                    tl.store(_word(words, group, BASE), last + 1)
                    flag = _word(words, group, FLAG)
                    publish(flag, flag_word((tl.load(flag) >> 32) + 1, 0))
            before += count


@triton.jit(do_not_specialize=["group", "rank", "timeout_us"])
def wait_kernel(words, status, group, rank, timeout_us):
    """One program: ends when all tiles of the group are stored."""
    waited = _word(words, group, WAITED)
    number = tl.load(waited) + 1
    flag = _word(words, group, FLAG)
    if consume(flag, flag_word(number, 0), words, status, 0, rank, timeout_us):
        tl.store(waited, number)


# --- 4 launchers


def multiply_in_groups(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    shards: Shards,
    groups: Groups,
    scratch: Scratch,
    config: TileConfig,
    *,
    bias: "torch.Tensor | None" = None,
    row_scale: "torch.Tensor | None" = None,
    column_scale: "torch.Tensor | None" = None,
) -> None:
    """Launches the products: into out, in the order of groups and owners."""
    grouped_kernel[(max(config.programs, 1),)](
        out,
        operand(x, config.block_m, config),
        operand(weight, config.block_n, config),
        row_scale,
        column_scale,
        bias,
        scratch.words,
        shards.table,
        len(shards.sizes),
        groups.count,
        groups.chunk,
        weight.size(0),
        x.size(1),
        *out.stride(),
        *x.stride(),
        *weight.stride(),
        scale_stride(row_scale),
        scale_stride(column_scale),
        **config.constants(),
        UPCAST=must_upcast(x.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def wait_for_group(scratch: Scratch, group: int, rank: int, timeout_us: int = 300_000_000) -> None:
    """Launches the wait for a group on the current stream; once for each group of a call."""
    wait_kernel[(1,)](scratch.words, scratch.status, group, rank, timeout_us, num_warps=1)


def gemm_then_reduce_scatter(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    shards: Shards,
    groups: Groups,
    scratch: Scratch,
    config: TileConfig,
    rank: int,
    reduce_scatter: Callable[[torch.Tensor, torch.Tensor], None],
    *,
    bias: "torch.Tensor | None" = None,
    row_scale: "torch.Tensor | None" = None,
    column_scale: "torch.Tensor | None" = None,
    stream: "torch.cuda.Stream | None" = None,
    timeout_us: int = 300_000_000,
) -> None:
    """out [rows of this rank, N] = own rows of the sum over ranks of x @ w^T, plus bias once.

    Every rank calls it with the same shards, groups and dtypes. Sums are the collective's: in its
    order and in the buffer's dtype, each partial sum rounded to it, as without this kernel.

    Args:
        reduce_scatter: (received [chunk, N], sent [owners * chunk, N]) on the current stream.
        bias: [N], the whole one, on every rank; rank 0 adds it.
        stream: for the collectives; None on a CPU.

    Raises:
        ValueError: the scratch is too small; alike on all ranks, before any launch.
    """
    owners = len(shards.sizes)
    rows = groups.count * owners * groups.chunk
    buffer, received = scratch.buffer, scratch.received
    if buffer is None or received is None or rows > buffer.size(0):
        have = 0 if buffer is None else buffer.size(0)
        raise ValueError(f"{OP}: {rows} rows of buffer, the scratch has {have}: make a larger one")
    _check_groups(scratch, groups, received.size(0))
    added = bias if rank == 0 else None
    scales = {"row_scale": row_scale, "column_scale": column_scale}
    multiply_in_groups(buffer, x, weight, shards, groups, scratch, config, bias=added, **scales)
    with _on(stream):
        for group in range(groups.count):
            wait_for_group(scratch, group, rank, timeout_us)
            first = group * owners * groups.chunk
            parts = received[: groups.chunk]
            reduce_scatter(parts, buffer[first : first + owners * groups.chunk])
            own = out[group * groups.chunk : (group + 1) * groups.chunk]
            own.copy_(parts[: own.size(0)])
    _join(stream)


def gemm_then_all_reduce(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    shards: Shards,
    groups: Groups,
    scratch: Scratch,
    config: TileConfig,
    rank: int,
    all_reduce: Callable[[torch.Tensor], None],
    *,
    bias: "torch.Tensor | None" = None,
    row_scale: "torch.Tensor | None" = None,
    column_scale: "torch.Tensor | None" = None,
    stream: "torch.cuda.Stream | None" = None,
    timeout_us: int = 300_000_000,
) -> None:
    """out [M, N], contiguous, = the sum over ranks of x @ w^T, plus bias once.

    As gemm_then_reduce_scatter, with shards of one part, [M], and
    all_reduce: (a band of rows of out, in place) on the current stream.
    """
    _check_groups(scratch, groups, groups.chunk)
    added = bias if rank == 0 else None
    scales = {"row_scale": row_scale, "column_scale": column_scale}
    multiply_in_groups(out, x, weight, shards, groups, scratch, config, bias=added, **scales)
    with _on(stream):
        for group in range(groups.count):
            wait_for_group(scratch, group, rank, timeout_us)
            all_reduce(out[group * groups.chunk : (group + 1) * groups.chunk])
    _join(stream)


def _check_groups(scratch: Scratch, groups: Groups, chunk: int) -> None:
    if groups.count > scratch.groups or groups.chunk > chunk:
        raise ValueError(
            f"{OP}: {groups.count} groups of {groups.chunk} rows, the scratch is for "
            f"{scratch.groups} of {chunk}: make a larger one"
        )


def _on(stream: "torch.cuda.Stream | None") -> "torch.cuda.StreamContext | nullcontext[None]":
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _join(stream: "torch.cuda.Stream | None") -> None:
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)

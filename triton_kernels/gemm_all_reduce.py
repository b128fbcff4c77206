"""y = sum over ranks s of x_s @ w_s^T, on every rank, with bias and residual once, and RMSNorm.

    x_s [M, K_s], w_s [N, K_s] (torch's Linear layout): columns of x and of the weight, by rank
    y [M, N] on all ranks, with the same bits

    one shot    each tile goes to every rank, and every rank sums all of it: one meeting
    two shot    each tile goes to its owner, who sums it and sends it round: two meetings, less
                traffic
    multimem    as two shot, but the switch adds and sends: needs multicast memory, N a multiple of
                4 and fp32 slots; the sum is in the switch's order, alike on all ranks but perhaps
                not from run to run, so a caller must allow it

Protocol: "slots" of slots.py. Launches: the push; for two shot and multimem the owner's sum; the
last, which sums or collects, tile by tile, or row by row where the norm needs whole rows. Each
waits only for launches before it, so it makes progress in any order of programs and ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .all_gather_plan import Shards
from .all_reduce_finish import LARGEST_NORM, collect, norm_rows, sum_by_switch
from .configurations import ONE_SHOT as ONE_SHOT_OP
from .gemm import TileConfig
from .partial_sums import TO_ALL, TO_OWNER, TO_SELF, push, sum_slots
from .signals import signature_of
from .slots import SlotLayout, even_sizes, tiles_of
from .workspace import Workspace

OP = "gemm_all_reduce"
ONE_SHOT, TWO_SHOT, MULTIMEM = "one_shot", "two_shot", "multimem"
ALGORITHMS = (ONE_SHOT, TWO_SHOT, MULTIMEM)
# Bytes of partial sums that a rank sends to one peer, up to which a second meeting costs more than
# the traffic it saves. Not measured on a GPU: 8 ranks at 450 GB/s send 256 KiB to seven in 4 us.
ONE_SHOT_BYTES = 256 * 1024


# --- 1 problem and choice


@dataclass(frozen=True)
class Algorithm:
    """How a sum is made, and why so."""

    name: str
    reason: str


def choose_algorithm(
    m: int,
    n: int,
    world: int,
    *,
    slot_dtype: torch.dtype = torch.float32,
    multicast: bool = False,
    any_order: bool = False,
    asked: "str | None" = None,
) -> Algorithm:
    """What fits values that all ranks share: the algorithm asked for, or else the next best.

    Args:
        multicast: whether every rank has a multicast address of its workspace.
        any_order: whether sums may be in another order than that of ranks (multimem).
        asked: one of ALGORITHMS, or None to choose by size.

    Raises:
        ValueError: `asked` is none of ALGORITHMS.
    """
    if asked is not None and asked not in ALGORITHMS:
        raise ValueError(f"{OP}: algorithm {asked!r}; there are {', '.join(ALGORITHMS)}")
    lacks = _what_multimem_lacks(n, slot_dtype, multicast, any_order)
    if asked == MULTIMEM:
        return (
            Algorithm(TWO_SHOT, f"instead of multimem: {lacks}")
            if lacks
            else Algorithm(MULTIMEM, "asked for")
        )
    if asked is not None:
        return Algorithm(asked, "asked for")
    nbytes = m * n * slot_dtype.itemsize
    size = f"{nbytes} bytes to each of {world - 1} peers"
    if nbytes <= ONE_SHOT_BYTES or world <= 2:
        return Algorithm(ONE_SHOT, f"{size}: one meeting")
    if lacks:
        return Algorithm(TWO_SHOT, f"{size}: each element once to its owner; no multimem: {lacks}")
    return Algorithm(MULTIMEM, f"{size}: the switch adds")


def _what_multimem_lacks(n: int, slot_dtype: torch.dtype, multicast: bool, any_order: bool) -> str:
    lacks = []
    if not multicast:
        lacks.append("no multicast address (sm_90, NVSwitch and a multicast mapping)")
    if n % 4:
        lacks.append(f"N = {n} is no multiple of 4")
    if slot_dtype != torch.float32:
        lacks.append(f"slots of {slot_dtype}, not fp32")
    if not any_order:
        lacks.append("sums must be in rank order")
    return ", ".join(lacks)


def layout_of(
    world: int,
    rows: int,
    n: int,
    configs: Sequence[TileConfig],
    algorithms: Sequence[str] = ALGORITHMS,
    slot_dtype: torch.dtype = torch.float32,
    result_dtype: torch.dtype = torch.bfloat16,
) -> SlotLayout:
    """The workspace for up to `rows` rows by these algorithms, cut by any of `configs`.

    Its slots hold whole results if it serves one_shot or multimem, else those of one owner.
    """
    whole = ONE_SHOT in algorithms or MULTIMEM in algorithms
    slot_rows = 0
    tiles = 1
    for config in configs:
        part = rows if whole else max(even_sizes(rows, world, config.block_m))
        slot_rows = max(slot_rows, part)
        tiles = max(tiles, tiles_of(part, n, config.block_m, config.block_n))
    results = rows if TWO_SHOT in algorithms or MULTIMEM in algorithms else 0
    return SlotLayout(world, slot_rows, n, tiles, slot_dtype, results, result_dtype)


def shards_of(
    algorithm: str, rows: int, world: int, config: TileConfig, device: "torch.device | str" = "cpu"
) -> Shards:
    """Who sums which rows. Made before a capture; one for each number of rows and config."""
    sizes = [rows] if algorithm == ONE_SHOT else even_sizes(rows, world, config.block_m)
    return Shards(sizes, device)


@dataclass(frozen=True)
class Norm:
    """RMSNorm of the sum: out = h * rsqrt(mean(h^2) + eps) * weight, h = sum + bias + residual.

    hidden [M, N] gets h, rounded; the norm is of h before it is rounded. weight: [N].
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    eps: float


# --- 4 launcher


def gemm_all_reduce(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    algorithm: str,
    shards: Shards,
    workspace: "Workspace[SlotLayout]",
    config: TileConfig,
    *,
    bias: "torch.Tensor | None" = None,
    residual: "torch.Tensor | None" = None,
    norm: "Norm | None" = None,
    row_scale: "torch.Tensor | None" = None,
    column_scale: "torch.Tensor | None" = None,
    multicast: int = 0,
    timeout_us: int = 300_000_000,
) -> None:
    """Every rank calls it, in the same order, with the same shapes, dtypes, algorithm and config.

    Args:
        out: [M, N], fp32, fp16 or bf16, any strides; the layout's result_dtype unless one_shot.
        x: [M, K] of this rank; weight: [N, K] of this rank; any strides, fp32, fp16, bf16, fp8.
        algorithm: of choose_algorithm(). shards: of shards_of() for it.
        workspace: of layout_of(); calls on it are ordered on each rank, on one stream.
        config: from configurations.choose().
        bias: [N], the whole one, on every rank. residual: [M, N], the same on every rank.
        norm: RMSNorm after bias and residual; its tensors are the same on every rank.
        row_scale, column_scale: fp32, of fp8 operands: one value, or one for each of M (N).
        multicast: the address of all workspaces at once; for multimem on a GPU.
        timeout_us: of one wait; then the status page says who is absent (signals.raise_failure with
            slots.STEPS), and out is undefined.

    Raises:
        ValueError: the call does not fit the workspace; alike on all ranks, before any launch.
    """
    (m, n), sizes, layout = out.shape, shards.sizes, workspace.layout
    one_shot = algorithm == ONE_SHOT
    part = m if algorithm == MULTIMEM else max(sizes)
    tiles = tiles_of(max(sizes), n, config.block_m, config.block_n)
    layout.check(f"{OP} {algorithm}", part, n, tiles, 0 if one_shot else m)
    _check_norm(norm, n)
    facts = (OP, layout, algorithm, sizes, str(x.dtype), config.block_m, config.block_n)
    signature = signature_of(*facts)
    target = {ONE_SHOT: TO_ALL, TWO_SHOT: TO_OWNER, MULTIMEM: TO_SELF}[algorithm]
    push(
        x,
        weight,
        workspace,
        shards.table,
        config,
        signature,
        timeout_us,
        target.value,
        row_scale,
        column_scale,
    )
    wait = (signature, timeout_us)
    if one_shot and norm is None:
        sum_slots(out, workspace, m, 0, config, *wait, bias, residual)
        return
    if not one_shot:
        own, first = sizes[workspace.rank], shards.starts[workspace.rank]
        if algorithm == MULTIMEM:
            sum_by_switch(workspace, own, first, config, *wait, bias, multicast)
        else:
            sum_slots(None, workspace, own, first, config, *wait, bias)
        bias = None  # it is in the results
    if norm is None:
        collect(out, workspace, shards.table, config, *wait, residual)
    else:
        norm_rows(
            out,
            norm.hidden,
            norm.weight,
            norm.eps,
            workspace,
            shards.table,
            len(sizes),
            config,
            *wait,
            bias,
            residual,
            from_slots=one_shot,
        )


def problem_op(algorithm: str) -> str:
    """Problem.op of configurations.py."""
    return ONE_SHOT_OP if algorithm == ONE_SHOT else OP


def _check_norm(norm: "Norm | None", n: int) -> None:
    if norm is not None and n > LARGEST_NORM:
        raise ValueError(
            f"{OP}: RMSNorm of rows of {n}; up to {LARGEST_NORM} fit one program: leave norm out "
            "and normalise the result"
        )

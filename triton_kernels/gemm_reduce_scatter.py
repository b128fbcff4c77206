"""y_r = rows r of (sum over ranks s of x_s @ w_s^T), plus bias and residual, once.

    x_s [M, K_s], w_s [N, K_s] (torch's Linear layout): columns of x and of the weight, by rank
    y_r [M_r, N]: rows of the result, by rank; M_0 + M_1 + ... = M, any sizes, some may be 0

Protocol: "slots" of slots.py. First launch: each rank multiplies the tiles of all owners, the
farthest along the ring first and its own last, stores each into its slot at the owner, and sets the
tile's flag. Second launch: the owner waits tile by tile and adds its slots in rank order in fp32;
bias, activation and residual come in there, once, and the result is rounded once.

It makes progress whatever the order in which programs and ranks run: the first launch waits only
for the begin of earlier calls, the second only for first launches of this call.
"""

from collections.abc import Sequence

import torch

from .all_gather_plan import Shards
from .gemm import TileConfig
from .partial_sums import TO_OWNER, push, sum_slots
from .signals import signature_of
from .slots import SlotLayout, tiles_of
from .workspace import Workspace

OP = "gemm_reduce_scatter"


def layout_of(
    world: int,
    rows: int,
    n: int,
    configs: Sequence[TileConfig],
    slot_dtype: torch.dtype = torch.float32,
) -> SlotLayout:
    """The workspace for parts of up to `rows` rows, cut by any of `configs`."""
    tiles = max(tiles_of(rows, n, config.block_m, config.block_n) for config in configs)
    return SlotLayout(world, rows, n, max(tiles, 1), slot_dtype)


def gemm_reduce_scatter(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    shards: Shards,
    workspace: "Workspace[SlotLayout]",
    config: TileConfig,
    *,
    bias: "torch.Tensor | None" = None,
    residual: "torch.Tensor | None" = None,
    activation: str = "none",
    row_scale: "torch.Tensor | None" = None,
    column_scale: "torch.Tensor | None" = None,
    timeout_us: int = 300_000_000,
) -> None:
    """Every rank calls it, in the same order, with the same shards, dtypes and config.

    Args:
        out: [rows of this rank, N], fp32, fp16 or bf16, any strides.
        x: [M, K] of this rank; weight: [N, K] of this rank; any strides, fp32, fp16, bf16, fp8.
        shards: rows of y by rank.
        workspace: of `layout_of`; calls on it are ordered on each rank, on one stream.
        config: from configurations.choose() for rows=shards.sizes.
        bias: [N], the whole one, on every rank. residual: [rows of this rank, N].
        activation: one of gemm.ACTIVATIONS, of the sum.
        row_scale, column_scale: fp32, of fp8 operands: one value, or one for each of M (N).
        timeout_us: of one wait; then the status page says who is absent (signals.raise_failure with
            slots.STEPS), and out is undefined.

    Raises:
        ValueError: the call does not fit the workspace; alike on all ranks, before any launch.
    """
    sizes, n = shards.sizes, weight.size(0)
    rows = max(sizes)
    workspace.layout.check(OP, rows, n, tiles_of(rows, n, config.block_m, config.block_n))
    facts = (OP, workspace.layout, sizes, str(x.dtype), config.block_m, config.block_n)
    signature = signature_of(*facts)
    push(
        x,
        weight,
        workspace,
        shards.table,
        config,
        signature,
        timeout_us,
        TO_OWNER.value,
        row_scale,
        column_scale,
    )
    own = sizes[workspace.rank]
    sum_slots(out, workspace, own, 0, config, signature, timeout_us, bias, residual, activation)

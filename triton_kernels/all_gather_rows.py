"""The rows of an all-gather as tensors of the host, and their push to the peers by copies."""

import torch

from .all_gather_plan import WORD, AllGatherLayout, Shards
from .tile_order import farthest_first, on_host
from .workspace import Workspace


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

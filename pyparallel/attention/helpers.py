"""Shards, positions and labels of a sharded sequence: what a model needs around its attention.

`place` is a group (of `pyparallel.ops`, or a simulated one), or the pair (rank, world size). All
ranks hold the whole `x` of `shard`; none does afterwards. Rows are those of sharding.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.attention.agreement import agree_on
from pyparallel.attention.cu_seqlens import host_lengths
from pyparallel.attention.positions import positions_of
from pyparallel.attention.sharding import Sharding
from pyparallel.attention.transport import Transport, transport_of
from pyparallel.errors import InvalidArgument

__all__ = ["position_ids", "shard", "shard_labels", "unshard"]

Place = Any
_CPU = torch.device("cpu")


def _place(place: Place, device: torch.device) -> tuple[int, int, Transport | None]:
    if isinstance(place, tuple):
        if len(place) != 2 or not all(isinstance(n, int) for n in place):
            raise InvalidArgument(f"place is {place!r}; expected a group or (rank, world size)")
        return place[0], place[1], None
    transport = transport_of(place, device)
    return transport.rank, transport.world_size, transport


def _sharding(
    name: str, total: int, world: int, cu_seqlens: Any, per_document: bool, sizes: Any
) -> Sharding:
    if isinstance(total, bool) or not isinstance(total, int):
        raise InvalidArgument(f"total is {total!r}; expected an int, the rows of the whole")
    borders = host_lengths(cu_seqlens, "cu_seqlens")
    return Sharding.of(
        name, total, world, cu_seqlens=borders, per_document=per_document, sizes=sizes
    )


def _dim(name: str, x: Any, dim: Any) -> int:
    """`dim` counted from the front."""
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise InvalidArgument(f"dim is {dim!r}; {name} has shape {list(x.shape)}")
    return dim % x.dim()


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sharding: Sharding, transport: Transport) -> Tensor:
        ctx.dim, ctx.sharding, ctx.transport = dim, sharding, transport
        return x.index_select(dim, sharding.rows(transport.rank).to(x.device))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        whole = ctx.transport.gather(dy.contiguous(), ctx.dim, ctx.sharding.local_sizes)
        return whole.index_select(ctx.dim, ctx.sharding.order().to(dy.device)), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sharding: Sharding, transport: Transport) -> Tensor:
        ctx.dim, ctx.sharding, ctx.rank = dim, sharding, transport.rank
        whole = transport.gather(x.contiguous(), dim, sharding.local_sizes)
        return whole.index_select(dim, sharding.order().to(x.device))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        rows = ctx.sharding.rows(ctx.rank).to(dy.device)
        return dy.index_select(ctx.dim, rows), None, None, None


def shard(
    x: Tensor,
    place: Place,
    *,
    sharding: str = "zigzag",
    dim: int = 1,
    cu_seqlens: "Tensor | Sequence[int] | None" = None,
    per_document: bool = False,
    sizes: "Sequence[int] | None" = None,
) -> Tensor:
    """This rank's rows of the whole `x`, along `dim`: a new tensor. Nothing is communicated.

    Backward, with a group: the gradients of all ranks' rows, joined: replicated, as `x` is (then it
    is collective). With (rank, world size): zeros in the rows of others.

    Args:
        x: any shape and dtype; `dim` is the sequence, of any length.
        place: the group, or (rank, world size).
        sharding: "contiguous", "zigzag" or "striped".
        cu_seqlens: where documents begin, and the last ends; see `Sharding`.
        per_document: cut each document by itself.
        sizes: rows of each rank, of "contiguous"; by default even (`Sharding.balanced` has others).

    Raises:
        ValueError: another sharding, or lengths that do not fit `x`.
    """
    dim = _dim("x", x, dim)
    rank, world, transport = _place(place, x.device)
    cut = _sharding(sharding, x.shape[dim], world, cu_seqlens, per_document, sizes)
    if transport is None or not x.requires_grad:
        return x.index_select(dim, cut.rows(rank).to(x.device))
    out: Tensor = _Shard.apply(x, dim, cut, transport)  # type: ignore[no-untyped-call]
    return out


def unshard(
    x: Tensor,
    place: Place,
    *,
    sharding: str = "zigzag",
    dim: int = 1,
    total: int | None = None,
    cu_seqlens: "Tensor | Sequence[int] | None" = None,
    per_document: bool = False,
) -> Tensor:
    """The whole of which every rank has its shard `x`, on every rank. Collective.

    Backward: this rank's rows of the gradient, which is taken to be alike on all ranks.

    Args:
        x: as `shard` gives it; shapes differ between ranks only along `dim`.
        place: the group.
        total: rows of the whole; the default is what the ranks hold together.
        sharding, dim, cu_seqlens, per_document: as for `shard`; contiguous parts of any sizes.

    Raises:
        ValueError: on all ranks: shards that are not those of such a sequence, or arguments that
            differ between ranks.
    """
    if isinstance(place, tuple):
        raise InvalidArgument("unshard gathers from all ranks: place must be a group")
    _, world, transport = _place(place, x.device if isinstance(x, Tensor) else _CPU)
    assert transport is not None
    try:
        dim = _dim("x", x, dim)
        borders = host_lengths(cu_seqlens, "cu_seqlens")
    except ValueError as error:  # the others would wait for this rank
        raise transport.refused("unshard", error) from None
    rest = [n for i, n in enumerate(x.shape) if i != dim]
    common = {
        "sharding": sharding, "dim": dim, "other dims": rest, "dtype": x.dtype, "total": total,
        "cu_seqlens": borders, "per_document": per_document,
    }  # fmt: skip
    held = [sizes[0] for sizes in agree_on(transport, "unshard", common, [x.shape[dim]])]
    whole = sum(held) if total is None else total
    uneven = sharding == "contiguous" and not per_document and len(held) == world
    cut = _sharding(sharding, whole, world, borders, per_document,
                    held if uneven and sum(held) == whole else None)  # fmt: skip
    if list(cut.local_sizes) != held:
        raise InvalidArgument(
            f"unshard: the ranks hold {held} rows; {sharding} shards of {whole} rows are "
            f"{list(cut.local_sizes)}"
        )
    out: Tensor = _Unshard.apply(x, dim, cut, transport)  # type: ignore[no-untyped-call]
    return out


def position_ids(
    total: int,
    place: Place,
    *,
    sharding: str = "zigzag",
    cu_seqlens: "Tensor | Sequence[int] | None" = None,
    per_document: bool = False,
    sizes: "Sequence[int] | None" = None,
    device: "torch.device | str" = "cpu",
) -> Tensor:
    """int64 [rows]: the position in its document of each of this rank's rows, as RoPE wants it.

    `total` is the length of the whole sequence. Padding behind the last document counts from 0.
    """
    rank, world, _ = _place(place, _CPU)
    cut = _sharding(sharding, total, world, cu_seqlens, per_document, sizes)
    return positions_of(cut, rank).to(device)


def shard_labels(
    tokens: Tensor,
    place: Place,
    *,
    sharding: str = "zigzag",
    dim: int = -1,
    cu_seqlens: "Tensor | Sequence[int] | None" = None,
    per_document: bool = False,
    sizes: "Sequence[int] | None" = None,
    ignore_index: int = -100,
) -> Tensor:
    """Of each of this rank's rows, the token after it: the labels of next-token prediction.

    Shifted before cutting, so that a row at the end of a part has its label too. The last row of a
    document, and padding, have `ignore_index`. `tokens` is the whole, integers of any shape.
    """
    dim = _dim("tokens", tokens, dim)
    rank, world, _ = _place(place, tokens.device)
    total = tokens.shape[dim]
    cut = _sharding(sharding, total, world, cu_seqlens, per_document, sizes)
    labels = torch.full_like(tokens, ignore_index)
    if total > 1:
        labels.narrow(dim, 0, total - 1).copy_(tokens.narrow(dim, 1, total - 1))
    ends = torch.tensor([end - 1 for end in cut.borders[1:] if end > 0], dtype=torch.int64)
    labels.index_fill_(dim, ends.to(tokens.device), ignore_index)
    behind = cut.borders[-1]
    labels.narrow(dim, behind, total - behind).fill_(ignore_index)
    return labels.index_select(dim, cut.rows(rank).to(tokens.device))

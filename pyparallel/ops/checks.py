"""What an op's arguments must be. Every misfit is collected; one error tells them all."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyparallel.errors import InvalidArgument

__all__ = [
    "Misfits",
    "by",
    "check_algorithm",
    "check_floats",
    "check_linear",
    "dim_of",
    "listed_sizes",
    "own_sizes",
    "sizes_of_whole",
]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn,)


class Misfits:
    """Collects what is wrong with one call's arguments."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    def raise_any(self) -> None:
        if self._texts:
            raise InvalidArgument("; ".join(self._texts))

    def __bool__(self) -> bool:
        return bool(self._texts)


def check_floats(tensors: "dict[str, Tensor | None]", misfits: Misfits) -> None:
    """Dense floating-point tensors of one dtype on one device; the first says which."""
    first: tuple[str, Tensor] | None = None
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            misfits.add(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
            continue
        if x.layout is not torch.strided:
            misfits.add(f"{name} has layout {x.layout}; expected a dense (strided) tensor")
        elif type(x).__name__ == "DTensor":
            misfits.add(f"{name} is a DTensor; pass its local part, {name}.to_local()")
        if first is None:
            first = name, x
            if x.dtype in FP8:
                misfits.add(
                    f"{name} has dtype {x.dtype}; with x_scale= and weight_scale= the GEMM ops "
                    "take it, on CUDA devices"
                )
            elif x.dtype not in FLOATS:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
                misfits.add(f"{name} has dtype {x.dtype}; expected one of {names}")
            if x.device.type not in ("cpu", "cuda", "meta"):
                misfits.add(f"{name} is on {x.device}; expected cpu or cuda")
            continue
        if x.dtype != first[1].dtype:
            misfits.add(
                f"{name} has dtype {x.dtype}, {first[0]} has {first[1].dtype}; pass them alike"
            )
        if x.device != first[1].device:
            misfits.add(f"{name} is on {x.device}, {first[0]} on {first[1].device}")


def check_linear(
    k: int,
    weight: Tensor,
    bias: Tensor | None,
    misfits: Misfits,
    *,
    weight_name: str = "weight",
    bias_name: str = "bias",
    x_text: str,
) -> None:
    """`weight` is [N, k], `bias` [N]; `x_text` says where k comes from."""
    if weight.dim() != 2:
        misfits.add(
            f"{weight_name} has shape {list(weight.shape)}; expected 2 dimensions, [N, {k}]"
        )
        return
    if weight.shape[1] != k:
        hint = ""
        if weight.shape[0] == k:
            hint = f"; it looks like [K, N]: pass {weight_name}.t()"
        misfits.add(
            f"{weight_name} has shape {list(weight.shape)}, but {x_text}; "
            f"expected [N, {k}], as in torch.nn.Linear{hint}"
        )
    elif bias is not None and tuple(bias.shape) != (weight.shape[0],):
        misfits.add(
            f"{bias_name} has shape {list(bias.shape)}; expected [{weight.shape[0]}], one per "
            f"row of {weight_name} (shape {list(weight.shape)})"
        )


def dim_of(dim: int, shape: Sequence[int], name: str, what: str, misfits: Misfits) -> int:
    """`dim` of a tensor of `shape`, not negative; `what` says which tensor."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        misfits.add(f"{name} is {dim!r}; expected an int")
        return 0
    if not -len(shape) <= dim < len(shape):
        misfits.add(
            f"{name} is {dim}, but {what} has shape {list(shape)}; "
            f"expected {-len(shape)} to {len(shape) - 1}"
        )
        return 0
    return dim % len(shape)


def by(algorithm: str | None) -> str:
    """What the note of a call says of the caller's own choice, which must be alike on all ranks."""
    return "" if algorithm is None else f", algorithm {algorithm!r}"


def check_algorithm(algorithm: Any, misfits: Misfits) -> None:
    """A name, or None; which names there are is known where one is chosen."""
    if algorithm is not None and not isinstance(algorithm, str):
        misfits.add(f"algorithm is {algorithm!r}; expected a str, or None")


def listed_sizes(shard_sizes: Any) -> Any:
    """The sizes of shards as a list, None as it is."""
    if shard_sizes is None:
        return None
    try:
        return list(shard_sizes)
    except TypeError:
        raise InvalidArgument(
            f"shard_sizes is {shard_sizes!r}; expected one size per rank, or None"
        ) from None


def _check_sizes(sizes: Sequence[int], world_size: int, misfits: Misfits) -> bool:
    good = (
        isinstance(sizes, Sequence)
        and len(sizes) == world_size
        and all(isinstance(n, int) and n >= 0 for n in sizes)
    )
    if not good:
        misfits.add(
            f"shard_sizes is {sizes!r}; expected {world_size} sizes, one per rank, none negative"
        )
    return good


def own_sizes(
    own: int,
    dim: int,
    sizes: Sequence[int] | None,
    rank: int,
    world_size: int,
    misfits: Misfits,
    what: str = "x",
) -> list[int]:
    """Every rank's size of `dim`, given that of this rank's shard."""
    if sizes is None:
        return [own] * world_size
    if not _check_sizes(sizes, world_size, misfits):
        return [own] * world_size
    if sizes[rank] != own:
        misfits.add(
            f"shard_sizes[{rank}] is {sizes[rank]}, but dim {dim} of this rank's {what} is {own} "
            f"(shard_sizes {list(sizes)})"
        )
    return list(sizes)


def sizes_of_whole(
    whole: int,
    dim: int,
    sizes: Sequence[int] | None,
    world_size: int,
    misfits: Misfits,
    what: str,
) -> list[int]:
    """The sizes of the shards of a `dim` of size `whole`; without `sizes` they are equal."""
    if sizes is None:
        if whole % world_size:
            n, extra = divmod(whole, world_size)
            uneven = [n + (r < extra) for r in range(world_size)]
            misfits.add(
                f"dim {dim} of {what} is {whole}, which does not divide by {world_size} ranks; "
                f"for uneven shards pass shard_sizes, such as shard_sizes={uneven}"
            )
        return [whole // world_size] * world_size
    if not _check_sizes(sizes, world_size, misfits):
        return [0] * world_size
    if sum(sizes) != whole:
        misfits.add(
            f"shard_sizes {list(sizes)} add up to {sum(sizes)}, but dim {dim} of {what} is {whole}"
        )
    return list(sizes)

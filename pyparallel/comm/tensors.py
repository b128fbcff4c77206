"""Which tensors the communicator takes, and how any layout becomes the plain arrays of the core."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pyparallel.comm.reductions import DTYPES
from pyparallel.errors import InvalidArgument

_PLAIN: Final = (Tensor, torch.nn.Parameter)


def is_plain(x: object) -> bool:
    """Whether the core may take the tensor's memory as it lies: the common case, told quickly."""
    return (
        type(x) in _PLAIN
        and isinstance(x, Tensor)  # known already; says so to the type checker
        and x.is_cpu
        and not x.requires_grad
        and x.layout is torch.strided
        and x.is_contiguous()
        and not x.is_neg()
        and x.dtype in DTYPES
    )


def is_array(x: Tensor) -> bool:
    """The same of a tensor that has passed `checked`."""
    return x.is_contiguous() and not x.is_neg()


def checked(x: object, what: str) -> Tensor:
    """`x` as a tensor of CPU memory without autograd, of any strides; raises where it is none."""
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{what} is a {type(x).__name__}; expected a torch.Tensor")
    if x.device.type != "cpu":
        raise InvalidArgument(
            f"{what} is on {x.device}; this communicator moves CPU memory. Pass {what}.cpu(); for "
            'CUDA tensors use pyparallel.comm.nccl, or torch.distributed\'s backend "pyparallel"'
        )
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{what} has layout {x.layout}; expected a dense (strided) tensor")
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise InvalidArgument(
            f"{what} is a {type(x).__name__}, whose memory is not its own; pass the plain tensor "
            "(a DTensor: to_local())"
        )
    if x.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        hint = "; pass torch.view_as_real(x)" if x.dtype.is_complex else ""
        raise InvalidArgument(f"{what} has dtype {x.dtype}; expected one of {known}{hint}")
    if x.requires_grad:
        if torch.is_grad_enabled():
            raise InvalidArgument(
                f"{what} requires grad, and autograd would not see this call; "
                f"pass {what}.detach(), or call under torch.no_grad()"
            )
        return x.detach()
    return x


def checked_output(x: object, what: str) -> Tensor:
    """As `checked`, and no two elements of `x` share memory."""
    tensor = checked(x, what)
    if any(stride == 0 and n > 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidArgument(
            f"{what} is expanded (shape {list(tensor.shape)}, strides {list(tensor.stride())}): "
            f"elements share one place, so it cannot be written; pass {what}.contiguous()"
        )
    return tensor


def contiguous(x: Tensor) -> Tensor:
    """The elements of `x` in order, in a plain array: `x` itself where it is one."""
    return x.resolve_neg().contiguous()


def staging_for(x: Tensor, *, avoid: Sequence[Tensor] = ()) -> Tensor:
    """`x` itself where the core may write it, else an array to write and then `give_back`."""
    if is_array(x) and not any(overlap(x, other) for other in avoid):
        return x
    return torch.empty(x.shape, dtype=x.dtype)


def disjoint(a: Tensor, b: Tensor, own: int | None = None) -> bool:
    """Whether two arrays are the same, touch no common byte, or lie exactly `own` bytes apart."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    if start_a - start_b == own:
        return True
    bytes_a, bytes_b = a.nbytes, b.nbytes
    if start_a == start_b:
        return bytes_a == bytes_b or bytes_a == 0 or bytes_b == 0
    return start_a + bytes_a <= start_b or start_b + bytes_b <= start_a


def written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd: a backward pass that has saved an old value must raise, not use it."""
    increment_version([x for x in tensors if not x.is_inference()])


def give_back(staging: Tensor, x: Tensor) -> None:
    """Copies what the core wrote to where it belongs."""
    if staging is x:
        return
    if x.is_inference():
        with torch.inference_mode():
            x.copy_(staging)
    else:
        x.copy_(staging)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors touch common bytes (judged by the first and last byte of each)."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    first_a, end_a = _extent(a)
    first_b, end_b = _extent(b)
    return first_a < end_b and first_b < end_a


def repeats(*tensors: Tensor) -> bool:
    """Whether an element surely lies at two places of `tensors`; never so for parts of a whole.

    Found are a common first element, dense ones that run into another, and more elements than fit.
    """
    tensors = tuple(x for x in tensors if x.numel())
    if len({x.data_ptr() for x in tensors}) < len(tensors):
        return True
    if not tensors:
        return False
    extents = [_extent(x) for x in tensors]
    span = max(end for _, end in extents) - min(start for start, _ in extents)
    if sum(x.numel() * x.element_size() for x in tensors) > span:
        return True
    dense = sorted(e for e, x in zip(extents, tensors, strict=True) if x.is_contiguous())
    return any(end > start for (_, end), (start, _) in pairwise(dense))


def any_overlap(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether a source and a target touch common bytes."""
    spans = [(*_extent(x), False) for x in sources if x.numel()]
    spans += [(*_extent(x), True) for x in targets if x.numel()]
    ends = {False: 0, True: 0}  # of the sources, of the targets met so far
    for start, end, is_target in sorted(spans):
        if start < ends[not is_target]:
            return True
        ends[is_target] = max(ends[is_target], end)
    return False


def _extent(x: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.element_size()


def check_like(x: Tensor, what: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises unless the tensor has this shape and dtype."""
    if list(x.shape) != list(shape) or x.dtype is not dtype:
        raise InvalidArgument(
            f"{what} is {list(x.shape)} {x.dtype}; expected {list(shape)} {dtype}"
        )


def tensor_list(
    tensors: Sequence[Tensor],
    what: str,
    world_size: int,
    check: Callable[[object, str], Tensor],
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """One checked tensor per rank, all of one dtype (`dtype`, or the first one's)."""
    if len(tensors) != world_size:
        raise InvalidArgument(
            f"{what} has {len(tensors)} tensors; expected {world_size}, one per rank"
        )
    checked_list = [check(x, f"{what}[{r}]") for r, x in enumerate(tensors)]
    dtype = dtype or checked_list[0].dtype
    for r, x in enumerate(checked_list):
        if x.dtype is not dtype:
            raise InvalidArgument(f"{what}[{r}] is {x.dtype}; expected {dtype}")
    return checked_list

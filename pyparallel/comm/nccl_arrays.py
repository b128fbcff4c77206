"""From what a caller has, a tensor or an array of any framework, to address, count and dtype."""

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch

from pyparallel._core import nccl as core
from pyparallel.errors import InvalidArgument, Unsupported

__all__ = ["RawArray", "View", "stream_handle", "view_of"]


@dataclass(frozen=True)
class RawArray:
    """`count` elements at an address of GPU memory, contiguous. The caller keeps them alive.

    `dtype` is a torch dtype or its name ("bfloat16"). `device` is the GPU's number, to be checked.
    """

    pointer: int
    count: int
    dtype: torch.dtype | str
    device: int | None = None


@dataclass(frozen=True)
class View:
    """An array as NCCL sees it."""

    pointer: int
    count: int
    element: Any  # core.Element
    device: int | None  # None: not known
    stream: int | None  # the stream its producer works on; None: not known
    read_only: bool
    owner: Any


_ELEMENTS: Final[dict[torch.dtype | str, Any]] = {}

# numpy's type strings, without the byte order
_TYPE_STRINGS: Final = {
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}
# DLPack's type codes: (code, bits)
_DLPACK_TYPES: Final = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
_DLPACK_GPU: Final = {2, 10, 13}  # CUDA, ROCm, CUDA managed


def element_of(dtype: torch.dtype | str) -> Any:
    """NCCL's idea of a dtype."""
    element = _ELEMENTS.get(dtype)
    if element is None:
        name = str(dtype).removeprefix("torch.")
        element = core.element(name)
        if element is None:
            raise InvalidArgument(f"NCCL cannot carry {name}; send its bytes as uint8 instead")
        _ELEMENTS[dtype] = element
    return element


def stream_handle(stream: Any) -> int:
    """The cudaStream_t of an integer, a torch, cupy or numba stream, or by `__cuda_stream__`."""
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    for attribute in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, attribute):
            handle = getattr(stream, attribute)
            return int(getattr(handle, "value", handle) or 0)
    raise InvalidArgument(
        f"stream={stream!r}: expected an integer handle (0 is the default stream), a torch or cupy "
        "stream, or an object with __cuda_stream__"
    )


def view_of(array: Any, what: str, stream: int | None, *, written: bool) -> View:
    """Looks at `array`; `what` names it in errors. `stream` is the one that the call is to use."""
    if isinstance(array, torch.Tensor):
        view = _torch_view(array, what)
    elif isinstance(array, RawArray):
        if array.count < 0:
            raise InvalidArgument(f"{what}: a RawArray of {array.count} elements")
        view = View(
            *(array.pointer, array.count, element_of(array.dtype), array.device),
            *(None, False, array),
        )
    elif hasattr(array, "__cuda_array_interface__"):
        view = _interface_view(array, what)
    elif hasattr(array, "__dlpack__"):
        view = _dlpack_view(array, what, stream)
    else:
        raise InvalidArgument(
            f"{what}: a {type(array).__name__} is no GPU array; expected a CUDA tensor of torch, "
            "an object with __cuda_array_interface__ or __dlpack__, or a RawArray"
        )
    if written and view.read_only:
        raise InvalidArgument(f"{what}: the array is read-only and would be written")
    return view


def _not_contiguous(what: str, shape: Any, strides: Any) -> InvalidArgument:
    return InvalidArgument(
        f"{what}: not contiguous (shape {tuple(shape)}, strides {tuple(strides)}); NCCL moves one "
        "block of memory: pass x.contiguous(), or an output that is contiguous"
    )


def _torch_view(x: torch.Tensor, what: str) -> View:
    if not x.is_cuda:
        raise InvalidArgument(
            f"{what}: the tensor is on {x.device}; NCCL works on memory of a GPU. For CPU tensors "
            "there is pyparallel.comm.Communicator"
        )
    if x.layout != torch.strided:
        raise InvalidArgument(f"{what}: layout {x.layout}; NCCL needs a dense (strided) tensor")
    if not x.is_contiguous():
        raise _not_contiguous(what, x.shape, x.stride())
    if x.is_conj() or x.is_neg():
        raise InvalidArgument(f"{what}: a lazily conjugated or negated view; pass x.resolve_conj()")
    device = x.device.index
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return View(x.data_ptr(), x.numel(), element_of(x.dtype), device, stream, False, x)


def _interface_view(array: Any, what: str) -> View:
    interface = array.__cuda_array_interface__
    shape, type_string = tuple(interface["shape"]), str(interface["typestr"])
    name = _TYPE_STRINGS.get(type_string[1:])
    if name is None or (type_string[0] == ">" and type_string[2:] != "1"):
        raise InvalidArgument(
            f"{what}: type {type_string} of __cuda_array_interface__ is unknown to NCCL; pass a "
            "RawArray with its dtype"
        )
    element = element_of(name)
    strides = interface.get("strides")
    if strides is not None and not _compact(shape, tuple(strides), element.itemsize):
        raise _not_contiguous(what, shape, strides)
    if interface.get("mask") is not None:
        raise InvalidArgument(f"{what}: a masked array")
    pointer, read_only = interface["data"]
    # 1 is the protocol's name for the default stream, which it may not call 0.
    stream = interface.get("stream")
    stream = 0 if stream == 1 else stream
    return View(int(pointer or 0), prod(shape), element, None, stream, bool(read_only), array)


def _compact(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    expected = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length == 0:
            return True
        if length != 1 and stride != expected:
            return prod(shape) == 0
        expected *= length
    return True


def _dlpack_view(array: Any, what: str, stream: int | None) -> View:
    kind, _ = array.__dlpack_device__()
    if kind not in _DLPACK_GPU:
        raise InvalidArgument(f"{what}: DLPack device type {int(kind)} is no GPU")
    if stream is None:
        raise InvalidArgument(f"{what}: a DLPack array does not say its stream; pass stream=")
    # DLPack calls CUDA's default stream 1: the producer makes that stream wait for its own work.
    capsule = array.__dlpack__(stream=stream or 1)
    pointer, shape, compact, code, bits, lanes, kind, device, read_only = core.dlpack(capsule)
    name = _DLPACK_TYPES.get((code, bits)) if lanes == 1 else None
    if name is None:
        raise InvalidArgument(
            f"{what}: DLPack type code {code}, {bits} bits, {lanes} lanes is unknown to NCCL"
        )
    if kind not in _DLPACK_GPU:
        raise InvalidArgument(f"{what}: DLPack device type {kind} is no GPU")
    if not compact:
        raise InvalidArgument(
            f"{what}: not contiguous (shape {shape}); NCCL moves one block of memory"
        )
    return View(pointer, prod(shape), element_of(name), device, stream, read_only, (array, capsule))


def external_stream(handle: int, device: int | torch.device) -> Any:
    """A stream of someone else's as torch's."""
    make: Any = torch.cuda.ExternalStream
    return make(handle, device=device)


def wait_for_producer(view: View, stream: int) -> None:
    """Makes `stream` wait for the work that the array's producer has under way on its own."""
    if view.stream is None or view.stream == stream or isinstance(view.owner, torch.Tensor):
        return  # torch tensors: who names another stream orders it, as everywhere in torch
    if not torch.cuda.is_available():
        raise Unsupported(
            f"the array's producer works on stream {view.stream:#x}, the call is to run on "
            f"{stream:#x}: to order them torch with CUDA is needed; pass stream={view.stream:#x}"
        )
    device = view.device if view.device is not None else torch.cuda.current_device()
    external_stream(stream, device).wait_stream(external_stream(view.stream, device))

"""DLPack objects as arrays: read as the protocol says, both versions of it, with and without torch.

Producers are capsules made here, field by field.
"""

import ctypes
from typing import Any

import numpy as np
import pytest

from pyparallel.comm.nccl_arrays import view_of
from pyparallel.errors import InvalidArgument
from tests.nccl.harness import Seat, Standin, run_ranks

# --- DLPack


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class DlArray:
    """numpy memory in a DLPack capsule that says it is a GPU's."""

    def __init__(self, values: np.ndarray, code: int, *, device: int = 2, version: int = 0, **odd):
        self.values = values
        shape = (ctypes.c_int64 * values.ndim)(*values.shape)
        steps = [stride // values.itemsize for stride in values.strides]
        strides = None if odd.pop("bare", False) else (ctypes.c_int64 * values.ndim)(*steps)
        address = values.ctypes.data - odd.get("byte_offset", 0)
        self.tensor = _Tensor(
            *(address, device, odd.pop("gpu", 0), values.ndim, code, values.itemsize * 8, 1),
            *(shape, strides, odd.pop("byte_offset", 0)),
        )
        self.version, self.flags, self.device = version, odd.pop("flags", 0), device
        self.streams: list[int] = []
        self.held: list[Any] = [shape, strides]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        if self.version:
            managed: Any = _Versioned(self.version, 0, None, None, self.flags, self.tensor)
            name = b"dltensor_versioned"
        else:
            managed, name = _Managed(self.tensor, None, None), b"dltensor"
        self.held.append(managed)
        self.held.append(name)
        return make(ctypes.addressof(managed), name, None)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("bare", [False, True])
def test_dlpack(standin: Standin, version: int, bare: bool) -> None:
    def body(seat: Seat) -> None:
        values = np.arange(6.0).reshape(2, 3) + seat.rank
        x = DlArray(values, 2, version=version, bare=bare, byte_offset=8)
        seat.comm.all_reduce(x, stream=seat.stream)
        seat.wait()
        assert np.array_equal(values, 2 * np.arange(6.0).reshape(2, 3) + 1)
        assert x.streams == [seat.stream]

    run_ranks(standin, 2, body)


def test_dlpack_types_and_streams() -> None:
    cases = [
        *((0, np.int8, "int8"), (0, np.int64, "int64"), (1, np.uint32, "uint32")),
        *((2, np.float16, "float16"), (2, np.float32, "float32"), (4, np.uint16, "bfloat16")),
        *((5, np.complex64, "complex64"), (6, np.bool_, "bool"), (10, np.uint8, "float8_e4m3fn")),
        (12, np.uint8, "float8_e5m2"),
    ]
    for code, dtype, name in cases:
        x = DlArray(np.zeros(4, dtype), code, gpu=2)
        view = view_of(x, "x", 0, written=False)
        assert (view.element.name, view.count, view.device) == (name, 4, 2)
        assert x.streams == [1]  # DLPack's name for the default stream


def test_dlpack_refusals() -> None:
    def look(*arguments, written: bool = False, stream: int | None = 5, **options) -> None:
        view_of(DlArray(*arguments, **options), "x", stream, written=written)

    grid = np.arange(12.0).reshape(3, 4)
    with pytest.raises(InvalidArgument, match="DLPack device type 1 is no GPU"):
        look(grid, 2, device=1)
    with pytest.raises(InvalidArgument, match="does not say its stream"):
        look(grid, 2, stream=None)
    with pytest.raises(InvalidArgument, match="not contiguous"):
        look(grid.T, 2)
    look(grid[:0].T, 2)
    look(grid[:1, :1].T, 2)
    with pytest.raises(InvalidArgument, match="type code 3, 64 bits, 1 lanes is unknown"):
        look(grid, 3)
    with pytest.raises(InvalidArgument, match="read-only and would be written"):
        look(grid, 2, version=1, flags=1, written=True)
    look(grid, 2, version=1, flags=1)
    with pytest.raises(InvalidArgument, match=r"capsule of version 2\.0; version 1 is known"):
        look(grid, 2, version=2)

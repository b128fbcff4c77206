"""Memory for NCCL: allocated by it, or the caller's and registered with a communicator."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from pyparallel._core import nccl as core
from pyparallel.comm.nccl_arrays import RawArray, element_of, view_of
from pyparallel.comm.nccl_library import load
from pyparallel.errors import Closed, InvalidArgument

if TYPE_CHECKING:
    from pyparallel.comm.nccl import NcclCommunicator

__all__ = ["NcclMemory", "Registration", "Window"]


class _Closing(ABC):
    """close() once or often, by hand or by `with`."""

    _core: Any

    @abstractmethod
    def close(self) -> None:
        """Gives back what this stands for; a second call does nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class NcclMemory(_Closing):
    """Memory of the current GPU from ncclMemAlloc: fit for windows and registration.

    An array of bytes to other frameworks: `torch.as_tensor(memory, device="cuda").view(dtype)`.
    """

    def __init__(self, nbytes: int, *, library: Any = None) -> None:
        self._core = core.Memory(load() if library is None else library, nbytes)

    @property
    def pointer(self) -> int:
        address = int(self._core.pointer)
        if address == 0:
            raise Closed("this NcclMemory has been freed")
        return address

    @property
    def nbytes(self) -> int:
        return int(self._core.nbytes)

    def array(self, dtype: torch.dtype | str, count: int, offset: int = 0) -> RawArray:
        """`count` elements from byte `offset` on."""
        end = offset + count * element_of(dtype).itemsize
        if offset < 0 or count < 0 or end > self.nbytes:
            raise InvalidArgument(f"bytes {offset} to {end} of a NcclMemory of {self.nbytes} bytes")
        return RawArray(self.pointer + offset, count, dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
        }

    def close(self) -> None:
        """Frees the memory; a second call does nothing."""
        self._core.free()


class Registration(_Closing):
    """A range of memory known to one communicator. Ends with close() or with the communicator."""

    def __init__(self, communicator: "NcclCommunicator", array: Any) -> None:
        view = view_of(array, "register", 0, written=False)
        nbytes = view.count * view.element.itemsize
        self._owner = array  # the memory must outlive the registration
        self._core = core.Registration(communicator._core, view.pointer, nbytes)

    @property
    def open(self) -> bool:
        return bool(self._core.open)

    def close(self) -> None:
        self._core.close()
        self._owner = None


class Window(_Closing):
    """A window on memory of every rank. Ends with close() or with the communicator."""

    def __init__(self, communicator: "NcclCommunicator", array: Any, symmetric: bool) -> None:
        view = view_of(array, "window", 0, written=False)
        nbytes = view.count * view.element.itemsize
        self._owner = array
        self._core = core.Window(communicator._core, view.pointer, nbytes, symmetric)

    @property
    def handle(self) -> int:
        """The ncclWindow_t; 0 once closed."""
        return int(self._core.handle)

    @property
    def open(self) -> bool:
        return bool(self._core.open)

    def close(self) -> None:
        self._core.close()
        self._owner = None

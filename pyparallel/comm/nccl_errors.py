"""One exception class per NCCL result code; `code` is the number, the text has NCCL's own words."""

from typing import Final

from pyparallel.errors import NcclError

__all__ = [
    "NcclInternalError",
    "NcclInvalidArgument",
    "NcclInvalidUsage",
    "NcclRemoteError",
    "NcclResultError",
    "NcclSystemError",
    "NcclTimeout",
    "NcclUnhandledCudaError",
]


class NcclResultError(NcclError):
    """A call of NCCL failed. Base of the classes below, and itself for codes they do not cover."""

    code: int = 0


class NcclUnhandledCudaError(NcclResultError):
    """A CUDA call inside NCCL failed."""


class NcclSystemError(NcclResultError):
    """A call of the operating system inside NCCL failed."""


class NcclInternalError(NcclResultError):
    """NCCL found a fault of its own."""


class NcclInvalidArgument(NcclResultError, ValueError):
    """NCCL refused an argument that this library's own checks let pass."""


class NcclInvalidUsage(NcclResultError):
    """NCCL was called in a way that it does not allow."""


class NcclRemoteError(NcclResultError):
    """A peer failed, or the network to it."""


class NcclTimeout(NcclResultError, TimeoutError):
    """NCCL's own time limit passed."""


ERROR_CLASSES: Final[dict[int, type[NcclResultError]]] = {
    0: NcclResultError,
    1: NcclUnhandledCudaError,
    2: NcclSystemError,
    3: NcclInternalError,
    4: NcclInvalidArgument,
    5: NcclInvalidUsage,
    6: NcclRemoteError,
    8: NcclTimeout,
}

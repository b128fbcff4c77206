"""One exception class per cause, the same for every engine (shared memory, NCCL, CUDA).

All derive from `CommError`, and from the built-in class that code without knowledge of this library
would catch. The native core raises them too: its C++ classes have the same names.
"""

__all__ = [
    "Aborted",
    "Closed",
    "CommError",
    "CudaError",
    "Interrupted",
    "InvalidArgument",
    "Mismatch",
    "NcclError",
    "NoMemory",
    "PeerLost",
    "SystemCallError",
    "Timeout",
    "Unsupported",
]


class CommError(RuntimeError):
    """Base of all errors of this library's communication."""


class InvalidArgument(CommError, ValueError):
    """The caller's arguments cannot work; found before any communication."""


class Mismatch(CommError, ValueError):
    """Ranks called different things: another op, size, dtype or order. Every rank raises."""


class Timeout(CommError, TimeoutError):
    """A deadline passed; the message names the ranks that have not come."""


class PeerLost(CommError, ConnectionError):
    """A rank's process died, or it closed its communicator while others needed it."""


class Aborted(CommError):
    """Someone called `abort()`, or an earlier failure broke the group."""


class Closed(CommError):
    """Used after `close()`, or in a forked child."""


class NoMemory(CommError, MemoryError):
    """Not enough memory to share; the message has the needed and the free bytes."""


class SystemCallError(CommError, OSError):
    """An operating system call failed; the message names it and its errno."""


class NcclError(CommError):
    """NCCL returned an error; the message has NCCL's own text."""


class CudaError(CommError):
    """The CUDA driver or run time returned an error; the message has its own text."""


class Unsupported(CommError, NotImplementedError):
    """This build or machine cannot do it; the message says what would be needed."""


class Interrupted(CommError, InterruptedError):
    """A signal ended the wait and its Python handler raised nothing."""

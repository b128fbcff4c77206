"""Communication between ranks: the communicator, shared memory to address, and their errors."""

try:
    from pyparallel import _core as _core
except ImportError as error:
    raise ImportError(
        f"pyparallel's native core does not load: {error}. In a source tree build it with "
        "`pip install -e . --no-build-isolation`; `python -m pyparallel doctor` says more."
    ) from error

from pyparallel import _autoload
from pyparallel.comm.communicator import Communicator, Recv, Send
from pyparallel.comm.reductions import Reduction, premul_sum
from pyparallel.comm.symmetric_memory import SymmetricMemory
from pyparallel.comm.work import Work
from pyparallel.errors import (
    Aborted,
    Closed,
    CommError,
    Interrupted,
    InvalidArgument,
    Mismatch,
    NoMemory,
    PeerLost,
    SystemCallError,
    Timeout,
    Unsupported,
)

__all__ = [
    "Aborted",
    "Closed",
    "CommError",
    "Communicator",
    "Interrupted",
    "InvalidArgument",
    "Mismatch",
    "NoMemory",
    "PeerLost",
    "Recv",
    "Reduction",
    "Send",
    "SymmetricMemory",
    "SystemCallError",
    "Timeout",
    "Unsupported",
    "Work",
    "premul_sum",
]

_autoload.register()

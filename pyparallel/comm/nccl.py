"""NCCL for any framework's arrays: `NcclCommunicator`, groups, memory, registration.

    id = nccl.unique_id()                       # on one rank; carry its 128 bytes to the others
    comm = nccl.NcclCommunicator(id, rank, world_size)
    comm.all_reduce(x)                          # on the current stream; returns before it is done
    with nccl.group():                          # several calls as one
        comm.send(x, peer=1)
        comm.recv(y, peer=1)
    comm.close()

The library is found at run time (`load`); `nccl_info()` says which, and what it can do.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch

from pyparallel._core import nccl as core
from pyparallel.comm.nccl_arrays import RawArray
from pyparallel.comm.nccl_calls import group
from pyparallel.comm.nccl_config import DEFAULTS, NcclConfig, NcclMemoryStats, options_of
from pyparallel.comm.nccl_errors import (
    NcclInternalError,
    NcclInvalidArgument,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclResultError,
    NcclSystemError,
    NcclTimeout,
    NcclUnhandledCudaError,
)
from pyparallel.comm.nccl_library import load, nccl_info, open_library
from pyparallel.comm.nccl_memory import NcclMemory, Registration, Window
from pyparallel.comm.nccl_one_sided import OneSided, SignalWait
from pyparallel.errors import InvalidArgument, NcclError, Timeout

__all__ = [
    "NcclCommunicator",
    "NcclConfig",
    "NcclError",
    "NcclInternalError",
    "NcclInvalidArgument",
    "NcclInvalidUsage",
    "NcclMemory",
    "NcclMemoryStats",
    "NcclRemoteError",
    "NcclResultError",
    "NcclSystemError",
    "NcclTimeout",
    "NcclUnhandledCudaError",
    "RawArray",
    "Registration",
    "SignalWait",
    "Window",
    "group",
    "load",
    "nccl_info",
    "open_library",
    "unique_id",
]


def unique_id(library: Any = None) -> bytes:
    """A new id for one communicator, 128 bytes, made by one rank and given to all."""
    made: bytes = (load() if library is None else library).unique_id()
    return made


class NcclCommunicator(OneSided):
    """One rank's seat in one NCCL group.

    Collective over all `world_size` ranks. The device is `device`, or the thread's current one.

    Data calls go onto a stream and return before they are done. Every wait of this class ends by
    `timeout` seconds, and so does launched work unless `watch=False`: then, or when a peer is lost,
    the communicator is aborted and each later call raises `Aborted` with the reason. With
    `abort_on_error=False` the failure is only recorded, so that `shrink(..., abort=True)` can go on
    with the ranks that are left. A `with` block closes at its end, and aborts on an exception.
    """

    def __init__(
        self,
        id: bytes | Sequence[bytes],
        rank: int,
        world_size: int,
        *,
        device: int | torch.device | None = None,
        name: str = "world",
        timeout: float = 30.0,
        blocking: bool | None = None,
        watch: bool = True,
        abort_on_error: bool = True,
        config: NcclConfig = DEFAULTS,
        library: Any = None,
    ) -> None:
        library = load() if library is None else library
        options = options_of(name, timeout, blocking, watch, abort_on_error, config)
        ids = [id] if isinstance(id, bytes | bytearray) else list(id)
        with _on_device(device):
            made = core.Communicator.init(library, ids, rank, world_size, options)
        self._settings = (blocking, watch, abort_on_error, config)
        self._adopt(made, device)

    @classmethod
    def from_store(
        cls,
        store: Any,
        rank: int,
        world_size: int,
        *,
        name: str = "world",
        timeout: float = 30.0,
        **options: Any,
    ) -> "NcclCommunicator":
        """Ranks that share a torch Store. A rank that does not come is named on the others."""
        from pyparallel.comm.nccl_rendezvous import absent_ranks, exchange_id

        library = options.get("library") or load()
        options["library"] = library
        id = exchange_id(store, rank, world_size, name, timeout, library)
        try:
            return cls(id, rank, world_size, name=name, timeout=timeout, **options)
        except Timeout as error:
            absent = absent_ranks(store, world_size, name)
            raise Timeout(f"{error}; never came to the store: ranks {absent or 'none'}") from error

    @classmethod
    def init_all(
        cls,
        devices: Sequence[int],
        *,
        name: str = "world",
        timeout: float = 30.0,
        watch: bool = True,
        abort_on_error: bool = True,
        library: Any = None,
    ) -> "list[NcclCommunicator]":
        """A whole group in this process: rank r on `devices[r]`. Blocking, with NCCL's defaults.

        What one thread calls on several of them belongs into one `group`.
        """
        library = load() if library is None else library
        options = options_of(name, timeout, True, watch, abort_on_error, DEFAULTS)
        made = core.Communicator.init_all(library, list(devices), options)
        settings = (True, watch, abort_on_error, DEFAULTS)
        return [cls._wrap(one, settings, device) for one, device in zip(made, devices, strict=True)]

    @classmethod
    def join_grown(
        cls,
        id: bytes,
        rank: int,
        world_size: int,
        *,
        device: int | torch.device | None = None,
        name: str = "world",
        timeout: float = 30.0,
        blocking: bool | None = None,
        watch: bool = True,
        abort_on_error: bool = True,
        config: NcclConfig = DEFAULTS,
        library: Any = None,
    ) -> "NcclCommunicator":
        """For a new rank, while the others are in `grow`; `id` is from `grow_id` of one of them."""
        library = load() if library is None else library
        options = options_of(name, timeout, blocking, watch, abort_on_error, config)
        with _on_device(device):
            made = core.Communicator.join_grown(library, id, rank, world_size, options)
        return cls._wrap(made, (blocking, watch, abort_on_error, config), device)

    def _adopt(self, made: Any, device: int | torch.device | None) -> None:
        self._core = made
        wanted = device.index if isinstance(device, torch.device) else device
        if wanted is not None and wanted != made.device:
            made.abort("made on another device than the one asked for", 5.0)
            raise InvalidArgument(
                f"communicator {made.name}: asked for device {wanted}, NCCL took {made.device}; "
                "make it current (torch.cuda.set_device) before the call"
            )

    @classmethod
    def _wrap(
        cls,
        made: Any,
        settings: tuple[bool | None, bool, bool, NcclConfig],
        device: int | torch.device | None = None,
    ) -> "NcclCommunicator":
        self = cls.__new__(cls)
        self._settings = settings
        self._adopt(made, device)
        return self

    # --- what it is

    @property
    def rank(self) -> int:
        return int(self._core.rank)

    @property
    def size(self) -> int:
        return int(self._core.size)

    @property
    def device(self) -> int:
        return int(self._core.device)

    @property
    def name(self) -> str:
        return str(self._core.name)

    @property
    def blocking(self) -> bool:
        """Whether the library itself waits in its calls (before 2.14.3, or asked for)."""
        return bool(self._core.blocking)

    @property
    def library(self) -> Any:
        return self._core.library

    @property
    def handle(self) -> int:
        """The ncclComm_t, for other libraries. It stays this object's."""
        return int(self._core.handle)

    @property
    def sequence(self) -> int:
        """Number of data calls launched so far."""
        return int(self._core.sequence)

    @property
    def failure(self) -> str:
        """Empty while usable, else the first reason why not."""
        return str(self._core.failure)

    @property
    def closed(self) -> bool:
        return bool(self._core.closed)

    @property
    def timeout(self) -> float:
        return float(self._core.timeout)

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._core.timeout = seconds

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.failure or "usable"
        return f"<NcclCommunicator {self.name} rank {self.rank} of {self.size}: {state}>"

    # --- new communicators

    def split(
        self, color: int | None, key: int | None = None, *, name: str | None = None
    ) -> "NcclCommunicator | None":
        """Collective: ranks of one `color` form a group in order of (`key`, rank); None: none."""
        if color is not None and color < 0:
            raise InvalidArgument(
                f"split: color {color}; colors are not negative, None is no group"
            )
        made = self._core.split(
            -1 if color is None else color,
            self.rank if key is None else key,
            self._child_options(name),
        )
        return None if made is None else type(self)._wrap(made, self._settings)

    def shrink(
        self, excluded: Sequence[int], *, abort: bool = False, name: str | None = None
    ) -> "NcclCommunicator":
        """A group without the ranks `excluded`; called by those that stay.

        `abort=True` ends what is under way first: the way on after a peer is lost.
        """
        made = self._core.shrink(list(excluded), abort, self._child_options(name))
        return type(self)._wrap(made, self._settings)

    def grow_id(self) -> bytes:
        """An id for `grow`: made by one rank of this group, given to the new ranks."""
        made: bytes = self._core.grow_id()
        return made

    def grow(
        self, world_size: int, id: bytes | None = None, *, name: str | None = None
    ) -> "NcclCommunicator":
        """A group with more ranks. Only the rank that called `grow_id` passes the id."""
        made = self._core.grow(world_size, id, self._child_options(name))
        return type(self)._wrap(made, self._settings)

    def _child_options(self, name: str | None) -> Any:
        if name is None:
            return None  # all like this one's, which is what NCCL does by itself
        blocking, watch, abort_on_error, config = self._settings
        return options_of(name, self.timeout, blocking, watch, abort_on_error, config)

    # --- memory

    def register(self, array: Any) -> Registration:
        """Lets NCCL use the array's memory without copies. Ranges may not overlap."""
        return Registration(self, array)

    def window(self, array: Any, *, symmetric: bool = True) -> Window:
        """Collective: a window on memory that all ranks registered alike (from `NcclMemory`)."""
        return Window(self, array, symmetric)

    # --- pauses

    def revoke(self) -> None:
        """Ends what this rank has under way, also in a thread that is stuck inside NCCL.

        Left to do then: `split`, `shrink`, `close`, `abort`. Every rank that goes on revokes.
        """
        self._core.revoke()

    @property
    def revoked(self) -> bool:
        return bool(self._core.revoked)

    def suspend(self) -> None:
        """Gives NCCL's memory back to the device; no call but `resume` until then. Collective."""
        self._core.suspend()

    def resume(self) -> None:
        """Takes back what `suspend` gave. Collective."""
        self._core.resume()

    def memory_stats(self) -> NcclMemoryStats:
        """What NCCL holds on the device for this communicator."""
        return NcclMemoryStats(*self._core.memory_stats())

    # --- life

    def check(self) -> None:
        """Raises what NCCL's background work has failed with, if it has."""
        self._core.check_async()

    def close(self, timeout: float | None = None) -> None:
        """Finishes what was launched, then destroys; at the deadline aborts, raises `Timeout`."""
        self._core.close(self.timeout if timeout is None else timeout)

    def abort(self, reason: str = "abort() was called", timeout: float = 10.0) -> None:
        """Ends everything now, from any thread. Raises `Timeout` when NCCL does not return."""
        if not self._core.abort(reason, timeout):
            raise Timeout(
                f"communicator {self.name} (rank {self.rank} of {self.size}): ncclCommAbort has "
                f"not returned after {timeout} s; it goes on in the background"
            )

    def __enter__(self) -> "NcclCommunicator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._core.abort(f"left by {type(error).__name__}: {error}", self.timeout)


def _on_device(device: int | torch.device | None) -> Any:
    """Makes a GPU the thread's current one, where torch knows of any."""
    if device is not None and torch.cuda.is_available():
        return torch.cuda.device(device)
    return nullcontext()

"""`SymmetricMemory`: the same allocation on every rank, addressable by all of them."""

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from pyparallel import _core
from pyparallel.comm.announced import Method, announced_by
from pyparallel.comm.communicator import Communicator
from pyparallel.comm.work import milliseconds
from pyparallel.errors import InvalidArgument

__all__ = ["SymmetricMemory"]


def _refuse_making(given: tuple[Any, ...], named: dict[str, Any], error: Exception) -> Exception:
    group = named.get("group", given[1] if len(given) > 1 else None)
    return group._refused("symmetric memory", error) if isinstance(group, Communicator) else error


def _told(op: str) -> Callable[[Method], Method]:
    """A collective of the memory, by its name in the core."""

    def refuse(given: tuple[Any, ...], _: dict[str, Any], error: Exception) -> Exception:
        given[0]._core.refuse(op, f"{type(error).__name__}: {error}")
        return error

    return announced_by(refuse)


class SymmetricMemory:
    """`nbytes` on every rank of `group`, addressable by all of them. Collective.

    Tensors are cut from it with `empty`, at equal offsets on all ranks; `peer(rank, tensor)` is the
    same tensor of another rank, `pointers(tensor)` all ranks' addresses of it, for kernels.
    Collectives of any `Communicator` whose ranks share the memory find it by address and copy less.

    Every rank makes the same calls of the constructor, `empty`, `free` and `barrier`, in the same
    order; a misfit or a failure on one rank raises on all. Different memories, of one group or of
    several, do not interfere.

    Closing never waits, and tensors stay valid after it: the memory goes with its last tensor.
    """

    @announced_by(_refuse_making)
    def __init__(
        self,
        group: Communicator,
        nbytes: int,
        *,
        device: "torch.device | str | int" = "cpu",
        channels: int = 16,
        multicast: bool = True,
        name: str | None = None,
        timeout: "float | timedelta | None" = None,
    ) -> None:
        """Makes the memory, all zero.

        Args:
            group: the ranks; it stays the caller's, and may be closed before the memory is.
            nbytes: bytes on each rank, at least; rounded up to what the device maps.
            device: "cpu", or the CUDA device of this rank.
            channels: how many independent signals there are between each pair of ranks.
            multicast: on CUDA, use multicast memory where every device has it.
            name: for messages; the group's by default.
            timeout: seconds that a call may take which names none; the group's by default.
        """
        try:
            self._timeout_ms = group._ms(timeout)
            where = _device(device)
            _refuse_in_capture(where, "SymmetricMemory(...)")
            size = _positive("nbytes", nbytes, 2**63)
            lines = _positive("channels", channels, 2**31)
            if name is not None and not isinstance(name, str):
                raise TypeError(f"name is {name!r}; expected a str")
        except Exception as error:
            raise group._refused("symmetric memory", error) from None
        self._device = where
        self._owner_pid = os.getpid()
        self._core = _core.SymmetricMemory.create(
            group._core,
            size,
            name or group.name,
            -1 if where.type == "cpu" else where.index,
            lines,
            multicast,
            self._timeout_ms,
        )
        self._bases = self._table(self._core.data)
        self._signal_pages = self._table(self._core.signal_page)

    # --- tensors

    @_told("allocate")
    def empty(
        self,
        shape: "int | Sequence[int]",
        *,
        dtype: torch.dtype = torch.float32,
        alignment: int = 256,
    ) -> torch.Tensor:
        """Collective: an uninitialised contiguous tensor, at the same offset on every rank.

        Its part of the memory is taken until `free`; dropping the tensor does not give it back,
        because ranks drop tensors at different times.
        """
        with self._refusing("allocate"):
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"dtype is {dtype!r}; expected a torch.dtype")
            _refuse_in_capture(self._device, "SymmetricMemory.empty")
            sizes = [_integer("size", n) for n in _sequence(shape)]
            aligned = _positive("alignment", alignment, 2**63)
            count = prod(sizes)
            # At least one element, so that a tensor without any has an address of its own too.
            nbytes = max(count, 1) * dtype.itemsize
            if any(n < 0 for n in sizes) or nbytes >= 2**63:
                raise InvalidArgument(
                    f"shape {tuple(sizes)} is negative or exceeds the address space"
                )
            if aligned % dtype.itemsize:
                raise InvalidArgument(
                    f"alignment {aligned}; expected a multiple of {dtype.itemsize} ({dtype})"
                )
        offset = self._core.allocate(nbytes, aligned, self._timeout_ms)
        return self._bytes(self.rank, offset, nbytes).view(dtype)[:count].view(sizes)

    @_told("release")
    def free(self, tensor: torch.Tensor) -> None:
        """Collective: gives back what `empty` took. No rank may use it any more, on any rank."""
        with self._refusing("release"):
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__name__
                raise TypeError(f"free() of a {kind}; expected a tensor of empty()")
            offset = self.offset(tensor)
        self._core.release(offset, self._timeout_ms)

    def peer(self, rank: int, tensor: "torch.Tensor | None" = None) -> torch.Tensor:
        """What lies in the memory of `rank` where `tensor` lies in this rank's; a view, no copy.

        Without `tensor`, all of that rank's data as uint8.
        """
        if tensor is None:
            return self._bytes(rank, 0, self._core.bytes)
        storage = tensor.untyped_storage()
        start = self._offset_of(storage.data_ptr(), storage.nbytes())
        whole = storage.nbytes() - storage.nbytes() % tensor.element_size()
        flat = self._bytes(rank, start, whole).view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def pointers(self, tensor: "torch.Tensor | None" = None) -> torch.Tensor:
        """Addresses of every rank's `tensor` (by default: of its data), as int64 on the device."""
        if tensor is None:
            return self._bases
        _refuse_in_capture(self._device, "SymmetricMemory.pointers(tensor)")
        return self._bases + self.offset(tensor)

    def multicast_pointer(self, tensor: "torch.Tensor | None" = None) -> int:
        """The address that reaches every rank's `tensor` at once; 0 where there is no multicast."""
        base = self._core.multicast
        return base + self.offset(tensor) if base and tensor is not None else base

    def offset(self, tensor: torch.Tensor) -> int:
        """Bytes from the start of the data to the tensor's first element: alike on all ranks."""
        first = int(tensor.storage_offset()) * tensor.element_size()
        return self._offset_of(tensor.untyped_storage().data_ptr() + first, 0)

    # --- signals

    @property
    def signals(self) -> torch.Tensor:
        """This rank's signal page: int64 [channel, source, 8]; the first of each 8 is the counter.

        For kernels: the page belongs to this memory alone, starts at zero and is never cleared. On
        the CPU `put_signal` and `wait_signal` use the same counters.
        """
        flat = from_dlpack(self._core.signal_view(self.rank))
        return flat.view(torch.int64).view(self.channels, self.world_size, 8)

    @property
    def signal_pointers(self) -> torch.Tensor:
        """Addresses of every rank's signal page, as int64 on the device."""
        return self._signal_pages

    def put_signal(self, peer: int, channel: int = 0) -> None:
        """Raises this rank's counter on `peer` by one; what was written before is seen by its wait.

        On CUDA it first waits for the current stream.
        """
        self._finish_stream()
        self._core.put_signal(peer, channel)

    def wait_signal(
        self, source: int, channel: int = 0, *, timeout: "float | timedelta | None" = None
    ) -> None:
        """Waits on the host for the next signal of `source`: the n-th wait for the n-th put.

        After a Timeout the same signal may be waited for again.
        """
        self._core.wait_signal(source, channel, self._ms(timeout))

    @_told("barrier")
    def barrier(self, *, timeout: "float | timedelta | None" = None) -> None:
        """Collective: what any rank wrote before it, every rank sees after it.

        On CUDA it first waits for the current stream.
        """
        with self._refusing("barrier"):
            limit = self._ms(timeout)
            self._finish_stream()
        self._core.barrier(limit)

    # --- life

    def abort(self, why: str = "abort() was called") -> None:
        """Wakes every rank that waits in this memory's calls; they raise `Aborted`."""
        self._core.abort(why)

    def close(self) -> None:
        """Leaves, without waiting; may be called twice. Tensors stay valid."""
        if os.getpid() == self._owner_pid:
            self._core.close()

    def __enter__(self) -> "SymmetricMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- facts

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """How many ranks share the memory."""
        return self._core.size

    @property
    def nbytes(self) -> int:
        """Bytes of data on each rank: what was asked for, rounded up."""
        return self._core.bytes

    @property
    def used(self) -> int:
        """Bytes taken by `empty` and not yet freed."""
        return self._core.used

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""
        return self._device

    @property
    def channels(self) -> int:
        """How many signal channels there are."""
        return self._core.channels

    @property
    def generation(self) -> int:
        """A number that tells this memory from others of its group, alike on all ranks."""
        return self._core.generation

    @property
    def failure(self) -> str:
        """Why the memory's collective calls can no longer be used; empty while they can."""
        return self._core.failure()

    def explain(self) -> dict[str, Any]:
        """How the memory is shared, and why not better."""
        return {
            "kind": self._core.kind,
            "device": str(self._device),
            "multicast": self._core.multicast != 0,
            "notes": [note for note in self._core.notes.split("; ") if note],
            "nbytes": self.nbytes,
            "granularity": self._core.granularity,
        }

    def __repr__(self) -> str:
        return (
            f"SymmetricMemory(group={self._core.name!r}, generation={self.generation}, "
            f"rank={self.rank}, world_size={self.world_size}, nbytes={self.nbytes}, "
            f"device={str(self._device)!r}, kind={self._core.kind!r})"
        )

    # --- inside

    @contextmanager
    def _refusing(self, op: str) -> Iterator[None]:
        """Around a collective's checks: what they raise is raised on the other ranks too."""
        try:
            yield
        except Exception as error:
            self._core.refuse(op, f"{type(error).__name__}: {error}")
            raise

    def _ms(self, timeout: "float | timedelta | None") -> int:
        return self._timeout_ms if timeout is None else milliseconds(timeout)

    def _table(self, address_of: Any) -> torch.Tensor:
        """Each rank's address as int64: those above 2^63 wrap, and kernels get the same 64 bits."""
        addresses = [address_of(rank) for rank in range(self.world_size)]
        signed = [a - 2**64 if a >= 2**63 else a for a in addresses]
        return torch.tensor(signed, dtype=torch.int64, device=self._device)

    def _bytes(self, rank: int, offset: int, nbytes: int) -> torch.Tensor:
        return from_dlpack(self._core.view(rank, offset, nbytes))

    def _offset_of(self, address: int, nbytes: int) -> int:
        offset = address - self._core.data(self.rank)
        if not 0 <= offset < self.nbytes or nbytes > self.nbytes - offset:
            raise InvalidArgument(
                f"the tensor at {address:#x} does not lie in this rank's part of {self!r}; "
                "make it with empty()"
            )
        return offset

    def _finish_stream(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _integer(what: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}; expected an integer") from None
    if not -(2**63) <= number < 2**63:
        raise InvalidArgument(f"{what} is {number}, which exceeds the address space")
    return number


def _positive(what: str, value: Any, limit: int) -> int:
    number = _integer(what, value)
    if not 1 <= number < limit:
        raise InvalidArgument(f"{what} is {number}; expected 1 to {limit - 1}")
    return number


def _sequence(shape: "int | Sequence[int]") -> Sequence[int]:
    return shape if isinstance(shape, Sequence) else [shape]


def _device(device: "torch.device | str | int") -> torch.device:
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if found.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device is {found}; symmetric memory lies on cpu or cuda")
    return found


def _refuse_in_capture(device: torch.device, call: str) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            f"{call} under CUDA graph capture: it cannot be captured; call it once before the "
            "capture and use what it gave inside"
        )

"""`Communicator`: one rank's seat in a group, for torch tensors in CPU memory."""

import atexit
import hashlib
import os
import time
import weakref
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from pyparallel import _core
from pyparallel.comm.announced import announced
from pyparallel.comm.boards import FileBoard, StoreBoard
from pyparallel.comm.collectives import Collectives
from pyparallel.comm.messages import Messages, Recv, Send
from pyparallel.comm.rendezvous import Board, assemble, check_group, hosts_of
from pyparallel.comm.work import milliseconds, settle_all
from pyparallel.errors import InvalidArgument

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Communicator", "Recv", "Send"]

DEFAULT_TIMEOUT = 30.0


class Communicator(Collectives, Messages):
    """One rank's seat in a group of ranks: collectives, messages, sub-groups.

    Make one on every rank with `from_store`, `from_file` or `from_id`. Every rank calls every
    collective, in the same order, with matching arguments; otherwise all ranks raise. Tensors may
    have any strides. A call that fails by a timeout, a lost peer or `abort()` breaks the group:
    every later call raises the first reason (see `failure`).

    Close it (or use it in a `with` block) when the rank is finished; closing never waits. Calls on
    one communicator from several threads run one at a time; several communicators are independent.
    """

    def __init__(self, core: _core.Communicator) -> None:
        """Wraps a joined core communicator; use the class methods instead."""
        super().__init__(core)
        self._owner_pid = os.getpid()
        self._spans_hosts: bool | None = None
        _open.add(self)

    # --- joining

    @staticmethod
    def unique_id() -> bytes:
        """A fresh id of 128 bytes for `from_id`: made by one rank, given to all, for one group."""
        return _core.Communicator.random_id()

    @classmethod
    def from_id(
        cls,
        id: bytes,
        rank: int,
        world_size: int,
        *,
        name: str = "world",
        timeout: "float | timedelta" = DEFAULT_TIMEOUT,
    ) -> "Communicator":
        """Joins the ranks of this host that hold the same id.

        `timeout` bounds the joining, and later each call that names none.
        """
        check_group(rank, world_size)
        return cls(_core.Communicator.join(id, rank, world_size, name, milliseconds(timeout)))

    @classmethod
    def from_store(
        cls,
        store: "Store",
        rank: int,
        world_size: int,
        *,
        name: str = "world",
        timeout: "float | timedelta" = DEFAULT_TIMEOUT,
    ) -> "Communicator":
        """Joins the ranks that share a torch.distributed Store.

        A store may serve many groups, one after another or with different names at once. Ranks may
        be on several hosts: then shared memory joins those of a host, and gloo the hosts.
        """
        check_group(rank, world_size)
        return cls._meet(StoreBoard(store, name, rank), rank, world_size, name, timeout)

    @classmethod
    def from_file(
        cls,
        path: "str | os.PathLike[str]",
        rank: int,
        world_size: int,
        *,
        name: str = "world",
        timeout: "float | timedelta" = DEFAULT_TIMEOUT,
    ) -> "Communicator":
        """Joins the ranks that name the same file, which need not exist and is gone afterwards.

        A file left behind by a crash does no harm.
        """
        check_group(rank, world_size)
        return cls._meet(FileBoard(path, rank), rank, world_size, name, timeout)

    @classmethod
    def _meet(
        cls, board: Board, rank: int, world_size: int, name: str, timeout: "float | timedelta"
    ) -> "Communicator":
        limit_ms = milliseconds(timeout)
        deadline = time.monotonic() + limit_ms / 1000
        joined = False
        try:
            records = assemble(board, rank, world_size, name, deadline, limit_ms / 1000)
            left = max(0.001, deadline - time.monotonic())
            if len(hosts_of(records)) > 1:
                core = _core.Communicator.from_capsule(
                    board.join_hosts(name, rank, world_size, left)
                )
            else:
                id = records[0].unique_id
                core = _core.Communicator.join(id, rank, world_size, name, int(1000 * left))
            core.timeout_ms = limit_ms
            joined = True
        finally:
            board.done(joined)
        return cls(core)

    # --- sub-groups

    @announced
    def split(
        self, color: int | None, key: int = 0, *, name: str | None = None
    ) -> "Communicator | None":
        """Collective: the ranks of one color become a group of their own, ordered by (key, rank).

        With color None this rank joins none, and gets None.
        """
        highest = 2**31 - 1
        if color is not None and not (isinstance(color, int) and 0 <= color <= highest):
            error = InvalidArgument(f"color is {color!r}; expected None or 0 to {highest}")
            raise self._refused("split", error)
        if not (isinstance(key, int) and abs(key) <= highest):
            error = InvalidArgument(f"key is {key!r}; expected an integer of 32 bits")
            raise self._refused("split", error)
        if name is not None and not isinstance(name, str):
            error = InvalidArgument(f"name is {name!r}; expected None or a str")
            raise self._refused("split", error)
        part = self._core.split(
            -1 if color is None else color,
            key,
            name or f"{self.name}/{color}",
            self._timeout_ms,
        )
        return None if part is None else Communicator(part)

    # --- life

    def abort(self, why: str = "abort() was called") -> None:
        """Ends the group for all its ranks: their current and later calls raise `Aborted`."""
        self._core.abort(why)

    def close(self) -> None:
        """Leaves the group, without waiting. Peers that still need this rank raise `PeerLost`."""
        if os.getpid() == self._owner_pid:  # a forked child is no rank and has nothing to leave
            self._core.close()
        _open.discard(self)

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- facts

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._world_size

    @property
    def name(self) -> str:
        """The group's name in messages."""
        return self._core.name

    def spans_hosts(self) -> bool:
        """Whether the ranks are on several hosts. Collective at its first call, then known."""
        if self._spans_hosts is None:
            identity = hashlib.sha256(_core.host_identity().encode()).digest()[:8]
            mine = torch.tensor([int.from_bytes(identity, "little", signed=True)])
            self._spans_hosts = len(set(self.all_gather(mine).tolist())) > 1
        return self._spans_hosts

    @property
    def timeout(self) -> float:
        """Seconds that a call may take which names no timeout of its own. May be set."""
        return self._timeout_ms / 1000

    @timeout.setter
    def timeout(self, timeout: "float | timedelta") -> None:
        self._timeout_ms = self._core.timeout_ms = milliseconds(timeout)

    @property
    def sequence(self) -> int:
        """How many collectives this rank has started: the #n of messages."""
        return self._core.sequence

    @property
    def failure(self) -> str:
        """Why the group can no longer be used; empty while it can."""
        return self._core.failure()

    def pid_of(self, rank: int) -> int:
        """Process id of a rank; 0 where it lives in another pid namespace."""
        if not 0 <= rank < self._world_size:
            raise InvalidArgument(f"rank {rank} of a group of {self._world_size}")
        return self._core.pid_of(rank)

    def __repr__(self) -> str:
        state = f", failure={self.failure!r}" if self.failure else ""
        seat = f"rank={self.rank}, world_size={self.world_size}"
        return f"Communicator(name={self.name!r}, {seat}{state})"


_open: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


def _leave_all() -> None:
    """At exit: no worker may still want the interpreter when it goes."""
    for communicator in list(_open):
        communicator.close()
    settle_all(1.0)


atexit.register(_leave_all)

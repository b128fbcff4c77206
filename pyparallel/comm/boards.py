"""The two boards of the rendezvous: a torch.distributed Store, and a file."""

import contextlib
import os
import stat
from datetime import timedelta
from typing import TYPE_CHECKING

from pyparallel.comm.rendezvous import Record
from pyparallel.errors import InvalidArgument, Mismatch, Unsupported

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LARGEST_FILE = 16 << 20


class StoreBoard:
    """Records under `pyparallel/NAME/N/RANK`: N counts this rank's meetings of that name.

    A rank that gives up says so under `pyparallel/NAME/N/over`. Whoever waits there, or comes to it
    later, goes on to its next meeting: so a rank that tries again meets those who come for the
    first time.
    """

    def __init__(self, store: "Store", name: str, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._group = f"pyparallel/{name}"
        self._prefix = ""

    def post(self, record: Record) -> None:
        self._prefix = f"{self._group}/{self._store.add(f'{self._group}/calls/{self._rank}', 1)}"
        self._store.set(f"{self._prefix}/{record.rank}", record.to_json())

    def over(self) -> bool:
        return bool(self._store.check([f"{self._prefix}/over"]))

    def read(self, rank: int) -> Record | None:
        key = f"{self._prefix}/{rank}"
        if not self._store.check([key]):
            return None
        return Record.from_json(self._store.get(key))

    def join_hosts(self, name: str, rank: int, world_size: int, timeout: float) -> object:
        from torch._C._distributed_c10d import PrefixStore

        from pyparallel import _torch
        from pyparallel.comm.torch_backend import make_gloo

        store = PrefixStore(f"{self._prefix}/hosts", self._store)
        limit = timedelta(seconds=timeout)
        return _torch.join(store, rank, world_size, name, limit, make_gloo)

    def done(self, joined: bool) -> None:
        """Takes this rank's record away: all have read it once the group is joined."""
        if not self._prefix:
            return
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every Store can delete
            if joined:
                self._store.delete_key(f"{self._prefix}/{self._rank}")
            else:
                self._store.set(f"{self._prefix}/over", "1")


class FileBoard:
    """Records as lines of one file, which is gone again once the group has met.

    Every rank appends its line and reads the others'. Lines of processes that have ended, and lines
    that are no records, are passed over: so a file left by a crash does no harm. A rank that has
    seen all unlinks the file; the others still read it through their open descriptors. So the next
    group of the same path starts with a new file, and a rank whose file went away before its group
    was complete adds its line to the new one.
    """

    def __init__(self, path: "str | os.PathLike[str]", rank: int) -> None:
        self._path = os.fspath(path)
        self._rank = rank
        self._fd = -1
        self._record: Record | None = None
        self._records: dict[int, Record] = {}
        self._size = -1

    def post(self, record: Record) -> None:
        self._record = record
        self._append()

    def read(self, rank: int) -> Record | None:
        self._refresh()
        return self._records.get(rank)

    def over(self) -> bool:
        return False  # a file that went away is started anew by read()

    def join_hosts(self, name: str, rank: int, world_size: int, timeout: float) -> object:
        raise Unsupported(
            f"group {name}: the ranks at {self._path} are on several hosts; use "
            "Communicator.from_store with a torch.distributed TCPStore"
        )

    def done(self, joined: bool) -> None:
        """Closes, and unlinks the file if it is still the one this rank wrote to."""
        if self._fd < 0:
            return
        if self._is_current():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108
        self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def _append(self) -> None:
        assert self._record is not None
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            self._fd = os.open(self._path, flags, 0o600)
            facts = os.fstat(self._fd)
            if facts.st_uid != os.geteuid() or not stat.S_ISREG(facts.st_mode):
                self._close()
                raise InvalidArgument(
                    f"rendezvous file {self._path}: expected a regular file of user "
                    f"{os.geteuid()}, found one of user {facts.st_uid} with mode "
                    f"{stat.filemode(facts.st_mode)}"
                )
            # A line of its own even after a half-written one. One write: appends do not interleave.
            os.write(self._fd, f"\n{self._record.to_json()}\n".encode())
            if self._is_current():
                self._size = -1
                return
            self._close()  # unlinked between open and write: the line would never be seen

    def _is_current(self) -> bool:
        try:
            there, ours = os.stat(self._path), os.fstat(self._fd)  # noqa: PTH116
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _refresh(self) -> None:
        current = self._is_current()
        self._read_lines()
        # Gone from the path, it holds a whole group, or a misfit, or a group that gave up. After
        # the last, start anew.
        assert self._record is not None
        world_size = self._record.world_size
        alike = all(record.world_size == world_size for record in self._records.values())
        if not current and alike and len(self._records) < world_size:
            self._close()
            self._append()
            self._read_lines()

    def _read_lines(self) -> None:
        size = os.fstat(self._fd).st_size
        if size == self._size:
            return
        self._size = size
        if size > _LARGEST_FILE:
            raise InvalidArgument(
                f"rendezvous file {self._path} has {size} bytes, far more than records need; "
                "pass a path of its own"
            )
        text = os.pread(self._fd, size, 0)
        self._records = {}
        for line in text.splitlines():
            record = Record.from_json(line)
            if record is None or not record.alive():
                continue
            earlier = self._records.get(record.rank)
            if earlier is not None and _process(earlier) != _process(record):
                raise Mismatch(
                    f"rendezvous file {self._path}: two living processes call themselves rank "
                    f"{record.rank}: pids {earlier.pid} and {record.pid}"
                )
            self._records[record.rank] = record


def _process(record: Record) -> tuple[str, int, int]:
    return record.pid_namespace, record.pid, record.started

"""How ranks find each other: each posts a record on a board (a Store or a file), reads the others'.

A record says who the rank is (process, host), how large it believes the group to be, and carries a
fresh random id: the group meets under the id of its first rank. So whoever is missing, rank 0
included, can be named by the ranks that did come, and a wrong world size is seen at once.

Nothing that is read is trusted: records are JSON, of bounded size, and checked field by field.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from pyparallel import _core
from pyparallel.errors import InvalidArgument, Mismatch, Timeout

_LONGEST_RECORD = 4096


@dataclass(frozen=True)
class Record:
    """What a rank tells the others before they share anything."""

    rank: int
    world_size: int
    pid: int
    started: int
    pid_namespace: str
    host: str
    id: str

    @classmethod
    def own(cls, rank: int, world_size: int) -> "Record":
        return cls(
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            started=start_time(os.getpid()) or 0,
            pid_namespace=_pid_namespace(),
            host=_core.host_identity(),
            id=_core.Communicator.random_id().hex(),
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> "Record | None":
        """None where the text is no record."""
        if len(text) > _LONGEST_RECORD:
            return None
        try:
            fields = json.loads(text)
        except ValueError:
            return None
        kinds = cls.__annotations__
        if not isinstance(fields, dict) or fields.keys() != kinds.keys():
            return None
        if any(type(fields[name]) is not kind for name, kind in kinds.items()):
            return None
        record = cls(**fields)
        try:
            bytes.fromhex(record.id)
        except ValueError:
            return None
        return record

    @property
    def unique_id(self) -> bytes:
        return bytes.fromhex(self.id)

    def alive(self) -> bool:
        """False when the process that wrote this has ended, as far as can be known from here."""
        if self.pid_namespace != _pid_namespace():
            return True
        return start_time(self.pid) == self.started


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names one process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 (proc)
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _pid_namespace() -> str:
    # The boot id as well: name space numbers are per kernel.
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:  # noqa: PTH123
            return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


class Board(Protocol):
    """Where records are posted. Reading never waits. `over`: a rank gave up the meeting in which
    this rank posted last; the next post begins another.

    `join_hosts` joins ranks of several hosts and gives the core's capsule, or raises Unsupported.
    """

    def post(self, record: Record) -> None: ...
    def read(self, rank: int) -> Record | None: ...
    def over(self) -> bool: ...
    def join_hosts(self, name: str, rank: int, world_size: int, timeout: float) -> object: ...
    def done(self, joined: bool) -> None: ...


def check_group(rank: int, world_size: int) -> None:
    """Raises unless `rank` of `world_size` can be."""
    for what, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgument(f"{what} is {value!r}; expected an int")
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidArgument(
            f"rank {rank} of {world_size}; expected a world_size of at least 1 and a rank "
            "from 0 to world_size - 1"
        )


def assemble(
    board: Board, rank: int, world_size: int, name: str, deadline: float, timeout: float
) -> list[Record]:
    """Posts this rank's record and gives those of all ranks, or names the absent ones.

    `deadline` is by time.monotonic().
    """
    mine = Record.own(rank, world_size)
    came: dict[int, Record] = {}
    gave_up: dict[int, Record] = {}
    pause = 0.0005
    while True:
        if not came or board.over():
            if came:  # which may have had others before this rank came
                for there in filter(None, map(board.read, range(world_size))):
                    _check_size(there, mine, name)  # perhaps why it was given up
                    gave_up[there.rank] = there
                mine = Record.own(rank, world_size)  # with a fresh id
            board.post(mine)
            came = {rank: mine}
            if board.over():
                continue
        for peer in range(world_size):
            if peer in came:
                continue
            record = board.read(peer)
            if record is None:
                continue
            _check_size(record, mine, name)
            came[peer] = record
        if len(came) == world_size and not board.over():
            return [came[r] for r in range(world_size)]
        if time.monotonic() >= deadline:
            raise Timeout(_absent(name, rank, world_size, came, gave_up, timeout))
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _check_size(record: Record, mine: Record, name: str) -> None:
    if record.world_size != mine.world_size:
        raise Mismatch(
            f"rendezvous of group {name}: rank {record.rank} (pid {record.pid}) has world_size "
            f"{record.world_size}, rank {mine.rank} (pid {mine.pid}) has {mine.world_size}; "
            "start all ranks with the same world_size"
        )


def _absent(
    name: str,
    rank: int,
    world_size: int,
    came: dict[int, Record],
    gave_up: dict[int, Record],
    timeout: float,
) -> str:
    """`gave_up`: came before, and may be here again."""
    left = {r: record for r, record in gave_up.items() if r not in came}
    missing = [r for r in range(world_size) if r not in came and r not in left]

    def listed(records: dict[int, Record]) -> str:
        return ", ".join(f"rank {r} (pid {records[r].pid})" for r in sorted(records))

    never = (
        f"{ranks_text(missing)} of world_size {world_size} did not come within {timeout:g} s"
        if missing
        else f"not all ranks of world_size {world_size} were there at once within {timeout:g} s"
    )
    before = f"; came and gave up: {listed(left)}" if left else ""
    return (
        f"rendezvous of group {name}: {never}; came: {listed(came)}{before}. Were {world_size} "
        f"ranks started, and is world_size right? (seen by rank {rank})"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0 and 2", "ranks 4, 5, 6 and 9 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 8:
        return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"


def hosts_of(records: Sequence[Record]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their lowest rank."""
    hosts: dict[str, list[int]] = {}
    for record in records:
        hosts.setdefault(record.host, []).append(record.rank)
    return list(hosts.values())

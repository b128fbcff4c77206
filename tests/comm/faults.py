"""Groups of bare ranks to be harmed, and what they leave behind."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pyparallel import _core

ROOT = Path(__file__).resolve().parents[2]


class End(NamedTuple):
    """How a rank's calls ended."""

    error: str
    text: str
    at: float  # time.monotonic() of the machine


class BareGroup:
    """Processes as ranks, in a loop of one op."""

    def __init__(
        self,
        size: int,
        op: str,
        count: int,
        join_ms: int,
        call_ms: int,
        env: Mapping[str, str],
        started: list[int] | None = None,
    ) -> None:
        self.id = _core.Communicator.random_id().hex()
        self.size, self.op = size, op
        self._heard = dict.fromkeys(range(size), "")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        self.processes = {
            rank: subprocess.Popen(
                [sys.executable, "-m", "tests.comm.bare_rank", self.id]
                + [str(word) for word in (rank, size, op, count, join_ms, call_ms)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in (range(size) if started is None else started)
        }

    def line(self, rank: int, timeout: float = 40.0) -> str:
        """The rank's next line of output; what it said last where it has ended."""
        stream = self.processes[rank].stdout
        assert stream is not None
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while "\n" not in self._heard[rank]:
                left = deadline - time.monotonic()
                assert selector.select(left), f"rank {rank} of {self.op}: silent for {timeout} s"
                said = os.read(stream.fileno(), 65536)
                if not said:
                    break
                self._heard[rank] += said.decode()
        line, _, self._heard[rank] = self._heard[rank].partition("\n")
        return line

    def wait_ready(self) -> None:
        for rank in self.processes:
            line = self.line(rank)
            assert line == "ready", f"rank {rank} of {self.op}: {line!r}"

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def signal(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Sends the signal; gives the time just before."""
        at = time.monotonic()
        self.processes[rank].send_signal(number)
        return at

    def end(self, rank: int, timeout: float = 40.0) -> End:
        return End(**json.loads(self.line(rank, timeout)))

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def bare_group(
    size: int,
    op: str,
    count: int = 1000,
    *,
    join_ms: int = 30_000,
    call_ms: int = 30_000,
    env: Mapping[str, str] | None = None,
    started: list[int] | None = None,
) -> Iterator[BareGroup]:
    group = BareGroup(size, op, count, join_ms, call_ms, env or {}, started)
    try:
        yield group
    finally:
        group.stop()


class Holdings(NamedTuple):
    """What a process holds that could leak."""

    descriptors: int
    maps: int
    threads: int
    kilobytes: int


def holdings() -> Holdings:
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return Holdings(
        descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        maps=len(Path("/proc/self/maps").read_text().splitlines()),
        threads=int(fields["Threads"]),
        kilobytes=int(fields["VmRSS"].split()[0]),
    )


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))  # noqa: PTH208

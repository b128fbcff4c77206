"""Runs a function as N ranks, each in a process of its own.

    results = run_ranks(fn, 3, arg)            # fn(rank, arg) in 3 processes; results in rank order
    with spawn_ranks(fn, 3, arg) as ranks:     # for faults: signals, deaths, messages on the way
        ranks.kill(1)
        outcomes = ranks.wait()

`fn` is a module-level function; its first argument is a `Rank`. Arguments and results are pickled.
run_ranks keeps its processes for the next call (importing torch costs seconds); a run that fails or
passes its deadline kills those it used. Whatever happens, no process outlives its caller.

No rank calls fn before all have imported it: each sends "ready", then waits for "go". So what a
test measures or limits does not begin with one rank's import, which is long where cores are busy.
"""

import atexit
import contextlib
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = 8  # idle processes kept for the next run
LOADING = 100.0  # seconds for the ranks to start and to import the function
GRACE = 10.0  # seconds that the others have to report once one rank has failed


@dataclass
class Rank:
    """What a rank's function gets to know."""

    rank: int
    world_size: int
    rendezvous: str  # path of a file that no one else uses and that does not exist yet
    timeout: float  # seconds until the whole run is killed
    _report: Callable[[Any], None] | None = field(default=None, repr=False)

    def store(self) -> Any:
        """A torch store shared by the ranks of this run."""
        from torch.distributed import FileStore

        return FileStore(self.rendezvous, self.world_size)

    def report(self, value: Any) -> None:
        """Tells the starter of the run something while it goes on (`SpawnedRanks.next_report`)."""
        assert self._report is not None
        self._report(value)


@dataclass
class Outcome:
    """How one rank ended: by returning, by an exception, or by dying."""

    rank: int
    value: Any = None
    exception: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None  # of a process that died before its function ended; -9 for SIGKILL
    skip: str = ""
    seconds: float = 0.0  # from the start of the run to this end

    @property
    def ok(self) -> bool:
        return self.exception is None and self.exit_code is None and not self.skip


class RanksFailedError(AssertionError):
    """Some rank failed; the message has every rank's traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 100.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls fn(rank, *args) on all ranks and gives their results in rank order."""
    workers = _pool.take(world_size, dict(env or {}))
    with _Run(workers, fn, args, timeout) as run:
        outcomes = run.wait(grace=GRACE)
        run.keep = all(outcome.ok or outcome.skip for outcome in outcomes)
    if not run.keep:
        raise RanksFailedError(_describe(fn, outcomes))
    for outcome in outcomes:
        if outcome.skip:
            pytest.skip(outcome.skip)
    return [outcome.value for outcome in outcomes]


@contextlib.contextmanager
def spawn_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 100.0,
    env: Mapping[str, str] | None = None,
) -> Iterator["SpawnedRanks"]:
    """Starts fn(rank, *args) in fresh processes, which are killed at the end of the block."""
    workers = [_Worker(dict(env or {})) for _ in range(world_size)]
    with _Run(workers, fn, args, timeout) as run:
        yield SpawnedRanks(run)


class SpawnedRanks:
    """Running ranks: to be signalled, listened to and waited for."""

    def __init__(self, run: "_Run") -> None:
        self._run = run

    def pid(self, rank: int) -> int:
        return self._run.workers[rank].process.pid

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> None:
        self._run.workers[rank].process.send_signal(signal_number)

    def next_report(self, rank: int, timeout: float = 60.0) -> Any:
        """The next value that this rank gave to Rank.report."""
        return self._run.next_report(rank, timeout)

    def wait(self, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """Waits for the ends of the ranks (default: of all); those past the deadline are killed."""
        return self._run.wait(ranks=ranks)


class _Worker:
    """A process that runs functions on request, one after another."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        ours, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()  # its offset is the process's: read with pread only
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **env}
        path = [str(ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.launch", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.connection = Connection(ours.detach())
        self.pidfd = os.pidfd_open(self.process.pid)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        os.close(self.pidfd)
        self.log.close()

    def output(self, start: int = 0, at_most: int = 8000) -> str:
        size = os.fstat(self.log.fileno()).st_size
        start = max(start, size - at_most)
        return os.pread(self.log.fileno(), at_most, start).decode(errors="replace")

    def stack(self) -> str:
        """What its Python threads are doing, as told by faulthandler; empty if it cannot tell."""
        start = os.fstat(self.log.fileno()).st_size
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        return self.output(start)


class _Run:
    """One function on its workers, from sending it out to the last outcome."""

    def __init__(
        self, workers: list[_Worker], fn: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> None:
        self.workers = workers
        self.keep = False
        self.outcomes: list[Outcome | None] = [None] * len(workers)
        self._reports: list[list[Any]] = [[] for _ in workers]
        self._ready: set[int] = set()
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._job = (fn, args, timeout)
        self._begin(LOADING)

    def _begin(self, seconds: float) -> None:
        self._start = time.monotonic()
        self._deadline = self._start + seconds

    def __enter__(self) -> "_Run":
        fn, args, timeout = self._job
        try:
            for number, worker in enumerate(self.workers):
                rank = Rank(number, len(self.workers), f"{self._folder}/rendezvous", timeout)
                job = pickle.dumps((fn.__module__, fn.__qualname__, rank, args))
                with contextlib.suppress(BrokenPipeError):  # a death is found by _take
                    worker.connection.send_bytes(job)
            while any(o is None and r not in self._ready for r, o in enumerate(self.outcomes)):
                if not self._pump(self._deadline):
                    self._give_up(range(len(self.workers)))
            self._begin(timeout)
            for rank in self._ready:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.workers[rank].connection.send_bytes(b"go")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _pool.give_back(self.workers, self.keep)
        shutil.rmtree(self._folder, ignore_errors=True)

    def next_report(self, rank: int, timeout: float) -> Any:
        deadline = min(self._deadline, time.monotonic() + timeout)
        while not self._reports[rank]:
            outcome = self.outcomes[rank]
            if outcome is not None:
                raise RanksFailedError(f"rank {rank} ended without a report: {outcome}")
            if not self._pump(deadline):
                stack = self.workers[rank].stack()
                raise TimeoutError(f"rank {rank} sent no report in {timeout} s; it is at\n{stack}")
        return self._reports[rank].pop(0)

    def wait(self, ranks: Sequence[int] | None = None, grace: float | None = None) -> list[Outcome]:
        wanted = list(range(len(self.workers)) if ranks is None else ranks)
        deadline = self._deadline
        while any(self.outcomes[rank] is None for rank in wanted):
            failed = any(outcome and not outcome.ok for outcome in self.outcomes)
            if grace is not None and failed:
                deadline = min(deadline, time.monotonic() + grace)
                grace = None
            if not self._pump(deadline):
                self._give_up(wanted)
        return [outcome for rank in wanted if (outcome := self.outcomes[rank]) is not None]

    def _give_up(self, ranks: Sequence[int]) -> None:
        seconds = time.monotonic() - self._start
        for rank in ranks:
            if self.outcomes[rank] is None:
                text = f"killed after {seconds:.1f} s without an end; it was at\n"
                text += self.workers[rank].stack()
                self.outcomes[rank] = Outcome(
                    rank, exception=TimeoutError(text), traceback=text, seconds=seconds
                )
        for rank in ranks:
            self.workers[rank].process.kill()

    def _pump(self, deadline: float) -> bool:
        """Takes in what the ranks sent; False when nothing came before the deadline."""
        sources: dict[Any, int] = {}
        for rank, outcome in enumerate(self.outcomes):
            if outcome is None:
                sources[self.workers[rank].connection] = rank
                sources[self.workers[rank].pidfd] = rank
        ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
        for rank in {sources[source] for source in ready}:
            self._take(rank)
        return bool(ready)

    def _take(self, rank: int) -> None:
        worker = self.workers[rank]
        try:
            if not worker.connection.poll():  # its death woke us, and all it sent has been read
                raise EOFError
            kind, *rest = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            code = worker.process.wait()
            outcome = Outcome(rank, exit_code=code, traceback=worker.output())
        else:
            if kind == "ready":
                self._ready.add(rank)
                return
            if kind == "report":
                self._reports[rank].append(rest[0])
                return
            if kind == "ok":
                outcome = Outcome(rank, value=rest[0])
            elif kind == "skip":
                outcome = Outcome(rank, skip=rest[0])
            else:
                outcome = Outcome(rank, exception=rest[0], traceback=rest[1])
        outcome.seconds = time.monotonic() - self._start
        self.outcomes[rank] = outcome


class _Pool:
    """Idle workers, the last used at the end: those are taken first."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def take(self, count: int, env: dict[str, str]) -> list[_Worker]:
        with self._lock:
            fit = [w for w in self._idle if w.env == env and w.process.poll() is None][-count:]
            self._idle = [worker for worker in self._idle if worker not in fit]
        return fit + [_Worker(env) for _ in range(count - len(fit))]

    def give_back(self, workers: list[_Worker], keep: bool) -> None:
        with self._lock:
            out = [] if keep else list(workers)
            if keep:
                self._idle += workers
                out = self._idle[:-KEPT]
                self._idle = self._idle[-KEPT:]
        for worker in out:
            worker.process.kill()
        for worker in out:
            worker.stop()

    def close(self) -> None:
        with self._lock:
            workers, self._idle = self._idle, []
        self.give_back(workers, keep=False)


_pool = _Pool()
close_pool = _pool.close
atexit.register(close_pool)


def _describe(fn: Callable[..., Any], outcomes: Sequence[Outcome]) -> str:
    lines = [f"{fn.__module__}.{fn.__qualname__} on {len(outcomes)} ranks:"]
    for outcome in outcomes:
        end = "ended well"
        if outcome.exit_code is not None:
            end = f"died with exit code {outcome.exit_code}; its output:"
        elif not outcome.ok:
            end = "failed:"
        lines.append(f"--- rank {outcome.rank} after {outcome.seconds:.2f} s {end}")
        lines.append(outcome.traceback.rstrip())
    return "\n".join(filter(None, lines))


def _serve(descriptor: int) -> None:
    """The worker's side: runs what it is sent until the other end is closed."""
    import faulthandler
    import traceback

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    threading.Thread(target=_die_with_caller, args=(descriptor,), daemon=True).start()

    def send(*message: Any) -> None:
        connection.send_bytes(pickle.dumps(message))

    environment = dict(os.environ)
    while True:
        try:
            module, name, rank, args = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            rank._report = lambda value: send("report", value)
            function = getattr(importlib.import_module(module), name)
            send("ready")
            connection.recv_bytes()  # "go"
            value = function(rank, *args)
            _leave_process_group()
            send("ok", value)
        except pytest.skip.Exception as skipped:
            send("skip", str(skipped))
        except BaseException as error:
            text = traceback.format_exc()
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                error = RuntimeError(f"{type(error).__name__}: {error}")
            send("error", error, text)
        _restore(environment)


def _restore(environment: dict[str, str]) -> None:
    """What a function set for itself (a host identity, say) must not reach the next one."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({k: v for k, v in environment.items() if os.environ.get(k) != v})


def _leave_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _die_with_caller(descriptor: int) -> None:
    """Ends this process, whatever it is doing, once the other end is closed. Sleeps until then."""
    import select

    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always told
    poll.poll()
    os._exit(3)


if __name__ == "__main__":
    # The jobs name this module tests.launch: serve under that name.
    from tests import launch

    launch._serve(int(sys.argv[1]))

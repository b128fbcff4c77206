"""`python -m pyparallel launch SCRIPT`: the ranks of one host, by torchrun's agent.

What torchrun does not do: it says in one line who died of what, after each attempt, and it ends a
job whose time is up. Several hosts are started by torchrun itself, or Slurm (docs/checkpoints.md).
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from pyparallel.help_text import Paragraphs

__all__ = ["main", "parser"]

_DESCRIPTION = """
Starts the ranks of a job on this host, says in one line which of them died of what, and starts all
again while --restarts are left. A script goes on from where it was if it loads its newest
checkpoint (docs/checkpoints.md).
"""
_EXAMPLES = """
examples:

  pyparallel launch --ranks 2 examples/two_ranks.py
  pyparallel launch --ranks 4 --restarts 3 train.py --lr 3e-4
  pyparallel launch --ranks 2 -m package.train

Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment, as
under torchrun, which starts jobs of several hosts. Exit status: 0 all ranks ended well; 1 the last
attempt failed; 2 what is asked cannot be; 124 the time was up.
"""


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    found = argparse.ArgumentParser(
        prog="pyparallel launch",
        usage="pyparallel launch [--ranks N] [OPTION ...] SCRIPT [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Paragraphs,
    )
    found.add_argument(
        "--ranks", type=int, metavar="N", help="processes to start (default: one per GPU)"
    )
    found.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="attempts after the first, each of all ranks (default %(default)s)",
    )
    found.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="after which the whole job is ended (default: never)",
    )
    found.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    found.add_argument("script", metavar="SCRIPT", help="what every rank runs")
    rest = found.add_argument(
        "arguments",
        metavar="ARGUMENT",
        nargs=argparse.REMAINDER,
        help="all that follows is SCRIPT's",
    )
    rest.required = False  # it may be nothing: not to be named beside a missing SCRIPT
    return found


def main(argv: "Sequence[str] | None" = None) -> int:
    """0 when every rank ended well, 1 when the last attempt failed, 124 when the time was up."""
    options = parser().parse_args(argv)
    ranks = _ranks(options.ranks)
    if ranks < 1 or options.restarts < 0 or (options.deadline or 1) <= 0:
        parser().error(
            f"--ranks {ranks}, --restarts {options.restarts}, --deadline {options.deadline}: "
            "expected 1 or more ranks, 0 or more restarts, a positive deadline"
        )
    if not options.module and not os.path.isfile(options.script):  # noqa: PTH113
        parser().error(f"there is no file {options.script}")
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    kind = ["-m"] if options.module else []
    command = ["-m", "pyparallel.launched", *kind, options.script, *options.arguments]
    status = 128 + signal.SIGTERM
    with contextlib.suppress(_EndedEarly), _deadline(options.deadline):
        status = _attempts(ranks, options.restarts, command)
    if _expired.is_set():
        _say(f"ended: {options.deadline:g} s have passed (--deadline)")
        return 124
    return status


def _ranks(asked: "int | None") -> int:
    if asked is not None:
        return asked
    import torch

    found = torch.cuda.device_count()
    if not found:
        parser().error("--ranks says how many, where there is no GPU to count")
    return found


def _attempts(ranks: int, restarts: int, command: "list[str]") -> int:
    from torch.distributed.elastic.multiprocessing.api import (
        SignalException,
        _terminate_process_handler,
    )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    signal.signal(signal.SIGTERM, _terminate_process_handler)  # as the agent does, but from now on
    for attempt in range(restarts + 1):
        begun = time.time()
        try:
            _attempt(ranks, command)
            return 0
        except ChildFailedError as failed:
            last = attempt == restarts
            then = "no attempt is left" if last else f"attempt {attempt + 2} of {restarts + 1}"
            _say(f"{_cause(failed.failures, begun)}; {then}")
        except SignalException as told:
            if not _expired.is_set():
                _say(f"ended by {told.sigval.name}")
            return 128 + told.sigval
    return 1


def _attempt(ranks: int, command: "list[str]") -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="pyparallel-launch-") as folder:  # last words go there
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            run_id=uuid.uuid4().hex,
            role="rank",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
        )
        elastic_launch(config, sys.executable)(*command)


def _cause(failures: "dict[int, Any]", begun: float) -> str:
    """Who died first, and of what. Others that die afterwards die of that."""

    def order(item: "tuple[int, Any]") -> "tuple[bool, float]":
        killed = item[1].exitcode < 0 and -item[1].exitcode != signal.SIGTERM
        return (not killed, item[1].timestamp)

    rank, failure = min(failures.items(), key=order)
    who = f"rank {rank} (process {failure.pid})"
    when = f"after {max(0.0, failure.timestamp - begun):.1f} s"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ""
        if -failure.exitcode == signal.SIGKILL:
            hint = " (by someone, or by the kernel where memory ran out: see dmesg)"
        return f"{who} was killed by {name} {when}{hint}"
    words = _last_words(failure)
    return f"{who} exited with {failure.exitcode} {when}" + (f": {words}" if words else "")


def _last_words(failure: Any) -> str:
    """The exception that ended it, as `pyparallel.launched` recorded it."""
    data = failure.error_file_data
    message = data.get("message", "") if isinstance(data, dict) else ""
    if isinstance(message, dict):
        message = message.get("message", "")
    lines = str(message).strip().splitlines()
    return lines[0][:500] if lines else ""


_expired = threading.Event()


class _EndedEarly(Exception):
    """SIGTERM before torchrun's agent, which handles it too, was there."""


def _end_early(number: int, frame: Any) -> None:
    raise _EndedEarly


@contextlib.contextmanager
def _deadline(seconds: "float | None") -> "Iterator[None]":
    """SIGTERM to this process then: torchrun's agent ends its ranks at it."""
    if seconds is None:
        yield
        return

    def expire() -> None:
        _expired.set()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, _end_early)
    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(text: str) -> None:
    print(f"pyparallel launch: {text}", file=sys.stderr, flush=True)

"""Starts the ranks of each world size, follows them, ends them: nothing outlives run()."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from bench import machine, providers
from bench.case import Row
from bench.options import Options
from bench.page import Page
from bench.suites import suite

_ROOT = Path(__file__).parent.parent
_START_UP = 240.0  # seconds: imports on a loaded machine, DeepSpeed's compilation
_LOG_TAIL = 2000

Report = Callable[[dict[str, Any]], None]
Found = tuple[list[Row], list[str]]  # rows, problems


def run(name: str, options: Options, report: Report) -> Found:
    """All world sizes of one suite. `report` gets each event of the ranks, for the display."""
    rows: list[Row] = []
    problems: list[str] = []
    for world in options.worlds:
        used = {p for pair in suite(name).pairs(options) for p in pair}
        peers = tuple(p for p in options.peers if p in used)
        if not _limit_runs(options, world):
            peers = tuple(p for p in peers if p != "limit")
        try:
            found, wrong = _run_world(name, replace(options, peers=peers), world, report)
        except RuntimeError as error:
            found, wrong = [], [str(error)]
        rows += found
        problems += wrong
    return rows, problems


def _limit_runs(options: Options, world: int) -> bool:
    return not options.busy and world <= machine.usable_cores()


def _run_world(name: str, options: Options, world: int, report: Report) -> Found:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        if "limit" in options.peers:
            providers.load("bench.providers.limit:build")(scratch)
        Page.create(scratch / "page", world)
        (scratch / "events").touch()
        spec = {"suite": name, "world": world, "scratch": str(scratch)}
        (scratch / "spec").write_text(json.dumps({**spec, "options": options.to_json()}))
        if options.busy:
            stack.enter_context(_burners())
        ranks = stack.enter_context(_ranks(name, options, world, scratch))
        events = stack.enter_context((scratch / "events").open())
        report({"kind": "world", "world": world})
        return _follow(ranks, events, scratch, options, world, report)


@contextmanager
def _ranks(
    name: str, options: Options, world: int, scratch: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "bench.worker", str(scratch / "spec")]
    used = {n for pair in suite(name).pairs(options) for n in pair}
    launchers = {providers.PROVIDERS[n].launcher for n in used} - {()}
    if len(launchers) > 1:
        raise RuntimeError(f"peers {sorted(used)} want different launchers: run them one by one")
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    started: list[subprocess.Popen[bytes]] = []
    try:
        if launchers:
            (launcher,) = launchers
            command = [*launcher, "-n", str(world), *command]
            started.append(_start(command, environment, scratch / "log.all"))
        else:
            for rank in range(world):
                mine = {**environment, "BENCH_RANK": str(rank)}
                started.append(_start(command, mine, scratch / f"log.{rank}"))
        yield started
    finally:
        for process in started:
            _end(process)


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a rank, or a launcher and its ranks: asked first so that the launcher cleans up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _burners() -> Iterator[None]:
    """One endless loop per core, as a machine that is busy with something else."""
    code = (
        "import ctypes, os, signal, sys\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
        "if os.getppid() != int(sys.argv[1]): sys.exit()\n"
        "while True: pass\n"
    )
    burning = [
        subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], start_new_session=True)
        for _ in range(machine.usable_cores())
    ]
    try:
        yield
    finally:
        for process in burning:
            _end(process)


def _follow(
    ranks: list[subprocess.Popen[bytes]],
    events: TextIO,
    scratch: Path,
    options: Options,
    world: int,
    report: Report,
) -> Found:
    """Collects rows until the ranks are done, one dies, or nothing has happened for too long."""
    rows: list[Row] = []
    problems: list[str] = []
    current, pending = "start-up", ""
    patience = options.timeout * 2 + _START_UP
    heard = time.monotonic()
    while True:
        dead = [r for r, process in enumerate(ranks) if process.poll() not in (None, 0)]
        over = all(process.poll() == 0 for process in ranks)
        text = events.read()
        *lines, pending = (pending + text).split("\n")
        for line in lines:
            event = json.loads(line)
            heard = time.monotonic()
            if event["kind"] == "row":
                rows.append(Row.from_json(event["row"]))
            elif event["kind"] == "case":
                current = event["label"]
            elif event["kind"] == "problem":
                problems.append(event["text"])
            report(event)
            if event["kind"] == "done":
                return rows, problems
        if dead:
            time.sleep(0.5)  # the others may be about to say why
            codes = ", ".join(f"rank {r} exited with {ranks[r].returncode}" for r in dead)
            text = f"world {world}, at {current}: {codes}\n{_logs(scratch)}"
            return rows, [*problems, text]
        if over:
            return rows, [*problems, f"world {world}: the ranks ended before their work was done"]
        if time.monotonic() - heard > patience:
            silence = f"world {world}: no news at {current} for {patience:.0f} s"
            return rows, [*problems, f"{silence}\n{_logs(scratch)}"]
        time.sleep(0.05)


def _logs(scratch: Path) -> str:
    texts = []
    for log in sorted(scratch.glob("log.*")):
        text = log.read_text(errors="replace").strip()
        if text:
            texts.append(f"--- {log.name.removeprefix('log.')}: {text[-_LOG_TAIL:]}")
    return "\n".join(texts)

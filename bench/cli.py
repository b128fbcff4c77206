"""`python -m bench SUITE...`: reads the arguments, shows progress, writes the report.

Exit status: 0 all verified; 1 a verification failed or ranks died; 2 the request makes no sense or
needs something that is not installed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine, providers, report, runner
from bench.attention_case import OPS as ATTENTION_OPS
from bench.block_case import OPS as BLOCK_OPS
from bench.case import LONG, Outcome, parse_bytes, parse_heads, parse_shape
from bench.gemm_case import OPS as GEMM_OPS
from bench.ops import DESCRIPTIONS, OPS
from bench.options import Options
from bench.pipeline_case import SCHEDULES
from bench.report.summary import show_summary
from bench.report.table import show
from bench.suites import ONE_WORLD, SUITES, TABLES, WEIGHTS, suite, table
from bench.train_case import LAYOUTS

QUICK_SECONDS = 110.0  # for the cases of all suites and world sizes together
MOST_RANKS = 8  # of a run that names no world sizes: each rank holds buffers and a torch of its own
T = TypeVar("T")
METHOD = (
    "Inputs are random; each side is verified against float64 on all ranks before it is timed. "
    "All sides run in the same processes, interleaved, aligned starts, the slowest rank counts; "
    "times are microseconds per call: median, p10 and p90 over samples of several calls."
)


def parser() -> argparse.ArgumentParser:
    others = (*GEMM_OPS, *BLOCK_OPS, *SCHEDULES, *ATTENTION_OPS, *LAYOUTS)
    out = argparse.ArgumentParser(
        prog="python -m bench",
        description="pyparallel against stock PyTorch and others: verified, then timed.",
    )
    out.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"of {', '.join(SUITES)} (all of these), {', '.join(TABLES)}",
    )
    out.add_argument(
        "--world",
        type=int,
        nargs="+",
        metavar="N",
        help=f"ranks (2, and one more than the cores, {MOST_RANKS} at most; on GPUs one each)",
    )
    out.add_argument("--quick", action="store_true", help="fewer sizes, less than three minutes")
    out.add_argument(
        "--out",
        type=Path,
        default=Path("bench_results"),
        metavar="DIR",
        help="where bench.json, plots and bench.html go (bench_results)",
    )
    out.add_argument(
        "--peer",
        nargs="+",
        default=[],
        choices=providers.OPTIONAL_PEERS,
        metavar="PEER",
        help=f"beyond stock PyTorch: {', '.join(providers.OPTIONAL_PEERS)}; limit is a plain "
        "copy-and-add in C++ (on where a compiler is); "
        f"with --device cuda, of suite attention: {', '.join(providers.CUDA_PEERS)}",
    )
    out.add_argument(
        "--op",
        nargs="+",
        default=[],
        choices=(*OPS, *others),
        metavar="OP",
        help=", ".join([*DESCRIPTIONS, *others]),
    )
    out.add_argument(
        "--size",
        nargs="+",
        default=[],
        type=_read_by(parse_bytes),
        metavar="BYTES",
        help="of suite collectives: 4K, 64M, ...",
    )
    out.add_argument(
        "--shape",
        nargs="+",
        default=[],
        type=_read_by(parse_shape),
        metavar="MxNxK",
        help="of suite gemm: 16x1024x4096, ...",
    )
    out.add_argument(
        "--rows", nargs="+", default=[], type=int, metavar="N", help="of suite attention: lengths"
    )
    out.add_argument(
        "--heads",
        default=(),
        type=_read_by(parse_heads),
        metavar="Q/KV",
        help="of suite attention: 8/2, ...",
    )
    out.add_argument("--dtype", nargs="+", default=[], choices=LONG)
    out.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    out.add_argument("--busy", action="store_true", help="with an endless loop on every core")
    out.add_argument("--seconds", type=float, help="for the cases of one world size")
    out.add_argument("--timeout", type=float, default=60.0, help="of one wait between ranks")
    return out


def _read_by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which shows what an ArgumentTypeError says, and of a ValueError nothing."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def default_worlds(cores: int) -> tuple[int, ...]:
    """Two ranks, and one more than the cores as far as that suits a run of minutes."""
    return tuple(sorted({2, min(cores + 1, MOST_RANKS)}))


def options_from(arguments: argparse.Namespace) -> Options:
    cuda = arguments.device == "cuda"
    default = (max(2, _gpus()),) if cuda else default_worlds(machine.usable_cores())
    worlds = tuple(arguments.world or default)
    if min(arguments.rows, default=1) < 1:
        raise ValueError(f"--rows {min(arguments.rows)}: want at least one")
    if min(worlds) < 1:
        raise ValueError(f"--world {min(worlds)}: want at least one rank")
    peers = list(dict.fromkeys(arguments.peer))
    for peer in peers:
        if cuda != (peer in providers.CUDA_PEERS):
            raise ValueError(
                f"--peer {peer} moves CPU memory: leave it out with --device cuda" if cuda else
                f"--peer {peer} runs on GPUs, in suite attention: want --device cuda"
            )  # fmt: skip
    if arguments.device == "cpu" and "limit" not in peers and not providers.missing("limit"):
        peers.append("limit")
    if cuda and (gpus := _gpus()) < max(worlds):
        raise ValueError(f"--device cuda: {max(worlds)} ranks need a GPU each; torch sees {gpus}")
    return Options(
        quick=arguments.quick,
        worlds=worlds,
        ops=tuple(arguments.op),
        sizes=tuple(arguments.size),
        shapes=tuple(arguments.shape),
        rows=tuple(arguments.rows),
        heads=arguments.heads,
        dtypes=tuple(LONG[d] for d in arguments.dtype),
        peers=tuple(peers),
        device=arguments.device,
        busy=arguments.busy,
        seconds=arguments.seconds or 0.0,
        timeout=arguments.timeout,
    )


def for_suite(name: str, names: Sequence[str], options: Options, worlds_named: bool) -> Options:
    """A quick run's part of the time, and of the world sizes, for one of the suites it runs."""
    if not options.quick:
        return options
    worlds = options.worlds
    if name in ONE_WORLD and not worlds_named:
        worlds = worlds[:1]
    part = WEIGHTS[name] / sum(WEIGHTS[n] for n in names)
    seconds = options.seconds or QUICK_SECONDS * part / len(worlds)
    return replace(options, worlds=worlds, seconds=seconds)


def main(argv: Sequence[str] | None = None) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    arguments = parser().parse_args(argv)
    try:
        options = options_from(arguments)
        names, tables = _suites(arguments.suites)
        _refuse_without_effect(arguments, names)
        names = _with_cases(names, options, named=bool(arguments.suites))
        lacks = _missing(names, options)
    except ValueError as error:
        lacks = [str(error)]
    if lacks:
        for line in lacks:
            print(f"python -m bench: {line}", file=sys.stderr)
        return 2
    wrong = [p for name in tables for p in table(name).report(console, arguments.out)]
    if not names:
        return 1 if wrong else 0
    named = arguments.world is not None
    plan = [(name, for_suite(name, names, options, named)) for name in names]
    outcome = measure(plan, options, console)
    outcome.problems += wrong
    written = report.write(outcome, arguments.out)
    show(outcome, console)
    show_summary(outcome, written, console)
    return 0 if outcome.ok else 1


def _gpus() -> int:
    import torch  # only where it is asked for: the other ways start without it

    return torch.cuda.device_count()


def _suites(asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """The suites and the tables asked for; all suites where nothing was."""
    for name in asked:
        if name not in SUITES and name not in TABLES:
            raise ValueError(f"suite {name!r} is not one of {', '.join([*SUITES, *TABLES])}")
    if not asked:
        return list(SUITES), []
    return [n for n in asked if n in SUITES], [n for n in asked if n in TABLES]


def _refuse_without_effect(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """A ValueError for a list of sizes, shapes or peers that no suite of this run reads."""
    readers = {"size": "collectives", "shape": "gemm", "rows": "attention", "heads": "attention"}
    for option, reader in readers.items():
        if getattr(arguments, option) and reader not in names:
            raise ValueError(f"--{option} has no effect: only suite {reader} takes it")
    for peer in arguments.peer:
        if peer in providers.CUDA_PEERS and "attention" not in names:
            raise ValueError(f"--peer {peer} has no effect: only suite attention takes it")
    if names:
        return
    for option, value in vars(arguments).items():
        if option == "suites" or value == parser().get_default(option):
            continue
        if option != "out":
            raise ValueError(f"--{option} has no effect: only {', '.join(SUITES)} take it")
        if "static" not in arguments.suites:
            raise ValueError(f"--out has no effect: {arguments.suites[0]} writes no file")


def _with_cases(names: Sequence[str], options: Options, *, named: bool) -> list[str]:
    """The suites that have something to run; one that was named must."""
    found = [n for n in names if any(suite(n).cases(options, w) for w in options.worlds)]
    without = [n for n in names if n not in found]
    if without and (named or not found):
        asked = f"--op {' '.join(options.ops)} " * bool(options.ops)
        asked += f"--world {' '.join(map(str, options.worlds))}"
        raise ValueError(f"{', '.join(without)}: no case for {asked}")
    return found


def _missing(names: Sequence[str], options: Options) -> list[str]:
    used = {name for s in names for pair in suite(s).pairs(options) for name in pair}
    return [text for name in sorted(used) if (text := providers.missing(name))]


def measure(plan: Sequence[tuple[str, Options]], options: Options, console: Console) -> Outcome:
    outcome = Outcome({**machine.describe(), "method": METHOD, "options": options.to_json()})
    started = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        for name, chosen in plan:
            rows, problems = runner.run(name, chosen, _Display(progress, name))
            outcome.rows += rows
            outcome.problems += problems
    outcome.meta["seconds"] = round(time.monotonic() - started, 1)
    return outcome


class _Display:
    """Events of the ranks -> a progress bar per world size, and a line for each bad row."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name = progress, name

    def __call__(self, event: dict[str, Any]) -> None:
        progress, kind = self._progress, event["kind"]
        if kind == "world":
            text = f"{self._name}, {event['world']} ranks"
            self._text, self._task = text, progress.add_task(f"{text}: starting", total=None)
        elif kind == "total":
            progress.update(self._task, total=event["cases"])
            if not progress.console.is_terminal:  # a log shows bars when all is over
                progress.console.print(f"{self._text}: {event['cases']} cases")
        elif kind == "case":
            text = f"{self._text}: {event['label']}"
            progress.update(self._task, completed=event["done"], description=text)
        elif kind == "row" and not event["row"]["verified"]:
            row = event["row"]
            progress.console.print(f"[bold red]{row['op']} {row['api']}:[/] {row['note']}")
        elif kind == "done":
            total = progress.tasks[self._task].total
            progress.update(self._task, completed=total, description=self._text)

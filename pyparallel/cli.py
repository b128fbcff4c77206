"""`python -m pyparallel COMMAND`: what this machine can do, and how fast it is."""

import errno
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import pyparallel

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "doctor": "versions, build, machine, and what works here and what not",
    "launch": "the ranks of a job on this host, started again when one dies: launch --help",
    "plan": "which parallelism for a model and a cluster: memory, time, and why",
    "simulate": "who does what when in a pipeline, and what a step takes, on paper",
    "profile": "where the time of a traced run went, and what to change",
    "bench": "compare with stock PyTorch (from a source tree): bench --help",
    "calibrate": "time the algorithms of the ops here, for the ops to choose by: calibrate --help",
}

USAGE = (
    "usage: pyparallel COMMAND [ARGUMENT...]\n       pyparallel --version | --help\n\n"
    + "\n".join(f"  {name:9} {effect}" for name, effect in COMMANDS.items())
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, which reads its own arguments, and gives its exit status: 141 where who
    reads its output has gone (`| head`), as the shell says of a program that SIGPIPE ends; 1 where
    the output cannot be written (a full disk). What the terminal's encoding lacks is printed as
    an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not a notebook's, not a test's
            stream.reconfigure(errors="backslashreplace")
    out = sys.stdout
    if out is None:  # started with a closed standard output: nobody reads
        return _run(argv)
    try:
        status = _run(argv)
        out.flush()
    except BrokenPipeError:
        _silence(out)
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _silence(out)
        print(f"pyparallel: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


def _silence(out: TextIO) -> None:
    """The interpreter flushes once more as it ends, and would complain of the same."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), out.fileno())


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else "--help"
    if command in ("--help", "-h"):
        print(USAGE)
        return 0
    if command == "--version":
        print(pyparallel.__version__)
        return 0
    if command == "doctor":
        return int(import_module("pyparallel.doctor").main(arguments))
    if command == "calibrate":
        return int(import_module("pyparallel.ops.calibrate").main(arguments))
    if command == "launch":
        return int(import_module("pyparallel.launch").main(arguments))
    if command == "plan":
        return int(import_module("pyparallel.plan").main(arguments))
    if command == "simulate":
        return int(import_module("pyparallel.simulate").main(arguments))
    if command == "profile":
        return int(import_module("pyparallel.profile").main(arguments))
    if command == "bench":
        return _bench(arguments)
    print(f"pyparallel: no command {command!r}\n{USAGE}", file=sys.stderr)
    return 2


def _bench(arguments: list[str]) -> int:
    if (
        importlib.util.find_spec("bench") is None
        or importlib.util.find_spec("bench.__main__") is None
    ):
        print(
            "pyparallel bench: the benchmark is part of the source tree, not of the installed "
            "package: run it in the source tree's folder.",
            file=sys.stderr,
        )
        return 2
    return int(import_module("bench.__main__").main(arguments) or 0)

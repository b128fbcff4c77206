"""`python -m pyparallel COMMAND`: what this machine can do, and how fast it is."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module

import pyparallel

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "doctor": "versions, build, machine, and what works here and what not",
    "simulate": "who does what when in a pipeline, and what a step takes, on paper",
    "bench": "compare with stock PyTorch (from a source tree): bench --help",
    "calibrate": "time the algorithms of the ops here, for the ops to choose by: calibrate --help",
}

USAGE = (
    "usage: pyparallel COMMAND [ARGUMENT...]\n       pyparallel --version | --help\n\n"
    + "\n".join(f"  {name:9} {effect}" for name, effect in COMMANDS.items())
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, which reads its own arguments, and gives its exit status."""
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
    if command == "simulate":
        return int(import_module("pyparallel.simulate").main(arguments))
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

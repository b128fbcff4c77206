"""`python -m pyparallel COMMAND`: what this machine can do, and how fast it is."""

import argparse
from collections.abc import Sequence

import pyparallel

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit status."""
    parser = argparse.ArgumentParser(prog="pyparallel", description=__doc__)
    parser.add_argument("--version", action="version", version=pyparallel.__version__)
    parser.parse_args(argv)
    return 0

"""docs/choosing.md: its blocks are commands and lines of what they print, brought up to date here.

A block begins with "$ pyparallel plan". Of what the command prints, the lines stay that the block
has already, found by their words; only their numbers are new.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from pyparallel.plan import main

GUIDE = Path(__file__).parents[2] / "docs" / "choosing.md"
COMMAND = "    $ pyparallel "


def refreshed(text: str) -> str:
    """The guide with the numbers that its commands print now."""
    return "\n".join(_lines(text.splitlines())) + "\n"


def _lines(old: list[str]) -> Iterator[str]:
    printed: list[str] = []
    for line in old:
        if line.startswith(COMMAND):
            printed = _printed(line.removeprefix(COMMAND))
            yield line
        elif line.startswith("    ") and printed:
            words = _words(line[4:])
            at = next((i for i, new in enumerate(printed) if _words(new) == words), None)
            if at is None:
                raise ValueError(f"docs/choosing.md: no line like {line.strip()!r} is printed now")
            yield "    " + printed.pop(at)
        else:
            printed = []
            yield line


def _printed(command: str) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(shlex.split(command)[1:])
    return out.getvalue().splitlines()


def _words(line: str) -> str:
    return re.sub(r"[\d.e+]+", "#", re.sub(r" +", " ", line))

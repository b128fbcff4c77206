"""The tables of docs/nccl.md, made from the binding's own lists.

python -m pyparallel.comm.nccl_table docs/nccl.md      # writes them into the file
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyparallel._core import nccl as core

OLDEST: Final = "2.3.5"  # the first release whose header is known; older ones may have it too


def _rows(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _since(version: str) -> str:
    return f"{version} or before" if version == OLDEST else version


def tables() -> dict[str, str]:
    """Name of each generated table, and its text."""
    symbols = [
        (f"`{name}`", _since(since), "required" if required else "feature flag")
        for name, since, required in core.symbols()
    ]
    settings = [(f"`{name}`", since) for name, since in core.config_fields() if name != "blocking"]
    types = [(f"`{name}`", _since(since)) for name, since in core.data_types()]
    return {
        "functions": _rows(("function", "since", "without it"), symbols),
        "settings": _rows(("field of `NcclConfig`", "since"), settings),
        "types": _rows(("dtype", "reduced since"), types),
    }


def filled(text: str) -> str:
    """`text` with each table between its marks replaced."""
    for name, table in tables().items():
        start, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"expected the marks {start} and {end} once each")
        before, rest = text.split(start)
        after = rest.split(end)[1]
        text = f"{before}{start}\n{table}\n{end}{after}"
    return text


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m pyparallel.comm.nccl_table FILE", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    path.write_text(filled(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

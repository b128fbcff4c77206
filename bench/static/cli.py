"""python -m bench static: the table of compiled Triton kernels, against the baseline.

`python -m bench.static` is the same with options: a part of the table, another folder, and
--accept, which makes what is found the baseline.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.static.compiling import ARCHITECTURES

TITLE = "compiled Triton kernels"
NOTE = (
    "Cycles of one multiprocessor for one turn of the main loop, by unit: a bound from compiled "
    "code (bench/static/units.py), not a measurement. share: tensor cores over the busiest other; "
    "serial, overlap: of the tensor peak, if units work in turn, or all at once."
)
OUT = Path("bench_results")


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.static", description=__doc__)
    out.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    out.add_argument(
        "--match", default="", metavar="TEXT", help="only kernels with this in the name"
    )
    out.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    out.add_argument("--workers", type=int, default=0, help="processes that compile (one per core)")
    out.add_argument("--accept", action="store_true", help="make these rows the baseline's")
    return out


def main(argv: "Sequence[str] | None" = None) -> int:
    """0 when nothing is wrong and nothing got worse; 1 with a line for each thing that is."""
    arguments = parser().parse_args(argv)
    from bench.static import table

    chosen = [
        entry.key
        for entry in table.everything()
        if entry.arch in arguments.arch and arguments.match in entry.description.name
    ]
    if not chosen:
        print(f"python -m bench.static: --match {arguments.match!r} fits none", file=sys.stderr)
        return 2
    workers = arguments.workers or machine.usable_cores()
    return 1 if show(chosen, workers, arguments.out, arguments.accept) else 0


def report(_console: Any, out: Path = OUT) -> list[str]:
    """All of the table, as `python -m bench` runs it; what is wrong."""
    from bench.static import table

    return show([entry.key for entry in table.everything()], machine.usable_cores(), out)


def show(chosen: Sequence[str], workers: int, out: Path, accept: bool = False) -> list[str]:
    """Compiles, reads, prints and writes static.json; what is wrong, or worse than the baseline."""
    import triton

    from bench.static import table

    started, rows, wrong = time.monotonic(), [], []
    for row, found in table.read_all(chosen, workers):
        rows.append(row)
        wrong += found
        if len(rows) % 50 == 0:
            print(f"{len(rows)} of {len(chosen)} kernels compiled and read", file=sys.stderr)
    print("\n".join(table.lines(rows)))
    print(f"\n{NOTE}")
    if accept:
        table.accept(rows, triton.__version__)
    version, baseline = table.load_baseline()
    if version == triton.__version__:
        wrong += table.compare(rows, baseline)
        new = [row.key for row in rows if row.key not in baseline]
        if new:
            print(f"{len(new)} kernels are not in the baseline yet; --accept adds them.")
    else:
        print(f"The baseline is of triton {version}, this is {triton.__version__}: not compared.")
    seconds = round(time.monotonic() - started, 1)
    facts = {"triton": triton.__version__, "note": NOTE, "seconds": seconds, "wrong": wrong}
    out.mkdir(parents=True, exist_ok=True)
    written = out / "static.json"
    rows_json = [row.to_json() for row in rows]
    written.write_text(json.dumps({**facts, "rows": rows_json}, indent=1))
    print(f"{len(rows)} kernels in {seconds} s, {len(wrong)} faults; written: {written}")
    for text in wrong:
        print(text, file=sys.stderr)
    return wrong

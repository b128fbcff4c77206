"""One rank: `python -m bench.worker SPEC`. Started by runner.py, one process per rank.

Rank 0 appends one JSON object per event to the events file: total, case, row, problem, done. Every
rank ends by itself when nothing happens for the time of the spec, with all stacks in its log, and
is killed by the kernel when whoever started it dies.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import providers
from bench.contest import Contest
from bench.machine import die_with_parent
from bench.options import Options
from bench.page import Page
from bench.providers.base import Provider, Setup
from bench.suites import suite
from bench.timing import Budget

SECONDS = 4.0  # at most for one case
SAMPLE_US = 1500.0
# On busy cores a sample must span many time slices of the scheduler, or it shows only how the ranks
# fare in the slice that the aligned start has just given them.
BUSY_SECONDS = 12.0
BUSY_SAMPLE_US = 100_000.0


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("BENCH_RANK") or os.environ["PMI_RANK"])
    die_with_parent()
    options = Options.from_json(spec["options"])
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_patience(options), exit=True)
    scratch = Path(spec["scratch"])
    events = _Events(scratch / "events" if rank == 0 else None)
    page = Page(scratch / "page", rank, spec["world"], options.timeout)
    try:
        _run(spec, options, rank, page, events)
    finally:
        page.close()
    events.write(kind="done")


def _run(spec: dict[str, Any], options: Options, rank: int, page: Page, events: _Events) -> None:
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    setup = Setup(rank, spec["world"], device, Path(spec["scratch"]), options.timeout, options.busy)
    module = suite(spec["suite"])
    cases = module.cases(options, spec["world"])
    pairs = module.pairs(options)
    beside = module.parts(options) if hasattr(module, "parts") else ()
    names = list(dict.fromkeys([*(name for pair in pairs for name in pair), *beside]))
    events.write(kind="total", cases=len(cases))
    with _opened(names, options, setup) as found:
        if hasattr(module, "contest"):
            contest = module.contest(page, found, device, spec["suite"], options)
        else:
            contest = Contest(page, found, device, spec["suite"], options.busy, options.seed)
        # Ranks take their time to import and to build; a first meeting that may last.
        page.exchange([float(rank)])
        most = BUSY_SECONDS if options.busy else getattr(module, "SECONDS", SECONDS)
        sample_us = BUSY_SAMPLE_US if options.busy else SAMPLE_US
        ends = time.monotonic() + (options.seconds or most / 2 * len(cases))
        for done, case in enumerate(cases):
            faulthandler.dump_traceback_later(_patience(options), exit=True)
            events.write(kind="case", label=case.label, done=done)
            share = max(0.1, (ends - time.monotonic()) / (len(cases) - done))
            seconds = page.exchange([share])[0][0]
            rows = contest.run(case, pairs, Budget(min(most, seconds * 0.9), sample_us))
            for row in rows:
                events.write(kind="row", row=row.to_json())
            for reason in contest.wrong_peers(pairs):
                events.write(kind="problem", text=f"{case.label}: {reason}")
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def _opened(names: list[str], options: Options, setup: Setup) -> Iterator[dict[str, Provider]]:
    found: dict[str, Provider] = {}
    for name in names:
        where = options.replace.get(name, providers.PROVIDERS[name].where)
        found[name] = providers.load(where)(setup)
    yield found
    for provider in reversed(list(found.values())):
        provider.close()


def _patience(options: Options) -> float:
    """Longest silence of a healthy rank: one wait that runs into its timeout, and some work."""
    return options.timeout * 2 + 60.0


class _Events:
    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", buffering=1) if path else None

    def write(self, **event: Any) -> None:
        if self._file:
            self._file.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    main()

"""What `python -m bench` runs, by name.

A suite starts ranks and times them: a module with TITLE, cases(options, world), pairs(options).
One whose cases are calls (call_contest.py) has `contest` too, and may have parts(options):
providers that are timed beside the pairs. SECONDS, where it has that, is the most that one of its
cases takes. Its weight is its part of the time of a quick run.
A table starts none: a module with TITLE and report(console), which prints it and gives a list of
what is wrong; it runs only when it is named.
"""

from __future__ import annotations

import importlib
from types import ModuleType

SUITES = {
    "collectives": "bench.suites.collectives",
    "gemm": "bench.suites.gemm",
    "layers": "bench.suites.layers",
    "pipeline": "bench.suites.pipeline",
    "attention": "bench.suites.attention",
    "train": "bench.suites.train",
}
WEIGHTS = {
    "collectives": 3.0,
    "gemm": 2.0,
    "layers": 1.0,
    "pipeline": 1.0,
    "attention": 1.0,
    "train": 0.8,
}
ONE_WORLD = (
    "gemm",
    "layers",
    "pipeline",
    "attention",
    "train",
)  # a quick run of these has the first of its world sizes only
TABLES = {"model": "bench.model", "static": "bench.static.cli", "planner": "bench.planner.page"}


def suite(name: str) -> ModuleType:
    return importlib.import_module(SUITES[name])


def table(name: str) -> ModuleType:
    return importlib.import_module(TABLES[name])

"""What `python -m bench` runs, by name.

A suite starts ranks and times them: a module with TITLE, cases(options, world) and pairs(options).
A table starts none: a module with TITLE and report(console), which prints it and gives a list of
what is wrong; it runs only when it is named.
"""

from __future__ import annotations

import importlib
from types import ModuleType

SUITES = {"collectives": "bench.suites.collectives"}
TABLES = {"model": "bench.model"}


def suite(name: str) -> ModuleType:
    return importlib.import_module(SUITES[name])


def table(name: str) -> ModuleType:
    return importlib.import_module(TABLES[name])

"""The suites by name. A suite is a module with TITLE, cases(options, world) and pairs(options)."""

from __future__ import annotations

import importlib
from types import ModuleType

SUITES = {"collectives": "bench.suites.collectives"}


def suite(name: str) -> ModuleType:
    return importlib.import_module(SUITES[name])

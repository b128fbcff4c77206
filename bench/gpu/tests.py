"""Runs test files and leaves their outcome, test by test: python -m bench.gpu.tests FILE..."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from bench.gpu.results import leave


class Outcomes:
    """What pytest reports, left after each test: a run that is killed shows how far it got."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A test has three phases; the worst one counts, and a passed call is what passes.
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = report.outcome
        if report.when == "teardown":
            leave({"tests": self.tests})


def main() -> int:
    outcomes = Outcomes()
    status = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[1:]], [outcomes])
    result: dict[str, Any] = {"tests": outcomes.tests}
    if status == 0 and set(outcomes.tests.values()) <= {"skipped"}:
        result["skipped"] = f"none of {len(outcomes.tests)} tests ran here"
    leave(result)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

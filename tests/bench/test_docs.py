"""The published numbers: tables are what their result files give, results are verified."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.report.json import read_json
from bench.report.markdown import goals, result

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS = sorted((DOCS / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_a_published_result_is_verified_and_its_page_is_made_from_it(path: Path) -> None:
    found = read_json(path)
    assert found.ok
    assert found.rows
    assert re.fullmatch(r"[a-z0-9-]+_[a-z0-9-]+_\d{4}-\d\d-\d\d", path.stem)
    assert result(path) in path.with_suffix(".md").read_text()
    assert path.stem in (DOCS / "performance.md").read_text()


def test_the_table_of_goals_is_that_of_the_result() -> None:
    (path,) = (p for p in RESULTS if p.stem.startswith("collectives"))
    assert goals(read_json(path)) in (DOCS / "performance.md").read_text()

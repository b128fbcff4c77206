"""bench.json: {"meta": .., "rows": [..]}, the one machine-readable result of every suite."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.case import Outcome, Row


def write_json(outcome: Outcome, path: Path) -> Path:
    """Whole or not at all: an interrupted run never leaves half a file."""
    meta = {**outcome.meta, "ok": outcome.ok, "problems": outcome.problems}
    rows = ",\n".join(_dump(row.to_json()) for row in outcome.rows)
    partial = path.with_suffix(".partial")
    partial.write_text(f'{{"meta": {_dump(meta)},\n"rows": [\n{rows}\n]}}\n')
    partial.replace(path)
    return path


def read_json(path: Path) -> Outcome:
    data = json.loads(path.read_text())
    return Outcome(data["meta"], [Row.from_json(r) for r in data["rows"]], data["meta"]["problems"])


def _dump(value: Any) -> str:
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no infinity: an infinite error (moved data differ, NaN) is written as 1e308."""
    if isinstance(value, float) and not math.isfinite(value):
        return 1e308
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value

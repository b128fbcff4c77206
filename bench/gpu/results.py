"""Where a part leaves its result for the driver."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def leave(result: dict[str, Any]) -> None:
    """Writes it to the file that the driver named, whole or not at all; else prints it."""
    named = os.environ.get("BENCH_GPU_RESULT")
    text = json.dumps(result, indent=1)
    if named is None:
        print(text)
        return
    partial = Path(f"{named}.partial")
    partial.write_text(text)
    partial.replace(named)

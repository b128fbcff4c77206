"""Threads of the core are started in one place, where nothing can escape their functions."""

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def test_threads_are_started_in_one_place() -> None:
    starts = re.compile(r"std::(thread|jthread|async)\b(?!::)|pthread_create")
    found = {
        str(path.relative_to(CSRC))
        for path in CSRC.rglob("*")
        if path.suffix in (".h", ".cpp", ".cu", ".cuh")
        for line in path.read_text().splitlines()
        if starts.search(line.partition("//")[0])
    }
    assert found == {"base/thread.h"}

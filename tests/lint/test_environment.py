"""Environment variables: the table, its page and the code name the same ones."""

import re
import subprocess
from pathlib import Path

from pyparallel.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
# Where a name is read: a string in C++ or Python, $ENV{} in CMake, a variable in a shell script.
READ = re.compile(
    r"""["']PYPARALLEL_([A-Z0-9_]+)["']|\$ENV\{PYPARALLEL_(\w+)\}|\bENV\{PYPARALLEL_(\w+)"""
)
READERS = ("csrc", "pyparallel", "triton_kernels", "bench", "examples", "setup.py")
ELSEWHERE = {"pyparallel/environment.py", "pyparallel/doctor_capabilities.py"}  # only speak of them


def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *READERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for path in listed.stdout.splitlines() if path not in ELSEWHERE]


def test_table_and_code_agree():
    read: dict[str, set[str]] = {}
    for path in _tracked():
        file = ROOT / path
        if file.suffix not in (".py", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".txt", ".sh"):
            continue
        for match in READ.finditer(file.read_text()):
            name = next(group for group in match.groups() if group)
            read.setdefault(f"PYPARALLEL_{name}", set()).add(path)
    table = {variable.name for variable in VARIABLES}
    assert set(read) - table == set(), {name: read[name] for name in set(read) - table}
    assert table - set(read) == set(), "in the table, but no code reads them"


def test_page_is_the_table():
    page = (ROOT / "docs/environment.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{v.name}` | {v.values} | {v.default} | {v.effect} |" for v in VARIABLES], (
        "rewrite the rows of docs/environment.md"
    )


def test_table_is_sorted_and_complete():
    names = [variable.name for variable in VARIABLES]
    assert names == sorted(set(names))
    assert all(v.values and v.default and v.effect for v in VARIABLES)

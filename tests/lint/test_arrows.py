"""Who may import whom (docs/architecture.md): no arrow goes up, and light rooms stay light.

Read from the source, so that a lazy import inside a function counts too.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Room -> the rooms of this project, and the outside packages, that it may import.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "schedule": (set(), {"numpy"}),
    # What reads YAML, and TOML before Python 3.11, is loaded only for such a file.
    "planner": ({"schedule"}, {"numpy", "tomli", "tomllib", "yaml"}),
    # matplotlib is loaded only for a PNG.
    "viz": ({"schedule", "planner"}, {"numpy", "matplotlib"}),
    "triton_kernels": (set(), {"triton", "torch"}),
    # _autoload only tells torch a name: its arrow back to comm is followed by the first group.
    "comm": ({"_core", "_torch", "_autoload", "errors"}, {"torch"}),
    "ops": ({"comm", "triton_kernels", "errors"}, {"torch", "triton"}),
    # triton_kernels and _torch hold two of its engines; transformers only on request.
    "attention": (
        {"ops", "comm", "triton_kernels", "_torch", "errors"},
        {"torch", "triton", "transformers"},
    ),
    "layers": ({"ops", "comm", "errors"}, {"torch"}),
    "pipeline": ({"schedule", "comm", "errors"}, {"torch"}),
    "training": (
        {"schedule", "planner", "comm", "ops", "attention", "layers", "pipeline", "errors"},
        {"torch", "numpy"},
    ),
}
# Files directly in pyparallel/: the base is below every room; the tools on top may import anything.
BASE = {"__init__", "_version", "errors", "environment"}
TOP = {
    "__main__",
    "_autoload",
    "cli",
    "doctor",
    "doctor_capabilities",
    "doctor_gpu",
    "doctor_machine",
    "help_text",
    "launch",
    "launched",
    "plan",
    "plan_files",
    "plan_options",
    "profile",
    "simulate",
}
# Room of csrc -> what it may include: other rooms, and single headers.
CSRC: dict[str, set[str]] = {
    "base": set(),
    "shm": {"base", "symmetric/registry.h"},
    "symmetric": {"base", "shm"},
    "nccl": {"base"},
    "cuda": {"base"},
    "capi": {"base", "shm", "symmetric"},
    "torch": {"base", "shm", "symmetric", "nccl", "cuda", "python"},
    "python": {"base", "shm", "symmetric", "nccl", "cuda"},
}
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](([a-z_]+)/[^>"]+)[>"]', re.MULTILINE)


def _imports(path: Path, package: list[str]) -> set[str]:
    """Absolute dotted names of all that a file imports; `package` is where it lives."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - (node.level - 1)]
                base = ".".join([*above, *filter(None, [node.module])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            names.add(str(node.args[0].value))
    return names


def _room_folder(room: str) -> Path:
    return ROOT / "triton_kernels" if room == "triton_kernels" else ROOT / "pyparallel" / room


def _misfits(path: Path, package: list[str], rooms: set[str], outside: set[str]) -> list[str]:
    misfits = []
    for name in sorted(_imports(path, package)):
        top, *rest = name.split(".")
        if top == "pyparallel":
            allowed = not rest or rest[0] in rooms or rest[0] in ("__version__",)
        else:
            allowed = top in sys.stdlib_module_names or top in outside
        if not allowed:
            misfits.append(f"{path.relative_to(ROOT)} imports {name}")
    return misfits


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_lies_below(room):
    rooms, outside = ROOMS[room]
    misfits = []
    for path in sorted(_room_folder(room).rglob("*.py")):
        inner = path.relative_to(_room_folder(room)).parent.parts
        misfits += _misfits(path, ["pyparallel", room, *inner], rooms | {room}, outside)
    assert not misfits, "\n".join(misfits)


def _includes_of_others(text: str, room: str) -> set[str]:
    return {
        header
        for header, top in _INCLUDE.findall(text)
        if top in CSRC and top != room and not {top, header} & CSRC[room]
    }


@pytest.mark.parametrize("room", sorted(CSRC))
def test_a_room_of_the_core_includes_only_what_lies_below(room):
    files = [f for f in sorted((ROOT / "csrc" / room).rglob("*")) if f.is_file()]
    misfits = [
        f"{file.relative_to(ROOT)} includes {header}"
        for file in files
        for header in sorted(_includes_of_others(file.read_text(), room))
    ]
    assert files
    assert not misfits, "\n".join(misfits)


def test_an_include_that_goes_up_is_found():
    text = '#include "shm/group.h"\n#include "symmetric/registry.h"\n#include "symmetric/plan.h"\n'
    assert _includes_of_others(text, "shm") == {"symmetric/plan.h"}
    assert _includes_of_others("# include <shm/group.h>\n", "base") == {"shm/group.h"}
    assert _includes_of_others("#include <torch/torch.h>\n", "shm") == {"torch/torch.h"}


def test_the_base_imports_nothing():
    misfits = []
    for name in sorted(BASE):
        misfits += _misfits(ROOT / f"pyparallel/{name}.py", ["pyparallel"], BASE, set())
    assert not misfits, "\n".join(misfits)


def test_every_file_and_folder_has_its_place():
    listed = subprocess.run(
        ["git", "ls-files", "pyparallel"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    parts = {Path(path).parts[1] for path in listed if path.endswith((".py", "triton_kernels"))}
    assert parts <= set(ROOMS) | {f"{name}.py" for name in BASE | TOP}, "say what it may import"


@pytest.mark.parametrize(
    ("source", "package", "expected"),
    [
        ("from .errors import Timeout", ["pyparallel", "comm"], "pyparallel.comm.errors.Timeout"),
        ("from ..ops import x", ["pyparallel", "comm"], "pyparallel.ops.x"),
        ("def f():\n  import pyparallel.ops", ["pyparallel"], "pyparallel.ops"),
        ("import_module('pyparallel.ops')", ["pyparallel"], "pyparallel.ops"),
        ("import importlib\nimportlib.import_module('torch')", ["pyparallel"], "torch"),
    ],
)
def test_all_forms_of_import_are_seen(tmp_path, source, package, expected):
    file = tmp_path / "file.py"
    file.write_text(source)
    assert expected in _imports(file, package)


def test_an_arrow_that_goes_up_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "pyparallel" / "comm" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text("from pyparallel.ops import anything\nimport scipy\n")
    found = _misfits(file, ["pyparallel", "comm"], *ROOMS["comm"])
    assert found == [
        "pyparallel/comm/x.py imports pyparallel.ops",
        "pyparallel/comm/x.py imports pyparallel.ops.anything",
        "pyparallel/comm/x.py imports scipy",
    ]

"""Finding and opening the library: every place, every way to fail, what is reported.

Each case runs in a fresh interpreter, since what a process has loaded it keeps. No GPU; the real
wheel is loaded too (test_real_library.py).
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nccl.libraries import LATEST, Libraries

# Only the core: no torch, hence quick, and nothing else that could have loaded NCCL.
PRELUDE = """
import ctypes, json, os, sys
import pyparallel._core as whole
core = whole.nccl
PROBE = [sys.executable, "-I", "-S", "-c",
         "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_NOW); os._exit(0)"]
def describe(library):
    return {"path": library.path, "origin": library.origin, "version": library.version_text,
            "missing": library.missing, "interposer": library.interposer,
            "deep_bound": library.deep_bound,
            "copies": core.loaded_copies(library.path)}
def attempt(path="", folders=(), probe=PROBE):
    try:
        return describe(core.open_library(path, list(folders), probe))
    except Exception as error:
        return {"error": str(error), "kind": type(error).__name__}
"""


def fresh(code: str, *arguments: object, **environment: str) -> Any:
    """Runs `code` in a new interpreter; gives what it prints last, as JSON."""
    searched = {"PYPARALLEL_NCCL_LIB", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"}
    clean = {key: value for key, value in os.environ.items() if key not in searched}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


OPEN = "print(json.dumps(attempt(*sys.argv[1:2], sys.argv[2:])))"


def site_with(library: Path, folder: Path) -> Path:
    """A folder of Python packages whose nvidia-nccl wheel is that library."""
    target = folder / "nvidia/nccl/lib/libnccl.so.2"
    target.parent.mkdir(parents=True)
    target.symlink_to(library)
    return folder


# --- the order of the places


def test_a_path_that_is_named_wins(libraries: Libraries, tmp_path: Path) -> None:
    named, other = libraries.build(22703, copy=1), libraries.build(22703, copy=2)
    site = site_with(other, tmp_path / "site")
    found = fresh(OPEN, named, site, PYPARALLEL_NCCL_LIB=str(other), CONDA_PREFIX=str(tmp_path))
    assert found["path"] == str(named)
    assert found["origin"] == "the path argument"
    assert found["version"] == "2.27.3"


def test_environment_before_the_mapped_copy(libraries: Libraries) -> None:
    named, mapped = libraries.build(copy=1), libraries.build(21805)
    code = "ctypes.CDLL(sys.argv[1]); print(json.dumps(attempt()))"
    found = fresh(code, mapped, PYPARALLEL_NCCL_LIB=str(named))
    assert (found["path"], found["origin"]) == (str(named), "PYPARALLEL_NCCL_LIB")
    assert sorted(copy[0] for copy in found["copies"]) == sorted([str(named), str(mapped)])
    assert [copy[0] for copy in found["copies"] if copy[1]] == [str(named)]


def test_mapped_copy_before_the_wheel(libraries: Libraries, tmp_path: Path) -> None:
    """Torch has loaded one: another would be a second NCCL in the process."""
    mapped, wheel = libraries.build(21805), libraries.build(copy=1)
    site = site_with(wheel, tmp_path / "site")
    code = "ctypes.CDLL(sys.argv[1]); print(json.dumps(attempt('', sys.argv[2:])))"
    found = fresh(code, mapped, site)
    assert found["path"] == str(mapped)
    assert found["origin"] == "the copy that this process had loaded"
    assert found["version"] == "2.18.5"
    assert [copy[0] for copy in found["copies"]] == [str(mapped)]


def test_mapped_copy_whose_file_is_gone(libraries: Libraries, tmp_path: Path) -> None:
    """An upgrade under a running process: the copy in memory is still the one to use."""
    private = tmp_path / "libnccl.so.2"
    private.write_bytes(libraries.build(22005).read_bytes())
    code = """
ctypes.CDLL(sys.argv[1]); os.unlink(sys.argv[1])
print(json.dumps(attempt()))
"""
    found = fresh(code, private)
    assert found["version"] == "2.20.5"
    assert [copy[2] for copy in found["copies"]] == [True]


def test_wheel_before_conda_before_loader(libraries: Libraries, tmp_path: Path) -> None:
    """Row 84: a bare name had picked the system's old copy though the wheel's was newer."""
    wheel, conda, system = (libraries.build(LATEST, copy=i) for i in (1, 2, 3))
    site = site_with(wheel, tmp_path / "site")
    (tmp_path / "conda/lib").mkdir(parents=True)
    (tmp_path / "conda/lib/libnccl.so.2").symlink_to(conda)
    places = {"CONDA_PREFIX": str(tmp_path / "conda"), "LD_LIBRARY_PATH": str(system.parent)}
    found = fresh(OPEN, "", site, **places)
    assert (found["path"], found["origin"]) == (str(wheel), "the nvidia-nccl wheel")
    found = fresh(OPEN, "", tmp_path, **places)
    assert (found["path"], found["origin"]) == (str(conda), "CONDA_PREFIX")
    del places["CONDA_PREFIX"]
    found = fresh(OPEN, "", tmp_path, **places, CUDA_HOME="/nowhere")
    assert (found["path"], found["origin"]) == (str(system), "the dynamic loader")


def test_cuda_home_last(libraries: Libraries, tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libnccl.so.2").symlink_to(libraries.build())
    found = fresh(OPEN, "", CUDA_PATH=str(tmp_path))
    if found["origin"] == "the dynamic loader":
        pytest.skip("this machine's loader has an NCCL of its own")
    assert (found["path"], found["origin"]) == (str(libraries.build()), "CUDA_PATH")


# --- failures


def test_nothing_to_find(tmp_path: Path) -> None:
    """Row 78: the failure is here and says all of it, not a NameError later on."""
    found = fresh(OPEN, "", tmp_path, CUDA_HOME=str(tmp_path), CONDA_PREFIX=str(tmp_path))
    if "error" not in found:
        pytest.skip("this machine's loader has an NCCL of its own")
    assert found["kind"] == "Unsupported"
    assert "libnccl.so.2: cannot open shared object file: No such file" in found["error"]
    for place in ("1 folders of Python packages", f"{tmp_path}/lib/", f"{tmp_path}/lib64/"):
        assert place in found["error"]
    assert "pip install nvidia-nccl-cu12" in found["error"]


def test_named_path_that_does_not_exist(libraries: Libraries, tmp_path: Path) -> None:
    """No other library is taken in its place."""
    site = site_with(libraries.build(), tmp_path / "site")
    found = fresh(OPEN, "", site, PYPARALLEL_NCCL_LIB="/nowhere/libnccl.so.2")
    words = "/nowhere/libnccl.so.2: cannot open shared object file: No such file or directory"
    assert words in found["error"]
    assert "PYPARALLEL_NCCL_LIB" in found["error"]


def test_missing_dependency(libraries: Libraries) -> None:
    """Row 78: what the library itself needs is not there; the loader's words name it."""
    needed = libraries.plain("gone/libgone.so", "int gone() { return 1; }", soname="libgone.so")
    broken = libraries.build(needs=str(needed))
    needed.unlink()
    found = fresh(OPEN, broken)
    assert "libgone.so: cannot open shared object file" in found["error"]


def test_text_file(tmp_path: Path) -> None:
    """Row 80: the loader's own text, verbatim."""
    text = tmp_path / "libnccl.so.2"
    text.write_text("version https://example.org/pointer\n" * 20)
    found = fresh(OPEN, text)
    with pytest.raises(OSError, match="invalid ELF header") as own:
        ctypes.CDLL(str(text))
    assert str(own.value) in found["error"]


@pytest.mark.parametrize("size", [1024, 4096, 60_000])
def test_truncated_file(libraries: Libraries, tmp_path: Path, size: int) -> None:
    """Row 79: a bus error in whoever loads it. Here an error, with both sizes."""
    whole = libraries.build().read_bytes()
    broken = tmp_path / "libnccl.so.2"
    broken.write_bytes(whole[:size])
    found = fresh(OPEN, broken)
    assert found["kind"] == "Unsupported"
    assert f"truncated: it has {size} bytes, its headers promise at least " in found["error"]


def test_file_that_kills(libraries: Libraries) -> None:
    """The probe dies in the place of this process; without a probe the process would."""
    source = "#include <signal.h>\n__attribute__((constructor)) void die() { raise(SIGBUS); }"
    deadly = libraries.plain("deadly/libnccl.so.2", source)
    found = fresh(OPEN, deadly)
    assert f"killed by signal {signal.SIGBUS.value} (Bus error)" in found["error"]
    with pytest.raises(AssertionError):
        fresh("attempt(sys.argv[1], (), [])\nprint(json.dumps(0))", deadly)


def test_file_that_hangs(libraries: Libraries) -> None:
    source = "#include <unistd.h>\n__attribute__((constructor)) void wait() { sleep(600); }"
    hanging = libraries.plain("hanging/libnccl.so.2", source)
    found = fresh(OPEN, hanging)
    assert "is not done after 10 s" in found["error"]


def test_probe_that_cannot_be_started(libraries: Libraries) -> None:
    code = "print(json.dumps(attempt(sys.argv[1], (), ['/nowhere/python'])))"
    found = fresh(code, libraries.build())
    assert found["kind"] == "SystemCallError"
    assert "/nowhere/python" in found["error"]


def test_missing_required_functions(libraries: Libraries) -> None:
    lacking = libraries.build(without=["ncclAllReduce", "ncclGroupEnd"])
    found = fresh(OPEN, lacking)
    assert "ncclGroupEnd, ncclAllReduce; the loader says" in found["error"]
    assert "undefined symbol: ncclGroupEnd" in found["error"]


@pytest.mark.parametrize("fault", ["bad_version", "version_error"])
def test_bad_version(libraries: Libraries, fault: str) -> None:
    found = fresh(OPEN, libraries.build(fault=fault))
    assert "which is no version of NCCL 2 or later" in found["error"]


# --- what was found


@pytest.mark.parametrize(
    ("code", "text"), [(2804, "2.8.4"), (21003, "2.10.3"), (23203, "2.32.3"), (30001, "3.0.1")]
)
def test_version_numbers(libraries: Libraries, code: int, text: str) -> None:
    """Two widths: the switch was at 2.9."""
    assert fresh(OPEN, libraries.build(code))["version"] == text


def test_missing_optional_functions(libraries: Libraries) -> None:
    """Row 85: flags, not failures."""
    found = fresh(OPEN, libraries.build(22703, without=["ncclCommWindowRegister"]))
    assert "ncclCommWindowRegister" in found["missing"]
    assert "ncclAlltoAll" in found["missing"]
    assert "ncclCommSplit" not in found["missing"]
    assert fresh(OPEN, libraries.build())["missing"] == []


def test_two_copies_are_reported(libraries: Libraries) -> None:
    """Row 82. A torch for CUDA brings a third."""
    first, second = libraries.build(21805), libraries.build()
    code = """
from pyparallel.comm.nccl import nccl_info
ctypes.CDLL(sys.argv[1])
library = core.open_library(sys.argv[2], [], PROBE)
print(json.dumps(nccl_info(library)))
"""
    info = fresh(code, first, second)
    assert info["version"] == "2.32.3"
    found = {copy["path"]: copy["ours"] for copy in info["copies"]}
    assert found.pop(str(first)) is False
    assert found.pop(str(second)) is True
    assert not any(found.values())
    assert len(info["warnings"]) == 1 + len(found)
    (warning,) = (text for text in info["warnings"] if str(first) in text)
    assert "PYPARALLEL_NCCL_LIB" in warning


def test_nothing_else_sees_our_copy(libraries: Libraries) -> None:
    """Row 81: a library that is loaded after us and wants NCCL must not get ours."""
    code = """
attempt(sys.argv[1])
try:
    ctypes.CDLL(None).ncclGetVersion
    print(json.dumps("visible"))
except AttributeError:
    print(json.dumps("hidden"))
"""
    assert fresh(code, libraries.build(2804)) == "hidden"


def test_interposed_library_calls_itself(libraries: Libraries) -> None:
    """Row 86: functions that everyone sees would catch NCCL's calls to itself.

    A call of the newer library to ncclGetVersion must reach its own, not the older one's.
    """
    older, newer = libraries.build(2804), libraries.build()
    code = """
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
found = attempt(sys.argv[2])
own = ctypes.CDLL(sys.argv[2])
found["through itself"] = own.standinVersionThroughTheTable()
print(json.dumps(found))
"""
    found = fresh(code, older, newer)
    assert found["version"] == "2.32.3"
    assert found["interposer"] == str(older)
    assert found["deep_bound"] is True
    assert found["through itself"] == LATEST


def test_process_library_is_one(libraries: Libraries) -> None:
    first, second = libraries.build(), libraries.build(22703)
    code = """
core.set_default_options([], PROBE)
one = core.process_library(sys.argv[1])
same = core.process_library() is one or core.process_library().path == one.path
try:
    core.process_library(sys.argv[2])
    text = ""
except ValueError as error:
    text = str(error)
print(json.dumps([same, text]))
"""
    same, text = fresh(code, first, second)
    assert same
    assert f"asked for NCCL from {second}, but this process already uses NCCL 2.32.3" in text


def test_info_without_a_library(tmp_path: Path) -> None:
    """Row 78: the report says why, and nothing raises."""
    code = """
from pyparallel.comm import nccl
print(json.dumps(nccl.nccl_info()))
"""
    info = fresh(code, PYPARALLEL_NCCL_LIB=str(tmp_path / "none.so"))
    assert info["available"] is False
    assert "cannot open shared object file" in info["error"]
    assert not any(copy["ours"] for copy in info["copies"])

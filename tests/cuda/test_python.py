"""The way from tensors to kernels: CudaCollectives, binding, loader; kernels as host threads.

The stand-in library runs the real kernels on host memory, so this covers arguments, order of calls,
choice, errors and failures. Ranks are streams of one process, as in bench/gpu.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cuda import programs

# The first test of a run compiles: minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

STAND_IN = ["stand_in.cpp", "emulated_kernels.cpp"]


@pytest.fixture(scope="module")
def stand_in() -> Path:
    return programs.shared_object(STAND_IN)


def _in_child(stand_in: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs virtual_ranks_cases.py, where the library is opened once for the whole process."""
    script = Path(__file__).with_name("virtual_ranks_cases.py")
    return programs.run([sys.executable, str(script), str(stand_in), *arguments], timeout=100)


@pytest.mark.parametrize(
    "case",
    [
        "collectives",
        "algorithms_give_the_same_bits",
        "in_place_and_misaligned",
        "signals",
        "misfits_name_the_call",
        "a_missing_rank_raises",
        "another_grid_raises",
        "abort_raises",
        "multimem_needs_a_newer_device",
    ],
)
def test_case(stand_in, case):
    done = _in_child(stand_in, case)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{case}: passed\n"


LOAD = "from pyparallel import _core; print(_core.cuda_kernels_unavailable())"


def _load(monkeypatch, path: str) -> str:
    monkeypatch.setenv("PYPARALLEL_CUDA_LIB", path)
    done = programs.run([sys.executable, "-c", LOAD], timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_cannot_be_opened_says_why(monkeypatch, tmp_path, stand_in):
    text = tmp_path / "text.so"
    text.write_text("no library")
    assert _load(monkeypatch, str(stand_in)) == ""
    assert "No such file" in _load(monkeypatch, str(tmp_path / "absent.so"))
    said = _load(monkeypatch, str(text))
    assert "invalid ELF header" in said or "file too short" in said
    assert "PYPARALLEL_CUDA_LIB" in said
    assert "is another library" in _load(monkeypatch, "libm.so.6")


def test_another_version_is_refused(monkeypatch):
    other = programs.shared_object(STAND_IN, "STAND_IN_VERSION=99")
    assert "has interface 99" in _load(monkeypatch, str(other))


def test_the_real_library_opens_without_a_driver():
    """And says that there is none, or finds the device."""
    library = programs.ROOT / "pyparallel" / "lib" / "libpyparallel_cuda.so"
    if not library.exists():
        pytest.skip("built without nvcc: there is no libpyparallel_cuda.so")
    said = programs.run([sys.executable, "-c", LOAD], timeout=60).stdout.strip()
    assert (said == "") if torch.cuda.is_available() else ("CUDA error" in said)
    assert ctypes.CDLL(str(library)).pyparallel_cuda_kernels is not None

"""The build's switches: what is left out, what is required, and what the errors say.

Only configures; nothing is compiled. CUDA's own tests need nvcc, and say so.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYPARALLEL_", "CUDA"))}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**clean, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def _configure(build: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run(
        *("cmake", "-S", "csrc", "-B", str(build), "-G", "Ninja", "-DPYPARALLEL_PYTHON=OFF"),
        *options,
        **environment,
    )


def _flat(text: str) -> str:
    return " ".join(text.split())


def test_cuda_left_out_on_request(tmp_path):
    done = _configure(tmp_path, "-DPYPARALLEL_CUDA=0")
    assert done.returncode == 0, done.stderr
    assert "pyparallel_cuda" not in (tmp_path / "build.ninja").read_text()
    assert '"reason": "PYPARALLEL_CUDA=0"' in (tmp_path / "build_info.json").read_text()


def test_cuda_left_out_without_nvcc(tmp_path):
    done = _configure(tmp_path, "-DPYPARALLEL_CUDA=auto", CUDACXX="/nowhere/nvcc")
    assert done.returncode == 0, done.stderr
    assert "left out, no working nvcc was found" in done.stdout
    assert "no working nvcc" in (tmp_path / "build_info.json").read_text()


def test_cuda_required_without_nvcc_says_where_it_was_looked_for(tmp_path):
    done = _configure(tmp_path, "-DPYPARALLEL_CUDA=1", CUDACXX="/nowhere/nvcc")
    assert done.returncode != 0
    message = _flat(done.stderr)
    assert "no working nvcc was found on PATH, in CUDACXX, CUDA_HOME or /usr/local/cuda" in message
    assert "leave the kernels out with PYPARALLEL_CUDA=0" in message


@needs_nvcc
def test_architectures_are_those_asked_for(tmp_path):
    done = _configure(tmp_path, "-DPYPARALLEL_CUDA=1", PYPARALLEL_CUDA_ARCHS="80, 90a")
    assert done.returncode == 0, done.stderr
    ninja = (tmp_path / "build.ninja").read_text()
    assert "code=sm_80" in ninja
    assert "code=sm_90a" in ninja
    assert "sm_100" not in ninja


@needs_nvcc
def test_an_architecture_that_is_none_is_an_error(tmp_path):
    done = _configure(tmp_path, "-DPYPARALLEL_CUDA=1", PYPARALLEL_CUDA_ARCHS="80;hopper")
    assert done.returncode != 0
    assert '"hopper" is not an architecture' in _flat(done.stderr)


def test_a_switch_with_another_value_is_an_error():
    done = _run(sys.executable, "setup.py", "build_ext", "--inplace", PYPARALLEL_CUDA="yes")
    assert done.returncode != 0
    assert "PYPARALLEL_CUDA='yes': expected 0 (leave out), 1 (require) or auto" in done.stderr


def test_torch_is_looked_up_without_importing_it():
    finder = str(ROOT / "csrc/cmake/find_torch.py")
    done = _run(sys.executable, finder)
    assert done.returncode == 0, done.stderr
    root, version, cuda = done.stdout.strip().split(";")
    assert (Path(root) / "include/torch").is_dir()
    assert version[0].isdigit()
    assert cuda
    absent = _run(sys.executable, "-I", "-S", finder)
    assert absent.returncode != 0
    assert f"torch is not installed for {sys.executable}" in absent.stderr


def test_an_old_torch_is_refused(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("__version__ = '2.8.0'\ncuda = None\n")
    finder = str(ROOT / "csrc/cmake/find_torch.py")
    done = _run(sys.executable, finder, PYTHONPATH=str(tmp_path))
    assert done.returncode != 0
    assert "torch 2.8.0" in done.stderr
    assert "older than 2.9" in done.stderr


@pytest.mark.slow
def test_a_second_build_compiles_nothing():
    command = (sys.executable, "setup.py", "build_ext", "--inplace")
    assert _run(*command).returncode == 0
    again = _run(*command)
    assert again.returncode == 0, again.stderr
    assert "no work to do" in again.stdout

"""The C example, built with find_package(pyparallel) against this package, as two processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyparallel

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent


def run(*command: object, **named) -> subprocess.CompletedProcess:
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PATH": path},
        **named,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_example_builds_and_runs(tmp_path):
    run("cmake", "-S", ROOT / "examples/c_abi", "-B", tmp_path, "-G", "Ninja",
        f"-Dpyparallel_DIR={pyparallel.cmake_dir()}")  # fmt: skip
    run("cmake", "--build", tmp_path)
    done = run(tmp_path / "all_reduce")
    expected = [
        f"rank {r} of 2: 1000 of 1000 sums are right (pyparallel {pyparallel.__version__})"
        for r in range(2)
    ]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.parametrize(
    "compiler", [["gcc", "-x", "c", "-std=c99"], ["g++", "-x", "c++", "-std=c++17"]]
)
def test_the_header_is_plain_c_and_cpp(compiler, tmp_path):
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]} here")
    source = tmp_path / "includes"
    source.write_text("#include <pyparallel/pyparallel.h>\nint main(void) { return 0; }\n")
    strict = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    run(*compiler, *strict, f"-I{pyparallel.get_include()}", source)

"""Drives the CMake build of csrc/ and lays its result into the package.

An editable install (`pip install -e . --no-build-isolation`) puts libraries, extension modules and
headers into pyparallel/ itself and keeps the build folder, so that the next run compiles only what
changed. A wheel takes the same files from the same build.

Environment: PYPARALLEL_CUDA=0|1, PYPARALLEL_CUDA_ARCHS, PYPARALLEL_TORCH=0|1 (docs/environment.md).
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CleanBuild(build):
    """A wheel holds what the tree has now, not what an earlier wheel left in the build folder."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """All extension modules come from one CMake project."""

    def run(self) -> None:
        package = ROOT / "pyparallel" if self.editable_mode or self.inplace else None
        target = package or Path(self.build_lib).resolve() / "pyparallel"
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        self._configure(build)
        _run("cmake", "--build", str(build), *_jobs())
        _run("cmake", "--install", str(build), "--prefix", str(target), "--component", "python")

    def _configure(self, build: Path) -> None:
        options = {
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Release"),
            "Python_EXECUTABLE": sys.executable,
            "PYPARALLEL_CUDA": _switch("PYPARALLEL_CUDA", default="auto"),
            "PYPARALLEL_TORCH": _switch("PYPARALLEL_TORCH", default="1"),
        }
        build.mkdir(parents=True, exist_ok=True)
        # A build folder made by another interpreter or torch would be reused for what it is not.
        stamp = build / "configured-for.txt"
        wanted = "\n".join(
            [os.path.realpath(sys.prefix), _version_of("torch"), _version_of("pybind11")]
        )
        if stamp.exists() and stamp.read_text() != wanted:
            shutil.rmtree(build)
            build.mkdir()
        _run(
            *("cmake", "-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja"),
            *(f"-D{name}={value}" for name, value in options.items()),
        )
        stamp.write_text(wanted)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "pyparallel"
        return [str(path) for path in package.rglob("*") if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


def _switch(name: str, default: str) -> str:
    value = os.environ.get(name, default)
    if value not in ("0", "1", "auto"):
        raise SystemExit(f"{name}={value!r}: expected 0 (leave out), 1 (require) or auto")
    return value


def _version_of(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution} not installed"


def _jobs() -> list[str]:
    if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ:
        return []
    return ["--parallel", str(os.cpu_count() or 1)]


def _run(*command: str) -> None:
    # Pinned cmake and ninja come as wheels: look beside the interpreter first.
    scripts = sysconfig.get_path("scripts")
    env = dict(os.environ, PATH=f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}")
    program = shutil.which(command[0], path=env["PATH"])
    if program is None:
        raise SystemExit(f"{command[0]} is needed to build pyparallel: pip install cmake ninja")
    status = subprocess.run([program, *command[1:]], env=env).returncode
    if status != 0:
        raise SystemExit(f"building pyparallel: `{' '.join(command)}` failed with status {status}")


setup(
    ext_modules=[Extension("pyparallel._core", sources=[])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
)

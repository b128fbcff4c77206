"""The wheel: built from this tree, installed elsewhere, moved, used by Python and by CMake.

Reuses the compiled objects of the in-place build, so it takes seconds. Not covered: other machines'
C libraries (the wheel is for the machine that built it).
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import pyparallel

ROOT = Path(__file__).resolve().parents[2]
BUILT = json.loads((ROOT / "pyparallel/lib/build_info.json").read_text())
WITH_TORCH = BUILT["torch"]["built"]  # PYPARALLEL_TORCH=0 leaves the backend out
ABI = sysconfig.get_config_var("EXT_SUFFIX")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _run(*command: object, cwd: Path, **environment: str) -> str:
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _files_of_the_tree() -> list[str]:
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    return [path for path in _run(*command, cwd=ROOT).splitlines() if os.path.lexists(ROOT / path)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    _run(*pip, "--wheel-dir", folder, ROOT, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """Where the wheel is installed: a folder that is moved afterwards, for nothing may name it."""
    folder = tmp_path_factory.mktemp("install")
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target")
    _run(*pip, folder / "first", wheel, cwd=folder)
    shutil.move(folder / "first", folder / "moved")
    return folder / "moved"


def _python(site: Path, code: str, cwd: Path) -> str:
    return _run(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=str(site)).strip()


def test_name_and_contents(wheel):
    assert wheel.name.startswith(f"pyparallel_kernels-{pyparallel.__version__}-cp")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"pyparallel/_core{ABI}", "pyparallel/py.typed"}
    if WITH_TORCH:
        expected.add(f"pyparallel/_torch{ABI}")
    if BUILT["cuda"]["built"]:
        expected.add("pyparallel/lib/libpyparallel_cuda.so")
    expected |= {"pyparallel/lib/libpyparallel.so", "pyparallel/lib/build_info.json"}
    expected.add("pyparallel/lib/cmake/pyparallel/pyparallelConfig.cmake")
    for path in _files_of_the_tree():
        if path.startswith("csrc/include/"):
            expected.add(f"pyparallel/{path.removeprefix('csrc/')}")
        elif path.startswith("triton_kernels/") and path.endswith(".py"):
            expected.add(f"pyparallel/{path}")
        elif path.startswith("pyparallel/viz/page/") or (
            path.startswith("pyparallel/") and path.endswith(".py")
        ):
            expected.add(path)
    assert expected <= names, sorted(expected - names)
    foreign = {n for n in names if not n.startswith(("pyparallel/", "pyparallel_kernels-"))}
    assert not foreign
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert "Name: pyparallel-kernels" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: <3.14,>=3.10" in lines
    required = [line for line in lines if line.startswith("Requires-Dist: ") and "extra" not in line]
    assert len(required) == 3, required


def test_python_finds_all_of_it(site, tmp_path):
    code = (
        "import pyparallel, pyparallel._core, pyparallel.triton_kernels, pyparallel.comm;"
        f"import torch{', pyparallel._torch' if WITH_TORCH else ''};"
        "print(pyparallel._core.__file__, pyparallel.triton_kernels.__file__,"
        " pyparallel.cmake_dir(), pyparallel.get_include(), sep='\\n')"
    )
    for line in _python(site, code, tmp_path).splitlines():
        assert Path(line).is_relative_to(site), line


def test_doctor_of_the_installed_copy(site, tmp_path):
    text = _run(
        *(sys.executable, "-m", "pyparallel", "doctor", "--json"),
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    facts = json.loads(text)
    assert Path(facts["pyparallel"]["path"]).is_relative_to(site)
    available = {c["name"] for c in facts["capabilities"] if c["available"]}
    assert {"native core", "CPU communicator (shared memory)"} <= available
    assert ("torch.distributed backend" in available) == WITH_TORCH
    assert (site / "bin" / "pyparallel").exists()


def test_find_package_from_the_moved_copy(site, tmp_path):
    (tmp_path / "main.c").write_text(
        "#include <pyparallel/pyparallel.h>\n#include <stdio.h>\n"
        'int main(void) { puts(pyparallel_version()); return 0; }\n'
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\n"
        "project(user LANGUAGES C)\n"
        f"find_package(pyparallel {pyparallel.__version__} REQUIRED CONFIG)\n"
        "add_executable(user main.c)\n"
        "target_link_libraries(user PRIVATE pyparallel::pyparallel)\n"
    )
    folder = _python(site, "import pyparallel; print(pyparallel.cmake_dir())", tmp_path)
    build = tmp_path / "build"
    _run("cmake", "-G", "Ninja", "-S", ".", "-B", build, f"-Dpyparallel_DIR={folder}", cwd=tmp_path)
    _run("cmake", "--build", build, cwd=tmp_path)
    assert _run(build / "user", cwd=tmp_path).strip() == pyparallel.__version__


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) reads the libraries")
def test_libraries_name_no_folder_and_no_driver(site):
    libraries = sorted(site.rglob("*.so"))
    assert len(libraries) >= 3
    for library in libraries:
        dynamic = _run("readelf", "-d", library, cwd=site)
        for line in dynamic.splitlines():
            if "RUNPATH" in line or "RPATH" in line:
                path = line.partition("[")[2].rstrip("]")
                assert all(part.startswith("$ORIGIN") for part in path.split(":")), (library, path)
            if "NEEDED" in line:
                assert not any(cuda in line for cuda in ("libcuda", "libcudart", "libnccl")), line


def test_source_archive_has_what_the_build_needs(tmp_path):
    files = _files_of_the_tree()
    for path in files:
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / "tree" / path, follow_symlinks=False)
    command = (sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path)
    _run(*command, cwd=tmp_path / "tree")
    (archive,) = tmp_path.glob("pyparallel_kernels-*.tar.gz")
    names = _run("tar", "tzf", archive, cwd=tmp_path).splitlines()
    inside = {name.partition("/")[2] for name in names}
    needed = {path for path in files if path.startswith("csrc/")} | {"setup.py", "LICENSE"}
    assert needed <= inside, sorted(needed - inside)
    assert "pyparallel/triton_kernels/__init__.py" in inside

"""Stand-ins for CUDA's driver, built once."""

import subprocess
from pathlib import Path

import pytest

from tests.native import build

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def standins(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, Path]":
    """Folders with a libcuda.so.1: whole, and with parts missing."""
    folders = {}
    for name in ("WHOLE", "BASE", "VMM", "MULTICAST"):
        folders[name] = tmp_path_factory.mktemp(name.lower())
        command = [str(build.compiler()), *build.COMMON, "-O1", "-fPIC", "-shared"]
        if name != "WHOLE":
            command.append(f"-DSTANDIN_WITHOUT_{name}")
        library = folders[name] / "libcuda.so.1"
        subprocess.run(
            [*command, HERE / "standin_cuda.cpp", "-o", library], check=True, timeout=100
        )
    return folders


@pytest.fixture
def env(standins: "dict[str, Path]") -> "dict[str, str]":
    return {"LD_LIBRARY_PATH": str(standins["WHOLE"])}

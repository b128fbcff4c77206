"""Tensor, sequence and pipeline parallelism on one communication core.

Importing this package is cheap: it loads neither torch nor the native core. Its rooms do when they
are imported (`import pyparallel.comm`).
"""

from pathlib import Path

from pyparallel._version import __version__

__all__ = ["__version__", "cmake_dir", "get_include"]


def cmake_dir() -> str:
    """The folder to give CMake as `pyparallel_DIR`, so that `find_package(pyparallel)` finds it."""
    return str(_installed("lib/cmake/pyparallel"))


def get_include() -> str:
    """The folder to put on a C compiler's include path for `#include <pyparallel/pyparallel.h>`."""
    return str(_installed("include"))


def _installed(relative: str) -> Path:
    path = Path(__file__).resolve().parent / relative
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: the native core of this pyparallel is not built. "
            "In a source tree build it with `pip install -e . --no-build-isolation`."
        )
    return path

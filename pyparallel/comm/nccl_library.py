"""The NCCL that was found: opening it, and what it is and can do."""

import atexit
import os
import sys
from typing import Any, Final

from pyparallel._core import nccl as core
from pyparallel.comm.nccl_errors import ERROR_CLASSES
from pyparallel.errors import Unsupported

__all__ = ["load", "nccl_info", "open_library"]

# What a program has to do that shows whether a file can be loaded: load it, and leave at once.
_PROBE: Final = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_NOW); os._exit(0)"
# How long the end of the process waits for communicators that are being aborted.
_LAST_WAIT: Final = 2.0

core.set_error_classes(ERROR_CLASSES)


def _wheel_folders() -> list[str]:
    return [folder for folder in dict.fromkeys(sys.path) if folder and os.path.isdir(folder)]  # noqa: PTH112


def _probe_command() -> list[str]:
    # No executable: an interpreter inside another program. The file's headers are still checked.
    return [sys.executable, "-I", "-S", "-c", _PROBE] if sys.executable else []


def load(path: str | os.PathLike[str] | None = None) -> Any:
    """The NCCL library of this process, found and opened by the first call.

    Looked for in this order: `path`, the environment variable PYPARALLEL_NCCL_LIB, a copy that the
    process has already mapped (torch's), the nvidia-nccl wheel, CONDA_PREFIX, the dynamic loader,
    CUDA_HOME. A path that is given is used or refused, never replaced by another. Raises
    `Unsupported` with the loader's own words; `ValueError` for another path than the one in use.
    """
    core.set_default_options(_wheel_folders(), _probe_command())
    return core.process_library(os.fspath(path) if path is not None else "")


def open_library(path: str | os.PathLike[str]) -> Any:
    """Opens that file, next to the process's library: to compare versions, or for tests."""
    return core.open_library(os.fspath(path), [], _probe_command())


def nccl_info(library: Any = None) -> dict[str, Any]:
    """What NCCL this process has: for reports, and to ask for a feature before it is needed.

    Never raises: without a usable library `available` is False and `error` says why. `features`
    maps each function of the binding to whether the library has it; `copies` lists every libnccl
    that is mapped, and `warnings` what is wrong with that.
    """
    info: dict[str, Any] = {"available": False, "error": None, "warnings": []}
    try:
        library = load() if library is None else library
    except Unsupported as error:
        info["error"] = str(error)
    else:
        missing = set(library.missing)
        info |= {
            "available": True,
            "path": library.path,
            "origin": library.origin,
            "version": library.version_text,
            "version_code": library.version,
            "features": {name: name not in missing for name, _, _ in core.symbols()},
            "missing": sorted(missing),
        }
        if library.interposer:
            info["warnings"].append(
                f"{library.interposer} puts NCCL functions before everyone else's; "
                + (
                    "the library was bound to its own (RTLD_DEEPBIND)"
                    if library.deep_bound
                    else "a sanitizer forbids RTLD_DEEPBIND: the library may call those"
                )
            )
    ours = info.get("path", "")
    info["copies"] = [
        {"path": path, "ours": own, "deleted": deleted}
        for path, own, deleted in core.loaded_copies(ours)
    ]
    if len(info["copies"]) > 1:
        paths = ", ".join(copy["path"] for copy in info["copies"])
        info["warnings"].append(
            f"{len(info['copies'])} copies of NCCL are in this process: {paths}. Handles of one "
            "mean nothing to another; PYPARALLEL_NCCL_LIB makes this library use the one you name"
        )
    return info


atexit.register(core.process_ends, _LAST_WAIT)
core.set_default_options(_wheel_folders(), _probe_command())

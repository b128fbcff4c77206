"""The conditions of a run, for the head of every result, and processes that end with it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("torch", "triton", "numpy", "pyparallel-kernels", "mpi4py", "deepspeed")
_PR_SET_PDEATHSIG = 1
_SIMD = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "commit": _commit(),
        "machine": {
            "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "simd": [s for s in _SIMD if s in _field("/proc/cpuinfo", "flags").split()],
            "memory": _field("/proc/meminfo", "MemTotal"),
            "virtual": "hypervisor" in _field("/proc/cpuinfo", "flags").split(),
            "kernel": platform.release().partition("-")[0],
            "load_at_start": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{p: v for p in _PACKAGES if (v := _version(p))},
        },
    }


def usable_cores() -> int:
    """Cores that this process may run on: under taskset, or in a container, not all of them."""
    return len(os.sched_getaffinity(0))


def processes(count: int) -> ProcessPoolExecutor:
    """Fresh interpreters that take work, none of which outlives this process, however it ends."""
    return ProcessPoolExecutor(count, get_context("spawn"), die_with_parent, (os.getpid(),))


def die_with_parent(parent: int = 0) -> None:
    """The kernel kills this process when the thread that started it ends; parent: its process,
    which may be gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The checked-out commit, with "+" where the tree differs from it; empty outside of git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except FileNotFoundError:
        return ""

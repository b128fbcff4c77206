"""The machine, before anything is built: GPU, driver, compiler, packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

from bench.gpu.results import leave

PACKAGES = ("torch", "triton", "pybind11", "cmake", "ninja", "pytest", "nvidia-nccl-cu13", "numpy")
COMMANDS = {
    "nvidia_smi": ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv"),
    "topology": ("nvidia-smi", "topo", "-m"),
    "nvcc": ("nvcc", "--version"),
    "compiler": ("g++", "--version"),
}


def _said(command: tuple[str, ...]) -> str:
    """What the command prints, or why it did not run."""
    program = shutil.which(command[0]) or shutil.which(command[0], path="/usr/local/cuda/bin")
    if program is None:
        return f"{command[0]} is not installed"
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"gpus": [], "why": str(error)}
    if not torch.cuda.is_available():
        return {"gpus": [], "why": "torch finds no CUDA device"}
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    gpus = [
        {
            "name": p.name,
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory": p.total_memory,
        }
        for p in found
    ]
    return {"gpus": gpus, "architecture": architecture(found[0].major, found[0].minor)}


def architecture(major: int, minor: int) -> str:
    """As PYPARALLEL_CUDA_ARCHS has it: 90a and later have instructions of their own."""
    return f"{major}{minor}" + ("a" if major >= 9 else "")


def main() -> None:
    leave(
        {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "packages": {package: _version(package) for package in PACKAGES},
            **{name: _said(command) for name, command in COMMANDS.items()},
            **_gpus(),
        }
    )


if __name__ == "__main__":
    main()

"""What can be done here: one function per capability, each with its reason and its mend."""

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Facts = dict[str, Any]


@dataclass(frozen=True)
class Capability:
    """One thing that works here or does not; a `mend` says what would make it work."""

    name: str
    available: bool
    reason: str
    mend: str = ""


REBUILD = "build again: pip install -e . --no-build-isolation"


def native_core(facts: Facts) -> Capability:
    """Whether the extension module of the core loads."""
    name = "native core"
    try:
        import_module("pyparallel._core")
    except ImportError as error:
        return Capability(name, False, str(error), f"needs a C++20 compiler; {REBUILD}")
    return Capability(name, True, f"version {(facts['build'] or {}).get('version', 'unknown')}")


def vector_reductions(facts: Facts) -> Capability:
    """Whether CPU reductions use wide instructions."""
    name = "vectorised CPU reductions"
    try:
        simd = import_module("pyparallel._core").simd_name()
    except ImportError as error:
        return Capability(name, False, str(error), REBUILD)
    except RuntimeError as error:
        return Capability(name, False, str(error), _mend(error))
    if simd == "portable":
        has = ", ".join(facts["cpu"]["simd"]) or "none of AVX2 and AVX-512"
        mend = "unset PYPARALLEL_SIMD" if os.environ.get("PYPARALLEL_SIMD") else ""
        return Capability(name, False, f"portable code is in use; this CPU has {has}", mend)
    return Capability(name, True, f"{simd} chosen for this CPU")


def cpu_communicator(facts: Facts) -> Capability:
    """Whether ranks of this host can share memory: tried by joining a group of one."""
    name = "CPU communicator (shared memory)"
    shared = facts["shared_memory"]
    if not os.environ.get("PYPARALLEL_SHM_DIR") and shared["memfd"]:
        mend = "name a tmpfs in PYPARALLEL_SHM_DIR, as in PYPARALLEL_SHM_DIR=/dev/shm"
        return Capability(name, False, shared["memfd"], mend)
    if shared["abstract_sockets"]:
        mend = "allow AF_UNIX sockets in this container's security profile"
        return Capability(name, False, shared["abstract_sockets"], mend)
    try:
        comm = import_module("pyparallel.comm")
        with comm.Communicator.from_id(comm.Communicator.unique_id(), 0, 1):
            pass
    except (ImportError, RuntimeError, AttributeError) as error:
        return Capability(name, False, str(error), _mend(error))
    where = os.environ.get("PYPARALLEL_SHM_DIR") or "anonymous memory files"
    return Capability(name, True, f"a group was joined; memory from {where}")


def symmetric_memory(_: Facts) -> Capability:
    """Whether ranks can address each other's memory on this host's CPUs: tried with one rank."""
    name = "symmetric memory on CPUs"
    try:
        comm = import_module("pyparallel.comm")
        with comm.Communicator.from_id(comm.Communicator.unique_id(), 0, 1) as group:
            comm.SymmetricMemory(group, 1 << 16).close()
    except (ImportError, RuntimeError, AttributeError) as error:
        return Capability(name, False, str(error), _mend(error))
    return Capability(name, True, "64 KiB were shared; collectives find buffers in it by address")


def device_memory(facts: Facts) -> Capability:
    """Whether CUDA devices of a group can address each other's memory."""
    name = "symmetric memory on GPUs"
    try:
        why = import_module("pyparallel._core").cuda_driver_unavailable()
    except (ImportError, AttributeError) as error:
        return Capability(name, False, str(error), REBUILD)
    if why or not facts["gpus"]["devices"]:
        reason = why or facts["gpus"]["error"]
        return Capability(name, False, reason, "a machine with an NVIDIA GPU and its driver")
    apart = [link for link in facts["gpus"]["links"] if link["link"] == "SYS"]
    note = f"; {len(apart)} pairs are linked by the CPUs only" if apart else ""
    return Capability(name, True, f"{len(facts['gpus']['devices'])} GPUs{note}")


def torch_backend(facts: Facts) -> Capability:
    """Whether dist.init_process_group("pyparallel") works with the installed torch."""
    name = "torch.distributed backend"
    built = (facts["build"] or {}).get("torch", {})
    installed = facts["versions"]["torch"]
    if installed is None:
        return Capability(
            name, False, "torch is not installed", "pip install torch, then " + REBUILD
        )
    if not built.get("built"):
        reason = f"not built: {built.get('reason', 'no build of the core was found')}"
        return Capability(name, False, reason, "PYPARALLEL_TORCH=1, then " + REBUILD)
    if built["version"].split("+")[0] != installed.split("+")[0]:
        reason = f"built for torch {built['version']}, but torch {installed} is installed"
        return Capability(name, False, reason, REBUILD)
    try:
        import_module("torch")
        import_module("pyparallel._torch")
    except ImportError as error:
        return Capability(name, False, str(error), REBUILD)
    return Capability(name, True, f"for torch {installed}")


def across_hosts(_: Facts) -> Capability:
    """Whether collectives can cross hosts: torch's gloo carries what leaves a host."""
    name = "groups across hosts"
    try:
        distributed = import_module("torch.distributed")
    except ImportError as error:
        return Capability(name, False, str(error), "pip install torch")
    if not distributed.is_available() or not distributed.is_gloo_available():
        return Capability(name, False, "this torch has no gloo", "install a torch with gloo")
    return Capability(name, True, "gloo between hosts, shared memory inside each")


def nccl(facts: Facts) -> Capability:
    """Whether an NCCL library is found and new enough."""
    name = "NCCL"
    found = facts["nccl"]
    if found.get("error"):
        mend = "pip install nvidia-nccl-cu12, or name a library in PYPARALLEL_NCCL_LIB"
        return Capability(name, False, found["error"], mend)
    if not facts["gpus"]["devices"]:
        reason = f"found {found['version']}, but there is no GPU: {facts['gpus']['error']}"
        return Capability(name, False, reason, "a machine with an NVIDIA GPU and its driver")
    return Capability(name, True, f"{found['version']} from {found['path']}")


def cuda_kernels(facts: Facts) -> Capability:
    """Whether the low-latency CUDA kernels are built and can run."""
    name = "low-latency CUDA kernels"
    built = (facts["build"] or {}).get("cuda", {})
    if not built.get("built"):
        reason = f"not built: {built.get('reason', 'no build of the core was found')}"
        return Capability(
            name, False, reason, "install nvcc, set PYPARALLEL_CUDA=1, then " + REBUILD
        )
    archs = ", ".join(f"sm_{arch}" for arch in built["archs"])
    try:
        why = import_module("pyparallel._core").cuda_kernels_unavailable()
    except ImportError as error:
        why = str(error)
    if why:
        reason = f"built for {archs}, but: {why}"
        return Capability(name, False, reason, "a machine with an NVIDIA GPU and its driver")
    return Capability(name, True, f"built by nvcc {built['nvcc']} for {archs}")


def triton_kernels(facts: Facts) -> Capability:
    """Whether Triton can compile kernels for a GPU that is here."""
    name = "Triton"
    if importlib.util.find_spec("triton") is None:
        return Capability(name, False, "triton is not installed", "pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return Capability(name, True, "in the interpreter (TRITON_INTERPRET=1), on the CPU")
    if not facts["gpus"]["devices"]:
        reason = f"triton {facts['versions']['triton']}, but no GPU: {facts['gpus']['error']}"
        return Capability(
            name, False, reason, "TRITON_INTERPRET=1 runs kernels on the CPU, for tests"
        )
    return Capability(name, True, f"triton {facts['versions']['triton']}")


def benchmark(_: Facts) -> Capability:
    """Whether the benchmark can print and plot."""
    missing = [m for m in ("rich", "matplotlib") if importlib.util.find_spec(m) is None]
    if missing:
        return Capability(
            "benchmark",
            False,
            f"not installed: {', '.join(missing)}",
            "pip install rich matplotlib",
        )
    if importlib.util.find_spec("bench") is None:
        return Capability(
            "benchmark",
            False,
            "bench/ is part of the source tree, not of the wheel",
            "run it there",
        )
    return Capability("benchmark", True, "python -m pyparallel bench")


def toolchain(_: Facts) -> Capability:
    """Whether the native core could be built again here."""
    name = "build tools"
    compiler = os.environ.get("CXX") or "c++"
    missing = [tool for tool in (compiler, "cmake", "ninja") if shutil.which(tool) is None]
    missing += [m for m in ("pybind11",) if importlib.util.find_spec(m) is None]
    if missing:
        mend = "install a C++20 compiler; pip install cmake ninja pybind11"
        return Capability(name, False, f"not found: {', '.join(missing)}", mend)
    nvcc = shutil.which("nvcc") or "none"
    return Capability(name, True, f"{shutil.which(compiler)}, cmake, ninja; nvcc: {nvcc}")


ALL: tuple[Callable[[Facts], Capability], ...] = (
    native_core,
    vector_reductions,
    cpu_communicator,
    symmetric_memory,
    torch_backend,
    across_hosts,
    nccl,
    device_memory,
    cuda_kernels,
    triton_kernels,
    benchmark,
    toolchain,
)


def _mend(error: Exception) -> str:
    if "PYPARALLEL_SIMD" in str(error):
        return "unset PYPARALLEL_SIMD, or name what this CPU has"
    if isinstance(error, MemoryError):
        return "a larger limit on shared memory (docker run --shm-size=1g, or the cgroup's limit)"
    return REBUILD

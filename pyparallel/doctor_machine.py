"""What `doctor` sees of the machine: CPUs, NUMA, memory, and the limits on sharing memory."""

import os
import platform
import resource
import socket
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

# The part of /proc/cpuinfo's flags that decides how fast reductions are.
_SIMD_FLAGS = ("avx2", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "asimd", "sve")


def cpu(root: Path = Path("/")) -> Facts:
    """Model, counts, what this process may use, instruction sets, NUMA nodes."""
    info = _read(root / "proc/cpuinfo") or ""
    flags: set[str] = set()
    model = ""
    for line in info.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in ("flags", "Features"):
            flags = set(value.split())
        elif key == "model name" and not model:
            model = value
    return {
        "model": model or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cgroup_cpus": _cgroup_cpus(root),
        "simd": [flag for flag in _SIMD_FLAGS if flag in flags],
        "numa_nodes": numa_nodes(root),
    }


def numa_nodes(root: Path = Path("/")) -> list[Facts]:
    """CPUs, memory and distances of each NUMA node; empty where the kernel does not say."""
    nodes = []
    found = (root / "sys/devices/system/node").glob("node[0-9]*")
    for folder in sorted(
        (folder for folder in found if folder.name[4:].isdecimal()), key=_node_number
    ):
        memory = [
            line for line in (_read(folder / "meminfo") or "").splitlines() if "MemTotal" in line
        ]
        nodes.append(
            {
                "node": _node_number(folder),
                "cpus": (_read(folder / "cpulist") or "").strip(),
                "memory_bytes": _kilobytes(memory[0].rpartition(":")[2]) if memory else None,
                "distances": [
                    int(part)
                    for part in (_read(folder / "distance") or "").split()
                    if part.isdecimal()
                ],
            }
        )
    return nodes


def memory(root: Path = Path("/")) -> Facts:
    """Physical memory, and the limit and use of this process's control group."""
    sizes = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            sizes[name] = _kilobytes(value)
    limit, used = _cgroup_memory(root)
    return {
        "total_bytes": sizes.get("MemTotal"),
        "available_bytes": sizes.get("MemAvailable"),
        "cgroup_limit_bytes": limit,
        "cgroup_used_bytes": used,
    }


def shared_memory() -> Facts:
    """Whether memory files and the sockets that hand them over work here, and how much fits."""
    facts: Facts = {
        "memfd": _try_memfd(),
        "abstract_sockets": _try_abstract_socket(),
        "dev_shm": _tmpfs("/dev/shm"),
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "file_size_limit": _or_none(resource.getrlimit(resource.RLIMIT_FSIZE)[0]),
        "huge_pages": _bracketed(_read(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))),
    }
    named = os.environ.get("PYPARALLEL_SHM_DIR")
    if named:
        facts["shm_dir"] = _tmpfs(named)
    return facts


def _tmpfs(path: str) -> Facts:
    try:
        status = os.statvfs(path)
    except OSError as error:
        return {"path": path, "error": f"{error.strerror} (errno {error.errno})"}
    return {
        "path": path,
        "total_bytes": status.f_blocks * status.f_frsize,
        "free_bytes": status.f_bavail * status.f_frsize,
        "writable": os.access(path, os.W_OK),
    }


def _try_memfd() -> str:
    """Empty when an anonymous memory file can be made and reserved, else why not."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        descriptor = os.memfd_create("pyparallel-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return f"memfd_create: {error.strerror} (errno {error.errno})"
    try:
        os.posix_fallocate(descriptor, 0, 1 << 16)
    except OSError as error:
        return f"posix_fallocate of 64 KiB: {error.strerror} (errno {error.errno})"
    finally:
        os.close(descriptor)
    return ""


def _try_abstract_socket() -> str:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(b"\0pyparallel-doctor-" + os.urandom(8).hex().encode())
    except (OSError, AttributeError) as error:
        return f"bind of an abstract Unix socket: {error}"
    return ""


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's group, innermost first: version 2, then the named controller's."""
    base = root / "sys/fs/cgroup"
    folders = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, *rest = line.split(":", 2)
        if len(rest) < 2:  # no line as the kernel writes it
            continue
        names, path = rest
        if not names:
            top = base
        elif controller in names.split(","):
            top = base / controller
        else:
            continue
        inner = top / path.lstrip("/")
        while inner != top and top in inner.parents:
            folders.append(inner)
            inner = inner.parent
        folders.append(top)
    return [*folders, base / controller]


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """The tightest limit above this process and the use counted against it."""
    tightest: tuple[int | None, int | None] = (None, None)
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, use_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / use_name)
            if (
                limit is not None
                and 0 <= limit < 1 << 60
                and (tightest[0] is None or limit < tightest[0])
            ):
                tightest = (limit, used)
    return tightest


def _cgroup_cpus(root: Path) -> float | None:
    """CPUs that the control group's quota allows, or None for no quota."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        both = (_read(folder / "cpu.max") or "").split()  # "max 100000" without a quota
        if len(both) == 2 and all(part.isdecimal() and int(part) for part in both):
            quotas.append(int(both[0]) / int(both[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.removeprefix("-").isdecimal() else None


def _kilobytes(text: str) -> int | None:
    """The bytes of "  16 kB"; None of anything else."""
    words = text.split()
    return int(words[0]) * 1024 if words and words[0].isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _bracketed(text: str | None) -> str | None:
    """The chosen one of "always [never] advise"."""
    return text.partition("[")[2].partition("]")[0] if text else None


def _node_number(folder: Path) -> int:
    return int(folder.name.removeprefix("node"))


def _or_none(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit

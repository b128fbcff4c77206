"""Contestant: plain C++ copy-and-add over shared memory (limits/copy_add.cpp), as a bound.

It spins, so it only takes part where every rank has a core to itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.case import Case
from bench.machine import usable_cores
from bench.providers.base import Buffers, Provider, Setup, Unsupported

SOURCE = Path(__file__).parent.parent / "limits" / "copy_add.cpp"


def build(folder: Path) -> Path:
    """Compiles the probe; raises with the compiler's own words."""
    library = folder / "copy_add.so"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
    command = [compiler, *flags, str(SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return library


class Limit(Provider):
    name = "limit"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        library = ctypes.CDLL(str(setup.scratch / "copy_add.so"))
        library.limit_bytes.restype = ctypes.c_size_t
        library.limit_create.restype = ctypes.c_void_p
        library.limit_create.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        library.limit_destroy.argtypes = [ctypes.c_void_p]
        library.limit_choose.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        library.limit_all_reduce.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_int,
        ]
        self._library = library
        size = library.limit_bytes(setup.world)
        fd = os.open(setup.scratch / "limit.page", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._limit = library.limit_create(address, setup.rank, setup.world)

    def batch(self, case: Case, sets: Sequence[Buffers]) -> Callable[[int], None]:
        if case.op != "all_reduce" or case.dtype != "float32":
            raise Unsupported("the limit is measured for the float32 all_reduce")
        if platform.machine() not in ("x86_64", "AMD64"):
            raise Unsupported("the limit's spin loop is written for x86")
        if self.setup.busy or self.setup.world > usable_cores():
            raise Unsupported("the limit spins: it needs a free core per rank")
        data = (ctypes.c_void_p * len(sets))(*[b.x.data_ptr() for b in sets])
        count = sets[0].x.numel()
        scratch = sets[0].x.clone()
        way = self._library.limit_choose(self._limit, scratch.data_ptr(), count)

        def run(calls: int) -> None:
            self._library.limit_all_reduce(self._limit, way, data, len(sets), count, calls)

        return run

    def close(self) -> None:
        self._library.limit_destroy(self._limit)

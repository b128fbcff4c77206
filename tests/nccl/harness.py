"""Ranks as threads of one process over a stand-in library, and arrays in host memory for them."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pyparallel.comm import nccl

JOIN = 60.0  # seconds until a test's threads are given up


class Array:
    """numpy memory that says it is a GPU's."""

    def __init__(self, values: np.ndarray, stream: int | None = None, read_only: bool = False):
        self.values = values
        self.stream = stream
        self.read_only = read_only

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.values.shape,
            "typestr": self.values.dtype.str,
            "data": (self.values.ctypes.data, self.read_only),
            "strides": None if self.values.flags.c_contiguous else self.values.strides,
            "stream": self.stream,
        }


def raw(values: np.ndarray, dtype: str) -> nccl.RawArray:
    """Bit patterns in numpy memory as elements of a type that numpy lacks."""
    return nccl.RawArray(values.ctypes.data, values.size, dtype)


class Standin:
    """The stand-in's own functions: what was called, what to fail."""

    def __init__(self, path: Path, cuda: Path):
        self.library = nccl.open_library(path)
        self._nccl = ctypes.CDLL(str(path))
        self._cuda = ctypes.CDLL(str(cuda))
        self._nccl.standinLog.restype = ctypes.c_char_p
        self._nccl.standinLastConfig.restype = ctypes.c_char_p
        self._cuda.standinSynchronize.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._cuda.standinSetStreamDevice.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._cuda.standinSetCapturing.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def log(self) -> list[str]:
        """The functions called since the last time, "nccl" left out."""
        lines: list[str] = self._nccl.standinLog().decode().split()
        return [line.removeprefix("nccl") for line in lines]

    def last_config(self) -> str:
        text: str = self._nccl.standinLastConfig().decode()
        return text

    def alive(self) -> int:
        return int(self._nccl.standinAlive())

    def fail_async(self, code: int) -> None:
        self._nccl.standinFailAsync(code)

    def let_go(self) -> None:
        self._nccl.standinLetGo()

    @contextlib.contextmanager
    def failing(self, function: str, code: int) -> Iterator[None]:
        self._nccl.standinSetResult(function.encode(), code)
        try:
            yield
        finally:
            self._nccl.standinSetResult(function.encode(), 0)

    def synchronize(self, stream: int, seconds: float = 20.0) -> None:
        assert self._cuda.standinSynchronize(stream, int(seconds * 1000)), (
            f"stream {stream} is stuck"
        )

    def set_device(self, device: int) -> None:
        self._cuda.standinSetDevice(device)

    def set_stream_device(self, stream: int, device: int) -> None:
        self._cuda.standinSetStreamDevice(stream, device)

    def set_capturing(self, stream: int, on: bool) -> None:
        self._cuda.standinSetCapturing(stream, on)


class Seat:
    """One rank's thread: its communicator, its stream, and a wait for it."""

    def __init__(self, standin: Standin, comm: nccl.NcclCommunicator, stream: int):
        self.standin = standin
        self.comm = comm
        self.stream = stream
        self.rank = comm.rank
        self.size = comm.size

    def wait(self) -> None:
        self.standin.synchronize(self.stream)


def run_threads(count: int, body: Callable[[int], Any]) -> list[Any]:
    """body(i) in `count` threads; their results, or the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = body(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank's thread is stuck"
    return results


_streams = iter(range(16, 1 << 30, 16))  # a handle of its own for each rank of each test


def run_ranks(
    standin: Standin, world: int, body: Callable[[Seat], Any], *, close: bool = True, **options: Any
) -> list[Any]:
    """body(seat) for each rank of one communicator; closed at the end."""
    id = nccl.unique_id(standin.library)
    streams = [next(_streams) for _ in range(world)]
    options = {"timeout": 20.0, "library": standin.library} | options

    def rank(index: int) -> Any:
        comm = nccl.NcclCommunicator(id, index, world, **options)
        seat = Seat(standin, comm, streams[index])
        result = body(seat)
        if close:
            seat.wait()
            comm.close()
        return result

    return run_threads(world, rank)

"""What may be passed as an array or a stream, and what is refused before NCCL is called.

torch has no GPU here: its tensors are stood in for by a subclass that says it is on one.
"""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from pyparallel.comm import nccl
from pyparallel.comm.nccl_arrays import stream_handle, view_of, wait_for_producer
from pyparallel.errors import InvalidArgument, Unsupported
from tests.nccl.harness import Array, Seat, Standin, raw, run_ranks


class GpuTensor(torch.Tensor):
    """A tensor in host memory that says it is on a GPU."""

    gpu = 0
    recorded: list[Any]

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.gpu)

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)


def on_gpu(x: torch.Tensor, gpu: int = 0) -> GpuTensor:
    made = x.as_subclass(GpuTensor)
    made.gpu = gpu
    made.recorded = []
    return made


class Stream:
    """As torch's: a handle, and who waits for whom."""

    waits: list[tuple[int, int]] = []  # noqa: RUF012

    def __init__(self, handle: int, device: Any = None) -> None:
        self.cuda_stream = handle

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append((self.cuda_stream, other.cuda_stream))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> int:
    """torch's current stream."""
    handle = 0x5550
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(handle))
    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    Stream.waits.clear()
    return handle


# --- torch


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8),
        *(torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_torch_tensors_on_the_current_stream(
    standin: Standin, current: int, dtype: torch.dtype
) -> None:
    plain = torch.randint(0, 8, (3, 5)).to(dtype)

    def body(seat: Seat) -> None:
        x = on_gpu(plain.clone())
        assert seat.comm.all_reduce(x, "max") is x
        out = on_gpu(torch.zeros(3, 5).to(dtype))
        assert seat.comm.broadcast(x, 0, out=out) is out
        standin.synchronize(current)
        for result in (x, out):
            host = result.as_subclass(torch.Tensor)
            assert torch.equal(host.view(torch.uint8), plain.view(torch.uint8))
        assert x.recorded == []  # torch orders the memory of the current stream itself

    run_ranks(standin, 1, body)


def test_torch_tensor_on_another_stream(standin: Standin, current: int) -> None:
    """torch's allocator must hear of it; work on the current stream is the caller's to order."""

    def body(seat: Seat) -> None:
        x = on_gpu(torch.ones(4))
        seat.comm.all_reduce(x, stream=Stream(seat.stream))
        seat.wait()
        assert [stream.cuda_stream for stream in x.recorded] == [seat.stream]

    run_ranks(standin, 1, body)
    assert Stream.waits == []


def test_refused_tensors(standin: Standin, current: int) -> None:
    def body(seat: Seat) -> None:
        comm = seat.comm
        with pytest.raises(InvalidArgument, match=r"all_reduce, x: the tensor is on cpu; NCCL"):
            comm.all_reduce(torch.ones(3))
        square = torch.ones(4, 6)
        for view in (square.t(), square[:, ::2], square[::2]):
            with pytest.raises(InvalidArgument, match=r"x: not contiguous \(shape .*strides"):
                comm.all_reduce(on_gpu(view))
            with pytest.raises(InvalidArgument, match=r"out: not contiguous"):
                comm.all_reduce(on_gpu(view.contiguous()), out=on_gpu(view))
        with pytest.raises(InvalidArgument, match="the array is on GPU 3, the communicator on 0"):
            comm.all_reduce(on_gpu(torch.ones(3), gpu=3))
        with pytest.raises(InvalidArgument, match="x is float32, out is float16"):
            comm.all_gather(on_gpu(torch.ones(3)), on_gpu(torch.ones(3).half()))
        with pytest.raises(InvalidArgument, match="NCCL cannot carry float8_e5m2fnuz"):
            comm.all_reduce(on_gpu(torch.ones(3).to(torch.float8_e5m2fnuz)))
        with pytest.raises(InvalidArgument, match="lazily conjugated"):
            comm.broadcast(on_gpu(torch.ones(3, dtype=torch.complex64).conj()), 0)
        comm.all_reduce(on_gpu(torch.ones(())))
        comm.all_reduce(on_gpu(torch.ones(1, 1, 1).transpose(0, 2)))
        standin.synchronize(current)
        assert comm.sequence == 2

    run_ranks(standin, 1, body)


# --- __cuda_array_interface__


def test_interface_stream_is_used(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        x = Array(np.ones(3), stream=seat.stream)
        seat.comm.all_reduce(x)
        seat.wait()
        with pytest.raises(InvalidArgument, match="the array names no stream; pass stream="):
            seat.comm.all_reduce(Array(np.ones(3)))

    run_ranks(standin, 1, body)


def test_interface_that_names_another_stream(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(Array(np.ones(3), stream=0x70), "x", 0x80, written=True)
    with pytest.raises(Unsupported, match=r"producer works on stream 0x70.*run on 0x80"):
        wait_for_producer(view, 0x80)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    wait_for_producer(view, 0x80)
    wait_for_producer(view, 0x70)
    default = view_of(Array(np.ones(3), stream=1), "x", 0, written=True)  # 1: the default stream
    wait_for_producer(default, 0)
    assert Stream.waits == [(0x80, 0x70)]


def test_interface_layouts() -> None:
    grid = np.arange(24.0).reshape(4, 6)
    for contiguous in (grid, grid[1:3], grid[:, :].reshape(2, 12), grid[:0], grid[:1, :3]):
        view = view_of(Array(contiguous), "x", 0, written=True)
        assert (view.count, view.pointer) == (contiguous.size, contiguous.ctypes.data)
    for strided in (grid.T, grid[:, ::2], grid[::2], grid[::-1]):
        with pytest.raises(InvalidArgument, match="not contiguous"):
            view_of(Array(strided), "x", 0, written=True)


def test_interface_refusals() -> None:
    with pytest.raises(InvalidArgument, match="read-only and would be written"):
        view_of(Array(np.ones(3), read_only=True), "x", 0, written=True)
    view_of(Array(np.ones(3), read_only=True), "x", 0, written=False)
    for odd in (np.zeros(3, ">f4"), np.zeros(3, "M8[s]"), np.zeros(3, "S4")):
        with pytest.raises(InvalidArgument, match="is unknown to NCCL"):
            view_of(Array(odd), "x", 0, written=False)
    with pytest.raises(InvalidArgument, match="DLPack device type 1 is no GPU"):
        view_of(np.ones(3), "x", 0, written=False)
    for nothing in (3, [1.0], None):
        with pytest.raises(InvalidArgument, match="is no GPU array; expected a CUDA tensor"):
            view_of(nothing, "x", 0, written=False)


def test_read_only_in_place(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        with pytest.raises(InvalidArgument, match="works in place, and the array is read-only"):
            seat.comm.all_reduce(Array(np.ones(3), read_only=True), stream=seat.stream)

    run_ranks(standin, 1, body)


# --- addresses and streams


def test_raw_addresses(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        values = np.arange(5, dtype=np.float32)
        seat.comm.all_reduce(raw(values, "float32"), stream=seat.stream)
        seat.wait()
        assert np.array_equal(values, 2 * np.arange(5))
        for bad, text in (
            (nccl.RawArray(0, 4, "float32"), "the input is null, 16 bytes are to be read"),
            (nccl.RawArray(64, -1, "float32"), "a RawArray of -1 elements"),
            (nccl.RawArray(64, 2**62, "float32"), "are more than memory can hold"),
            (nccl.RawArray(64, 4, "float33"), "NCCL cannot carry float33"),
            (nccl.RawArray(64, 4, "float32", device=1), "the array is on GPU 1"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                seat.comm.all_reduce(bad, stream=seat.stream)
        seat.comm.all_reduce(nccl.RawArray(0, 0, torch.float32), stream=seat.stream)

    run_ranks(standin, 2, body)


def test_streams() -> None:
    class Cupy:
        ptr = 7

    class Numba:
        handle = ctypes.c_void_p(8)

    class NumbaDefault:
        handle = ctypes.c_void_p(0)

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 9

    class ProtocolAttribute:
        __cuda_stream__ = (0, 10)

    streams = [5, Stream(6), Cupy(), Numba(), NumbaDefault(), Protocol(), ProtocolAttribute()]
    assert [stream_handle(stream) for stream in streams] == [5, 6, 7, 8, 0, 9, 10]
    with pytest.raises(InvalidArgument, match="expected an integer handle"):
        stream_handle("default")


# --- counts, roots and overlaps


def test_counts(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        comm = seat.comm

        def a(count: int) -> Array:
            return Array(np.zeros(count, np.float32), stream=seat.stream)

        cases = [
            (lambda: comm.all_reduce(a(3), out=a(4)), "x has 3 elements, out has 4"),
            (lambda: comm.reduce_scatter(a(7), a(3)), r"it must be 3 \* 2 = 6. For uneven parts"),
            (lambda: comm.all_gather(a(3), a(7)), r"out has 7 elements, x has 3"),
            (lambda: comm.all_to_all(a(7), a(7)), "x has 7 elements, no multiple of 2"),
            (lambda: comm.all_to_all(a(6), a(6), in_sizes=[3, 3]), "go together"),
            (lambda: comm.all_gather(a(3), a(7), sizes=[3, 5]), "make 8, out has 7"),
            (lambda: comm.all_gather(a(3), a(7), sizes=[7]), r"sizes=\[7\] for 2 ranks"),
            (lambda: comm.all_gather(a(3), a(7), sizes=[9, -2]), r"sizes=\[9, -2\] for 2 ranks"),
            (lambda: comm.reduce_scatter(a(7), a(2), sizes=[3, 4]), "do not give this rank its 2"),
            (lambda: comm.gather(a(3), seat.rank), "the root needs out="),
            (lambda: comm.scatter(None, seat.rank, a(3)), "the root needs x"),
            (lambda: comm.gather(a(3), 1 - seat.rank, sizes=[2, 2]), "do not give this rank its 3"),
            (lambda: comm.broadcast(a(3), 2), r"root 2 is not in 0\.\.1"),
            (lambda: comm.reduce(a(3), -1), r"root -1 is not in 0\.\.1"),
            (lambda: comm.send(a(3), 2), r"peer 2 is not in 0\.\.1"),
            (lambda: comm.recv(a(3), -1), r"peer -1 is not in 0\.\.1"),
        ]
        for call, text in cases:
            with pytest.raises(InvalidArgument, match=text):
                call()
        assert comm.sequence == 0
        with pytest.raises(InvalidArgument, match=rf"\(rank {seat.rank} of 2"):
            cases[0][0]()

    run_ranks(standin, 2, body)
    assert "AllReduce" not in standin.log()


def test_overlaps(standin: Standin) -> None:
    """In place is one thing, half in place another."""

    def body(seat: Seat) -> None:
        memory = np.zeros(20, np.float32)

        def part(first: int, count: int) -> Array:
            return Array(memory[first : first + count], stream=seat.stream)

        comm = seat.comm
        mine = 4 * seat.rank
        for call in (
            lambda: comm.all_reduce(part(0, 8), out=part(4, 8)),
            lambda: comm.all_gather(part(4 - mine, 4), part(0, 8)),
            lambda: comm.reduce_scatter(part(0, 8), part(4 - mine, 4)),
            lambda: comm.all_to_all(part(0, 8), part(0, 8)),
        ):
            with pytest.raises(InvalidArgument, match="overlap; in place means"):
                call()
        comm.all_reduce(part(0, 8), out=part(8, 8))
        seat.wait()

    run_ranks(standin, 2, body)

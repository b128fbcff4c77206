"""Cases of test_python.py (on the stand-in) and of test_gpu.py (device "cuda"), by name.

virtual_ranks_cases.py LIBRARY CASE: the library is opened once per process, hence a process each.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    os.environ["PYPARALLEL_CUDA_LIB"] = sys.argv[1]
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.gpu.virtual_ranks import VirtualRanks, rank_order_sum  # noqa: E402
from pyparallel.comm.cuda_kernels import ALGORITHMS, WorkspaceLayout  # noqa: E402
from pyparallel.errors import Aborted, CommError, CudaError, Mismatch, Timeout  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Setup:
    """The device, and a grid that it runs quickly."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.grid = (2, 4) if device == "cpu" else (4, 512)
        self.slot_bytes = 512 if device == "cpu" else 1 << 16

    def ranks(self, world: int, timeout: float = 20.0) -> VirtualRanks:
        layout = WorkspaceLayout(world, max_blocks=4, signals=4, slot_bytes=self.slot_bytes)
        return VirtualRanks(layout, device=self.device, timeout=timeout)

    def random(self, count: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        whole = torch.randn(count + offset, device=self.device).to(dtype)
        return whole[offset:]

    def poisoned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), float("nan"), dtype=dtype, device=self.device)

    def ready(self) -> None:
        """What default-stream work prepared is there for every stream."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def collectives(s: Setup) -> None:
    for world in (1, 2, 3, 4):
        ranks = s.ranks(world)
        for dtype in DTYPES:
            for count in (0, 1, 77, 3 * s.slot_bytes // dtype.itemsize + 5):
                x = [s.random(count, dtype) for _ in range(world)]
                wide = [s.random(count * world, dtype) for _ in range(world)]
                total = [s.poisoned(count, dtype) for _ in range(world)]
                gathered = [s.poisoned(count * world, dtype) for _ in range(world)]
                share = [s.poisoned(count, dtype) for _ in range(world)]
                s.ready()

                def calls(seat, r, stream, x=x, wide=wide, out=(total, gathered, share)):
                    seat.all_reduce(
                        x[r], out=out[0][r], algorithm="two_shot", grid=s.grid, stream=stream
                    )
                    seat.all_gather(x[r], out=out[1][r], grid=s.grid, stream=stream)
                    seat.reduce_scatter(wide[r], out=out[2][r], grid=s.grid, stream=stream)
                    seat.barrier(stream=stream)

                ranks.on_all(calls)
                ranks.synchronize()
                for r in range(world):
                    assert torch.equal(total[r], rank_order_sum(x)), (world, dtype, count, r)
                    assert torch.equal(gathered[r], torch.cat(x)), (world, dtype, count, r)
                    mine = [w[r * count : (r + 1) * count] for w in wide]
                    assert torch.equal(share[r], rank_order_sum(mine)), (world, dtype, count, r)


def algorithms_give_the_same_bits(s: Setup) -> None:
    ranks = s.ranks(3)
    for dtype in DTYPES:
        x = [s.random(501, dtype) for _ in range(3)]
        outs = {name: [s.poisoned(501, dtype) for _ in range(3)] for name in ALGORITHMS[:2]}
        s.ready()
        for name, out in outs.items():
            ranks.on_all(
                lambda seat, r, stream, name=name, out=out, x=x: seat.all_reduce(
                    x[r], out=out[r], algorithm=name, grid=s.grid, stream=stream
                )
            )
        ranks.synchronize()
        for r in range(3):
            assert torch.equal(outs["one_shot"][r], outs["two_shot"][0])


def in_place_and_misaligned(s: Setup) -> None:
    ranks = s.ranks(2)
    for dtype in DTYPES:
        x = [s.random(333, dtype, offset=1 + 2 * r) for r in range(2)]
        expected = rank_order_sum(x)
        s.ready()
        ranks.on_all(
            lambda seat, r, stream, x=x: seat.all_reduce(
                x[r], algorithm="one_shot", grid=s.grid, stream=stream
            )
        )
        ranks.synchronize()
        assert torch.equal(x[0], expected)
        assert torch.equal(x[1], expected)


def signals(s: Setup) -> None:
    ranks = s.ranks(2)
    for _ in range(3):
        ranks.seats[0].wait_signal(2, 5, stream=ranks.streams[0])
        ranks.seats[1].put_signal(0, 2, 4, stream=ranks.streams[1])
        ranks.seats[1].put_signal(0, 2, stream=ranks.streams[1])
        ranks.synchronize()


def _raises(kind: type[Exception], parts: list[str], call: Callable[[], object]) -> None:
    said = ""
    try:
        call()
    except kind as error:
        said = str(error)
    missing = [part for part in parts if part not in said]
    assert not missing, f"{missing} not in {said!r} ({kind.__name__} was expected)"


def misfits_name_the_call(s: Setup) -> None:
    ranks = s.ranks(2)
    seat, stream = ranks.seats[1], ranks.streams[1]
    x = s.random(12, torch.float32)
    _raises(
        ValueError,
        ["all_gather", "rank 1", "out has 12 elements", "expected 24"],
        lambda: seat.all_gather(x, out=x.clone(), stream=stream),
    )
    _raises(
        ValueError, ["strides (2,)", "contiguous"], lambda: seat.all_reduce(x[::2], stream=stream)
    )
    _raises(ValueError, ["torch.float16"], lambda: seat.all_reduce(x, out=x.half(), stream=stream))
    _raises(
        ValueError,
        ["'tree'", "one_shot"],
        lambda: seat.all_reduce(x, algorithm="tree", stream=stream),
    )
    _raises(
        ValueError,
        ["grid of 5 blocks", "1 to 4"],
        lambda: seat.all_reduce(x, algorithm="one_shot", grid=(5, 32), stream=stream),
    )
    _raises(
        ValueError,
        ["int32 elements"],
        lambda: seat.all_reduce(x.int(), algorithm="one_shot", grid=s.grid, stream=stream),
    )
    _raises(
        ValueError,
        ["no multicast address"],
        lambda: seat.all_reduce(x, algorithm="multimem", grid=s.grid, stream=stream),
    )
    _raises(
        ValueError, ["signal 4 of a workspace with 4"], lambda: seat.put_signal(0, 4, stream=stream)
    )
    _raises(
        ValueError,
        ["overlap"],
        lambda: seat.all_reduce(x[:8], out=x[4:], algorithm="one_shot", grid=s.grid, stream=stream),
    )
    _raises(ValueError, ["73 ranks"], WorkspaceLayout(73).core)
    _raises(TypeError, ["slot_bytes"], WorkspaceLayout(2, slot_bytes=0.5 * 2**20).core)
    elsewhere = torch.empty(12, device="meta")
    _raises(
        ValueError,
        ["out is on meta", "this seat is on"],
        lambda: seat.all_reduce(x, out=elsewhere, stream=stream),
    )


def a_missing_rank_raises(s: Setup) -> None:
    ranks = s.ranks(3, timeout=0.4)
    x = [s.random(64, torch.float32) for _ in range(3)]
    s.ready()
    start = time.monotonic()
    for r in (0, 2):
        ranks.seats[r].all_reduce(x[r], algorithm="one_shot", grid=s.grid, stream=ranks.streams[r])
    _raises(Timeout, ["#1, group virtual, rank 0: rank 1 absent after 0.4"], ranks.synchronize)
    assert 0.3 < time.monotonic() - start < 30
    # The seat is out of use: later calls return at once and change nothing.
    before = x[0].clone()
    ranks.seats[0].all_reduce(x[0], algorithm="one_shot", grid=s.grid, stream=ranks.streams[0])
    _raises(Timeout, ["rank 1 absent"], ranks.synchronize)
    assert torch.equal(before, x[0])


def another_grid_raises(s: Setup) -> None:
    ranks = s.ranks(2)
    x = [s.random(640, torch.float32) for _ in range(2)]
    s.ready()
    for r in range(2):
        ranks.seats[r].all_reduce(
            x[r], algorithm="one_shot", grid=(1 + r, s.grid[1]), stream=ranks.streams[r]
        )
    _raises(Mismatch, ["grid 1", "grid 2"], ranks.synchronize)


def abort_raises(s: Setup) -> None:
    ranks = s.ranks(2)
    ranks.seats[0].barrier(stream=ranks.streams[0])
    ranks.seats[0].abort()
    _raises(Aborted, ["aborted by the host", "waiting for rank 1"], ranks.synchronize)


def multimem_needs_a_newer_device(s: Setup) -> None:
    from pyparallel.comm.cuda_kernels import CudaCollectives, new_status_page

    library = ctypes.CDLL(os.environ["PYPARALLEL_CUDA_LIB"])
    library.stand_in_capability(80)
    ranks = s.ranks(1)
    assert library.stand_in_prepared() == 1, "kernels are loaded before any is launched"
    memory = ranks._memory[0]
    address = -(-memory.data_ptr() // 128) * 128
    seat = CudaCollectives(0, [address], ranks.layout, new_status_page(), multicast=address)
    x = s.random(8, torch.float32)
    _raises(
        CudaError,
        ["all_reduce (multimem)", "not supported", "801"],
        lambda: seat.all_reduce(x, algorithm="multimem", grid=s.grid, stream=1),
    )


def main() -> None:
    name = sys.argv[2]
    torch.manual_seed(5)
    globals()[name](Setup("cpu"))
    print(f"{name}: passed", flush=True)
    os._exit(0)  # a seat that waits for a rank that never comes must not keep the process


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, CommError) as error:
        import traceback

        traceback.print_exception(error)
        os._exit(1)

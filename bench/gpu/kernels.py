"""Every kernel of csrc/cuda on one device, ranks as streams: verified, then timed.

Method. Each rank has a stream and a workspace in the same memory, so this measures launch, meeting
and memory, not a link. A sample is some rounds (one call per rank each) started back to back, over
their number: eager from the host's clock, captured from a replayed CUDA graph. Median, p10 and p90
over samples. The peer is one copy, on the device, of all bytes that the ranks store for each other.
Results are compared bit by bit with the sum in rank order before anything is timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.results import leave
from bench.gpu.virtual_ranks import VirtualRanks, rank_order_sum
from pyparallel.comm.cuda_kernels import WorkspaceLayout, choose
from pyparallel.errors import CommError

OPS = ("barrier", "one_shot", "two_shot", "all_gather", "reduce_scatter")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Most valuable first: a run that is cut short keeps them.
WORLDS = (2, 4, 8)
SIZES = (4 << 10, 64 << 10, 1 << 20, 256 << 10, 16 << 10, 4 << 20)


@dataclass
class Case:
    """One op on one size: the arrays of all ranks, the call, and what it should give."""

    op: str
    dtype: str
    nbytes: int
    ranks: VirtualRanks
    grid: tuple[int, int]

    def __post_init__(self) -> None:
        world, dtype, device = self.ranks.world, DTYPES[self.dtype], self.ranks.device
        self.count = self.nbytes // dtype.itemsize
        if self.op in ("all_gather", "reduce_scatter"):
            self.count //= world
        wide = self.count * world
        inputs = wide if self.op == "reduce_scatter" else self.count
        outputs = wide if self.op == "all_gather" else self.count
        self.x = [torch.randn(inputs, device=device).to(dtype) for _ in range(world)]
        self.out = [
            torch.full((outputs,), float("nan"), dtype=dtype, device=device) for _ in range(world)
        ]
        self.ranks.synchronize()  # the arrays were made on another stream

    def start(self, seat: Any, rank: int, stream: int) -> None:
        x, out = self.x[rank], self.out[rank]
        if self.op == "barrier":
            seat.barrier(stream=stream)
        elif self.op == "all_gather":
            seat.all_gather(x, out=out, grid=self.grid, stream=stream)
        elif self.op == "reduce_scatter":
            seat.reduce_scatter(x, out=out, grid=self.grid, stream=stream)
        else:
            seat.all_reduce(x, out=out, algorithm=self.op, grid=self.grid, stream=stream)

    def expected(self, rank: int) -> torch.Tensor:
        if self.op == "all_gather":
            return torch.cat(self.x)
        if self.op == "reduce_scatter":
            mine = slice(rank * self.count, (rank + 1) * self.count)
            return rank_order_sum([x[mine] for x in self.x])
        return rank_order_sum(self.x)

    def verify(self) -> bool:
        """Runs twice (both buffers of the workspace) and compares every rank's bits."""
        for _ in range(2):
            self.ranks.on_all(self.start)
        self.ranks.synchronize()
        if self.op == "barrier":
            return True
        return all(torch.equal(self.out[r], self.expected(r)) for r in range(self.ranks.world))

    def stored_bytes(self) -> int:
        """What all ranks together store into workspaces in one round."""
        world, element = self.ranks.world, DTYPES[self.dtype].itemsize
        message = self.count * element
        return {
            "barrier": 0,
            "two_shot": 2 * world * message,
            "one_shot": world * world * message,
            "all_gather": world * world * message,
            "reduce_scatter": world * world * message,
        }[self.op]


def quantiles(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    at = [ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9)]
    return {"p10": at[0], "median": at[1], "p90": at[2]}


def _samples(one: Callable[[], None], rounds: int, count: int, wait: Callable[[], None]) -> Any:
    """Microseconds per round, by the host's clock around `one` and `wait`."""
    times = []
    for sample in range(count + 2):
        start = time.perf_counter()
        one()
        wait()
        if sample >= 2:  # the first two warm up
            times.append((time.perf_counter() - start) / rounds * 1e6)
    return quantiles(times)


def time_eager(case: Case, rounds: int, samples: int) -> Any:
    def one() -> None:
        for _ in range(rounds):
            case.ranks.on_all(case.start)

    return _samples(one, rounds, samples, case.ranks.synchronize)


def time_captured(case: Case, rounds: int, samples: int) -> Any:
    """The same from a CUDA graph: every rank's launches on a branch of their own."""
    ranks = case.ranks
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for stream in ranks.cuda_streams:
            stream.wait_stream(main)
        for _ in range(rounds):
            ranks.on_all(case.start)
        for stream in ranks.cuda_streams:
            main.wait_stream(stream)
    return _samples(graph.replay, rounds, samples, ranks.synchronize)


def time_copy(case: Case, rounds: int, samples: int) -> Any:
    nbytes = max(case.stored_bytes(), 1)
    a = torch.empty(nbytes, dtype=torch.uint8, device=case.ranks.device)
    b = torch.empty_like(a)

    def one() -> None:
        for _ in range(rounds):
            b.copy_(a)

    wait = torch.cuda.synchronize if a.is_cuda else (lambda: None)
    return _samples(one, rounds, samples, wait)


def rows_of(case: Case, rounds: int, samples: int) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {
        "suite": "gpu_kernels",
        "op": case.op,
        "shape": [case.count],
        "bytes": case.nbytes if case.op != "barrier" else 0,
        "dtype": case.dtype,
        "world_size": case.ranks.world,
        "grid": list(case.grid),
        "peer": "one copy on the device of the bytes stored",
        "error_bound": 0.0,
    }
    verified = case.verify()
    row.update(verified=verified, error=0.0 if verified else 1e308)
    if not verified:
        yield row | {"launch": "eager"}
        return
    row["peer_us"] = time_copy(case, rounds, samples)
    ways = {"eager": time_eager}
    if case.ranks.device.type == "cuda":
        ways["captured"] = time_captured
    for launch, timer in ways.items():
        ours = timer(case, rounds, samples)
        yield row | {
            "launch": launch,
            "ours_us": ours,
            "speedup": row["peer_us"]["median"] / ours["median"],
        }


def measure(
    device: str,
    seconds: float,
    *,
    worlds: tuple[int, ...] = WORLDS,
    sizes: tuple[int, ...] = SIZES,
    layout: dict[str, int] | None = None,
    grid: tuple[int, int] | None = None,
    rounds: int = 20,
    samples: int = 15,
) -> dict[str, Any]:
    """Rows until all cases are through or the time is; a case that fails costs only itself."""
    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    result = {"rows": rows, "problems": problems, "left_out": 0}
    for world in worlds:
        # At most 12 blocks of 512 threads per rank: eight ranks fit every GPU at once.
        shape = WorkspaceLayout(world, **(layout or {"max_blocks": 12, "slot_bytes": 1 << 20}))
        for nbytes in sizes:
            for op in OPS:
                for dtype in DTYPES if op != "barrier" else ["float32"]:
                    if op == "barrier" and nbytes != sizes[0]:
                        continue
                    if time.monotonic() > end:
                        result["left_out"] += 1
                        continue
                    where = f"{op} {dtype} {nbytes} B on {world} ranks"
                    try:
                        # A fresh workspace: one that a failure put out of use stays so.
                        ranks = VirtualRanks(shape, device=device)
                        case = Case(
                            op, dtype, nbytes, ranks, grid or _grid(op, dtype, nbytes, shape)
                        )
                        rows.extend(rows_of(case, rounds, samples))
                    except (CommError, RuntimeError) as error:
                        problems.append(f"{where}: {error}")
        leave(result)  # what there is so far survives a kill
    problems += [
        f"{row['op']} {row['dtype']} {row['bytes']} B on {row['world_size']} ranks: wrong"
        for row in rows
        if not row["verified"]
    ]
    leave(result)
    return result


def _grid(op: str, dtype: str, nbytes: int, layout: WorkspaceLayout) -> tuple[int, int]:
    """The grid the library would take, with one thing made equal: all ranks share the device."""
    collective = op if op in ("all_gather", "reduce_scatter") else "all_reduce"
    element = DTYPES[dtype]
    count = nbytes // element.itemsize
    found = choose(collective, element, count, layout)
    return found["blocks"], found["threads"]


def show(result: dict[str, Any]) -> str:
    lines = []
    for row in result["rows"]:
        times = row.get("ours_us")
        took = f"{times['median']:9.2f} us" if times else "    WRONG"
        lines.append(
            f"{row['op']:<15}{row['dtype']:<10}{row['bytes']:>9} B x {row['world_size']} "
            f"{row['launch']:<9}{took}"
        )
    return "\n".join([*lines, *result["problems"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=80.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        leave({"skipped": "torch finds no CUDA device"})
        return
    result = measure("cuda", options.seconds)
    print(show(result))
    if result["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

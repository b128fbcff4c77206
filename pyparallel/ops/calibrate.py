"""`python -m pyparallel calibrate`: times every algorithm of the ops on this machine, for rule.py.

Starts the ranks, which time the algorithms of each shape in turns: all ranks start a sample
together, the slowest counts, the median of the samples is kept. Rank 0 adds the points to the file.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import pyparallel.ops as ops
from pyparallel.comm import Communicator
from pyparallel.ops.choosing import DTYPES, algorithms
from pyparallel.ops.model import OPS, Problem
from pyparallel.ops.rule import Point, default_path, load, save

__all__ = ["main", "measure", "problems"]

ROWS = {"cpu": (1, 16, 128, 512), "cuda": (1, 16, 128, 1024, 8192)}
WEIGHTS = {  # (N, K) of the whole weight
    "cpu": ((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096)),
    "cuda": ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672), (28672, 8192)),
}
ROUNDS = 7  # samples of each algorithm
SAMPLE_S = 0.002  # at least, of one sample
_QUIET = 0.15  # of the cores: what a desktop does when nobody uses it
_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_PR_SET_PDEATHSIG = 1


def problems(
    world: int, device: str, dtypes: Sequence[str], chosen: Sequence[str]
) -> list[Problem]:
    """What is measured: each op at each (rows, weight), smallest first."""
    found = [
        Problem.of_whole(op, m, n, k, dtype, world)
        for op in chosen
        for dtype in dtypes
        for n, k in WEIGHTS[device]
        for m in ROWS[device]
        if op == "matmul_all_reduce" or m >= world
    ]
    return sorted(dict.fromkeys(found), key=lambda p: p.flops)


def measure(
    group: Any, communicator: Communicator, work: Sequence[Problem], device: str, seconds: float
) -> Iterator[Point]:
    """Times the work, and gives a point for each as it is done. Collective over the group.

    `communicator` joins the same ranks and aligns them. The time is shared between what is left; a
    shape that is not reached gets no point.
    """
    ends = time.monotonic() + seconds
    for problem in work:
        late = torch.tensor([float(time.monotonic() > ends)])
        if float(communicator.broadcast(late, root=0)):
            return
        calls = {
            name: _call(problem, group, communicator.rank, device, name)
            for name in algorithms(problem.op, device)
        }
        found = _times(calls, communicator, device)
        if "plain" in found:
            yield Point(
                problem.op, device, problem.dtype, problem.world,
                problem.m, problem.n, problem.k, found,
            )  # fmt: skip


def _call(p: Problem, group: Any, rank: int, device: str, algorithm: str) -> Callable[[], Any]:
    dtype = _NAMES[p.dtype]
    generator = torch.Generator().manual_seed(rank)
    rows, more = divmod(p.m, p.world)
    if p.op == "all_gather_matmul":
        rows += rank < more
    else:
        rows = p.m
    where = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    x = torch.randn(rows, p.k, generator=generator).to(dtype).to(where)
    weight = torch.randn(p.n, p.k, generator=generator).to(dtype).to(where)
    options: dict[str, Any] = {"algorithm": algorithm}
    if p.op != "matmul_all_reduce" and more:
        options["shard_sizes"] = [p.m // p.world + (r < more) for r in range(p.world)]
    op = getattr(ops, p.op)
    return lambda: op(x, weight, group, **options)


def _times(
    calls: dict[str, Callable[[], Any]], communicator: Communicator, device: str
) -> dict[str, float]:
    """Median microseconds by name; without those that cannot run here."""
    counts = {}
    for name, call in calls.items():
        try:
            call()
            counts[name] = 1
        except (ValueError, NotImplementedError):  # refused on every rank: not for this group
            continue
    if not counts:
        return {}
    for name in counts:
        spent = _sample(calls[name], 1, communicator, device)
        counts[name] = max(1, min(1000, int(SAMPLE_S * 1e6 / max(spent, 1.0))))
    samples: dict[str, list[float]] = {name: [] for name in counts}
    names = list(counts)
    for turn in range(ROUNDS):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_sample(calls[name], counts[name], communicator, device))
    return {name: median(values) for name, values in samples.items()}


def _sample(call: Callable[[], Any], count: int, communicator: Communicator, device: str) -> float:
    """Microseconds of one call on the slowest rank, the same on all ranks."""
    communicator.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    spent = torch.tensor([(time.perf_counter() - begin) / count * 1e6], dtype=torch.float64)
    return float(communicator.all_reduce(spent, "max"))


# --- the command


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m pyparallel calibrate",
        description="Times the algorithms of pyparallel.ops on this machine, and keeps the times "
        "for the ops to choose by (docs/explain.md). Run it with nothing else on the machine.",
    )
    out.add_argument("--world", type=int, default=2, metavar="N", help="ranks (2)")
    out.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    out.add_argument(
        "--dtype",
        nargs="+",
        choices=("fp32", "bf16", "fp16"),
        default=[],
        metavar="DTYPE",
        help="fp32, bf16, fp16",
    )
    out.add_argument(
        "--op", nargs="+", choices=OPS, default=list(OPS), metavar="OP", help=", ".join(OPS)
    )
    out.add_argument("--seconds", type=float, default=60.0, help="for all shapes together (60)")
    out.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # given to the ranks it starts
    out.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return out


def main(argv: Sequence[str]) -> int:
    """Runs the command; status 0 where all ranks did, 1 where one failed, 2 for a bad request."""
    arguments = _parser().parse_args(argv)
    lacks = _lacks(arguments)
    if lacks:
        print(f"python -m pyparallel calibrate: {lacks}", file=sys.stderr)
        return 2
    if arguments.rank is not None:
        return _rank(arguments)
    load = _load()
    if load > _QUIET:
        print(
            f"python -m pyparallel calibrate: other programs take {load:.0%} of the cores: the "
            "times may be far off, and choices by them wrong. Run it again on a quiet machine",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        return _start(arguments, list(argv), Path(folder))


def _lacks(arguments: argparse.Namespace) -> str:
    if arguments.world < 2:
        return f"--world {arguments.world}: one rank has nothing to choose; want two or more"
    if arguments.seconds <= 0:
        return f"--seconds {arguments.seconds:g}: want more than none"
    path = default_path()
    if path is None:
        return "PYPARALLEL_RULE is none: there is no file to write"
    if arguments.device == "cuda" and torch.cuda.device_count() < arguments.world:
        seen = torch.cuda.device_count()
        return f"--device cuda: {arguments.world} ranks need a GPU each; torch sees {seen}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return f"no folder for {path}: {error.strerror}"
    return ""


def _load(seconds: float = 0.3) -> float:
    """The share of this machine's cores that was busy for so long; 0 where /proc does not say."""

    def times() -> tuple[int, int]:
        with Path(
            "/proc/stat"
        ).open() as file:  # cpu user nice system idle iowait irq softirq steal ...
            fields = [int(word) for word in file.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    try:
        total, idle = times()
        time.sleep(seconds)
        later, idle_later = times()
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - (idle_later - idle) / max(1, later - total)


def _start(arguments: argparse.Namespace, argv: list[str], folder: Path) -> int:
    """Starts the ranks and waits for them; none outlives this call."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = []
    deadline = time.monotonic() + 3 * arguments.seconds + 120
    try:
        for rank in range(arguments.world):
            command = [sys.executable, "-m", "pyparallel", "calibrate", *argv]
            command += ["--rank", str(rank), "--folder", str(folder)]
            started.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        while True:
            failed = [r for r, p in enumerate(started) if p.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                what = f"rank {failed[0]} failed" if failed else "the ranks take too long"
                print(f"python -m pyparallel calibrate: {what}", file=sys.stderr)
                return 1
            if all(process.poll() == 0 for process in started):
                return 0
            time.sleep(0.05)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def _rank(arguments: argparse.Namespace) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    rank, world, device = arguments.rank, arguments.world, arguments.device
    dtypes = arguments.dtype or (["bf16", "fp16"] if device == "cuda" else ["fp32", "bf16"])
    path = default_path()
    assert path is not None
    work = problems(world, device, dtypes, arguments.op)
    with Communicator.from_file(arguments.folder / "meet", rank, world, timeout=120) as comm:
        group: Any = comm
        if device == "cuda":
            torch.cuda.set_device(rank)
            store = FileStore(str(arguments.folder / "store"), world)
            dist.init_process_group("pyparallel", store=store, rank=rank, world_size=world)
            group = dist.group.WORLD
        points = []
        for point in measure(group, comm, work, device, arguments.seconds):
            points.append(point)
            if rank == 0:
                print(_line(point), flush=True)
        if rank == 0:
            save(points, path)
            print(f"{len(points)} of {len(work)} shapes measured; written to {path}")
            _, why = load(path)
            print(f"in use: {why}")
        if device == "cuda":
            dist.destroy_process_group()
    return 0


def _line(p: Point) -> str:
    times = ", ".join(f"{name} {us:.1f}" for name, us in sorted(p.us.items(), key=lambda i: i[1]))
    return f"{p.op} {p.dtype} x{p.world} [{p.m}, {p.k}] x [{p.n}, {p.k}]^T: {times} us"

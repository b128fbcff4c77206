"""Our NCCL binding with two processes on one GPU, which NCCL 2.30 and later allow on request."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.gpu.results import leave

WORLD = 2
NEEDED = 23000  # as NCCL counts versions
SIZES = (4 << 10, 256 << 10, 4 << 20)


def _rank(rank: int, folder: Path) -> None:
    import torch

    from pyparallel.comm import nccl

    file = folder / "id"
    if rank == 0:
        (folder / "partial").write_bytes(bytes(nccl.unique_id()))
        (folder / "partial").rename(file)
    else:
        end = time.monotonic() + 30
        while not file.exists():
            if time.monotonic() > end:
                raise SystemExit("rank 0 left no id")
            time.sleep(0.01)
    comm = nccl.NcclCommunicator(file.read_bytes(), rank, WORLD)
    rows: list[dict[str, Any]] = []
    for nbytes in SIZES:
        generators = [torch.Generator().manual_seed(seed) for seed in range(WORLD)]
        inputs = [torch.randn(nbytes // 4, generator=g) for g in generators]
        x = inputs[rank].cuda()
        comm.all_reduce(x)
        torch.cuda.synchronize()
        exact = sum(t.double() for t in inputs)
        error = float((x.cpu().double() - exact).abs().max())
        bound = float((sum(t.abs() for t in inputs) * torch.finfo(torch.float32).eps).max())
        times = []
        for _ in range(30):
            x.copy_(inputs[rank])
            torch.cuda.synchronize()
            start = time.perf_counter()
            comm.all_reduce(x)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        times.sort()
        rows.append(
            {
                "suite": "gpu_nccl",
                "op": "all_reduce",
                "shape": [nbytes // 4],
                "bytes": nbytes,
                "dtype": "float32",
                "world_size": WORLD,
                "ours_us": {"p10": times[3], "median": times[15], "p90": times[27]},
                "error": error,
                "error_bound": bound,
                "verified": error <= bound,
            }
        )
    comm.close()
    if rank == 0:
        leave({"rows": rows})
    if not all(row["verified"] for row in rows):
        raise SystemExit(f"rank {rank}: an all_reduce was wrong")


def main() -> None:
    if len(sys.argv) == 3:
        _rank(int(sys.argv[1]), Path(sys.argv[2]))
        return
    import torch

    from pyparallel.comm import nccl

    if not torch.cuda.is_available():
        leave({"skipped": "torch finds no CUDA device"})
        return
    info = nccl.nccl_info()
    if not info["available"]:
        leave({"skipped": info["error"]})
        return
    if info["version_code"] < NEEDED:
        leave({"skipped": f"NCCL {info['version']}: two ranks on one GPU need 2.30"})
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.gpu.nccl_ranks"]
        ranks = [
            subprocess.Popen([*command, str(rank), folder], env=os.environ) for rank in range(WORLD)
        ]
        try:
            end = time.monotonic() + 50
            statuses = [p.wait(timeout=max(0.1, end - time.monotonic())) for p in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(statuses):
        raise SystemExit(f"exit statuses of the ranks: {statuses}")


if __name__ == "__main__":
    main()

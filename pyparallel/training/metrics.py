"""What a training tells about itself: lines of a file, curves, and the share of a machine's peak
that it reaches, by a convention that is named."""

import importlib.util
import json
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyparallel.planner import ModelSpec
from pyparallel.planner.flops import CONVENTIONS, flops_per_token

__all__ = ["MetricsLog", "Utilization", "measured_peak", "peak_bytes"]


class MetricsLog:
    """One JSON object a line in `metrics.jsonl`, and TensorBoard's curves if they are wanted.

    Lines are appended, so that a run that is resumed goes on in the same file; a line is on the
    disk when `write` returns.

    Args:
        folder: of the run; made where it is not there.
        tensorboard: write its files into `folder`/tensorboard as well.

    Raises:
        ImportError: tensorboard is wanted and not installed.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = False) -> None:
        self._curves: Any = None
        if tensorboard:
            if importlib.util.find_spec("tensorboard") is None:
                raise ImportError(
                    "tensorboard is wanted and not installed: pip install tensorboard, or leave it "
                    f"out; {folder / 'metrics.jsonl'} has the same numbers"
                )
            from torch.utils.tensorboard import SummaryWriter

            self._curves = SummaryWriter(str(folder / "tensorboard"))
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float | int | str | None]) -> None:
        """Values of a step by name; None is not known. Numbers become curves."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._curves is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._curves.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._curves is not None:
            self._curves.close()


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs utilization: FLOPs that the model asks for, per second, of what the machine can.

    Attributes:
        flops_per_token: forward and backward, by the convention.
        peak: FLOP/s of one rank.
        ranks: of the run.
        convention: of `pyparallel.planner.CONVENTIONS`; figures of different ones can be a factor
            of two apart.
        peak_source: where `peak` is from.
    """

    flops_per_token: float
    peak: float
    ranks: int
    convention: str
    peak_source: str

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        rows: int,
        ranks: int,
        peak: float,
        peak_source: str,
        convention: str = "full",
    ) -> "Utilization":
        """Of a model on sequences of so many rows."""
        flops = flops_per_token(spec, rows, convention)
        return cls(flops, peak, ranks, convention, peak_source)

    def at(self, tokens_per_second: float) -> float:
        """The share, 0 to 1, at so many tokens per second over all ranks."""
        return tokens_per_second * self.flops_per_token / (self.peak * self.ranks)

    def __str__(self) -> str:
        return (
            f"MFU by convention {self.convention!r} ({CONVENTIONS[self.convention]}), of "
            f"{self.peak / 1e9:.4g} GFLOP/s a rank ({self.peak_source})"
        )


def measured_peak(device: str, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of this process in matrix products of 1024: the fastest of those that fit into the
    time. On all ranks at once it is each one's share of the machine."""
    a, b = (torch.randn(1024, 1024, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    a @ b
    while True:
        _settle(device)
        begin = time.perf_counter()
        a @ b
        _settle(device)
        now = time.perf_counter()
        best = min(best, now - begin)
        if now > end:
            return 2 * 1024**3 / best


def _settle(device: str) -> None:
    """Waits for what has been started."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(device_type: str) -> int:
    """The most memory that this process has had: on CUDA of tensors, on the CPU of all it has."""
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

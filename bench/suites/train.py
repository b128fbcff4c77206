"""Suite `train`: training steps of a small Llama at layouts of 2 and 4 ranks, against PyTorch's own
parts for the same layout (bench/providers/stock_trains.py).

`tok/s` is tokens of the global batch per second, of ours and of the peer. On more ranks than cores
(the layouts of four on two cores) ranks take turns: such rows say that nothing is lost, not how
much is won.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import device

from bench.call_contest import CallContest
from bench.case import Row
from bench.options import Options
from bench.page import Page
from bench.providers.base import Provider
from bench.timing import Budget
from bench.train_case import LAYOUTS, Sizes, TrainCase

TITLE = "Training steps of a composed model"
QUICK = Sizes(hidden=128, layers=4, samples=4, rows=256, microbatches=4)
FULL = (QUICK, Sizes(hidden=256, layers=4, samples=8, rows=256, microbatches=4))
CUDA = (Sizes(hidden=2048, layers=16, samples=16, rows=2048, microbatches=8),)
QUICK_LAYOUTS = ("dp2", "tp2", "sp2", "pp2")
SECONDS = 30.0  # at most for one case
OPS = tuple(LAYOUTS)


def cases(options: Options, world: int) -> list[TrainCase]:
    """Largest first: what they take beyond their share of the time is then known early."""
    sizes = CUDA if options.device == "cuda" else (QUICK,) if options.quick else FULL
    found = [
        TrainCase(name, s, world, options.seed)
        for name, (axes, _) in LAYOUTS.items()
        for s in sizes
        if math.prod(axes.values()) == world
        if (name in options.ops if options.ops else not options.quick or name in QUICK_LAYOUTS)
    ]
    if options.dtypes and "float32" not in options.dtypes:
        return []
    return sorted(found, key=lambda case: -case.flops)


def pairs(options: Options) -> list[tuple[str, str]]:
    """(ours, peer) for each row of a case."""
    return [("train", "stock_train")]


class TrainContest(CallContest):
    """Calls, and the tokens per second that they make."""

    def run(self, case: Any, pairs: Sequence[tuple[str, str]], budget: Budget) -> list[Row]:
        def rate(summary: Any) -> float:
            return case.tokens / summary.median * 1e6 if summary else 0.0

        return [
            replace(row, parts={"tok/s": rate(row.ours_us), "peer tok/s": rate(row.peer_us)})
            for row in super().run(case, pairs, budget)
        ]


def contest(
    page: Page, found: Mapping[str, Provider], device: device, suite: str, options: Options
) -> CallContest:
    return TrainContest(page, found, device, suite, options.busy)


__all__ = ["OPS", "TITLE", "cases", "contest", "pairs"]

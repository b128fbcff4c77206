"""Suite `pipeline`: training steps of a GPT cut into stages, against torch.distributed.pipelining.

Every schedule that both have, on the same stages in the same processes: ours on our backend, theirs
on gloo (NCCL on CUDA) and on our backend. Beside the times each row has, of ours, the share of the
ranks' time that is idle, measured and as the simulator has it from times measured in the same run;
the simulated step in percent of the measured one; and the most memory that a step takes on a rank,
ours and theirs.
The last case is the one of much communication for little work: one layer of 1024 a stage, 32
microbatches of 64 tokens; only a run that is not quick has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import device

from bench.call_contest import CallContest
from bench.case import Row
from bench.options import Options
from bench.page import Page
from bench.pipeline_case import CHUNKS, SCHEDULES, PipelineCase, Sizes
from bench.providers.base import Provider
from bench.timing import Budget

TITLE = "Training steps of a pipeline"
QUICK = Sizes(hidden=128, layers=8, batch=1, tokens=64, microbatches=8)
FULL = (
    QUICK,
    Sizes(hidden=256, layers=8, batch=2, tokens=64, microbatches=8),
    Sizes(hidden=256, layers=16, batch=1, tokens=64, microbatches=16),
)
CUDA = (Sizes(hidden=2048, layers=16, batch=4, tokens=1024, microbatches=16),)
QUICK_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-v")
HEAVY_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-v")
SECONDS = 40.0  # at most for one case
_TIMED = 0.5  # of a case's time; the rest goes into references, profiles and peaks


def heavy(stages: int) -> Sizes:
    return Sizes(hidden=1024, layers=stages, batch=1, tokens=64, microbatches=32)


def cases(options: Options, world: int) -> list[PipelineCase]:
    """Largest first: what they take beyond their share of the time is then known early."""
    sizes = CUDA if options.device == "cuda" else (QUICK,) if options.quick else FULL
    usual = QUICK_SCHEDULES if options.quick and not options.ops else SCHEDULES
    wanted = [name for name in usual if not options.ops or name in options.ops]
    found = [PipelineCase(name, s, world, options.seed) for name in wanted for s in sizes]
    if not options.quick:
        found += [
            PipelineCase(name, heavy(world * CHUNKS[name]), world, options.seed)
            for name in wanted
            if name in HEAVY_SCHEDULES
        ]
    if options.dtypes and "float32" not in options.dtypes:
        return []
    return sorted(found, key=lambda case: -case.flops)


def pairs(options: Options) -> list[tuple[str, str]]:
    """(ours, peer) for each row of a case."""
    return [("pipeline", "stock_pipeline"), ("pipeline", "stock_pipeline_ours")]


class PipelineContest(CallContest):
    """Calls, and what else is to be known of a step."""

    def run(self, case: Any, pairs: Sequence[tuple[str, str]], budget: Budget) -> list[Row]:
        rows = super().run(case, pairs, replace(budget, seconds=budget.seconds * _TIMED))
        ours = self.trials["pipeline"]
        if not ours.verified:
            return rows
        found = self._figures_of(ours.provider)
        peaks = {name: self._peak(name) for pair in pairs for name in pair}
        names = {trial.provider.name: name for name, trial in self.trials.items()}
        return [
            replace(
                row,
                parts={
                    **found,
                    "peak MB": peaks["pipeline"],
                    "peer MB": peaks[names[row.peer]],
                },
            )
            for row in rows
        ]

    def _figures_of(self, provider: Any) -> dict[str, float]:
        from pyparallel.schedule import simulate

        profile = provider.profile()
        simulation = simulate(profile.plan, profile.costs)
        whole = profile.step_time * profile.plan.ranks
        return {
            "idle %": 100 * (1 - sum(simulation.busy) / whole),
            "simulated %": 100 * simulation.bubble_share,
            "sim/step %": 100 * profile.ratio,
        }

    def _peak(self, name: str) -> float:
        """Of the fullest rank."""
        trial = self.trials[name]
        if not trial.verified:
            return 0.0
        provider: Any = trial.provider
        return max(row[0] for row in self.page.exchange([provider.peak_bytes() / 2**20]))


def contest(
    page: Page, found: Mapping[str, Provider], device: device, suite: str, options: Options
) -> CallContest:
    return PipelineContest(page, found, device, suite, options.busy)


__all__ = ["SCHEDULES", "TITLE", "cases", "contest", "pairs"]

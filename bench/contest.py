"""One case from start to rows: buffers, verification on all ranks, timing, pairing.

`Trials` is what every kind of contest shares; `Contest` is that of buffers and collectives, and
call_contest.py has that of calls with inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bench.case import Case, Row, Summary
from bench.machine import usable_cores
from bench.ops import Layout, layout
from bench.page import Page
from bench.providers import OPTIONAL_PEERS
from bench.providers.base import Buffers, Provider, Unsupported
from bench.reference import Inputs, Verdict, bound, check
from bench.stats import summarize
from bench.timing import Budget, Contestant, measure

_SET_BYTES = 32 << 20  # buffers that take turns fill at most this much
_SETS = 4
_RECHECK_BYTES = 1 << 20
# In-place sums grow by the world size at each call; inputs are restored before they overflow.
_LARGEST = 1e30


@dataclass
class Trial:
    """What became of one contestant on one case; the same on all ranks."""

    provider: Provider
    run: Callable[[int], None] | None = None
    verified: bool = False
    error: float | None = None
    limit: float | None = None
    reason: str = ""  # why it is not timed
    timed: Contestant | None = None

    def failed(self) -> bool:
        """Wrong or broken, as opposed to absent."""
        return self.run is not None and not self.verified


@dataclass
class Trials:
    """The contestants of one rank, the page they share with the other ranks, the last case."""

    page: Page
    providers: Mapping[str, Provider]
    device: torch.device
    suite: str
    busy: bool
    trials: dict[str, Trial] = field(default_factory=dict, init=False)

    def wrong_peers(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Why peers failed in the last case; a wrong peer is no measure of anything."""
        peers = dict.fromkeys(peer for _, peer in pairs)
        return [self.trials[p].reason for p in peers if self.trials[p].failed()]

    def agree_on_failure(self, trial: Trial, unsupported: str, problem: str) -> bool:
        state = 2.0 if problem else 1.0 if unsupported else 0.0
        worst = max(row[0] for row in self.page.exchange([state]))
        if worst == 0.0:
            return False
        texts = self.page.exchange_text(problem or unsupported)
        reasons = sorted({t for t in texts if t})
        trial.verified = False
        if worst == 1.0:
            trial.run = None
            trial.reason = "; ".join(reasons)
        else:
            trial.run = trial.run or (lambda n: None)
            trial.reason = f"{trial.provider.name} FAILED: " + "; ".join(reasons)
        return True

    def settle(self, trial: Trial, worst: Verdict, limit: float, same: bool) -> None:
        """All ranks' verdicts make the trial's. Collective."""
        found = self.page.exchange([worst.error, limit, float(worst.ok)])
        trial.error = max(row[0] for row in found)
        trial.limit = max(row[1] for row in found)
        trial.verified = all(row[2] for row in found) and same
        if not trial.verified:
            text = f"error {worst.error:.3g} > {worst.bound:.3g} at {worst.where}"
            wrong = [
                f"rank {r}: {said}"
                for r, said in enumerate(self.page.exchange_text("" if worst.ok else text))
                if said
            ]
            if not same:
                wrong.append("ranks hold different bits")
            trial.reason = f"{trial.provider.name} WRONG: " + "; ".join(wrong)

    @staticmethod
    def summary(trial: Trial) -> Summary | None:
        if not trial.verified or trial.timed is None or not trial.timed.samples:
            return None
        return summarize(trial.timed.samples, trial.timed.calls)


@dataclass
class Contest(Trials):
    """The contest of collectives, on buffers."""

    seed: int = 0
    _inputs: dict[str, Inputs] = field(default_factory=dict)

    def run(self, case: Case, pairs: Sequence[tuple[str, str]], budget: Budget) -> list[Row]:
        """Rows for (ours, peer) pairs of provider names. Collective over the ranks."""
        plan = layout(case.op, case.count, case.world, self.page.rank)
        sets = self._buffers(case, plan)
        inputs = self._inputs_of(case.dtype)
        trials = {name: Trial(provider) for name, provider in self.providers.items()}
        for trial in trials.values():
            self._verify(case, plan, sets, inputs, trial)
        ready = [t for t in trials.values() if t.verified]
        for trial in ready:
            assert trial.run is not None
            trial.timed = Contestant(
                trial.provider.name,
                trial.run,
                refresh=self._refresher(case, sets, inputs),
                max_calls=self._max_calls(case, len(sets)),
                finish=torch.cuda.synchronize if self.device.type == "cuda" else None,
            )
        if ready:
            measure(self.page, [t.timed for t in ready if t.timed], budget)
        if case.nbytes <= _RECHECK_BYTES:
            for trial in ready:
                self._verify(case, plan, sets, inputs, trial)
        self.trials = trials
        return [
            self._row(case, plan, trials, ours, peer)
            for ours, peer in pairs
            if case.op not in trials[ours].provider.lacks
            if peer not in OPTIONAL_PEERS or trials[peer].run is not None
        ]

    def _inputs_of(self, dtype: str) -> Inputs:
        if dtype not in self._inputs:
            self._inputs[dtype] = Inputs(getattr(torch, dtype), self.seed)
        return self._inputs[dtype]

    def _buffers(self, case: Case, plan: Layout) -> list[Buffers]:
        dtype = getattr(torch, case.dtype)
        # Busy: samples are long, and small sums would have to be restored within one.
        most = max(_SETS, _RECHECK_BYTES // max(1, case.nbytes) // 8) if self.busy else _SETS
        number = max(1, min(most, _SET_BYTES // max(1, case.nbytes), 32))
        sets = []
        for _ in range(number):
            x = torch.empty(plan.in_count, dtype=dtype, device=self.device)
            y = x if plan.in_place else torch.empty(plan.out_count, dtype=dtype, device=self.device)
            sets.append(Buffers(x, y, plan))
        return sets

    def _fill(self, sets: list[Buffers], inputs: Inputs) -> None:
        for variant, buffers in enumerate(sets):
            if buffers.y is not buffers.x:
                buffers.y.fill_(float("nan"))
            inputs.fill(buffers.x, self.page.rank, variant)

    def _refresher(
        self, case: Case, sets: list[Buffers], inputs: Inputs
    ) -> Callable[[], None] | None:
        if case.op not in ("all_reduce", "reduce"):
            return None
        return lambda: self._fill(sets, inputs)

    @staticmethod
    def _max_calls(case: Case, sets: int) -> int:
        if case.op not in ("all_reduce", "reduce") or case.world == 1:
            return 1 << 20
        calls, size = 0, 1.0
        while size * case.world < _LARGEST:
            size *= case.world
            calls += 1
        return calls * sets

    def _verify(
        self, case: Case, plan: Layout, sets: list[Buffers], inputs: Inputs, trial: Trial
    ) -> None:
        """Runs every set once and checks each rank's output; leaves the verdict in `trial`."""
        self._fill(sets, inputs)
        self.page.align()
        unsupported, problem = "", ""
        try:
            if trial.run is None:
                trial.run = trial.provider.batch(case, sets)
            trial.run(len(sets))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except Unsupported as error:
            unsupported = str(error)
        except Exception as error:  # any failure of a contestant is a result, not our crash
            problem = f"{type(error).__name__}: {error}"
        if self.agree_on_failure(trial, unsupported, problem):
            return
        limit = bound(getattr(torch, case.dtype), case.world, trial.provider.wide_sum)
        worst = Verdict(0.0, 0.0, 0)
        same, exact = True, 0.0
        for variant, buffers in enumerate(sets):
            verdict = check(buffers.y, plan, inputs, variant, limit)
            if variant == 0 or not verdict.error <= worst.error:
                worst = verdict
            sums = self.page.exchange([verdict.checksum])
            same = same and (not plan.same_everywhere or len({s[0] for s in sums}) == 1)
            exact = max(exact, verdict.bound)
        self.settle(trial, worst, exact, same)

    def _row(
        self, case: Case, plan: Layout, trials: Mapping[str, Trial], ours: str, peer: str
    ) -> Row:
        mine, theirs = trials[ours], trials[peer]
        ours_us = self.summary(mine)
        peer_us = self.summary(theirs)
        bound_us = self.summary(trials["limit"]) if "limit" in trials else None
        notes = [mine.reason, theirs.reason, theirs.provider.note(case) if peer_us else ""]
        shares = plan.out_splits or plan.in_splits
        return Row(
            suite=self.suite,
            op=case.op,
            api="torch.distributed" if ours == "torch" else "direct",
            shape=list(shares) if shares else [plan.out_count],
            dtype=case.dtype,
            world_size=case.world,
            peer=peer,
            peer_us=peer_us,
            ours_us=ours_us,
            speedup=peer_us.median / ours_us.median if peer_us and ours_us else None,
            error=mine.error,
            error_bound=mine.limit,
            verified=mine.verified,
            peer_verified=theirs.verified,
            bytes=case.nbytes,
            flops=plan.adds,
            bound_us=bound_us.median if bound_us else None,
            note="; ".join(note for note in notes if note),
            busy=self.busy,
            crowded=case.world > usable_cores(),
        )

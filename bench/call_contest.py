"""One case of a suite whose contestants are calls: inputs to outputs, checked, timed in turns.

The case itself says what the inputs are and what a right output is (GemmCase is one), so a suite
adds a case class and providers, and nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Protocol

import torch

from bench.case import Row
from bench.contest import Trial, Trials
from bench.machine import usable_cores
from bench.page import Page
from bench.providers.base import Provider, Unsupported
from bench.reference import Verdict
from bench.timing import Budget, Contestant, measure

_SET_BYTES = 32 << 20  # inputs that take turns fill at most this much
_SETS = 4


class CallCase(Protocol):
    """What a case of such a suite is."""

    op: str
    dtype: str
    world: int

    @property
    def label(self) -> str: ...
    @property
    def size(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def input_bytes(self) -> int: ...
    @property
    def same_everywhere(self) -> bool: ...
    def inputs(self, rank: int, variant: int, device: torch.device | str = "cpu") -> Any: ...
    def reference(self, rank: int, variant: int) -> Any: ...
    def check(self, reference: Any, output: torch.Tensor, stock: bool) -> Verdict: ...


class CallContest(Trials):
    """The contestants of one rank. `parts` are timed beside the pairs and shown in each row."""

    def __init__(
        self,
        page: Page,
        providers: Mapping[str, Provider],
        device: torch.device,
        suite: str,
        busy: bool,
        parts: Sequence[str] = (),
        figures: Callable[[Mapping[str, float]], dict[str, float]] | None = None,
    ) -> None:
        """`figures` makes a row's `parts` of the medians of parts, `ours` and `peer`."""
        super().__init__(page, providers, device, suite, busy)
        self._parts = tuple(parts)
        self._figures = figures

    def run(self, case: Any, pairs: Sequence[tuple[str, str]], budget: Budget) -> list[Row]:
        number = max(1, min(_SETS, _SET_BYTES // max(1, case.input_bytes)))
        sets = [case.inputs(self.page.rank, v, self.device) for v in range(number)]
        self.trials = {name: Trial(provider) for name, provider in self.providers.items()}
        peers = {peer for _, peer in pairs}
        references = [case.reference(self.page.rank, v) for v in range(number)]
        for name, trial in self.trials.items():
            self._verify(case, sets, references, trial, name)
        ready = [t for t in self.trials.values() if t.verified and t.run is not None]
        for trial in ready:
            assert trial.run is not None
            finish = torch.cuda.synchronize if self.device.type == "cuda" else None
            trial.timed = Contestant(trial.provider.name, trial.run, finish=finish)
        if ready:
            measure(self.page, [t.timed for t in ready if t.timed], budget)
        absent = {n for n in peers if self.trials[n].run is None}
        return [self._row(case, ours, peer) for ours, peer in pairs if peer not in absent]

    def _verify(
        self,
        case: CallCase,
        sets: Sequence[Any],
        references: Sequence[Any],
        trial: Trial,
        name: str,
    ) -> None:
        unsupported, problem = "", ""
        outputs: list[Any] = []
        self.page.align()
        try:
            calls = [trial.provider.prepare(case, inputs) for inputs in sets]
            outputs = [call() for call in calls]
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            trial.run = _rounds(calls)
        except Unsupported as error:
            unsupported = str(error)
        except Exception as error:  # any failure of a contestant is a result, not our crash
            problem = f"{type(error).__name__}: {error}"
        if self.agree_on_failure(trial, unsupported, problem):
            return
        if name in self._parts:  # a part of a call has no result of its own to check
            trial.verified = True
            return
        worst, same = Verdict(0.0, 1.0, 0), True
        stock = trial.provider.stock
        for reference, output in zip(references, outputs, strict=True):
            verdict = case.check(reference, output, stock)
            if verdict.error > worst.error:
                worst = verdict
            sums = self.page.exchange([float(verdict.checksum)])
            same = same and (not case.same_everywhere or len({s[0] for s in sums}) == 1)
        self.settle(trial, worst, worst.bound, same)

    def _row(self, case: CallCase, ours: str, peer: str) -> Row:
        mine, theirs = self.trials[ours], self.trials[peer]
        ours_us, peer_us = self.summary(mine), self.summary(theirs)
        medians = {
            name: summary.median
            for name, trial in [("ours", mine), ("peer", theirs), *self.trials.items()]
            if (summary := self.summary(trial))
        }
        figures = self._figures(medians) if self._figures else {}
        notes = [mine.reason, theirs.reason, mine.provider.note(case), theirs.provider.note(case)]
        return Row(
            suite=self.suite,
            op=case.op,
            api=mine.provider.name,
            shape=case.shape,
            dtype=case.dtype,
            world_size=case.world,
            peer=theirs.provider.name,
            peer_us=peer_us,
            ours_us=ours_us,
            speedup=peer_us.median / ours_us.median if peer_us and ours_us else None,
            error=mine.error,
            error_bound=mine.limit,
            verified=mine.verified,
            peer_verified=theirs.verified,
            bytes=case.nbytes,
            flops=case.flops,
            bound_us=None,
            note="; ".join(note for note in notes if note),
            busy=self.busy,
            crowded=case.world > usable_cores(),
            size=case.size,
            parts=figures,
        )


def _rounds(calls: Sequence[Callable[[], object]]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for call in islice(cycle(calls), n):
            call()

    return run

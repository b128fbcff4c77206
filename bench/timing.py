"""How long a call takes: the method of every number this benchmark prints.

- Contestants run interleaved in the same processes, a sample each per round, and the order turns
  from round to round: drift and noise of the machine meet all alike. Ratios are to be trusted more
  than absolute times.
- A sample is a batch of calls long enough for the clock (`sample_us`); all ranks start it together
  (page.py), and the slowest rank counts.
- Inputs vary: calls go round several buffers with different data. Large buffers exceed the caches;
  small ones are warm for every contestant, as just-computed data is.
- Rounds go on until the median of every contestant is known to `precision`, or the budget is spent.
- Nothing is timed that has not been verified on all ranks (verify.py), which is the warm-up too.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.page import Page
from bench.stats import median_uncertainty


@dataclass(frozen=True)
class Budget:
    seconds: float  # for all contestants of one case together
    sample_us: float  # at least, for one sample
    precision: float = 0.02
    min_rounds: int = 5


@dataclass
class Contestant:
    """Something to time. `run(n)` makes n calls; `refresh` restores inputs, untimed."""

    name: str
    run: Callable[[int], None]
    refresh: Callable[[], None] | None = None
    max_calls: int = 1 << 20  # calls between two refreshes
    finish: Callable[[], None] | None = None  # waits for a device; part of the timed span
    calls: int = 1
    samples: list[float] = field(default_factory=list)  # microseconds per call, slowest rank


def measure(page: Page, contestants: list[Contestant], budget: Budget) -> int:
    """Fills the contestants' samples; collective over the page's ranks. Returns the rounds."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return _measure(page, contestants, budget)
    finally:
        if enabled:
            gc.enable()


def _measure(page: Page, contestants: list[Contestant], budget: Budget) -> int:
    started = time.perf_counter()
    for contestant in contestants:
        _calibrate(page, contestant, budget)
    rounds = 0
    while True:
        turn = rounds % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            cost = _sample(page, contestant, contestant.calls)
            _lengthen(contestant, cost, budget)
            contestant.samples.append(cost)
        rounds += 1
        elapsed = page.exchange([time.perf_counter() - started])[0][0]  # rank 0's: all agree
        if rounds < budget.min_rounds and elapsed < 4 * budget.seconds:
            continue
        settled = all(median_uncertainty(c.samples) < budget.precision for c in contestants)
        if settled or elapsed * (rounds + 1) / rounds > budget.seconds:
            return rounds


def _calibrate(page: Page, contestant: Contestant, budget: Budget) -> None:
    """Chooses the number of calls per sample, alike on all ranks."""
    cost, calls = _sample(page, contestant, 1), 1
    while cost * calls < budget.sample_us / 4 and calls < contestant.max_calls:
        calls = min(calls * 4, contestant.max_calls)
        cost = _sample(page, contestant, calls)
    calls = math.ceil(budget.sample_us / max(cost, 0.01))
    contestant.calls = max(1, min(calls, contestant.max_calls))


def _lengthen(contestant: Contestant, cost: float, budget: Budget) -> None:
    """Mends a calibration that a disturbance misled: samples so far were too short to count."""
    if cost * contestant.calls < budget.sample_us / 3 and contestant.calls < contestant.max_calls:
        calls = math.ceil(budget.sample_us / max(cost, 0.01))
        contestant.calls = min(calls, contestant.max_calls, contestant.calls * 8)
        contestant.samples.clear()


def _sample(page: Page, contestant: Contestant, calls: int) -> float:
    if contestant.refresh is not None:
        contestant.refresh()
    run, finish = contestant.run, contestant.finish
    page.align()
    begin = time.perf_counter_ns()
    run(calls)
    if finish is not None:
        finish()
    spent = time.perf_counter_ns() - begin
    return max(row[0] for row in page.exchange([spent / calls / 1000.0]))

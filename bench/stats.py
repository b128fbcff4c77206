"""Robust statistics of timing samples, and when there are enough of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.case import Summary


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between order statistics; `ordered` is sorted and not empty."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(samples: Sequence[float], calls: int) -> Summary:
    ordered = sorted(samples)
    p10, p20, median, p80, p90 = (quantile(ordered, q) for q in (0.1, 0.2, 0.5, 0.8, 0.9))
    return Summary(p10, p20, median, p80, p90, len(ordered), calls)


def median_uncertainty(samples: Sequence[float]) -> float:
    """Half the width of the median's 95 % confidence interval, relative to the median.

    By order statistics (no assumption about the distribution): the interval reaches from rank
    n/2 - 0.98 sqrt(n) to n/2 + 0.98 sqrt(n). Infinite below six samples, where none exists.
    """
    n = len(samples)
    if n < 6:
        return math.inf
    ordered = sorted(samples)
    reach = 0.98 * math.sqrt(n)
    low = max(0, math.floor(n / 2 - reach))
    high = min(n - 1, math.ceil(n / 2 + reach) - 1)
    median = quantile(ordered, 0.5)
    return (ordered[high] - ordered[low]) / 2 / median if median > 0 else 0.0


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))

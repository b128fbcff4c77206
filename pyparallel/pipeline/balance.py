"""Where to cut parts into stages: exactly, by an explicit count, or by a layout in letters.

All three give counts: how many parts each stage takes, in order, every part once.
"""

import math
import re
from collections.abc import Sequence

__all__ = ["balance", "check_counts", "counts_of_layout"]

_CELL = re.compile(r"([A-Za-z])(?:\*([0-9]{1,6}))?")


def balance(
    weights: Sequence[float],
    stages: int,
    *,
    memory: Sequence[float] | None = None,
    cap: float | Sequence[float] | None = None,
    allow_empty: bool = False,
) -> tuple[int, ...]:
    """The counts whose heaviest stage is as light as can be; among those, the most even ones.

    An exact dynamic programme over all contiguous cuts: O(stages * parts^2).

    Args:
        weights: of each part: parameters, floating point operations, or measured time.
        stages: how many.
        memory: bytes of each part, for `cap`.
        cap: bytes each stage has, one number or one per stage.
        allow_empty: stages may have no part. Otherwise each has one at least.

    Raises:
        ValueError: fewer parts than stages; a number that is none or below 0; no cut that fits.
    """
    parts = len(weights)
    _check(weights, "weights", parts)
    if stages < 1:
        raise ValueError(f"{stages} stages: allowed are 1, 2, 3, ...; nearest 1")
    if not allow_empty and stages > parts:
        raise ValueError(
            f"{stages} stages for {parts} parts: each takes one at least; nearest {max(parts, 1)} "
            "stages, or allow_empty=True"
        )
    if (memory is None) != (cap is None):
        raise ValueError("memory and cap go together: bytes of the parts, and bytes of the stages")
    caps = _caps(cap, stages)
    _check(memory or (), "memory", parts if memory is not None else 0)
    weight = _sums(weights)
    held = _sums(memory if memory is not None else [0] * parts)

    # best[i]: (heaviest stage, sum of squares) of the first i parts in the stages so far
    worst = (math.inf, math.inf)
    best: list[tuple[float, float]] = [(0, 0), *[worst] * parts]
    cuts: list[list[int]] = []
    for stage in range(stages):
        following = [worst] * (parts + 1)
        cut = [-1] * (parts + 1)
        for end in range(parts + 1):
            for begin in range(end + 1 if allow_empty else end):
                taken = weight[end] - weight[begin]
                if held[end] - held[begin] > caps[stage] or best[begin] == worst:
                    continue
                candidate = (max(best[begin][0], taken), best[begin][1] + taken * taken)
                if candidate < following[end]:
                    following[end], cut[end] = candidate, begin
        best = following
        cuts.append(cut)
    if best[parts] == worst:
        least = [f"part {i} needs {m}" for i, m in enumerate(memory or ()) if m > max(caps)]
        raise ValueError(
            f"{parts} parts of {held[parts]} bytes do not fit into {stages} stages of at most "
            f"{cap} bytes, in order; {'; '.join(least) or 'more stages or a higher cap would do'}"
        )
    counts, end = [], parts
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(counts))


def check_counts(counts: Sequence[int], parts: int) -> tuple[int, ...]:
    """Explicit counts, once it is sure that they take every part once.

    Raises:
        ValueError: they do not, with the sums.
    """
    if not counts or any(count < 0 for count in counts):
        raise ValueError(f"counts {list(counts)}: one number per stage is expected, 0 or more")
    if sum(counts) != parts:
        raise ValueError(
            f"counts {list(counts)} take {sum(counts)} parts, the model has {parts}: "
            "every part lands once"
        )
    return tuple(counts)


def counts_of_layout(layout: str, kinds: Sequence[str]) -> tuple[int, ...]:
    """The counts of a layout such as `E t*3 | t*4 | t*4 | t*3 N L`.

    Args:
        layout: stages between bars; in each, letters of parts in order, `t*3` for `t t t`. A stage
            may be empty.
        kinds: the letter of each part of the model, in order.

    Raises:
        ValueError: a word that is none, or parts in another order or number than the model's.
    """
    counts: list[int] = []
    letters: list[str] = []
    for stage in layout.split("|"):
        before = len(letters)
        for word in stage.split():
            match = _CELL.fullmatch(word)
            if match is None:
                raise ValueError(f"layout {layout!r}: {word!r} is no part such as t or t*3")
            letters += match[1] * int(match[2] or 1)
            if len(letters) > len(kinds):
                break
        counts.append(len(letters) - before)
    for position, (named, kind) in enumerate(zip(letters, kinds, strict=False)):
        if named != kind:
            raise ValueError(
                f"layout {layout!r}: part {position} is {named!r} there, {kind!r} in the model, "
                f"which is {_runs(kinds)!r}"
            )
    if len(letters) != len(kinds):
        more = "more" if len(letters) > len(kinds) else f"{len(letters)}"
        raise ValueError(
            f"layout {layout!r} has {more} parts, the model has {len(kinds)}: {_runs(kinds)!r}"
        )
    return tuple(counts)


def _runs(kinds: Sequence[str]) -> str:
    """`E t*4 N L`: the layout of one stage."""
    runs: list[tuple[str, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return " ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in runs)


def _sums(values: Sequence[float]) -> list[float]:
    """Sums of the first 0, 1, 2, ... values."""
    sums: list[float] = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _caps(cap: float | Sequence[float] | None, stages: int) -> list[float]:
    if cap is None:
        return [math.inf] * stages
    caps = list(cap) if isinstance(cap, Sequence) else [cap] * stages
    _check(caps, "cap", stages)
    return caps


def _check(values: Sequence[float], name: str, count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values, expected are {count}")
    wrong = [value for value in values if not 0 <= value < math.inf]
    if wrong:
        raise ValueError(f"{name} has {wrong[0]!r}: finite numbers from 0 are expected")

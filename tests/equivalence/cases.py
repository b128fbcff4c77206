"""What is compared: layouts of 2, 4 and 8 ranks, ZeRO, recomputation, precision. Pure data.

`every_case` is the whole cross product; `covering` a part of it in which every pair of values of
two different settings appears that appears in the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any

AXES = ("dp", "tp", "sp", "pp")
WORLDS = (2, 4, 8)


@dataclass(frozen=True)
class Case:
    dp: int
    tp: int
    sp: int
    pp: int
    zero: int
    recompute: str
    precision: str
    tp_sequence_parallel: bool

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.sp * self.pp

    def __str__(self) -> str:
        sizes = " ".join(f"{a}{getattr(self, a)}" for a in AXES if getattr(self, a) > 1)
        cut = " sequence" if self.tp_sequence_parallel else ""
        return f"{sizes}{cut} zero{self.zero} recompute-{self.recompute} {self.precision}"


def every_case(worlds: Sequence[int] = WORLDS) -> list[Case]:
    """In a fixed order. ZeRO where there are ranks to shard over; tensor parallelism with parts of
    the sequence in every other layout that has it, so that both are in the whole."""
    return [case for world in worlds for case in _of_world(world)]


def _of_world(world: int) -> Iterator[Case]:
    sizes = [s for s in product(*[[1, 2, 4, 8]] * 4) if s[0] * s[1] * s[2] * s[3] == world]
    with_tp = 0
    for dp, tp, sp, pp in sizes:
        with_tp += tp > 1
        for zero in (0, 1, 2, 3) if dp * sp > 1 else (0,):
            for recompute, precision in product(("none", "full"), ("fp32", "bf16")):
                yield Case(dp, tp, sp, pp, zero, recompute, precision, tp > 1 and with_tp % 2 == 1)


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Of settings with their values, two at a time."""
    return set(combinations(asdict(case).items(), 2))


def covering(cases: Sequence[Case]) -> list[Case]:
    """Greedy: the case that adds most pairs, the smallest world and the first of equals."""
    missing = set().union(*map(pairs_of, cases))
    left = {case: pairs_of(case) for case in cases}
    chosen = []
    while missing:
        best = max(left, key=lambda case: (len(left[case] & missing), -case.world))
        missing -= left.pop(best)
        chosen.append(best)
    return [case for case in cases if case in chosen]


def in_ci() -> list[Case]:
    """All pairs of two and four ranks' cases, and of eight ranks every three axes together, each
    with settings that the others have not."""
    kinds = [(0, "full", "bf16"), (1, "none", "fp32"), (2, "full", "fp32"), (3, "none", "bf16")]
    threes = [c for c in every_case([8]) if sum(getattr(c, a) > 1 for a in AXES) == 3]
    layouts = list(dict.fromkeys((c.dp, c.tp, c.sp, c.pp) for c in threes))
    chosen = [
        case
        for case in threes
        if (case.zero, case.recompute, case.precision)
        == kinds[layouts.index((case.dp, case.tp, case.sp, case.pp))]
    ]
    return covering(every_case([2, 4])) + chosen

"""How many passes a pipeline rank keeps at once: from the schedule object.

A rank's peak is over combinations of its chunks. `in_flight` gives, per rank, those combinations
that no other one covers; memory is the largest sum over them. Cached: it depends on the schedule
alone, and not on what a pass keeps.
"""

from functools import lru_cache

from pyparallel.planner.layout import Layout
from pyparallel.schedule import Kind, Schedule, generate

__all__ = ["closed_form", "in_flight", "made_schedule"]

Profile = tuple[tuple[tuple[float, ...], ...], ...]


def made_schedule(layout: Layout, microbatches: int) -> Schedule:
    """The layout's schedule, compute only."""
    name = layout.schedule if layout.pp > 1 else "1f1b"
    chunks = layout.chunks if layout.pp > 1 else 1
    group = layout.group_size or None
    return generate(
        name,
        layout.pp,
        microbatches,
        chunks=chunks,
        group_size=group if name == "interleaved-1f1b" else None,
    )


@lru_cache(maxsize=512)
def _profile(layout: Layout, microbatches: int) -> Profile:
    """Per rank, the maximal (passes kept per chunk). A half backward's rest counts as `WEIGHT_REST`
    of a pass until its weight half is done."""
    schedule = made_schedule(layout, microbatches)
    return tuple(
        _maximal(schedule, rank, held) for rank, held in enumerate(schedule.held)
    )  # fmt: skip


WEIGHT_REST = 32 / 34  # arXiv:2401.10241: M_W = 32 s b h of M_B = 34 s b h, without scores


def _maximal(schedule: Schedule, rank: int, held: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
    place = {stage: chunk for chunk, stage in enumerate(held)}
    now = [0.0] * len(held)
    peaks: set[tuple[float, ...]] = set()
    change = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.BACKWARD_INPUT: WEIGHT_REST - 1.0,
        Kind.BACKWARD_WEIGHT: -WEIGHT_REST,
    }
    for action in schedule.rows[rank]:
        step = change.get(action.kind, 0.0)
        now[place[action.stage]] += step
        if step > 0:
            peaks.add(tuple(round(n, 9) for n in now))
    best: list[tuple[float, ...]] = []
    for peak in sorted(peaks, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(kept, peak, strict=True)) for kept in best):
            best.append(peak)
    return tuple(best) or ((0.0,) * len(held),)


def in_flight(layout: Layout, microbatches: int) -> Profile:
    """Per rank, the combinations of passes per chunk that may be its peak."""
    bounded = microbatches
    if layout.schedule not in ("gpipe", "looped-bfs"):
        # Beyond three rounds of the pipeline no rank keeps more, as long as the rounds' size stays.
        bounded = min(microbatches, 3 * layout.pp)
        while bounded < microbatches and _round(layout, bounded) != _round(layout, microbatches):
            bounded += 1
    key = Layout(
        pp=layout.pp,
        schedule=layout.schedule,
        chunks=layout.chunks,
        group_size=layout.group_size,
    )
    return _profile(key, bounded)


def closed_form(layout: Layout, microbatches: int) -> tuple[float, ...] | None:
    """Per rank, passes in flight in whole passes of the rank's layers, where the schedule's formula
    is known (formulas of arXiv:2104.04473 and of Megatron-LM's warm-up); None elsewhere."""
    p, m, v = layout.pp, microbatches, layout.chunks
    if p == 1:
        return (1.0,)
    if layout.schedule == "gpipe":
        return (float(m),) * p
    if layout.schedule == "1f1b":
        return tuple(float(min(p - i, m)) for i in range(p))
    if layout.schedule == "interleaved-1f1b":
        group = _round(layout, m)
        return tuple(
            min(2 * (p - i - 1) + (v - 1) * group + 1, m * v) / v for i in range(p)
        )  # fmt: skip
    return None


def _round(layout: Layout, m: int) -> int:
    """Microbatches of the largest round of interleaved 1F1B: nearly equal, none below the size."""
    size = min(layout.group_size or layout.pp, m)
    return -(-m // (m // size))

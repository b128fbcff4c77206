"""Which layouts a search looks at: all sizes that multiply to the devices, with what may be chosen
beside them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.errors import PlanError
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.report import Rejected
from pyparallel.planner.rules import divisors, nearest, violations
from pyparallel.schedule import FAMILIES

__all__ = ["Space", "misfit", "sizes"]

MICRO_BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 16)
LEAST_TOKENS = 1024  # of a sequence on one device, by default: below, no kernel is busy
_FREE = ("dp", "tp", "pp", "cp", "ep", "replicas", "micro_batch", "zero", "schedule", "chunks",
         "recompute",
         "offload", "cp_kind", "sequence_parallel", "overlap_tp", "overlap_dp",
         "overlap_pp", "overlap_backward")  # fmt: skip


@dataclass(frozen=True)
class Space:
    """What a search may choose.

    Attributes:
        fixed: fields of `Layout` that are given; all others are free.
        zero: ZeRO stages to try.
        schedules: of the pipeline, to try.
        offload: states on the host may be tried, where nothing fits without.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    zero: tuple[int, ...] = (1, 3)
    schedules: tuple[str, ...] = ("1f1b", "interleaved-1f1b")
    offload: bool = True

    def __post_init__(self) -> None:
        unknown = sorted(set(self.fixed) - set(_FREE))
        if unknown:
            raise PlanError(f"cannot fix {', '.join(unknown)}; can fix {', '.join(_FREE)}")
        for name in ("dp", "tp", "pp", "cp", "ep", "replicas", "micro_batch", "chunks"):
            value = self.fixed.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"{name}={value!r}; allowed are 1, 2, 3, ...; nearest 1")

    def values(self, name: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of a field: the given value, or all of these."""
        return (self.fixed[name],) if name in self.fixed else default


def sizes(
    job: Job, cluster: ClusterSpec, devices: int, space: Space
) -> Iterator[Layout | Rejected]:
    """All (tp, cp, pp, ep, dp) whose product is the devices, and what no layout of them can mend.

    Where sizes divide neither heads, layers nor sequence, one `Rejected` names the rule.
    """
    model = job.model
    for tp in _sized(space, "tp", [d for d in divisors(devices) if d <= model.heads]):
        for pp in _sized(space, "pp", [d for d in divisors(devices // tp) if d <= model.layers]):
            if devices % (tp * pp):
                continue  # a size that is given, beside one that leaves it no room
            rest = devices // (tp * pp)
            contexts = [c for c in divisors(rest) if job.seq / c >= LEAST_TOKENS or c == 1]
            for cp in _sized(space, "cp", [c for c in contexts if c <= 64]):
                if rest % cp:
                    continue
                dp = rest // cp
                if space.fixed.get("dp", dp) != dp:
                    continue
                shards = max(dp * cp // space.fixed.get("replicas", 1), 1)
                for ep in _sized(space, "ep", _expert_sizes(job, shards)):
                    layout = Layout(
                        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, **_given(space)
                    )  # fmt: skip
                    broken = _unmendable(job, cluster, layout)
                    yield broken or layout


def misfit(devices: int, space: Space) -> str | None:
    """Why the sizes that are given cannot be of so many devices, with the nearest that could:
    they must divide the devices, and be all of them if none is free. None where they can be."""
    given = {n: space.fixed[n] for n in ("dp", "cp", "pp", "tp") if n in space.fixed}
    product, free = prod(given.values()), len(given) < 4
    if devices % product == 0 if free else devices == product:
        return None
    text = " x ".join(f"{name} {size}" for name, size in given.items())
    text += f" = {product}" if len(given) > 1 else ""
    low = devices // product * product
    near = [n for n in (low, low + product) if n] if free else [product]
    mend = f"nearest --gpus {' and '.join(map(str, near))}"
    for name in reversed(given):
        others = product // given[name]
        if given[name] > 1 and devices % others == 0:
            fine = divisors(devices // others) if free else [devices // others]
            mend += f", or {name} {nearest(given[name], fine)}"
            break
    does = "does not divide" if free else "is not"
    return f"devices: {text} {does} {devices} devices; {mend}"


def _sized(space: Space, name: str, default: list[int]) -> tuple[int, ...]:
    return space.values(name, tuple(default))


def _expert_sizes(job: Job, shards: int) -> list[int]:
    if job.model.experts is None:
        return [1]
    return [d for d in divisors(shards) if job.model.experts.count % d == 0]


def _given(space: Space) -> dict[str, Any]:
    """Fixed fields that no loop runs over."""
    looped = {"dp", "tp", "pp", "cp", "ep", "micro_batch", "zero", "schedule", "chunks",
              "recompute", "offload"}  # fmt: skip
    return {name: value for name, value in space.fixed.items() if name not in looped}


_MENDABLE = {"microbatches", "chunks", "batch"}  # by another micro batch or schedule


def _unmendable(job: Job, cluster: ClusterSpec, layout: Layout) -> Rejected | None:
    found = violations(job, cluster, layout.with_(schedule="gpipe"))
    found = [v for v in found if v.rule not in _MENDABLE or _is_smallest(job, layout)]
    if not found:
        return None
    return Rejected(layout, found[0].rule, found[0].text)


def _is_smallest(job: Job, layout: Layout) -> bool:
    """No other micro batch would mend the batch."""
    return bool(job.global_batch % layout.dp)


def choices(job: Job, layout: Layout, space: Space) -> Iterator[tuple[Layout, ...]]:
    """What may be chosen beside the sizes. Each tuple is a ladder: recomputation upwards, and for
    each the ZeRO stages upwards; either step up is slower and needs less memory."""
    share = job.global_batch // layout.dp
    for micro in space.values("micro_batch", MICRO_BATCHES):
        if share % micro:
            continue
        m = share // micro
        for schedule, chunks in _pipelines(job, layout, m, space):
            base = layout.with_(micro_batch=micro, schedule=schedule, chunks=chunks)
            yield tuple(
                base.with_(zero=zero, recompute=recompute)
                for recompute in space.values("recompute", _recomputes(job))
                for zero in space.values("zero", _stages_of_zero(layout, space))
            )


def _stages_of_zero(layout: Layout, space: Space) -> tuple[int, ...]:
    """Where nothing shares the states, one stage stands for all."""
    return space.zero if layout.data > 1 or 1 not in space.zero else (1,)


def _recomputes(job: Job) -> tuple[str, ...]:
    return ("none", "full") if job.attention == "flash" else ("none", "selective", "full")


def _pipelines(job: Job, layout: Layout, m: int, space: Space) -> Iterator[tuple[str, int]]:
    if layout.pp == 1:
        if space.fixed.get("chunks", 1) == 1:
            yield "1f1b", 1
        return
    each = job.model.layers // layout.pp
    for schedule in space.values("schedule", space.schedules):
        if m < layout.pp and schedule != "gpipe":
            continue
        fixed = FAMILIES[schedule].chunks
        if space.fixed.get("chunks", fixed) != fixed is not None and "schedule" not in space.fixed:
            continue  # a schedule that has not as many stages per rank
        if fixed is not None:
            yield schedule, space.fixed.get("chunks", fixed)
            continue
        even = [v for v in CHUNKS if 1 < v <= each and job.model.layers % (layout.pp * v) == 0]
        for chunks in space.values("chunks", tuple(even)):
            yield schedule, chunks

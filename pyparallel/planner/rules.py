"""Which layouts cannot be: each rule with its numbers and the nearest values that would do."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.errors import MOST_DEVICES, PlanError, in_microbatches, shown
from pyparallel.planner.layout import CP_KINDS, OFFLOADS, RECOMPUTES, Job, Layout
from pyparallel.schedule import FAMILIES

__all__ = ["Violation", "check", "violations"]


class Violation(NamedTuple):
    """A rule that a layout breaks."""

    rule: str
    text: str


def check(job: Job, cluster: ClusterSpec, layout: Layout) -> None:
    """Refuses a layout that cannot be.

    Raises:
        PlanError: all rules that are broken, each with its numbers and what would work.
    """
    found = violations(job, cluster, layout)
    if found:
        raise PlanError(f"{layout.label}: " + "; ".join(f"{v.rule}: {v.text}" for v in found))


def violations(job: Job, cluster: ClusterSpec, layout: Layout) -> list[Violation]:
    """All rules that the layout breaks; none if it can be."""
    found = list(_sizes(layout))
    if found:
        return found  # nothing else can be counted
    return [
        *_choices(layout, cluster, job),
        *_replicas(layout),
        *_secondary(layout),
        *_heads(job, layout),
        *_sequence(job, layout),
        *_layers(job, layout),
        *_batch(job, layout),
        *_experts(job, layout),
    ]


def nearest(value: int, allowed: Iterable[int], count: int = 2) -> str:
    """ "2 and 4": of the allowed values, those nearest to one."""
    near = sorted(sorted(set(allowed), key=lambda a: (abs(a - value), a))[:count])
    return " and ".join(map(str, near)) or "none"


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def _sizes(layout: Layout) -> Iterator[Violation]:
    for name in ("dp", "tp", "pp", "cp", "ep", "replicas", "micro_batch", "chunks"):
        value = getattr(layout, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield Violation(name, f"{name}={value!r}; allowed are 1, 2, 3, ...; nearest 1")
        elif value > MOST_DEVICES:
            yield Violation(name, f"{name}={shown(value)}; allowed are 1 to {MOST_DEVICES}")


def _choices(layout: Layout, cluster: ClusterSpec, job: Job) -> Iterator[Violation]:
    for name, allowed in (
        ("zero", (0, 1, 2, 3)),
        ("recompute", RECOMPUTES),
        ("offload", OFFLOADS),
        ("cp_kind", CP_KINDS),
        ("schedule", tuple(FAMILIES)),
    ):
        value = getattr(layout, name)
        if value not in allowed:
            yield Violation(name, f"{value!r} is not one of {', '.join(map(str, allowed))}")
    if cluster.devices and layout.devices > cluster.devices:
        yield Violation(
            "devices",
            f"dp {layout.dp} x cp {layout.cp} x pp {layout.pp} x tp {layout.tp} = "
            f"{layout.devices} devices; {cluster.name} has {cluster.devices}",
        )
    if layout.offload == "all" and layout.zero != 3:
        yield Violation(
            "offload", f"all states on the host with zero {layout.zero}: weights need zero 3"
        )
    if job.bytes.compute not in cluster.gpu.peak_tflops:
        have = ", ".join(sorted(cluster.gpu.peak_tflops))
        yield Violation(
            "precision", f"{cluster.gpu.name} has no {job.bytes.compute} GEMM; it has {have}"
        )


def _replicas(layout: Layout) -> Iterator[Violation]:
    r, data = layout.replicas, layout.data
    if r == 1:
        return
    product = f"dp {layout.dp} x cp {layout.cp} = {data}"
    if layout.zero == 0:
        yield Violation(
            "replicas", f"{r} with zero 0, which shards nothing; nearest 1, or zero 1, 2, 3"
        )
    elif data % r:
        fine = nearest(r, [d for d in divisors(data) if d < data or d == 1])
        yield Violation("replicas", f"{r} does not divide {product}; nearest {fine}")
    elif r == data:
        fine = nearest(r, [d for d in divisors(data) if d < data])
        yield Violation(
            "replicas", f"{r} of {product} leave one shard, so none; nearest {fine}, or zero 0"
        )


def _secondary(layout: Layout) -> Iterator[Violation]:
    n, shards = layout.secondary, layout.shards
    if n == 0:
        return
    if layout.zero != 3:
        yield Violation(
            "secondary", f"{n} with zero {layout.zero}, which keeps weights whole; nearest zero 3"
        )
    elif n < 1 or shards % n:
        product = f"dp {layout.dp} x cp {layout.cp} / replicas {layout.replicas} = {shards}"
        fine = nearest(n, divisors(shards))
        yield Violation("secondary", f"{n} does not divide {product}; nearest {fine}")


def _heads(job: Job, layout: Layout) -> Iterator[Violation]:
    model, t = job.model, layout.tp
    if model.heads % t:
        yield Violation(
            "heads",
            f"{model.heads} heads over tp {t} leave {model.heads % t}; "
            f"nearest tp {nearest(t, divisors(model.heads))}",
        )
    elif model.latent is None and model.kv_heads % t and t % model.kv_heads:
        fine = [
            d for d in divisors(model.heads) if not model.kv_heads % d or not d % model.kv_heads
        ]
        yield Violation(
            "kv heads",
            f"{model.kv_heads} kv heads over tp {t}: neither divides the other; "
            f"nearest tp {nearest(t, fine)}",
        )
    width = model.ffn
    if model.experts is not None:
        width = model.experts.ffn
    if width % t:
        yield Violation(
            "ffn",
            f"width {width} over tp {t} leaves {width % t}; nearest tp "
            f"{nearest(t, [d for d in divisors(model.heads) if width % d == 0])}",
        )
    if model.vocab < t:
        yield Violation("vocabulary", f"{model.vocab} rows over tp {t}; at most tp {model.vocab}")
    if layout.cp > 1 and layout.cp_kind == "ulysses" and not model.heads % t:
        local, c = model.heads // t, layout.cp
        if local % c:
            yield Violation(
                "heads",
                f"{model.heads} heads / tp {t} = {local} over cp {c} (ulysses); nearest cp "
                f"{nearest(c, divisors(local))}, or cp_kind ring",
            )


def _sequence(job: Job, layout: Layout) -> Iterator[Violation]:
    parts = 2 * layout.cp if layout.cp > 1 and layout.cp_kind == "ring" else layout.cp
    why = f"cp {layout.cp}" + (" in 2 x cp chunks" if parts > layout.cp else "")
    if layout.sequence_parallel and layout.tp > 1:
        parts *= layout.tp
        why += f" x tp {layout.tp} (sequence parallel)"
    if job.seq % parts:
        low = job.seq // parts * parts
        near = " and ".join(str(s) for s in (low, low + parts) if s)
        yield Violation(
            "sequence", f"{job.seq} tokens over {why} leave {job.seq % parts}; nearest {near}"
        )


def _layers(job: Job, layout: Layout) -> Iterator[Violation]:
    layers, stages = job.model.layers, layout.stages
    if layout.layers_per_stage is not None:
        counts = layout.layers_per_stage
        if len(counts) != stages or sum(counts) != layers or min(counts, default=0) < 0:
            yield Violation(
                "layers",
                f"layers_per_stage {list(counts)} has {len(counts)} stages and {sum(counts)} "
                f"layers; wanted pp {layout.pp} x chunks {layout.chunks} = {stages} stages and "
                f"{layers} layers",
            )
    elif layers < stages:
        yield Violation(
            "layers",
            f"{layers} layers over pp {layout.pp} x chunks {layout.chunks} = {stages} stages: a "
            f"stage would be empty; nearest {layers} stages",
        )
    family = FAMILIES.get(layout.schedule)
    if family is None:
        return
    if layout.pp == 1 and layout.chunks > 1:
        yield Violation("chunks", f"{layout.chunks} chunks with pp 1 have no effect; nearest 1")
    elif layout.pp > 1 and family.chunks not in (None, layout.chunks):
        yield Violation(
            "chunks",
            f"{layout.schedule} has {family.chunks} stages per rank, not {layout.chunks}"
            + ("; for more take interleaved-1f1b" if family.chunks == 1 else ""),
        )
    if layout.pp > 1 and family.even_ranks and layout.pp % 2:
        near = f"{layout.pp - 1} and {layout.pp + 1}"
        yield Violation(
            "pp", f"{layout.schedule} needs an even pp, not {layout.pp}; nearest {near}"
        )
    if layout.pp > 1 and family.copies > 1:
        yield Violation(
            "schedule", f"{layout.schedule} holds every stage twice, which no memory model here "
            "counts; dualpipev holds them once",
        )  # fmt: skip
    if layout.recompute_layers is not None and layout.recompute != "full":
        yield Violation(
            "recompute",
            f"recompute_layers {layout.recompute_layers} has no effect with {layout.recompute}",
        )


def _batch(job: Job, layout: Layout) -> Iterator[Violation]:
    b, d, total = layout.micro_batch, layout.dp, job.global_batch
    if total % (b * d):
        low = total // (b * d) * (b * d)
        near = " and ".join(str(n) for n in (low, low + b * d) if n)
        yield Violation(
            "batch",
            f"global batch {total} is not micro batch {b} x dp {d} x a whole number of "
            f"microbatches; nearest global batch {near}, or micro batch x dp among "
            f"{nearest(b * d, divisors(total), 3)}",
        )
        return
    m = total // (b * d)
    if layout.pp > 1 and m < layout.pp and layout.schedule != "gpipe":
        yield Violation(
            "microbatches",
            f"m = {total} / ({b} x {d}) = {in_microbatches(m)} for pp {layout.pp}: the "
            f"pipeline never fills; nearest pp {m}, or a global batch of "
            f"{b * d * layout.pp}, or schedule gpipe",
        )
    if layout.group_size:
        if layout.schedule != "interleaved-1f1b":
            yield Violation("group_size", "only interleaved-1f1b takes one")
        elif layout.group_size < layout.pp:
            yield Violation(
                "group_size", f"{layout.group_size} with pp {layout.pp}; nearest {layout.pp}"
            )


def _experts(job: Job, layout: Layout) -> Iterator[Violation]:
    e, x = layout.ep, job.model.experts
    if e == 1:
        return
    if x is None:
        yield Violation("ep", f"{job.model.name} has no experts to spread over ep {e}; nearest 1")
        return
    if x.count % e:
        yield Violation(
            "ep",
            f"{x.count} experts over ep {e} leave {x.count % e}; "
            f"nearest ep {nearest(e, divisors(x.count))}",
        )
    if layout.shards % e:
        yield Violation(
            "ep",
            f"ep {e} does not divide dp {layout.dp} x cp {layout.cp}"
            + (f" / replicas {layout.replicas}" if layout.replicas > 1 else "")
            + f" = {layout.shards}; "
            f"nearest {nearest(e, divisors(layout.shards))}",
        )

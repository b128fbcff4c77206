"""One plan in words: memory of every stage, the step by parts, MFU by convention, and the formula
behind each number."""

from collections.abc import Iterator

from pyparallel.planner.clusters import GIB
from pyparallel.planner.errors import in_microbatches
from pyparallel.planner.flops import CONVENTIONS
from pyparallel.planner.kernels import running
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.memory import CONTEXT_BYTES, MARGIN, state_bytes_of
from pyparallel.planner.report import Plan

__all__ = ["describe", "formulas", "gib", "memory_table"]


def gib(value: float) -> str:
    """ "12.3 GiB"."""
    return f"{value / GIB:.1f} GiB"


def describe(plan: Plan) -> Iterator[str]:
    """One plan in words: memory of every stage, the step by parts, all conventions of MFU."""
    job, layout, memory, time = plan.job, plan.layout, plan.memory, plan.time
    m = layout.microbatches(job)
    yield f"{layout.label}; {in_microbatches(m)} of {layout.micro_batch} x {job.seq} tokens"
    yield ""
    yield from memory_table(plan)
    if memory.host_bytes:
        yield f"on the host {gib(memory.host_bytes)} per device, of {gib(memory.host_capacity)}"
    yield ""
    yield (
        f"a step takes {time.step:.3f} s: {plan.tokens_per_second:.0f} tokens/s, "
        f"{plan.tokens_per_second_per_gpu:.0f} per device"
    )
    parts = sorted(time.parts.items(), key=lambda item: -item[1])
    for name, seconds in parts:
        if seconds > 5e-4 * time.step:
            hidden = time.hidden.get(name.split()[0], 0.0) if name.endswith("exposed") else 0.0
            beside = f"  ({hidden:.3f} s more are hidden)" if hidden > 5e-4 * time.step else ""
            yield f"  {name:14} {seconds:9.3f} s  {100 * seconds / time.step:5.1f} %{beside}"
    yield ""
    yield "MFU by convention (the same step):"
    for name in CONVENTIONS:
        rate, mfu = plan.flops.tflops_per_gpu[name], plan.flops.mfu[name]
        what = CONVENTIONS[name].split(":")[0].split("(")[0].strip()
        yield f"  {name:9} {100 * mfu:5.1f} %  {rate:7.1f} TFLOP/s per device  {what}"
    if plan.notes:
        yield ""
        yield from (f"note: {note}" for note in plan.notes)


def formulas(plan: Plan) -> Iterator[str]:
    """Where each number comes from, with the numbers of the fullest device."""
    job, layout, cluster, stage = plan.job, plan.layout, plan.cluster, plan.memory.fullest
    each = state_bytes_of(job, layout)[0]
    local = stage.local_parameters
    names = ("weights", "gradients", "optimizer")
    whole = (job.bytes.weight, job.bytes.gradient, job.bytes.optimizer)
    yield f"rank {stage.rank} has {local / 1e9:.3f}B parameters of its {stage.layers} layers"
    copies = f" / replicas {layout.replicas}" if layout.replicas > 1 else ""
    for name, bytes_each, all_of_it in zip(names, each, whole, strict=True):
        over = "" if bytes_each == all_of_it else f" / (dp {layout.dp} x cp {layout.cp}{copies})"
        if layout.secondary and name == "weights":
            over += f" + {local / 1e9:.3f}B x {all_of_it:g} bytes / hpz {layout.secondary}"
        where = " (on the host)" if layout.offload != "none" and not stage.parts[name] else ""
        yield f"  {name}: {local / 1e9:.3f}B x {all_of_it:g} bytes{over}{where}"
    if layout.ep > 1:
        yield (
            f"  experts' states are shared by dp cp{copies} / ep = "
            f"{layout.shards // layout.ep} ranks"
        )
    per_pass = stage.activations / stage.in_flight if stage.in_flight else 0.0
    yield (
        f"  activations: {stage.in_flight:.2f} passes in flight, counted on the schedule "
        f"{layout.schedule}, x {per_pass / GIB:.3f} GiB a pass ({_form(job, layout)})"
    )
    yield (
        f"  logits: ({4 if job.loss == 'fused' else 12} + {job.bytes.activation:g}) bytes x "
        "s b / c x V / t, on the last rank; transient: a layer's MLP "
        "gradients, and one bf16 gradient of each matrix's shape"
    )
    yield (
        f"  margin: {100 * MARGIN:g} % for the allocator's fragments, and "
        f"{CONTEXT_BYTES / GIB:g} GiB that a process has before its first tensor"
    )
    gpu = cluster.gpu
    yield (
        f"GEMM: flops / ({gpu.peak(job.bytes.compute) / 1e12:g} TFLOP/s x "
        f"{gpu.share(job.bytes.compute):g} x waves), no less than bytes / "
        f"{gpu.memory_rate / 1e9:.0f} GB/s; all kernels x {running(layout.devices):.3f} in a job "
        f"of {layout.devices} devices"
    )
    yield (
        f"collectives: alpha-beta, {cluster.intra.rate / 1e9:.0f} GB/s and "
        f"{cluster.intra.latency_us:g} us a step inside a node, {cluster.inter.rate / 1e9:.0f} "
        f"GB/s and {cluster.inter.latency_us:g} us between"
    )
    sent = ", ".join(f"{axis} {v / 1e9:.3g} GB" for axis, v in plan.time.volume.items() if v)
    yield f"sent by one device in a step: {sent or 'nothing'}"


def _form(job: Job, layout: Layout) -> str:
    """The formula of a layer's activations, for the usual cases."""
    if layout.recompute == "full":
        return "2 s b h per layer" + (" / t" if layout.sequence_parallel else "")
    if job.dropout and job.attention == "unfused":
        core = "" if layout.recompute == "selective" else " + 5 a s / h"
        if layout.sequence_parallel:
            return f"s b h (34{core}) / t per layer"
        return f"s b h (10 + 24 / t{core.replace('/ h', '/ (h t)')}) per layer"
    return "(s b / c) [h (8 + 4 + 4 k / a) + f (6 or 4)] bytes per layer, over t"


def memory_table(plan: Plan) -> Iterator[str]:
    """GiB of every pipeline rank by part; equal neighbours in one line."""
    stages = plan.memory.stages
    names = [n for n in stages[0].parts if any(s.parts[n] > 0.005 * GIB for s in stages)]
    yield f"memory per device, GiB of {plan.memory.capacity / GIB:.4g}:"
    yield "  pp rank  layers  " + "  ".join(f"{n:>11}" for n in names) + "  " + f"{'total':>7}"
    shown = list(stages) if len(stages) <= 8 else [*stages[:4], *stages[-3:]]
    for before, stage in zip([None, *shown], shown, strict=False):
        if before is not None and stage.rank != before.rank + 1:
            yield f"  ...{stage.rank - before.rank - 1} more between"
        cells = "  ".join(f"{stage.parts[n] / GIB:11.2f}" for n in names)
        full = " full" if stage.total > plan.memory.capacity else ""
        yield f"  {stage.rank:7}  {stage.layers:6}  {cells}  {stage.total / GIB:7.2f}{full}"

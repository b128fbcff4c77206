"""Bytes per device: what ZeRO leaves of the states, activations in flight, and what comes beside.

States: per local number, weight + gradient + optimizer bytes of the precision, each divided by the
ranks that share it (arXiv:1910.02054; Megatron's distributed optimizer is zero=1).
"""

from collections.abc import Callable

from pyparallel.planner.activations import (
    layer_activations,
    layer_transient,
    local_tokens,
    logits_bytes,
    weight_gradients,
)
from pyparallel.planner.clusters import GIB, ClusterSpec
from pyparallel.planner.flight import closed_form, in_flight
from pyparallel.planner.layout import Job, Layout, Precision
from pyparallel.planner.report import MemoryReport, StageMemory
from pyparallel.planner.stages import (
    Local,
    StageLayers,
    held_stages,
    local_parameters,
    stages_of,
)

__all__ = [
    "CONTEXT_BYTES",
    "MARGIN",
    "end_activations",
    "gathered",
    "memory_report",
    "state_bytes",
    "state_bytes_of",
]

# Of what is allocated, what PyTorch's caching allocator holds beyond it; and what a process has
# before its first tensor (context, libraries' workspaces, NCCL's buffers). Assumed.
MARGIN = 0.04
CONTEXT_BYTES = 1.5 * GIB


def state_bytes(
    precision: Precision, zero: int, ranks: float, secondary: float = 0
) -> tuple[float, float, float]:
    """Bytes of weight, gradient and optimizer per local number, `ranks` sharing what ZeRO shards,
    `secondary` of them the weights' second copy.

    With float32 gradients: 18; zero 1: 6 + 12/d; 2: 2 + 16/d; 3: 18/d (+ 2/secondary).
    """
    weight = precision.weight / (ranks if zero >= 3 else 1)
    weight += precision.weight / secondary if secondary else 0.0
    gradient = precision.gradient / (ranks if zero >= 2 else 1)
    return weight, gradient, precision.optimizer / (ranks if zero >= 1 else 1)


def state_bytes_of(job: Job, layout: Layout) -> tuple[tuple[float, float, float], ...]:
    """The same of a layout: of the dense numbers, and of the experts', which fewer ranks share."""
    return tuple(
        state_bytes(
            job.bytes,
            layout.zero,
            max(layout.shards / ep, 1),
            max(layout.secondary / ep, 1) if layout.secondary else 0,
        )
        for ep in (1, layout.ep)
    )


def memory_report(
    job: Job, cluster: ClusterSpec, layout: Layout, *, exact: bool = True
) -> MemoryReport:
    """Memory of every pipeline rank.

    Args:
        exact: activations in flight from the schedule object; False: from its closed form where
            there is one (the search, which then works the best ones out exactly).
    """
    stages = stages_of(job.model, layout)
    local = local_parameters(job.model, layout, stages)
    held = held_stages(layout.schedule, layout.pp, layout.chunks)
    activations = _activations_in_flight(job, layout, stages, exact)
    made, host = [], 0.0
    for rank, (numbers, stage_numbers) in enumerate(zip(local, held, strict=True)):
        own = [stages[s] for s in stage_numbers]
        weights, gradients, optimizer, on_host = _states(job, layout, numbers)
        host = max(host, on_host)
        kept, flight = activations[rank]
        transient = _of_kinds(job, layout, own, layer_transient)
        logits = logits_bytes(job, layout) if any(s.head for s in own) else 0.0
        # The logits are gone before the first layer's backward begins: the larger one counts.
        if logits > transient:
            transient = 0.0
        else:
            logits = 0.0
        transient += _of_kinds(job, layout, own, weight_gradients)
        layers = sum(len(s.layers) for s in own)
        ends = any(s.embedding or s.head for s in own)
        buffers = gathered(job, layout, layers, numbers, ends)
        allocated = weights + gradients + optimizer + kept + logits + buffers + transient
        made.append(
            StageMemory(
                rank=rank,
                layers=layers,
                local_parameters=numbers.total,
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                activations=kept,
                in_flight=flight,
                logits=logits,
                buffers=buffers,
                transient=transient,
                margin=MARGIN * allocated + CONTEXT_BYTES,
            )
        )
    return MemoryReport(tuple(made), cluster.capacity, host, cluster.host_gib * GIB)


def _states(job: Job, layout: Layout, local: Local) -> tuple[float, float, float, float]:
    """Weights, gradients, optimizer on the device, and what is on the host."""
    totals = [0.0, 0.0, 0.0]
    for count, each in zip(local, state_bytes_of(job, layout), strict=True):
        for i, size in enumerate(each):
            totals[i] += count * size
    weights, gradients, optimizer = totals
    if layout.offload == "none":
        return weights, gradients, optimizer, 0.0
    if layout.offload == "optimizer":
        return weights, gradients, 0.0, optimizer
    return 0.0, gradients, 0.0, optimizer + weights


def _activations_in_flight(
    job: Job, layout: Layout, stages: tuple[StageLayers, ...], exact: bool
) -> list[tuple[float, float]]:
    """Per pipeline rank, bytes kept at the peak, and in how many whole passes."""
    per_kind = {
        moe: layer_activations(job, layout, job.model.layers - 1 if moe else 0)
        for moe in {job.model.is_moe(layer) for layer in (0, job.model.layers - 1)}
    }
    per_stage = [stage_activations(job, layout, stage, per_kind) for stage in stages]
    held = held_stages(layout.schedule, layout.pp, layout.chunks)
    m = layout.microbatches(job)
    passes = None if exact else closed_form(layout, m)
    found = []
    for rank, own in enumerate(held):
        whole = sum(per_stage[s] for s in own)
        if passes is not None:
            found.append((passes[rank] * whole, passes[rank]))
            continue
        combinations = in_flight(layout, m)[rank]
        peak = max(
            sum(n * per_stage[s] for n, s in zip(counts, own, strict=True))
            for counts in combinations
        )
        mean = max(sum(counts) for counts in combinations) / len(own)
        found.append((peak, peak / whole if whole else mean))
    return found


def stage_activations(
    job: Job, layout: Layout, stage: StageLayers, per_kind: dict[bool, float]
) -> float:
    """Bytes that one microbatch keeps in a stage."""
    model = job.model
    total = sum(per_kind[model.is_moe(layer)] for layer in stage.layers)
    if layout.recompute == "full" and layout.recompute_layers is not None:
        plain = layout.with_(recompute="none")
        again = min(layout.recompute_layers, len(stage.layers))
        total = sum(
            layer_activations(job, layout if i < again else plain, layer)
            for i, layer in enumerate(stage.layers)
        )
    embedding, head = end_activations(job, layout)
    return total + stage.embedding * embedding + stage.head * head


def end_activations(job: Job, layout: Layout) -> tuple[float, float]:
    """Bytes of a microbatch that the embedding keeps (its dropout's mask) and the head (inputs of
    the last norm and of the output layer)."""
    whole = local_tokens(job, layout) / (layout.tp if layout.sequence_parallel else 1)
    units = job.model.hidden * whole
    return job.dropout * units, 2 * job.bytes.activation * units


def _of_kinds(
    job: Job, layout: Layout, own: list[StageLayers], count: Callable[[Job, Layout, int], float]
) -> float:
    """The largest over the kinds of layers (dense, with experts) that a rank has."""
    kinds = {job.model.is_moe(layer) for s in own for layer in s.layers}
    return max(
        (count(job, layout, job.model.layers - 1 if moe else 0) for moe in kinds), default=0.0
    )


def gathered(job: Job, layout: Layout, layers: int, local: Local, ends: bool) -> float:
    """Buffers: gathered rows of sequence parallelism, messages of the pipeline, ring attention's
    blocks, ZeRO-3's gathered layers, the window of offloaded states."""
    model, e = job.model, job.bytes.activation
    tokens = local_tokens(job, layout)
    total = 0.0
    if layout.tp > 1 and layout.sequence_parallel:
        total += e * model.hidden * tokens
    if layout.pp > 1:
        whole = tokens / (layout.tp if layout.sequence_parallel else 1)
        total += 2 * e * model.hidden * whole
    if layout.cp > 1:
        keys = max(model.kv_heads / layout.tp, 1.0) * model.head_dim
        total += 2 * 2 * e * keys * tokens
    if (layout.zero >= 3 and layout.shards > 1) or layout.offload == "all":
        # Weights of the layer in use and of the next one, gradients of one; an end's table whole.
        table = model.padded_vocab(layout.tp) * model.hidden / layout.tp if ends else 0.0
        each = max(local.total - table, 0.0) / max(layers, 1)
        total += max(2 * each, each + table) * job.bytes.weight
        total += max(each, table) * job.bytes.reduced
    if layout.offload != "none":
        total += 2 * min(5e8, local.total) * job.bytes.reduced
    return total

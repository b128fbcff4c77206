"""Seconds of a step: passes of every stage, the pipeline by the simulator, then what comes once.

    step = pipeline(stage times) + exposed gradient traffic + optimizer

The rank whose passes take longest decides the slope; the bubble is what the simulated step has
beyond that rank's own passes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pyparallel.planner.activations import local_tokens
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.collectives import Group, group_of
from pyparallel.planner.flight import made_schedule
from pyparallel.planner.kernels import Kernels
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.passes import Pass, Passes, Three
from pyparallel.planner.report import TimeReport
from pyparallel.planner.stages import Local, StageLayers, held_stages, local_parameters, stages_of
from pyparallel.schedule import Costs, simulate

__all__ = [
    "closed_form_pipeline",
    "data_parallel",
    "message_seconds",
    "optimizer_seconds",
    "pipeline_costs",
    "time_report",
]

_AXES = ("tp", "cp", "ep", "pp", "dp")
LARGEST = 8_000  # actions that are simulated one by one; beyond, whole rounds are added
# The bubble beside that of 1F1B with as many chunks, for equal passes (docs/schedules.md).
RAMPS = {"zb-h1": 1 / 3, "zb-h2": 0.0, "zb-v": 0.0, "v-half": 1.0, "v-min": 4 / 3, "dualpipev": 0.5}
# Bytes of an Adam step per number of a shard: reads gradient, master weight and two moments in
# float32, writes the three, and the weight in 16 bits. The norm reads the gradient once more, and
# clearing writes it.
ADAM_BYTES = 4 * 4 + 3 * 4 + 2
GRADIENT_PASSES = 2


def time_report(
    job: Job,
    cluster: ClusterSpec,
    layout: Layout,
    *,
    exact: bool = True,
    kernels: Kernels | None = None,
) -> TimeReport:
    """Time of a step of a layout that `rules.py` accepts.

    Args:
        exact: the pipeline by the simulator; False: by its closed form (the search).
        kernels: of this device, precision and number of devices, to remember GEMM times.
    """
    kernels = kernels or Kernels(cluster.gpu, job.bytes, layout.devices)
    stages = stages_of(job.model, layout)
    costs = _stage_costs(job, cluster, layout, kernels, stages)
    m = layout.microbatches(job)
    held = held_stages(layout.schedule, layout.pp, layout.chunks)
    busy = [sum(costs[s].seconds for s in own) for own in held]
    slowest = max(range(len(busy)), key=busy.__getitem__)
    hop = message_seconds(job, cluster, layout)
    if layout.pp == 1:
        pipeline = m * busy[0]
    elif exact:
        # Rounds that are added, not simulated, are all alike: not so the last where m is uneven.
        pipeline = max(_simulated(layout, m, costs, hop), m * max(busy))
    else:
        pipeline = closed_form_pipeline(layout, m, max(busy), sum(busy), hop)
    own = [costs[s] for s in held[slowest]]
    total = Pass()
    for cost in own:
        for part in (cost.three.forward, cost.three.inputs, cost.three.weights):
            total.add(part, m)
    local = local_parameters(job.model, layout, stages)
    numbers = max(local, key=lambda n: n.total)
    forward, backward = sum(c.forward for c in own), sum(c.backward for c in own)
    dp = data_parallel(job, cluster, layout, forward, backward, numbers, m)
    pp_exposed, bubble = _bubble(layout, m, busy, slowest, pipeline, hop)
    optimizer = optimizer_seconds(job, cluster, layout, kernels, numbers)
    exposed = {**total.exposed, "pp": pp_exposed, "dp": dp.exposed}
    hidden = {**total.hidden, "pp": 0.0, "dp": dp.hidden}
    crossings = 2 * m * layout.chunks if layout.pp > 1 else 0
    volume = {
        **total.volume,
        "pp": crossings * _message_bytes(job, layout),
        "dp": dp.volume,
    }
    return TimeReport(
        step=pipeline + dp.exposed + optimizer,
        gemm=total.gemm,
        attention=total.attention,
        elementwise=total.elementwise,
        exposed={axis: exposed[axis] for axis in _AXES},
        hidden={axis: hidden[axis] for axis in _AXES},
        bubble=bubble,
        optimizer=optimizer,
        stage_forward=tuple(c.forward for c in costs),
        stage_backward=tuple(c.backward for c in costs),
        volume={axis: volume[axis] for axis in _AXES},
    )


class _StageCost:
    """Seconds of one microbatch through a stage."""

    def __init__(self, three: Three) -> None:
        self.three = three
        self.forward = three.forward.seconds
        self.inputs = three.inputs.seconds
        self.weights = three.weights.seconds

    @property
    def backward(self) -> float:
        return self.inputs + self.weights

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def _stage_costs(
    job: Job,
    cluster: ClusterSpec,
    layout: Layout,
    kernels: Kernels,
    stages: Sequence[StageLayers],
) -> list[_StageCost]:
    passes = Passes(job, cluster, layout, kernels)
    plain = None
    if layout.recompute == "full" and layout.recompute_layers is not None:
        plain = Passes(job, cluster, layout.with_(recompute="none"), kernels)
    made: dict[tuple[bool, bool], Three] = {}

    def layer(number: int, again: bool) -> Three:
        key = (job.model.is_moe(number), again)
        if key not in made:
            made[key] = (passes if again or plain is None else plain).layer(number)
        return made[key]

    costs = []
    for stage in stages:
        three = Three()
        for i, number in enumerate(stage.layers):
            again = layout.recompute_layers is None or i < layout.recompute_layers
            _add(three, layer(number, again))
        if stage.embedding:
            _add(three, passes.embedding())
        if stage.head:
            _add(three, passes.head())
        costs.append(_StageCost(three))
    return costs


def _add(total: Three, more: Three) -> None:
    total.forward.add(more.forward)
    total.inputs.add(more.inputs)
    total.weights.add(more.weights)


def _message_bytes(job: Job, layout: Layout) -> float:
    whole = local_tokens(job, layout) / (layout.tp if layout.sequence_parallel else 1)
    return job.bytes.activation * job.model.hidden * whole


def message_seconds(job: Job, cluster: ClusterSpec, layout: Layout) -> float:
    if layout.pp == 1:
        return 0.0
    return group_of(layout, cluster, "pp").hop(_message_bytes(job, layout))


def pipeline_costs(job: Job, cluster: ClusterSpec, layout: Layout) -> Costs:
    """What the layout's actions take, for pyparallel.schedule and pyparallel.viz, in seconds."""
    stages = stages_of(job.model, layout)
    kernels = Kernels(cluster.gpu, job.bytes, layout.devices)
    costs = _stage_costs(job, cluster, layout, kernels, stages)
    return _costs(layout, costs, message_seconds(job, cluster, layout))


def _costs(layout: Layout, costs: Sequence[_StageCost], hop: float) -> Costs:
    """Messages that are not overlapped: of one stage per rank both ends meet and wait. With more a
    rank sends and receives in one batch, so that each message takes half its time of either end;
    in an order of its own, which meeting one by one would make wait for the other ranks' passes."""
    batched = not layout.overlap_pp and layout.chunks > 1
    return Costs(
        forward=tuple(c.forward for c in costs),
        backward_input=tuple(c.inputs for c in costs),
        backward_weight=tuple(c.weights for c in costs),
        latency=hop / 2 if batched else hop,
        issue=hop / 2 if batched else 0.0,
        overlapped=layout.overlap_pp or batched,
    )


def _simulated(layout: Layout, m: int, costs: Sequence[_StageCost], hop: float) -> float:
    """Step time by the simulator. Where there are too many actions, the time of whole rounds in
    the steady state is added: a schedule's order repeats every round of pp microbatches (of
    interleaved rounds that are not full, within some 0.1 %)."""
    times = _costs(layout, costs, hop)

    def step(microbatches: int) -> float:
        return float(simulate(made_schedule(layout, microbatches), times).step_time)

    size = 2 * layout.pp * layout.chunks
    round_size = layout.group_size or layout.pp
    short = 2 * round_size + m % round_size
    if m * size <= LARGEST or short + round_size >= m:
        return step(m)
    first, second = step(short), step(short + round_size)
    return first + (second - first) / round_size * (m - short)


def closed_form_pipeline(layout: Layout, m: int, slowest: float, total: float, hop: float) -> float:
    """Seconds of the pipeline: m passes of the slowest rank, one pass of every other for the ramp
    (divided by the chunks), and the ramp's messages; without overlap every microbatch's."""
    ramp = (total - slowest) / layout.chunks
    ramp *= RAMPS.get(layout.schedule, 1.0)
    messages = 2 * (layout.pp - 1) * hop
    if not layout.overlap_pp:
        messages += 2 * m * layout.chunks * hop
    return m * slowest + ramp + messages


def _bubble(
    layout: Layout, m: int, busy: Sequence[float], slowest: int, pipeline: float, hop: float
) -> tuple[float, float]:
    """What the pipeline takes beyond its slowest rank: messages that nothing hides, and idling."""
    if layout.pp == 1:
        return 0.0, 0.0
    beyond = max(0.0, pipeline - m * busy[slowest])
    messages = 2 * (layout.pp - 1) * hop
    if not layout.overlap_pp:
        messages += 2 * m * layout.chunks * hop
    exposed = min(beyond, messages)
    return exposed, beyond - exposed


class Traffic(NamedTuple):
    """Of gradients in a step: seconds exposed and hidden, bytes that a device sends."""

    exposed: float
    hidden: float
    volume: float


def data_parallel(
    job: Job,
    cluster: ClusterSpec,
    layout: Layout,
    forward: float,
    backward: float,
    local: Local,
    m: int,
) -> Traffic:
    """Gradients (and, sharded, the weights that come back) of a step.

    Beside the passes they hide behind the last microbatch's backward (its first layers' gradients
    come last: one part in eight has nothing to hide behind) and the first one's forward. ZeRO-2
    and 3 have no room for whole gradients, which are scattered once per microbatch; ZeRO-3 gathers
    the weights twice per microbatch, with a second copy (ZeRO++, arXiv:2306.10209, section 3.2) the
    second time from that. With replicas each shard's gradients are reduced between them
    once (MiCS, arXiv:2205.00119, section 3.4).
    """
    if layout.data == 1:
        return Traffic(0.0, 0.0, 0.0)
    parts: list[_Part] = []
    kinds = (local.dense, "", layout.shards), (local.experts, "expert ", layout.shards // layout.ep)
    for numbers, kind, shards in kinds:
        if not numbers:
            continue
        group = group_of(layout, cluster, f"{kind}shards")
        again = group_of(layout, cluster, f"{kind}secondary") if layout.secondary else group
        parts += _of_shards(job, layout, numbers, group, again, forward, backward, m)
        if layout.replicas > 1:
            copies = group_of(layout, cluster, "replicas")
            own = numbers * job.bytes.reduced / max(shards, 1)
            parts.append(_Part(copies.reduce(own), backward, 2 * copies.sent(own), copies.sm_share))
    sent = sum(part.sent for part in parts)
    if not layout.overlap_dp:
        return Traffic(sum(part.seconds for part in parts), 0.0, sent)
    exposed = hidden = 0.0
    for part in parts:
        behind = min(part.seconds * 7 / 8, part.compute)
        hidden += behind
        exposed += part.seconds - behind + part.sm_share * behind
    return Traffic(exposed, hidden, sent)


class _Part(NamedTuple):
    """One collective, or as many as there are microbatches: its seconds, those of compute that it
    may hide behind, the bytes a device sends, and the share of a device that it takes."""

    seconds: float
    compute: float
    sent: float
    sm_share: float


def _of_shards(
    job: Job,
    layout: Layout,
    numbers: float,
    group: Group,
    again: Group,
    forward: float,
    backward: float,
    m: int,
) -> Iterator[_Part]:
    """What the ranks that share a shard's parameters send each other; `again`: those from whom a
    backward gathers the weights."""
    gradient, weight = numbers * job.bytes.reduced, numbers * job.bytes.weight

    def gathers(among: Group, size: float, times: int, compute: float) -> _Part:
        seconds, sent = times * among.gather(size), times * among.sent(size)
        return _Part(seconds, times * compute, sent, among.sm_share)

    if layout.zero == 0:
        yield _Part(group.reduce(gradient), backward, 2 * group.sent(gradient), group.sm_share)
        return
    yield gathers(group, gradient, m if layout.zero >= 2 else 1, backward)
    yield gathers(group, weight, m if layout.zero >= 3 else 1, forward)
    if layout.zero >= 3:
        yield gathers(again, weight, m, backward)


def optimizer_seconds(
    job: Job, cluster: ClusterSpec, layout: Layout, kernels: Kernels, local: Local
) -> float:
    """Adam over the shard; the gradient's norm and its clearing; with offload, gradients go to the
    host and weights come back, and the host's memory is what the update waits for."""
    sharded = layout.zero >= 1
    own = local.dense / (layout.shards if sharded else 1)
    own += local.experts / (max(layout.shards // layout.ep, 1) if sharded else 1)
    clearing = GRADIENT_PASSES * local.total * job.bytes.gradient
    if layout.offload == "none":
        return kernels.move(own * ADAM_BYTES + clearing, 4)
    rate = cluster.host_gbps * 1e9
    traffic = own * (job.bytes.reduced + job.bytes.weight) / rate
    return traffic + own * ADAM_BYTES / rate + kernels.move(clearing, 2)

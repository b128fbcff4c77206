"""Peak memory and step time of many layouts of one job, in some ten microseconds each.

The same formulas as memory.py and cost.py with closed forms for the pipeline: what layouts have in
common is worked out once. tests/planner/test_search.py holds both equal.
"""

from typing import NamedTuple

from pyparallel.planner.activations import (
    layer_activations,
    layer_transient,
    logits_bytes,
    weight_gradients,
)
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.cost import (
    closed_form_pipeline,
    data_parallel,
    message_seconds,
    optimizer_seconds,
)
from pyparallel.planner.flight import closed_form, in_flight
from pyparallel.planner.kernels import Kernels
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.memory import (
    CONTEXT_BYTES,
    MARGIN,
    end_activations,
    gathered,
    state_bytes_of,
)
from pyparallel.planner.passes import Passes, Three
from pyparallel.planner.stages import (
    Local,
    end_parameters,
    held_stages,
    layer_parameters,
    stages_of,
)

__all__ = ["Estimate", "Estimator"]


class Estimate(NamedTuple):
    """A layout's fullest device and its step."""

    layout: Layout
    peak: float
    host: float
    step: float


class _RankShape(NamedTuple):
    """What some pipeline ranks hold: dense layers, layers with experts, and the ends. `first` is
    the first of them, which keeps the most passes; `ranks` says how many they are."""

    dense: int
    moe: int
    embedding: bool
    head: bool
    first: int = 0
    ranks: int = 1


class _Sizes(NamedTuple):
    """Bytes of a microbatch on a device, by kind of layer (plain, with experts)."""

    kept: tuple[float, float]
    transient: tuple[float, float]
    weight_gradients: tuple[float, float]
    logits: float
    embedding: float
    head: float


class _Times(NamedTuple):
    """Seconds of a microbatch (forward, backward), by kind of layer, and of the ends."""

    layer: tuple[tuple[float, float], tuple[float, float]]
    embedding: tuple[float, float]
    head: tuple[float, float]


class Estimator:
    """Estimates of one job on one cluster. Layouts must be ones that `rules.py` accepts, with
    layers spread evenly."""

    def __init__(self, job: Job, cluster: ClusterSpec) -> None:
        self.job, self.cluster = job, cluster
        self._kernels: dict[int, Kernels] = {}
        self._shapes: dict[tuple[str, int, int], tuple[_RankShape, ...]] = {}
        self._numbers: dict[tuple[int, int], tuple[Local, Local, float, float]] = {}
        self._sizes: dict[tuple[object, ...], _Sizes] = {}
        self._times: dict[tuple[object, ...], _Times] = {}
        kinds = (not job.model.is_moe(0), job.model.moe_layers > 0)
        self._kinds = [k for k, there in enumerate(kinds) if there]

    def estimate(self, layout: Layout) -> Estimate:
        """Memory and time of a layout."""
        peak, host = self.memory(layout)
        return Estimate(layout, peak, host, self.step(layout))

    def kernels(self, layout: Layout) -> Kernels:
        """Kernels of a job of as many devices."""
        if layout.devices not in self._kernels:
            made = Kernels(self.cluster.gpu, self.job.bytes, layout.devices)
            self._kernels[layout.devices] = made
        return self._kernels[layout.devices]

    def memory(self, layout: Layout) -> tuple[float, float]:
        """Bytes of the fullest device, and on its host."""
        job = self.job
        sizes = self._activations(layout)
        flight = self._flight(layout)
        own, experts = state_bytes_of(job, layout)
        on_device = (
            0.0 if layout.offload == "all" else 1.0,
            1.0,
            1.0 if layout.offload == "none" else 0.0,
        )
        each_dense = sum(b * f for b, f in zip(own, on_device, strict=True))
        each_expert = sum(b * f for b, f in zip(experts, on_device, strict=True))
        most = host = 0.0
        for shape in self._rank_shapes(layout):
            numbers = self._numbers_of(layout, shape)
            kept = shape.dense * sizes.kept[0] + shape.moe * sizes.kept[1]
            kept += shape.embedding * sizes.embedding + shape.head * sizes.head
            there = [k for k in self._kinds if (shape.dense, shape.moe)[k]]
            transient = max((sizes.transient[k] for k in there), default=0.0)
            once = max((sizes.weight_gradients[k] for k in there), default=0.0)
            ends = shape.embedding or shape.head
            total = (
                numbers.dense * each_dense
                + numbers.experts * each_expert
                + flight[shape.first] * kept
                + max(transient, shape.head * sizes.logits)
                + once
                + gathered(job, layout, shape.dense + shape.moe, numbers, ends)
            )
            most = max(most, total)
            if layout.offload != "none":
                host = max(
                    host,
                    numbers.dense * (sum(own) - each_dense)
                    + numbers.experts * (sum(experts) - each_expert),
                )
        return most * (1 + MARGIN) + CONTEXT_BYTES, host

    def _flight(self, layout: Layout) -> tuple[float, ...]:
        """Passes in flight by rank. Where only the schedule object says it: the most of any rank,
        its chunks taken as equal, so that the estimate is never too low."""
        m = layout.microbatches(self.job)
        flight = closed_form(layout, m)
        if flight is None:
            counts = (max(map(sum, one)) / layout.chunks for one in in_flight(layout, m))
            flight = (max(counts),) * layout.pp
        return flight

    def step(self, layout: Layout) -> float:
        """Seconds of a step."""
        job = self.job
        times = self._passes(layout)
        total, slowest, largest = 0.0, (0.0, 0.0), Local(0.0, 0.0)
        for shape in self._rank_shapes(layout):
            forward, backward = (
                shape.dense * times.layer[0][i]
                + shape.moe * times.layer[1][i]
                + shape.embedding * times.embedding[i]
                + shape.head * times.head[i]
                for i in (0, 1)
            )
            total += shape.ranks * (forward + backward)
            if forward + backward > sum(slowest):
                slowest = (forward, backward)
            numbers = self._numbers_of(layout, shape)
            largest = max(largest, numbers, key=lambda n: n.total)
        m = layout.microbatches(job)
        if layout.pp == 1:
            pipeline = m * total
        else:
            hop = message_seconds(job, self.cluster, layout)
            pipeline = closed_form_pipeline(layout, m, sum(slowest), total, hop)
        traffic = data_parallel(job, self.cluster, layout, *slowest, largest, m)
        return (
            pipeline
            + traffic.exposed
            + optimizer_seconds(job, self.cluster, layout, self.kernels(layout), largest)
        )

    def _rank_shapes(self, layout: Layout) -> tuple[_RankShape, ...]:
        key = (layout.schedule, layout.pp, layout.chunks)
        if key not in self._shapes:
            stages = stages_of(self.job.model, layout)
            ranks: dict[_RankShape, list[int]] = {}
            for rank, held in enumerate(held_stages(*key)):
                own = [stages[s] for s in held]
                layers = [n for s in own for n in s.layers]
                moe = sum(map(self.job.model.is_moe, layers))
                shape = _RankShape(
                    len(layers) - moe,
                    moe,
                    any(s.embedding for s in own),
                    any(s.head for s in own),
                )
                ranks.setdefault(shape, []).append(rank)
            self._shapes[key] = tuple(
                shape._replace(first=same[0], ranks=len(same)) for shape, same in ranks.items()
            )
        return self._shapes[key]

    def _numbers_of(self, layout: Layout, shape: _RankShape) -> Local:
        """Parameters on a device of such a rank; a tied table is not there twice."""
        dense, moe, embedding, head = self._local(layout)
        if shape.head and shape.embedding and self.job.model.tied:
            head = float(self.job.model.norm_width * self.job.model.hidden)
        return Local(
            shape.dense * dense.dense
            + shape.moe * moe.dense
            + shape.embedding * embedding
            + shape.head * head,
            shape.dense * dense.experts + shape.moe * moe.experts,
        )

    def _local(self, layout: Layout) -> tuple[Local, Local, float, float]:
        key = (layout.tp, layout.ep)
        if key not in self._numbers:
            model = self.job.model
            nothing = Local(0.0, 0.0)
            dense = layer_parameters(model, layout, 0) if 0 in self._kinds else nothing
            moe = nothing
            if 1 in self._kinds:
                moe = layer_parameters(model, layout, model.layers - 1)
            self._numbers[key] = (dense, moe, *end_parameters(model, layout))
        return self._numbers[key]

    def _activations(self, layout: Layout) -> _Sizes:
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute,
               layout.sequence_parallel)  # fmt: skip
        if key not in self._sizes:
            job, last = self.job, self.job.model.layers - 1

            def by_kind(count: object) -> tuple[float, float]:
                assert callable(count)
                one, two = (
                    count(job, layout, number) if kind in self._kinds else 0.0
                    for kind, number in ((0, 0), (1, last))
                )
                return one, two

            self._sizes[key] = _Sizes(
                by_kind(layer_activations),
                by_kind(layer_transient),
                by_kind(weight_gradients),
                logits_bytes(job, layout),
                *end_activations(job, layout),
            )
        return self._sizes[key]

    def _passes(self, layout: Layout) -> _Times:
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.recompute,
               layout.sequence_parallel, layout.cp_kind, layout.overlap_tp,
               layout.overlap_backward, layout.devices)  # fmt: skip
        if key not in self._times:
            passes = Passes(self.job, self.cluster, layout, self.kernels(layout))
            last = self.job.model.layers - 1
            none = (0.0, 0.0)
            dense = _both(passes.layer(0)) if 0 in self._kinds else none
            moe = _both(passes.layer(last)) if 1 in self._kinds else none
            self._times[key] = _Times((dense, moe), _both(passes.embedding()), _both(passes.head()))
        return self._times[key]


def _both(three: Three) -> tuple[float, float]:
    return three.forward.seconds, three.inputs.seconds + three.weights.seconds

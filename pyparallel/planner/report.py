"""What a plan says: memory by stage and part, time by part, and what was rejected, as data.

Everything has `to_json`; pictures, tables and emitters read nothing else.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pyparallel.planner.clusters import GIB, ClusterSpec
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.notes import Note

__all__ = ["FlopsReport", "MemoryReport", "Plan", "Rejected", "StageMemory", "TimeReport"]


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one device of a pipeline rank.

    Attributes:
        rank: of the pipeline, from 0.
        layers: how many it holds, over all its chunks.
        local_parameters: numbers that the device's stages have, before ZeRO.
        weights, gradients, optimizer: after ZeRO and offload.
        activations: of all microbatches in flight at the peak.
        in_flight: microbatches kept at the peak, in whole passes of the rank's layers.
        logits: of the last stage.
        buffers: communication, gathered weights, offload windows.
        transient: what lives inside one layer's backward.
        margin: the allocator's fragmentation.
    """

    rank: int
    layers: int
    local_parameters: float
    weights: float
    gradients: float
    optimizer: float
    activations: float
    in_flight: float
    logits: float
    buffers: float
    transient: float
    margin: float

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part, in the order of a stacked bar."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers",
                 "transient", "margin")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """Without the margin: what an allocator's own peak counter shows."""
        return self.total - self.margin


@dataclass(frozen=True)
class MemoryReport:
    """Memory of every pipeline rank against a device's capacity; host bytes with offload."""

    stages: tuple[StageMemory, ...]
    capacity: float
    host_bytes: float = 0.0
    host_capacity: float = 0.0

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak(self) -> float:
        return self.fullest.total

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity and self.host_bytes <= self.host_capacity

    def to_json(self) -> dict[str, Any]:
        return {
            "capacity_bytes": self.capacity,
            "peak_bytes": self.peak,
            "peak_gib": self.peak / GIB,
            "fits": self.fits,
            "fullest_rank": self.fullest.rank,
            "host_bytes": self.host_bytes,
            "host_capacity_bytes": self.host_capacity,
            "stages": [
                {**asdict(s), "parts": s.parts, "total": s.total} for s in self.stages
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class TimeReport:
    """Seconds of a step, of the pipeline rank that decides it.

    The parts add up to `step`: compute (GEMMs, attention, passes over memory), exposed
    communication by dimension, the bubble, and what comes once per step.

    Attributes:
        step: seconds.
        gemm, attention, elementwise: compute of all microbatches of the slowest rank.
        exposed: by dimension ("tp", "cp", "ep", "pp", "dp"), what nothing hides.
        hidden: by dimension, what runs beside the passes.
        bubble: idle time of the pipeline, of that rank.
        optimizer: the update, with offload's traffic.
        stage_forward, stage_backward: seconds of one microbatch, by stage.
        volume: by dimension, bytes that one device sends in a step.
    """

    step: float
    gemm: float
    attention: float
    elementwise: float
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]
    bubble: float
    optimizer: float
    stage_forward: tuple[float, ...]
    stage_backward: tuple[float, ...]
    volume: Mapping[str, float]

    @property
    def compute(self) -> float:
        return self.gemm + self.attention + self.elementwise

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.step if self.step else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, in the order of a stacked bar; they add up to `step`."""
        return {
            "gemm": self.gemm,
            "attention": self.attention,
            "elementwise": self.elementwise,
            **{f"{name} exposed": value for name, value in self.exposed.items()},
            "bubble": self.bubble,
            "optimizer": self.optimizer,
        }

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        document.update(
            exposed=dict(self.exposed), hidden=dict(self.hidden), volume=dict(self.volume),
            compute=self.compute, bubble_share=self.bubble_share, parts=self.parts,
        )  # fmt: skip
        return document


@dataclass(frozen=True)
class FlopsReport:
    """FLOPs of a step over all devices, by convention, and what they say of a step time.

    Attributes:
        counts: by the name of a convention in flops.py, FLOPs of a step.
        tflops_per_gpu, mfu: by convention, at the plan's step time.
    """

    counts: Mapping[str, float]
    tflops_per_gpu: Mapping[str, float]
    mfu: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {key: dict(value) for key, value in vars(self).items()}


@dataclass(frozen=True)
class Plan:
    """One layout of a job on a cluster, worked out."""

    job: Job
    cluster: ClusterSpec
    layout: Layout
    memory: MemoryReport
    time: TimeReport
    flops: FlopsReport
    notes: tuple[Note, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.job.tokens / self.time.step

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.layout.devices

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job.to_json(),
            "cluster": self.cluster.to_json(),
            "layout": self.layout.to_json(),
            "memory": self.memory.to_json(),
            "time": self.time.to_json(),
            "flops": self.flops.to_json(),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot be used, and the reason that binds.

    Attributes:
        rule: "memory", "host memory", "time", or the name of a rule in rules.py.
        reason: with the numbers.
    """

    layout: Layout
    rule: str
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "layout": self.layout.to_json(),
            "rule": self.rule,
            "reason": self.reason,
            "numbers": dict(self.numbers),
        }

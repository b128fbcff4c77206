"""What is asked and what is chosen: a `Job` is what to train, a `Layout` is how to spread it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pyparallel.planner.errors import PlanError, named, shown
from pyparallel.planner.models import MOST_OTHERS, ModelSpec

__all__ = [
    "CP_KINDS",
    "LOSSES",
    "OFFLOADS",
    "PRECISIONS",
    "RECOMPUTES",
    "Job",
    "Layout",
    "Precision",
]

RECOMPUTES = ("none", "selective", "op", "full")
OFFLOADS = ("none", "optimizer", "all")
LOSSES = ("fused", "plain")
CP_KINDS = ("ring", "ulysses", "all-gather")


@dataclass(frozen=True)
class Precision:
    """Bytes of a parameter's parts.

    Attributes:
        compute: dtype of the GEMMs.
        weight, gradient: of the copies that the passes use.
        optimizer: of everything that distributed optimizers shard (master weights, two moments).
        activation: of a kept activation's element.
        reduced: of a gradient's element while it is reduced.
        gemm_input: of an activation's element that is kept only for a matrix's weight gradient.
    """

    name: str
    compute: str
    weight: float
    gradient: float
    optimizer: float
    activation: float
    reduced: float
    gemm_input: float = 2


# Sources: docs of Megatron-LM on its distributed optimizer (bf16, fp16, fp32); arXiv:1910.02054,
# section 3.1 (fp16-zero: 2 + 2 + 12). fp8 keeps weights in bf16,
# casts per microbatch, and keeps the inputs of its GEMMs in 8 bits.
PRECISIONS: Mapping[str, Precision] = {
    p.name: p
    for p in (
        Precision("bf16", "bf16", 2, 4, 12, 2, 4),
        Precision("bf16-grads", "bf16", 2, 2, 12, 2, 2),
        Precision("fp16", "fp16", 2, 4, 12, 2, 4),
        Precision("fp16-zero", "fp16", 2, 2, 12, 2, 2),
        Precision("fp16-megatron", "fp16", 2, 2, 16, 2, 2),
        Precision("fp8", "fp8", 2, 4, 12, 2, 4, 1),
        Precision("fp8-grads", "fp8", 2, 2, 12, 2, 2, 1),
        Precision("fp32", "fp32", 4, 4, 8, 4, 4, 4),
    )
}


@dataclass(frozen=True)
class Job:
    """What to train.

    Attributes:
        seq: tokens of a sequence.
        global_batch: sequences of a step.
        precision: a key of `PRECISIONS`.
        attention: "flash" (no score is kept), or "unfused" (scores are written and kept, as the
            Megatron of 2021 and 2022 did).
        dropout: masks of one byte are kept (GPT of that time); False for models without.
        loss: "fused" (Megatron's and compiled ones: logits in 16 bits, and once in float32), or
            "plain" (PyTorch's operations one by one: a float32 copy, its log-softmax and the
            gradient of that beside the logits).
    """

    model: ModelSpec
    seq: int
    global_batch: int
    precision: str = "bf16"
    attention: str = "flash"
    dropout: bool = False
    loss: str = "fused"

    def __post_init__(self) -> None:
        misfits = []
        for name in ("seq", "global_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                misfits.append(f"{name}={shown(value)}: 1 or more is expected")
            elif value > MOST_OTHERS:
                misfits.append(f"{name}={shown(value)}: at most {MOST_OTHERS} are expected")
        if self.precision not in PRECISIONS:
            misfits.append(f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}")
        if self.attention not in ("flash", "unfused"):
            misfits.append(f"attention={self.attention!r} is not one of flash, unfused")
        if self.loss not in LOSSES:
            misfits.append(f"loss={self.loss!r} is not one of {', '.join(LOSSES)}")
        if misfits:
            raise PlanError("job: " + "; ".join(misfits))

    @property
    def bytes(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.seq * self.global_batch

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "model": self.model.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Job":
        return cls(**{**document, "model": ModelSpec.from_json(document["model"])})


@dataclass(frozen=True)
class Layout:
    """How a job is spread over dp x cp x pp x tp devices.

    Ranks are numbered with tp fastest, then cp, dp, and pp outermost (Megatron's default order).

    Attributes:
        dp, tp, pp, cp: sizes; devices = dp tp pp cp. Context parallelism splits the sequence.
        ep: experts over this many of the dp x cp ranks; adds no devices.
        sequence_parallel: activations outside of the GEMMs are sharded over tp as well.
        micro_batch: sequences of a microbatch.
        zero: 0 none, 1 optimizer, 2 gradients, 3 weights sharded over dp x cp.
        replicas: hybrid sharding: what `zero` shards is sharded over dp cp / replicas ranks that
            lie next to each other, and copied `replicas` times.
        secondary: with zero 3, neighbours that together hold the weights once more from a forward
            to its backward, which gathers them there (ZeRO++'s hpZ); 0: nobody.
        schedule, chunks: a key of pyparallel.schedule.FAMILIES, and stages per rank.
        group_size: microbatches of a round of interleaved-1f1b; 0: pp.
        recompute: "none", "selective" (the attention core), "op" (every second matrix product and
            all between them; what torchtitan calls so) or "full" (whole layers).
        recompute_layers: with "full", layers of a stage that are recomputed; None: all.
        offload: "none", "optimizer" or "all" states on the host.
        cp_kind: how attention sees other ranks' tokens.
        layers_per_stage: layers of every stage (pp x chunks of them); None: even.
        overlap_dp: gradients (and ZeRO's weights) travel beside the passes.
        overlap_backward: in a column-parallel matrix's backward, its collectives run beside the
            other half (what Megatron's and our layers do).
        overlap_tp: collectives of tensor parallelism beside the GEMMs, in pieces.
        overlap_pp: messages of the pipeline beside the passes.
        one_adapter: rings of data parallelism cross nodes through one adapter per node, not through
            all of them (what ZeRO-3 did in 2021).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    micro_batch: int = 1
    zero: int = 1
    replicas: int = 1
    secondary: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    group_size: int = 0
    recompute: str = "none"
    recompute_layers: int | None = None
    offload: str = "none"
    cp_kind: str = "ring"
    layers_per_stage: tuple[int, ...] | None = None
    overlap_dp: bool = True
    overlap_backward: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = True
    one_adapter: bool = False

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    @property
    def data(self) -> int:
        """Ranks that reduce gradients together: dp x cp."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that what `zero` shards is cut over: dp x cp / replicas."""
        return self.data // self.replicas

    def microbatches(self, job: Job) -> int:
        """m, of a step and replica."""
        return job.global_batch // (self.micro_batch * self.dp)

    def with_(self, **changes: Any) -> "Layout":
        """A copy with some choices changed."""
        return replace(self, **changes)

    @property
    def label(self) -> str:
        """As tables and pictures have it: "dp 8 tp 4 pp 2, zero-1, 1f1b"."""
        sizes = [f"{n} {getattr(self, n)}" for n in ("dp", "tp", "pp")]
        sizes += [f"{n} {getattr(self, n)}" for n in ("cp", "ep") if getattr(self, n) > 1]
        sharded = f"zero-{self.zero}"
        if self.replicas > 1:
            sharded += f" in {self.replicas} replicas"
        if self.secondary:
            sharded += f" hpz {self.secondary}"
        words = [" ".join(sizes), sharded, f"mbs {self.micro_batch}"]
        if self.pp > 1:
            words.append(self.schedule + (f" v{self.chunks}" if self.chunks > 1 else ""))
        if self.recompute != "none":
            words.append(f"{self.recompute} recompute")
        if self.offload != "none":
            words.append(f"offload {self.offload}")
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "devices": self.devices, "label": self.label}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Layout":
        """Of the form that `to_json` gives.

        Raises:
            PlanError: unknown keys.
        """
        known = {f.name for f in fields(cls)}
        given = {k: v for k, v in document.items() if k not in ("devices", "label")}
        unknown = sorted(set(given) - known)
        if unknown:
            raise PlanError(f"layout: unknown keys {', '.join(map(named, unknown))}")
        if given.get("layers_per_stage") is not None:
            given["layers_per_stage"] = tuple(given["layers_per_stage"])
        return cls(**given)

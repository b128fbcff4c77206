"""What every framework's configuration says about a training run, in one vocabulary, and the sums
that have to come out: ranks of the world, samples of the batch."""

from dataclasses import dataclass, fields

from pyparallel.planner.importers.reader import Reader
from pyparallel.planner.models import ModelSpec
from pyparallel.planner.rules import divisors

__all__ = ["Settings", "complete", "nearest_divisors"]


@dataclass
class Settings:
    """Sizes and choices; None where the configuration does not say.

    Attributes:
        model: the model, where the configuration has its sizes or a name the planner knows.
        gpus: ranks in all.
        tp, pp, cp, ep: sizes of the tensor, pipeline, context and expert groups.
        dp: replicas of the data, those that share shards included.
        replicas: copies of what `zero` shards, each sharded over dp cp / replicas ranks.
        shard: ranks of dp x cp that share the shards of `zero`, where a configuration counts those
            instead; None for dp cp / replicas.
        secondary: ranks that hold the weights once more from forward to backward; 0: none.
        chunks: stages per pipeline rank.
        layers_per_stage: of every stage, where they are not even.
        schedule: a name of `pyparallel.schedule.FAMILIES`.
        microbatch: samples of a microbatch.
        accumulation: microbatches per step and replica.
        batch: samples of a step.
        sequence: tokens of a sample.
        zero: what is sharded: 0 nothing, 1 optimizer, 2 gradients too, 3 parameters too.
        sequence_parallel: norms and dropout on shards of the sequence.
        context: how attention crosses cp, a member of `CP_KINDS`.
        recompute: "none", "selective", "op" or "full".
        recompute_every: with "full", one layer of so many is recomputed.
        recompute_layers: with "full", layers of a stage that are recomputed; None: all.
        group_size: microbatches of a round of interleaved-1f1b; 0: pp.
        overlap_dp, overlap_tp, overlap_pp: messages of each kind beside the passes.
        dropout, unfused: whether masks, and attention's scores, are kept.
        plain_loss: whether it is PyTorch's own, in 32 bits, operation by operation.
        precision: of the passes: "bf16", "fp16", "fp8" or "fp32".
        gradient_bytes: 2 or 4, of a gradient that is kept.
        main_gradients: the optimizer keeps gradients in fp32 beside those of 16 bits.
        stored: parameters outside the passes: "copies" (16 bits, and the optimizer's fp32 copy) or
            "fp32" (in fp32 alone, cast for the passes).
        offload_optimizer, offload_parameters: kept in host memory.
    """

    model: ModelSpec | None = None
    gpus: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int | None = None
    replicas: int = 1
    shard: int | None = None
    secondary: int = 0
    chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    schedule: str = "1f1b"
    microbatch: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    sequence: int | None = None
    zero: int = 0
    sequence_parallel: bool = False
    context: str = "ring"
    recompute: str = "none"
    recompute_every: int = 1
    recompute_layers: int | None = None
    group_size: int = 0
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = True
    dropout: bool = False
    unfused: bool = False
    plain_loss: bool = False
    precision: str = "bf16"
    gradient_bytes: int = 4
    main_gradients: bool = False
    stored: str = "copies"
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def differences(self, other: "Settings") -> list[str]:
        """Fields whose values differ, with both."""
        return [
            f"{f.name}: {getattr(self, f.name)!r} and {getattr(other, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]


def complete(reader: Reader, settings: Settings, gpus: int | None) -> None:
    """Fills in gpus, dp and the batch from what is said; what does not come out is a violation."""
    if gpus is not None:
        if settings.gpus is not None and settings.gpus != gpus:
            reader.assumptions.append(
                f"{gpus} devices as asked; the configuration itself starts {settings.gpus}"
            )
        settings.gpus = gpus
    _ranks(reader, settings)
    _batch(reader, settings)


def _ranks(reader: Reader, s: Settings) -> None:
    model = s.tp * s.pp * s.cp
    product = f"tp {s.tp} x pp {s.pp} x cp {s.cp}"
    if s.gpus is None:
        s.dp = 1 if s.dp is None else s.dp
        s.gpus = model * s.dp
        reader.assumptions.append(
            f"{s.gpus} devices, for {product} x dp {s.dp}: --gpus says otherwise"
        )
    elif s.gpus % model:
        down, up = s.gpus // model * model, (s.gpus // model + 1) * model
        near = " or ".join(str(n) for n in (down, up) if n)
        reader.violations.append(
            reader.broken(
                "the devices are a multiple of tp x pp x cp",
                f"{s.gpus} devices and {product} = {model}",
                f"take {near} devices, or sizes whose product divides {s.gpus}",
            )
        )
        s.dp = s.dp or max(s.gpus // model, 1)
    elif s.dp is None:
        s.dp = s.gpus // model
    elif s.dp * model != s.gpus:
        reader.violations.append(
            reader.broken(
                "dp x tp x pp x cp is the number of devices",
                f"dp {s.dp} x {product} = {s.dp * model}, and {s.gpus} devices",
                f"take dp {s.gpus // model}, or {s.dp * model} devices",
            )
        )


def _batch(reader: Reader, s: Settings) -> None:
    """batch = microbatch x accumulation x dp: any one of the three is derived."""
    dp = s.dp or 1
    given = [n is not None for n in (s.batch, s.microbatch, s.accumulation)]
    if s.batch is None:
        s.microbatch = s.microbatch or 1
        s.accumulation = s.accumulation or 1
        s.batch = s.microbatch * s.accumulation * dp
        if not any(given):
            reader.assumptions.append(f"one sample per replica, a batch of {s.batch}")
    elif s.microbatch is None and s.accumulation is None:
        s.accumulation, s.microbatch = 1, max(s.batch // dp, 1)
    elif s.microbatch is None:
        s.microbatch = max(s.batch // (dp * (s.accumulation or 1)), 1)
    elif s.accumulation is None:
        s.accumulation = max(s.batch // (dp * s.microbatch), 1)
    product = s.microbatch * s.accumulation * dp  # type: ignore[operator]
    if product != s.batch:
        step = s.microbatch * dp  # type: ignore[operator]
        down, up = s.batch // step * step, (s.batch // step + 1) * step
        near = " or ".join(str(n) for n in (down, up) if n)
        if all(given):
            near = str(product)
        reader.violations.append(
            reader.broken(
                "batch = microbatch x accumulation x dp",
                f"{s.batch}, and {s.microbatch} x {s.accumulation} x {dp} = {product}",
                f"take a batch of {near}",
            )
        )


def nearest_divisors(value: int, of: int) -> str:
    """The divisors of `of` around `value`, for a mend: "2 or 4"."""
    all_ = divisors(of)
    below = [n for n in all_ if n <= value][-1:]
    above = [n for n in all_ if n >= value][:1]
    return " or ".join(str(n) for n in dict.fromkeys(below + above))

"""Which layers a pipeline rank holds, and how many numbers of them are on one of its devices."""

from functools import lru_cache
from typing import NamedTuple

from pyparallel.planner.layout import Layout
from pyparallel.planner.models import Linear, ModelSpec, linears
from pyparallel.schedule import generate

__all__ = [
    "Local",
    "StageLayers",
    "end_parameters",
    "even_layers",
    "held_stages",
    "layer_parameters",
    "local_linear",
    "local_parameters",
    "stages_of",
]


class StageLayers(NamedTuple):
    """One stage: its number, its layers, and whether the embedding and the head are on it."""

    stage: int
    layers: range
    embedding: bool
    head: bool


class Local(NamedTuple):
    """Numbers of a device. `experts` are sharded by ZeRO over dp cp / ep ranks, `dense` over
    dp cp."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage; what is left over goes to the middle, away from embedding and head."""
    each, left = divmod(layers, stages)
    first = (stages - left + 1) // 2
    if left and first + left > stages - 1 and first > 0:
        first = max(0, min(first, stages - left))
    return tuple(each + (first <= s < first + left) for s in range(stages))


def stages_of(model: ModelSpec, layout: Layout) -> tuple[StageLayers, ...]:
    """All stages in the order of the model. `rules.py` has refused what does not add up."""
    counts = layout.layers_per_stage or even_layers(model.layers, layout.stages)
    made, begin = [], 0
    for stage, count in enumerate(counts):
        last = stage == len(counts) - 1
        made.append(StageLayers(stage, range(begin, begin + count), stage == 0, last))
        begin += count
    return tuple(made)


@lru_cache(maxsize=256)
def held_stages(schedule: str, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Per pipeline rank, the stages on it: `schedule.held`."""
    if pp == 1 and chunks == 1:
        return ((0,),)
    if schedule in ("1f1b", "gpipe", "zb-h1", "zb-h2"):
        return tuple((rank,) for rank in range(pp))
    if schedule in ("interleaved-1f1b", "looped-bfs"):
        return tuple(tuple(c * pp + rank for c in range(chunks)) for rank in range(pp))
    return generate(schedule, pp, 1, chunks=chunks).held


def local_linear(linear: Linear, model: ModelSpec, layout: Layout) -> Linear:
    """The matrix as one device has it: outputs or inputs over tp, experts over ep. Where tp is
    larger than kv_heads, keys and values are held once per group of ranks."""
    t = layout.tp
    inputs, outputs = linear.inputs, linear.outputs
    if linear.name == "qkv":
        keys = max(model.kv_heads / t, 1.0)
        outputs = round((model.heads / t + 2 * keys) * model.head_dim)
    elif linear.shard == "column":
        outputs = -(-outputs // t)
    elif linear.shard == "row":
        inputs = -(-inputs // t)
    copies = -(-linear.copies // layout.ep) if linear.copies > 1 else 1
    return linear._replace(inputs=inputs, outputs=outputs, copies=copies)


def local_parameters(
    model: ModelSpec, layout: Layout, stages: tuple[StageLayers, ...]
) -> tuple[Local, ...]:
    """Per pipeline rank, what one of its devices has."""
    per_kind = {}
    for moe in {model.is_moe(layer) for layer in (0, model.layers - 1)}:
        per_kind[moe] = layer_parameters(model, layout, model.layers - 1 if moe else 0)
    counts = []
    for held in held_stages(layout.schedule, layout.pp, layout.chunks):
        dense = experts = 0.0
        for stage in (stages[s] for s in held):
            with_experts = sum(model.is_moe(layer) for layer in stage.layers)
            for kind, number in ((True, with_experts), (False, len(stage.layers) - with_experts)):
                if number:
                    dense += number * per_kind[kind].dense
                    experts += number * per_kind[kind].experts
            dense += _ends(model, layout, stage)
        counts.append(Local(dense, experts))
    return tuple(counts)


def layer_parameters(model: ModelSpec, layout: Layout, layer: int) -> Local:
    """Numbers of layer number `layer` on one device."""
    dense, experts = float(model.norm_parameters()), 0.0
    for linear in linears(model, layer):
        local = local_linear(linear, model, layout)
        count = local.weights + local.bias * local.outputs * local.copies
        if linear.copies > 1:
            experts += count
        else:
            dense += count
    return Local(dense, experts)


def end_parameters(model: ModelSpec, layout: Layout) -> tuple[float, float]:
    """Numbers of the embedding and of the head on one device, the head with its own table."""
    t = layout.tp
    table = model.padded_vocab(t) * model.hidden / t
    embedding = model.embedding_parameters(t) - model.padded_vocab(t) * model.hidden + table
    return embedding, model.norm_width * model.hidden + table


def _ends(model: ModelSpec, layout: Layout, stage: StageLayers) -> float:
    """Embedding and head; a tied table is on both ends where these are different stages."""
    embedding, head = end_parameters(model, layout)
    if stage.head and model.tied and stage.embedding:
        head = float(model.norm_width * model.hidden)
    return stage.embedding * embedding + stage.head * head

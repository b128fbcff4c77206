"""A model cut into stages: every part on one stage, by balance, by counts or by a layout.

partition = partition_model(model, stages=4)             # balanced by parameters
stage = partition.stage(rank)                            # an nn.Module with the model's names
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pyparallel.pipeline.balance import balance, check_counts, counts_of_layout
from pyparallel.pipeline.causal_lm import CausalLM
from pyparallel.pipeline.decoder import Decoder
from pyparallel.pipeline.parts import Part
from pyparallel.pipeline.sequential import SequentialModel
from pyparallel.pipeline.traced import TracedModel

__all__ = ["Partition", "TiedParameter", "partition_model"]


@dataclass(frozen=True)
class TiedParameter:
    """One parameter that parts of several stages use.

    Attributes:
        names: the names it has in the model.
        stages: the stage of each name.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """Which part is on which stage.

    Attributes:
        parts: of the model, in order.
        counts: how many of them each stage has.
        tied: the parameters that more than one stage holds: their gradients are to be summed over
            those stages (tied.py).
        structure: how the model was understood; it makes the stages.
    """

    parts: tuple[Part, ...]
    counts: tuple[int, ...]
    tied: tuple[TiedParameter, ...]
    structure: SequentialModel | CausalLM | Decoder | TracedModel

    @property
    def stages(self) -> int:
        return len(self.counts)

    def stage(self, index: int) -> nn.Module:
        """The module of a stage. It shares its parameters with the model; a stage without parts
        gives its input back."""
        first = self._first(index)
        if self.counts[index] == 0:
            return _PassThrough()
        return self.structure.stage(first, first + self.counts[index])

    def parts_of(self, index: int) -> tuple[Part, ...]:
        first = self._first(index)
        return self.parts[first : first + self.counts[index]]

    def _first(self, index: int) -> int:
        if not 0 <= index < self.stages:
            raise ValueError(f"stage {index}: there are stages 0 to {self.stages - 1}")
        return sum(self.counts[:index])


class _PassThrough(nn.Module):
    """A stage without parts."""

    def forward(self, *values: Any, **_: Any) -> Any:
        return values[0] if len(values) == 1 else values


def partition_model(
    model: nn.Module,
    stages: int | None = None,
    *,
    by: str | Sequence[float] = "parameters",
    counts: Sequence[int] | None = None,
    layout: str | None = None,
    memory_cap: float | Sequence[float] | None = None,
    allow_empty: bool = False,
    split_points: Sequence[str] | None = None,
) -> Partition:
    """Cuts a model into stages. Nothing is copied or moved; parameters may be on meta.

    Args:
        model: an `nn.Sequential`; a causal language model of transformers (causal_lm.py); a model
            of an embedding, a list of layers, a norm and an output layer (decoder.py); with
            split_points, any model that torch.fx can trace, or an `fx.GraphModule` (traced.py).
        stages: how many, when they are balanced.
        by: "parameters", "flops", or one number per part (measured times).
        counts: parts of each stage, instead of a balance.
        layout: the stages in letters, such as `E t*3 | t*4 | t*3 N L`, instead of a balance.
        memory_cap: bytes of parameters each stage may have, one number or one per stage.
        allow_empty: a balance may leave stages without parts.
        split_points: names of modules before which the model may be cut, in the order in which
            they run: what lies between two is a part.

    Raises:
        ValueError: a model of another structure, more stages than parts, counts or a layout that do
            not take every part once, or no cut within the cap.
    """
    structure: SequentialModel | CausalLM | Decoder | TracedModel
    if split_points is not None:
        structure = TracedModel(model, split_points)
    elif isinstance(model, nn.Sequential):
        structure = SequentialModel(model)
    elif getattr(model, "base_model_prefix", ""):
        structure = CausalLM(model)
    else:
        structure = Decoder(model)
    parts = tuple(structure.parts())
    given = [name for name, value in (("counts", counts), ("layout", layout)) if value is not None]
    if len(given) + (stages is not None) != 1:
        raise ValueError(
            f"one of stages, counts and layout says how to cut; given are "
            f"{[*given, *(['stages'] if stages is not None else [])]}"
        )
    if stages is None and (by != "parameters" or memory_cap is not None or allow_empty):
        raise ValueError(f"by, memory_cap and allow_empty have no effect with {given[0]}")
    if counts is not None:
        chosen = check_counts(counts, len(parts))
    elif layout is not None:
        chosen = counts_of_layout(layout, [part.kind for part in parts])
    else:
        assert stages is not None
        chosen = balance(
            _weights(parts, by),
            stages,
            memory=None if memory_cap is None else [part.bytes for part in parts],
            cap=memory_cap,
            allow_empty=allow_empty,
        )
    untied = Partition(parts, chosen, (), structure)
    return replace(untied, tied=_tied(untied))


def _weights(parts: Sequence[Part], by: str | Sequence[float]) -> list[float]:
    if by == "parameters":
        return [part.parameters for part in parts]
    if by == "flops":
        return [part.flops for part in parts]
    if isinstance(by, str):
        raise ValueError(f"by={by!r}: allowed are 'parameters', 'flops', or a number per part")
    if len(by) != len(parts):
        raise ValueError(f"by has {len(by)} numbers for {len(parts)} parts")
    return list(by)


def _tied(partition: Partition) -> tuple[TiedParameter, ...]:
    """Parameters that are on several stages."""
    places: dict[int, list[tuple[str, int]]] = {}
    for stage in range(partition.stages):
        for name, parameter in partition.stage(stage).named_parameters(remove_duplicate=False):
            places.setdefault(id(parameter), []).append((name, stage))
    return tuple(
        TiedParameter(tuple(name for name, _ in several), tuple(stage for _, stage in several))
        for several in places.values()
        if len({stage for _, stage in several}) > 1
    )

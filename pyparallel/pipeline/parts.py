"""What a model is cut into: parts, in the order in which data passes them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

__all__ = ["Part", "part", "shallow"]


@dataclass(frozen=True)
class Part:
    """A piece of a model that is not cut further.

    Attributes:
        kind: "E" embedding, "t" layer, "N" final norm, "L" output layer (and loss).
        modules: qualified names of the modules it has.
        parameters: how many numbers it holds; what is tied counts in every part that has it.
        flops: floating point operations per token forward: 2 per weight of a matrix that is
            multiplied; embeddings are looked up, not multiplied. Attention's own products, equal
            in all layers, are left out.
        bytes: of its parameters.
    """

    kind: str
    modules: tuple[str, ...]
    parameters: int
    flops: int
    bytes: int


def part(kind: str, modules: Mapping[str, nn.Module]) -> Part:
    """The part of a kind that these modules, by qualified name, make up."""
    distinct = {id(p): p for module in modules.values() for p in module.parameters()}
    looked_up = {
        id(p)
        for module in modules.values()
        for inner in module.modules()
        if isinstance(inner, nn.Embedding)
        for p in inner.parameters()
    }
    flops = sum(
        2 * p.numel() for key, p in distinct.items() if p.dim() > 1 and key not in looked_up
    )
    return Part(
        kind,
        tuple(modules),
        sum(p.numel() for p in distinct.values()),
        flops,
        sum(p.numel() * p.element_size() for p in distinct.values()),
    )


def shallow(module: nn.Module) -> nn.Module:
    """The module with a list of children of its own; parameters and children are shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin

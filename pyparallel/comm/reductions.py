"""Reductions by name, and the dtypes they work on."""

from dataclasses import dataclass
from typing import Final

import torch

from pyparallel.errors import InvalidArgument

__all__ = ["Reduction", "premul_sum"]


@dataclass(frozen=True)
class Reduction:
    """What is done with the values of the ranks. Made by name, or by `premul_sum`."""

    name: str
    code: int
    factor: float = 1.0


REDUCTIONS: Final = {
    name: Reduction(name, code)
    for name, code in {
        "sum": 0,
        "avg": 1,
        "min": 2,
        "max": 3,
        "product": 4,
        "band": 6,
        "bor": 7,
        "bxor": 8,
    }.items()
}

DTYPES: Final = {
    torch.float64: 0,
    torch.float32: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
    torch.bool: 9,
}


def premul_sum(factor: float) -> Reduction:
    """The sum of each rank's input times that rank's own `factor` (floating-point tensors only)."""
    return Reduction("premul_sum", 5, float(factor))


def reduction_of(op: "str | Reduction") -> Reduction:
    """The reduction of that name; a `Reduction` is given back as it is."""
    if isinstance(op, Reduction):
        return op
    found = REDUCTIONS.get(op) if isinstance(op, str) else None
    if found is None:
        known = ", ".join(f'"{name}"' for name in REDUCTIONS)
        raise InvalidArgument(f"unknown reduction {op!r}; known are {known} and premul_sum(factor)")
    return found

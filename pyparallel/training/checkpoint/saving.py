"""Who writes what: every box of the model once, by one of the ranks that hold it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyparallel.training.checkpoint.files import DTYPES, dtype_name
from pyparallel.training.checkpoint.pieces import Piece

__all__ = ["Staging", "assign", "described", "digest", "file_name"]

Description = list[list[Any]]  # of each piece: key, shape, offsets, sizes, dtype


def described(pieces: Sequence[Piece]) -> Description:
    """What the other ranks need to know of a rank's pieces, as JSON has it."""
    return [
        [p.key, list(p.shape), list(p.offsets), list(p.view.shape), dtype_name(p.view.dtype)]
        for p in pieces
    ]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def assign(every: Sequence[Description]) -> list[list[int]]:
    """Which of its pieces each rank writes: of equal ones the rank with the fewest bytes so far.

    The same on all ranks.

    Raises:
        ValueError: ranks differ in what a tensor is, or there are parts of one that nobody holds.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    tensors: dict[str, tuple[Any, Any]] = {}
    boxes: dict[str, dict[tuple[int, ...], list[int]]] = {}
    misfits = []
    for rank, pieces in enumerate(every):
        for number, (key, shape, offsets, sizes, dtype) in enumerate(pieces):
            known = tensors.setdefault(key, (shape, dtype))
            box = boxes.setdefault(key, {}).setdefault(tuple(offsets), sizes)
            if known != (shape, dtype) or box != sizes:
                misfits.append(
                    f"{key} is {dtype} {shape} with {sizes} at {offsets} on rank {rank}, "
                    f"{known[1]} {known[0]} with {box} elsewhere"
                )
            holders.setdefault((key, tuple(offsets)), []).append((rank, number))
    for key, of_key in boxes.items():
        held, whole = sum(map(prod, of_key.values())), prod(tensors[key][0])
        if held != whole:
            misfits.append(f"{key} has {whole} elements, and the ranks hold {held} of it")
    if misfits:
        raise ValueError("; ".join(misfits[:4]))
    taken: list[list[int]] = [[] for _ in every]
    written = [0] * len(every)
    for (key, offsets), found in holders.items():
        rank, number = min(found, key=lambda at: (written[at[0]], at[0]))
        taken[rank].append(number)
        written[rank] += prod(boxes[key][offsets]) * DTYPES[tensors[key][1]].itemsize
    return [sorted(numbers) for numbers in taken]


def file_name(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


@dataclass
class Staging:
    """Copies of pieces in host memory, kept from save to save while the pieces stay alike."""

    _copies: list[Tensor] | None = None

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> list[Tensor]:
        old = self._copies or []
        alike = len(old) == len(pieces) and all(
            o.shape == p.view.shape and o.dtype is p.view.dtype
            for o, p in zip(old, pieces, strict=True)
        )
        if not alike:
            self._copies = old = [
                torch.empty(p.view.shape, dtype=p.view.dtype, device="cpu") for p in pieces
            ]
        for copy, piece in zip(old, pieces, strict=True):
            copy.copy_(piece.view)
        return old

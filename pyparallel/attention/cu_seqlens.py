"""Lengths of packed documents, as the host knows them.

They may come as a tensor of a device: it is read once, and remembered for as long as the tensor
lives unchanged, so that a training step waits for its device at the first layer only.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyparallel.errors import InvalidArgument

__all__ = ["host_lengths"]

_read = WeakTensorKeyDictionary()  # tensor -> (its version, the integers)


def host_lengths(values: "Tensor | Sequence[int] | None", name: str) -> tuple[int, ...] | None:
    """The integers of `values`, a tensor of any integer dtype and device, or a sequence."""
    if values is None:
        return None
    if isinstance(values, Tensor):
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(
                f"{name} has shape {list(values.shape)} and dtype {values.dtype}; expected one "
                "dimension of int32 or int64"
            )
        if values.is_inference():
            return tuple(values.tolist())
        known = _read.get(values)
        if known is None or known[0] != values._version:
            known = _read[values] = values._version, tuple(values.tolist())
        integers: tuple[int, ...] = known[1]
        return integers
    try:
        return tuple(operator.index(n) for n in values)
    except TypeError:
        raise InvalidArgument(f"{name} is {values!r}; expected integers, or a tensor") from None

"""torch.autocast: what the operands of a product are before an op sees them.

Under torch.autocast a product of ours computes as torch.nn.functional.linear does there: operands
of 16 or 32 bits are cast to autocast's dtype, float64 stays. The cast is outside the op, so its
result, its saved tensors and its derivative are of one dtype, whatever algorithm runs, and a weight
gets its gradient in its own.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["casts", "is_cast"]

_CASTS = (torch.float32, torch.float16, torch.bfloat16)


def is_cast(x: Any) -> bool:
    """Whether torch.autocast is on for the device of `x`."""
    if not isinstance(x, Tensor) or x.device.type not in ("cpu", "cuda"):
        return False
    return torch.is_autocast_enabled(x.device.type)


def casts(x: Any, *others: Any) -> tuple[Any, ...]:
    """The operands of a product, in autocast's dtype where it is on for the device of `x`.

    What is no tensor, or of a dtype that autocast leaves alone, is given back as it is.
    """
    operands = (x, *others)
    if not is_cast(x):
        return operands
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.dtype in _CASTS else t for t in operands
    )

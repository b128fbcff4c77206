"""The Triton kernels as an engine of attention steps.

They are imported with the first operands that they may take: Triton's import takes a second, which
a CPU never needs. Off CUDA they run in Triton's interpreter, where a test has imported them so.
"""

import sys
from typing import Any

from torch import Tensor

from pyparallel.attention.mask import Mask

__all__ = ["backward_step", "forward_step", "unfit"]


def unfit(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str:
    """Why the kernels do not take such an attention; empty: they do."""
    if q.device.type != "cuda" and "pyparallel.triton_kernels.flash_attention" not in sys.modules:
        return f"device {q.device}; Triton's kernels run on CUDA"
    from pyparallel.triton_kernels import flash_attention_arguments

    return flash_attention_arguments.unfit(q, k, v, mask)


def forward_step(*arguments: Any) -> None:
    """As plain.forward_step."""
    from pyparallel.triton_kernels import flash_attention

    flash_attention.forward_step(*arguments)


def backward_step(*arguments: Any, **options: Any) -> None:
    """As plain.backward_step; not deterministic: dq by atomic adds."""
    from pyparallel.triton_kernels import flash_attention_backward

    flash_attention_backward.backward_step(*arguments, **options)

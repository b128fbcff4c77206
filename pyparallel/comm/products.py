"""The matmul between the collectives of a tensor-parallel layer, on the core's fastest way.

`times_weight(x [.., K], weight [N, K])` gives x @ weight^T [.., N], without autograd: torch's
linear, but up to 16 rows of x on a CPU with AVX-512 read the weight once (csrc/torch/few_rows.h),
and more of them in float32 are oneDNN's where MKL leaves half of the CPU idle (many_rows.h).
`times_weight_into(out, x, weight)` is the same of matrices, into `out`.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from pyparallel._torch import product as times_weight
from pyparallel._torch import product_into as times_weight_into

__all__ = ["biased_product", "part_times_weight", "times_weight", "times_weight_into"]


def part_times_weight(x: Tensor, weight: Tensor) -> Tensor:
    """As times_weight, for a product that ranks will add up.

    16-bit parts are rounded before they are added. A sum over K in another order than torch's turns
    some of these roundings round, and so gives sums that are as good on the whole, but not element
    by element as good as torch's: those stay torch's own.
    """
    return times_weight(x, weight) if x.dtype is torch.float32 else linear(x, weight)


def biased_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight^T + bias, without autograd. What torch rounds once, is rounded once."""
    if bias is None:
        return times_weight(x, weight)
    if x.dtype is torch.float32 and x.device.type == "cpu":
        y: Tensor = times_weight(x, weight)
        y += bias
        return y
    return linear(x, weight, bias)

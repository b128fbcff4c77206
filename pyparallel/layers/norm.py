"""RMSNorm and LayerNorm of activations that may be split along the sequence.

Under sequence parallelism a rank sees its own tokens only, so that its gradient of a norm's weight
is a part of the sum. Each backward pass adds the parts up (`ops.replicate`): once, whether or not
passes accumulate into `.grad`, and without anything to call after them. Weight and bias share one
exchange.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyparallel import ops
from pyparallel.errors import InvalidArgument
from pyparallel.layers.module import ShardedModule
from pyparallel.layers.parameters import REPLICATED
from pyparallel.layers.sequence import SequenceSharding, sharding_of
from pyparallel.ops.autocast import is_cast

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(ShardedModule):
    """A norm over the last dimension of `size`, with a weight that every rank holds."""

    weight: nn.Parameter

    def __init__(
        self,
        size: int,
        group: Any,
        eps: "float | None",
        sequence_parallel: "bool | SequenceSharding",
        bias: bool,
        device: Any,
        dtype: "torch.dtype | None",
    ) -> None:
        super().__init__(group)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"size is {size!r}; expected an int of 1 or more")
        self.size = size
        self.eps = eps
        self.sequence = sharding_of(sequence_parallel)
        self._shard("weight", (size,), REPLICATED, device, dtype)
        if bias:
            self._shard("bias", (size,), REPLICATED, device, dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _init_whole(self, name: str, whole: Tensor) -> None:
        whole.fill_(1.0 if name == "weight" else 0.0)

    def _scales(self, x: Tensor) -> "tuple[Tensor, Tensor | None]":
        """Weight and bias, whose gradients are those of all tokens."""
        self._tensor(x)
        misfits = []
        if x.dim() < 1 or x.shape[-1] != self.size:
            misfits.append(f"input has shape {list(x.shape)}; expected [..., {self.size}]")
        same = x.dtype == self.weight.dtype or is_cast(x)
        if not same or x.device != self.weight.device:
            misfits.append(
                f"input is {x.dtype} on {x.device}, weight {self.weight.dtype} on "
                f"{self.weight.device}"
            )
        if misfits:
            raise self._refused(InvalidArgument("; ".join(misfits)))
        bias: Tensor | None = self._parameters["bias"]
        if self.sequence is None:
            return self.weight, bias
        if bias is None:
            return ops.replicate(self.weight, self.place.name), None
        both = ops.replicate(torch.stack((self.weight, bias)), self.place.name)
        return both[0], both[1]

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, sequence_parallel={self.sequence is not None}"


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467).

    size: of the last dimension. eps: None is the dtype's smallest step, as in torch.nn.RMSNorm.
    group, sequence_parallel, device, dtype: as in ColumnParallelLinear; without sequence_parallel
    nothing is communicated. forward(x): x [..., size] of the weight's dtype, gives the same shape;
    ValueError, on all ranks, for another size or dtype.
    """

    def __init__(
        self,
        size: int,
        group: Any,
        *,
        eps: "float | None" = 1e-6,
        sequence_parallel: "bool | SequenceSharding" = False,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__(size, group, eps, sequence_parallel, False, device, dtype)

    @classmethod
    def from_norm(cls, norm: nn.RMSNorm, group: Any, **options: Any) -> "RMSNorm":
        """One with the parameters and eps of `norm`."""
        layer = cls(_size(norm), group, eps=norm.eps, device="meta", **options)
        layer._set_whole("weight", norm.weight, norm.weight.requires_grad)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        weight, _ = self._scales(x)
        return functional.rms_norm(x, (self.size,), weight, self.eps)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv 1607.06450).

    bias: whether there is one. Everything else as in RMSNorm.
    """

    def __init__(
        self,
        size: int,
        group: Any,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        sequence_parallel: "bool | SequenceSharding" = False,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__(size, group, eps, sequence_parallel, bias, device, dtype)

    @classmethod
    def from_norm(cls, norm: nn.LayerNorm, group: Any, **options: Any) -> "LayerNorm":
        """One with the parameters and eps of `norm`."""
        bias = norm.bias is not None
        layer = cls(_size(norm), group, eps=norm.eps, bias=bias, device="meta", **options)
        layer._set_whole("weight", norm.weight, norm.weight.requires_grad)
        if bias:
            layer._set_whole("bias", norm.bias, norm.bias.requires_grad)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._scales(x)
        assert self.eps is not None
        return functional.layer_norm(x, (self.size,), weight, bias, self.eps)


def _size(norm: "nn.RMSNorm | nn.LayerNorm") -> int:
    if getattr(norm, "weight", None) is None or norm.weight.dim() != 1:
        raise InvalidArgument(f"{norm} has no weight over one dimension; expected such a norm")
    return norm.weight.shape[0]

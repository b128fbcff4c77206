"""Column- and row-parallel linear layers: the two halves of a tensor-parallel block.

    [.., K] alike      -> ColumnParallelLinear -> [.., N_r] -> RowParallelLinear -> [.., K] alike
    [M_r, .., K] part  -> gathered inside      -> [M, .., N_r] -> scattered inside -> [M_r, .., K]

With W [N, K] of the whole, rank r holds rows W_r (column-parallel: y_r = x W_r^T + b_r) or columns
W_r (row-parallel: y = sum_r x_r W_r^T + b, b once). The scheme is Megatron-LM's (arXiv 1909.08053),
the second line its sequence parallelism (arXiv 2205.05198). Gradients need nothing from the user:

    W_r, b_r of column-parallel   own rows: complete on this rank
    W_r of row-parallel           own columns: complete on this rank
    b of row-parallel             complete and alike on all ranks, also if each has some rows only
    copies of kv heads            summed over the copies in every backward pass
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyparallel import ops
from pyparallel.comm.products import biased_product
from pyparallel.errors import InvalidArgument
from pyparallel.layers.module import InitMethod, ShardedModule
from pyparallel.layers.parameters import REPLICATED, ParameterLayout, Part, assemble
from pyparallel.layers.partition import Partition
from pyparallel.layers.sequence import SequenceSharding, sharding_of
from pyparallel.ops.autocast import casts, is_cast
from pyparallel.ops.library import is_direct, matmul, rows_of
from pyparallel.ops.main_grad import MainGrad, behind

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(ShardedModule):
    """What both halves share: sizes, beginning, what an input must be."""

    weight: nn.Parameter
    bias: "nn.Parameter | None"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Any,
        sequence_parallel: "bool | SequenceSharding",
        init_method: "InitMethod | None",
    ) -> None:
        super().__init__(group)
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidArgument(f"{name} is {size!r}; expected an int of 1 or more")
        self.in_features = in_features
        self.out_features = out_features
        self.sequence = sharding_of(sequence_parallel)
        self.init_method = init_method

    def _make(
        self, weight: ParameterLayout, bias: "ParameterLayout | None", device: Any, dtype: Any
    ) -> None:
        self._shard("weight", (self.out_features, self.in_features), weight, device, dtype)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self._shard("bias", (self.out_features,), bias, device, dtype)
        self.reset_parameters()

    def _init_whole(self, name: str, whole: Tensor) -> None:
        if name == "weight" and self.init_method is not None:
            self.init_method(whole)
        elif name == "bias" and self.init_method is not None:
            whole.zero_()
        else:  # torch.nn.Linear's: uniform in +-1/sqrt(in_features), weight and bias
            bound = self.in_features**-0.5
            whole.uniform_(-bound, bound)

    def _from(self, linear: nn.Linear) -> None:
        """Takes the shards of a whole layer's parameters."""
        for name in ("weight", "bias"):
            whole = getattr(linear, name, None)
            if whole is not None:
                self._set_whole(name, whole, whole.requires_grad)

    def _check(self, x: Tensor, features: int) -> None:
        """Raises on all ranks if `x` [..., features] cannot be this layer's input."""
        self._tensor(x)
        misfits = []
        if x.dim() < 1 or x.shape[-1] != features:
            misfits.append(
                f"input has shape {list(x.shape)}; expected [..., {features}] "
                f"(weight {self.out_features} x {self.in_features}, {self.place.size} ranks)"
            )
        if x.dtype != self.weight.dtype and not is_cast(x):
            misfits.append(f"input has dtype {x.dtype}, weight {self.weight.dtype}")
        if x.device != self.weight.device:
            misfits.append(f"input is on {x.device}, weight on {self.weight.device}")
        if misfits:
            raise self._refused(InvalidArgument("; ".join(misfits)))

    def _axis(self, x: Tensor) -> int:
        assert self.sequence is not None
        self._tensor(x)
        try:
            return self.sequence.axis(x.shape)
        except InvalidArgument as error:
            raise self._refused(error) from None

    def extra_repr(self) -> str:
        held = "x".join(map(str, self.weight.shape))
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.place.rank} of {self.place.size}, "
            f"holds={held}, sequence_parallel={self.sequence is not None}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """y_r = x W_r^T + b_r: each rank has some of the output features.

    Args:
        in_features, out_features: of the whole layer. Features need not divide by the ranks.
        group: a ProcessGroup, a DeviceMesh of one dimension, or a Communicator. All its ranks call
            forward and backward, in the same order.
        bias: with a bias, of which each rank holds its part.
        gather_output: give all output features, on every rank alike.
        sequence_parallel: the input is this rank's part of the sequence (True: dim 0, equal parts;
            or the model's `SequenceSharding`); the output has the whole sequence.
        partition: which output features each rank holds, where it is not the even split (whole
            heads, replicated kv heads, fused parts). Its size is out_features.
        multiple_of: pads each rank's features to a multiple: zeros, never trained,
            in no state dict.
        parts: names and sizes of fused parts, as state dicts of the whole layer have them.
        init_method: fills a whole weight (the bias is then zero). None: as torch.nn.Linear.
        transposed: state dicts of the whole have the weight as [in, out] (GPT-2's Conv1D).
        device, dtype: of the parameters; on "meta" nothing is allocated, see `materialize`.

    forward(x): x [..., in_features], alike on all ranks, or [.. M_r .., in_features] with
    sequence_parallel, any strides; gives [..., local features], or [..., out_features] with
    gather_output. Raises ValueError, on all ranks and before anything is sent, if x does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Any,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: "bool | SequenceSharding" = False,
        partition: "Partition | None" = None,
        multiple_of: int = 1,
        parts: "tuple[tuple[str, int], ...]" = (),
        init_method: "InitMethod | None" = None,
        transposed: bool = False,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence_parallel, init_method)
        self.gather_output = gather_output
        self.partition = _partition(
            "out_features", out_features, self.place.size, partition, multiple_of
        )
        named = tuple(Part(*part) for part in parts)
        if named and sum(part.size for part in named) != out_features:
            raise InvalidArgument(f"parts {parts} do not add up to out_features={out_features}")
        self._make(
            ParameterLayout(0, self.partition, named, transposed),
            ParameterLayout(0, self.partition, named) if bias else None,
            device,
            dtype,
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Any, **options: Any) -> "ColumnParallelLinear":
        """This rank's part of an existing layer; `options` as in the constructor.

        Parameters keep values, dtype, device (meta too) and requires_grad. `linear` must hold the
        same values on all ranks; nothing is communicated.
        """
        layer = cls(*_sizes(linear), group, bias=linear.bias is not None, device="meta", **options)
        layer._from(linear)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        (weight, into), bias = self._trained_into("weight"), self._trained("bias")
        if self.sequence is None:
            self._check(x, self.in_features)
            y = _linear_of_replicated(x, weight, bias, self.place.name, into)
        else:
            y = ops.all_gather_matmul(
                x,
                weight,
                self.place.name,
                self._axis(x),
                bias,
                self.sequence.sizes(self.place.size),
                main_grad=into,
            )
        return self._gathered(y) if self.gather_output else y

    def _gathered(self, y: Tensor) -> Tensor:
        sizes = [self.partition.local_size(rank) for rank in range(self.place.size)]
        y = ops.gather(y, self.place.name, -1, sizes)
        return assemble(y, y.dim() - 1, self.partition)[0]


class RowParallelLinear(_ParallelLinear):
    """y = sum_r x_r W_r^T + b: each rank has some of the input features; the bias is added once.

    Args:
        in_features, out_features, group, init_method, transposed, device, dtype: as in
            ColumnParallelLinear.
        bias: with a bias, of which every rank holds all.
        input_is_parallel: the input has this rank's features only, as a column-parallel layer gives
            them. False: it has all, alike on all ranks, and is split here.
        sequence_parallel: the output is this rank's part of the sequence (True: along dim 0; or the
            model's `SequenceSharding`); the input has the whole sequence. Parts may be uneven.
        partition, multiple_of: of the input features, as the layer before has them.

    forward(x): x [..., local features] (or [..., in_features]), any strides; gives
    [..., out_features], the same bits on every rank, or this rank's part of the sequence. Raises
    ValueError, on all ranks and before anything is sent, if x does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Any,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: "bool | SequenceSharding" = False,
        partition: "Partition | None" = None,
        multiple_of: int = 1,
        init_method: "InitMethod | None" = None,
        transposed: bool = False,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__(in_features, out_features, group, sequence_parallel, init_method)
        self.input_is_parallel = input_is_parallel
        self.partition = _partition(
            "in_features", in_features, self.place.size, partition, multiple_of
        )
        if not input_is_parallel and any(len(runs) != 1 for runs in self.partition.runs):
            raise InvalidArgument(
                "input_is_parallel=False splits consecutive features, but the partition has "
                "several runs on a rank; give the layer its features, with input_is_parallel=True"
            )
        self._make(
            ParameterLayout(1, self.partition, (), transposed),
            REPLICATED if bias else None,
            device,
            dtype,
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: Any, **options: Any) -> "RowParallelLinear":
        """This rank's part of an existing layer, as ColumnParallelLinear.from_linear."""
        layer = cls(*_sizes(linear), group, bias=linear.bias is not None, device="meta", **options)
        layer._from(linear)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        (weight, into), bias = self._trained_into("weight"), self.bias
        if not self.input_is_parallel:
            self._check(x, self.in_features)
            x = self._own_features(x)
        if self.sequence is None:
            y: Tensor = ops.matmul_all_reduce(x, weight, self.place.name, bias, main_grad=into)
            return y
        axis = self._axis(x)
        sizes = self.sequence.cut(x.shape, self.place.size)
        return ops.matmul_reduce_scatter(
            x, weight, self.place.name, axis, bias, sizes, main_grad=into
        )

    def _own_features(self, x: Tensor) -> Tensor:
        sizes = [self.partition.real_size(rank) for rank in range(self.place.size)]
        x = ops.split(x, self.place.name, -1, sizes)
        padding = self.partition.local_size(self.place.rank) - x.shape[-1]
        return functional.pad(x, (0, padding)) if padding else x


class _LinearOfReplicated(torch.autograd.Function):
    """y = x W_r^T + b_r for an x that all ranks have; dx = all_reduce(dy_r W_r)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: "Tensor | None", group: str) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = rows_of(dy)
        dx = ops.matmul_all_reduce(dy, weight.t(), ctx.group) if needs_x else None
        dw = matmul(rows.t(), rows_of(x)) if needs_weight else None
        return dx, dw, rows.sum(0) if needs_bias else None, None


def _linear_of_replicated(
    x: Tensor, weight: Tensor, bias: "Tensor | None", group: str, into: "MainGrad | None"
) -> Tensor:
    x, weight, bias = casts(x, weight, bias)
    if not torch.is_grad_enabled():
        return product(x, weight, bias)
    w = weight if into is None else weight.detach()
    y: Tensor = _LinearOfReplicated.apply(x, w, bias, group)  # type: ignore[no-untyped-call]
    return y if into is None else behind([y], [weight], x, [into])[0]


def product(x: Tensor, weight: Tensor, bias: "Tensor | None") -> Tensor:
    """torch's linear; the core's fastest way where only this call sees the tensors."""
    if is_direct(x, weight, bias):
        return biased_product(x, weight, bias)
    return functional.linear(x, weight, bias)


def _partition(
    what: str, size: int, ranks: int, partition: "Partition | None", multiple_of: int
) -> Partition:
    if partition is None:
        return Partition.even(size, ranks, multiple_of=multiple_of)
    if multiple_of != 1:
        raise InvalidArgument("pass either partition or multiple_of; a partition has its padding")
    if partition.size != size or partition.world_size != ranks:
        raise InvalidArgument(
            f"partition splits {partition.size} over {partition.world_size} ranks; expected "
            f"{what}={size} over the {ranks} ranks of the group"
        )
    return partition


def _sizes(linear: Any) -> tuple[int, int]:
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise InvalidArgument(
            f"{type(linear).__name__} has no weight of shape [out, in]; expected a torch.nn.Linear"
        )
    return weight.shape[1], weight.shape[0]

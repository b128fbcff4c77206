"""Column-parallel layers fused into one GEMM and one gather: q, k, v of an attention; gate and up.

    whole model   q_proj [heads d, K]   k_proj [kv d, K]   v_proj [kv d, K]
    rank r        weight [(h_r + 2 k_r) d, K]: its heads of q, then of k, then of v

State dicts of the whole model have the parts' own names, as siblings of the fused layer, which is
what the model without fusing has: a `qkv` of `attention` is `attention.q_proj.weight`, ...
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyparallel.errors import InvalidArgument
from pyparallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyparallel.layers.module import InitMethod
from pyparallel.layers.partition import HeadSplit, Partition, split_heads
from pyparallel.layers.place import Place
from pyparallel.layers.sequence import SequenceSharding

__all__ = ["FusedColumnParallelLinear", "GatedMLP", "QKVParallelLinear"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


class FusedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input, as one.

    partitions has, for each named part, how its output features fall onto the ranks. forward(x)
    gives a tuple of one tensor per part, [..., local features of the part]; x, other arguments and
    errors as in ColumnParallelLinear.
    """

    def __init__(
        self,
        in_features: int,
        partitions: "dict[str, Partition]",
        group: Any,
        *,
        bias: bool = True,
        sequence_parallel: "bool | SequenceSharding" = False,
        init_method: "InitMethod | None" = None,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        if not partitions:
            raise InvalidArgument("partitions is empty; expected one Partition per fused part")
        super().__init__(
            in_features,
            sum(partition.size for partition in partitions.values()),
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            partition=Partition.joined(list(partitions.values())),
            parts=tuple((name, partition.size) for name, partition in partitions.items()),
            init_method=init_method,
            device=device,
            dtype=dtype,
        )
        rank = self.place.rank
        self.local_sizes = [partition.local_size(rank) for partition in partitions.values()]

    def _from_parts(self, linears: Sequence[nn.Linear]) -> None:
        """Takes the shards of whole layers, one per part, in order."""
        sizes = [size for _, size in self._layouts["weight"].parts]
        for name in ("weight", "bias"):
            wholes: list[Tensor] = [getattr(linear, name) for linear in linears]
            if wholes[0] is None:  # then no part has a bias
                continue
            if len({(w.dtype, w.device, w.requires_grad) for w in wholes}) != 1:
                raise InvalidArgument(
                    f"{name}s of the parts differ in dtype, device or requires_grad: "
                    f"{[(w.dtype, str(w.device), w.requires_grad) for w in wholes]}"
                )
            shapes = [tuple(w.shape) for w in wholes]
            tail = (self.in_features,) if name == "weight" else ()
            if shapes != [(size, *tail) for size in sizes]:
                raise InvalidArgument(
                    f"{name}s of the parts have shapes {shapes}; expected "
                    f"{[(size, *tail) for size in sizes]}"
                )
            self._set_whole(name, torch.cat([w.detach() for w in wholes]), wholes[0].requires_grad)

    def forward(self, x: Tensor) -> "tuple[Tensor, ...]":  # type: ignore[override]
        return torch.split(super().forward(x), self.local_sizes, dim=-1)


class QKVParallelLinear(FusedColumnParallelLinear):
    """The q, k and v projections of grouped-query attention, whole heads on each rank.

    Query heads need not divide by the ranks, nor kv heads: where they are fewer than ranks (or do
    not go up) kv heads are copied, and each backward pass sums the gradients of the copies, so that
    they stay equal. `heads` (a HeadSplit) says who has what; `num_heads` and `num_kv_heads` are
    this rank's. The output projection is
    RowParallelLinear(total_heads * head_dim, hidden, group, partition=qkv.heads.query).

    forward(x) gives q [..., num_heads * head_dim], k and v [..., num_kv_heads * head_dim].
    Raises ValueError if num_kv_heads does not divide num_heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        group: Any,
        *,
        num_kv_heads: "int | None" = None,
        head_dim: "int | None" = None,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        bias: bool = True,
        sequence_parallel: "bool | SequenceSharding" = False,
        init_method: "InitMethod | None" = None,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        if head_dim is None and hidden_size % num_heads:
            raise InvalidArgument(
                f"hidden_size={hidden_size} is no multiple of num_heads={num_heads}; pass head_dim"
            )
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        place = Place(group)
        heads = split_heads(num_heads, num_kv_heads or num_heads, head_dim, place.size)
        q, k, v = names
        super().__init__(
            hidden_size,
            {q: heads.query, k: heads.kv, v: heads.kv},
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            init_method=init_method,
            device=device,
            dtype=dtype,
        )
        self.heads: HeadSplit = heads
        self.head_dim = head_dim
        self.total_heads = num_heads
        self.num_heads = heads.query_heads(place.rank)
        self.num_kv_heads = heads.kv_heads(place.rank)

    @classmethod
    def from_linears(
        cls,
        q: nn.Linear,
        k: nn.Linear,
        v: nn.Linear,
        group: Any,
        *,
        num_heads: int,
        **options: Any,
    ) -> "QKVParallelLinear":
        """This rank's heads of existing projections; the number of kv heads is in their shapes."""
        head_dim, rest = divmod(q.weight.shape[0], num_heads)
        if rest or k.weight.shape[0] % max(1, head_dim):
            raise InvalidArgument(
                f"q has {q.weight.shape[0]} and k {k.weight.shape[0]} output features: no whole "
                f"heads of {num_heads} query heads"
            )
        layer = cls(
            q.weight.shape[1],
            num_heads,
            group,
            num_kv_heads=k.weight.shape[0] // head_dim,
            head_dim=head_dim,
            bias=_bias_of([q, k, v]),
            device="meta",
            **options,
        )
        layer._from_parts([q, k, v])
        return layer


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up fused: one gather, one reduction.

    Args:
        hidden_size, intermediate_size: of the whole; the second need not divide by the ranks.
        group, sequence_parallel, init_method, device, dtype: as in ColumnParallelLinear.
        activation: one of "silu", "gelu", "gelu_tanh", "relu".
        bias: whether the three have biases.
        multiple_of: pads each rank's share of intermediate_size to a multiple.

    forward(x): x [..., hidden_size] replicated gives the same; with sequence_parallel both are this
    rank's part of the sequence. State dicts of the whole have gate_proj, up_proj and down_proj.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        group: Any,
        *,
        activation: str = "silu",
        bias: bool = False,
        sequence_parallel: "bool | SequenceSharding" = False,
        multiple_of: int = 1,
        init_method: "InitMethod | None" = None,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InvalidArgument(
                f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}"
            )
        self.activation = activation
        partition = Partition.even(intermediate_size, Place(group).size, multiple_of=multiple_of)
        if sequence_parallel is True:
            sequence_parallel = SequenceSharding()
        self.gate_up = FusedColumnParallelLinear(
            hidden_size,
            {"gate_proj": partition, "up_proj": partition},
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            init_method=init_method,
            device=device,
            dtype=dtype,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            partition=partition,
            init_method=init_method,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def from_linears(
        cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, group: Any, **options: Any
    ) -> "GatedMLP":
        """This rank's part of existing projections; `options` as in the constructor."""
        hidden, intermediate = gate.weight.shape[1], gate.weight.shape[0]
        bias = _bias_of([gate, up, down])
        mlp = cls(hidden, intermediate, group, bias=bias, device="meta", **options)
        if tuple(down.weight.shape) != (hidden, intermediate):
            raise InvalidArgument(
                f"down has shape {list(down.weight.shape)}; expected [{hidden}, {intermediate}]"
            )
        mlp.gate_up._from_parts([gate, up])
        mlp.down_proj._from(down)
        return mlp

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        gated = ACTIVATIONS[self.activation](gate)
        # In place where no gradient needs the factor: one array less to allocate and fill.
        gated = gated * up if torch.is_grad_enabled() else gated.mul_(up)
        y: Tensor = self.down_proj(gated)
        return y


def _bias_of(linears: Sequence[nn.Linear]) -> bool:
    has = {linear.bias is not None for linear in linears}
    if len(has) != 1:
        raise InvalidArgument("some of the layers to fuse have a bias and some have none")
    return has.pop()

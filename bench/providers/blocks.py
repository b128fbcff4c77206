"""Contestants of suite `layers`: our layers, and torch's DTensor by `parallelize_module`.

Both are made of the same whole block; ours attends by pyparallel.attention. The stock
side is what torch's tensor parallel tutorial writes: ColwiseParallel and RowwiseParallel on the
block's own linear layers, activations replicated between blocks, or cut along the sequence by
PrepareModuleInput and the second layer's output layout. In training a call is forward and
backward; gradients are new in each call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from bench.block_case import MLP, BlockCase, BlockInputs, attend
from bench.providers.base import Provider, Setup, Unsupported
from bench.providers.gemm import Ops
from bench.providers.torch_distributed import TorchDistributed

Call = Callable[[], Any]


class _Blocks(Provider):
    """Makes calls of a block; subclasses shard it, once per block and dtype."""

    _made: tuple[Any, nn.Module] | None = None

    def prepare(self, case: BlockCase, inputs: BlockInputs) -> Call:  # type: ignore[override]
        if case.sizes.kv_heads % case.world:
            raise Unsupported(f"{case.sizes.kv_heads} kv heads on {case.world} ranks")
        if case.sequence and case.m % case.world:
            raise Unsupported(f"DTensor cuts {case.m} tokens otherwise on {case.world} ranks")
        key = case.block, case.sequence, case.dtype, case.sizes, case.seed
        if self._made is None or self._made[0] != key:
            self._made = key, self.sharded(case)
        block = self._made[1]
        each = case.sizes.kv_heads // case.world
        mine = slice(self.setup.rank * each, (self.setup.rank + 1) * each)
        cache = case.cache(inputs.variant, mine)
        if cache is not None:
            cache = cache[0].to(inputs.x.device), cache[1].to(inputs.x.device)
        x, dy = inputs.x, inputs.dy

        def forward() -> Tensor:
            with torch.no_grad():
                y: Tensor = block(x, cache)
                return y

        wanted = list(block.parameters())

        def train() -> list[Tensor]:
            leaf = x.detach().requires_grad_()
            y = block(leaf, cache)
            return [y, *self.whole_parts(torch.autograd.grad(y, [leaf, *wanted], dy))]

        return train if case.train else forward

    def sharded(self, case: BlockCase) -> nn.Module:
        raise NotImplementedError

    def whole_parts(self, grads: Any) -> list[Tensor]:
        """Gradients of x and of the whole block's layers, in order, as views."""
        return list(grads)


class _Attention(nn.Module):
    """Ours between projections: pyparallel.attention where there is enough to do for it."""

    def __init__(self, qkv: nn.Module, o_proj: nn.Module, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = qkv
        self.o_proj = o_proj

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        way: Callable[..., Tensor]
        q, k, v = self.qkv(x)
        if cache is None:
            way = attend_causal if q.shape[1] >= _MANY_TOKENS else attend
        else:  # torch's kernel is done with a small cache before our steps would have begun
            small = cache[0].dtype is torch.float32 and cache[0].nbytes < _SMALL_CACHE
            way = attend if small else attend_to_cache
        y: Tensor = self.o_proj(way(q, k, v, cache, self.head_dim))
        return y


_MANY_TOKENS, _SMALL_CACHE = 256, 1 << 19


def attend_causal(q: Tensor, k: Tensor, v: Tensor, cache: None, head_dim: int) -> Tensor:
    """`attend` of a whole sequence, which this rank has for its heads."""
    from pyparallel.attention import sequence_parallel_attention

    sequences, tokens = q.shape[:2]
    q, k, v = (x.view(sequences, tokens, -1, head_dim) for x in (q, k, v))
    out = sequence_parallel_attention(q, k, v, group=_alone(), causal=True)
    assert isinstance(out, Tensor)
    return out.flatten(2)


@lru_cache(maxsize=1)
def _alone() -> Any:
    """A group of this rank only."""
    from pyparallel.attention import simulate

    return simulate(1, lambda group: group)[0]


def attend_to_cache(
    q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], head_dim: int
) -> Tensor:
    """`attend` over cached keys, then over the new ones: the state goes on, nothing is joined."""
    from pyparallel.attention import Mask, State, choose_engine, finish

    sequences, tokens = q.shape[:2]
    q, k, v = (x.view(sequences, tokens, -1, head_dim) for x in (q, k, v))
    old, new = _rows(0, cache[0].shape[2]), _rows(cache[0].shape[2], tokens)
    mask = Mask(head_dim**-0.5, causal=True)
    engine, _ = choose_engine(q, k, v, mask)
    state = State.empty(q, head_dim)
    cached = (x.transpose(1, 2) for x in cache)
    engine.forward_step(q, *cached, new, old, mask, state)
    engine.forward_step(q, k, v, new, new, mask, state)
    return finish(state, None, q.dtype)[0].flatten(2)


@lru_cache(maxsize=64)
def _rows(first: int, count: int) -> Any:
    """`count` rows of a sequence, from position `first` on."""
    from pyparallel.attention import Piece, Pieces

    return Pieces([Piece(0, count, first, 1, 0)])


class _MLP(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor, cache: None) -> Tensor:
        y: Tensor = self.mlp(x)
        return y


class Layers(_Blocks, Ops):
    """pyparallel.layers: fused gate and up, fused q, k and v."""

    name = "layers"

    def sharded(self, case: BlockCase) -> nn.Module:
        from pyparallel import layers

        whole: Any = case.whole().to(self.setup.device)
        cut: Any = layers.SequenceSharding(dim=1) if case.sequence else False
        if case.block == MLP:
            mlp = layers.GatedMLP.from_linears(
                whole.gate_proj, whole.up_proj, whole.down_proj, self._group, sequence_parallel=cut
            )
            self._sizes = mlp.gate_up.local_sizes
            return _MLP(mlp)
        qkv = layers.QKVParallelLinear.from_linears(
            whole.q_proj, whole.k_proj, whole.v_proj, self._group, num_heads=case.sizes.heads,
            sequence_parallel=cut,
        )  # fmt: skip
        self._sizes = qkv.local_sizes
        o_proj = layers.RowParallelLinear.from_linear(
            whole.o_proj, self._group, partition=qkv.heads.query, sequence_parallel=cut
        )
        return _Attention(qkv, o_proj, case.sizes.head_dim)

    def whole_parts(self, grads: Any) -> list[Tensor]:
        dx, fused, second = grads
        return [dx, *fused.split(self._sizes), second]


class DTensor(_Blocks, TorchDistributed):
    """torch.distributed.tensor.parallel.parallelize_module."""

    stock = True

    def __init__(self, setup: Setup) -> None:
        self.backend = "nccl" if setup.device.type == "cuda" else "gloo"
        self.name = f"DTensor+{self.backend}"
        super().__init__(setup)

    def sharded(self, case: BlockCase) -> nn.Module:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = DeviceMesh.from_group(self.group, self.setup.device.type)
        block = copy.deepcopy(case.whole()).to(self.setup.device)
        second = RowwiseParallel(output_layouts=Shard(1) if case.sequence else Replicate())
        plan = {
            name: second if name in ("down_proj", "o_proj") else ColwiseParallel()
            for name, _ in block.named_children()
        }
        if case.sequence:  # one gather for all first layers; the cache, None in prefill, stays
            parallelize_module(block, mesh, PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ))  # fmt: skip
        return parallelize_module(block, mesh, plan)

    def whole_parts(self, grads: Any) -> list[Tensor]:
        return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]

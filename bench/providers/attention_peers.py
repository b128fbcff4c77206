"""Contestants of suite `attention` on CUDA that are packages of others, called as their pages say.

    flash_attn         stock PyTorch's way (attention.py) with flash-attn's kernel for torch's
    ring_flash_attn    its zigzag ring under a causal mask, its ring without, its llama3 form of
                       packed documents
    context_parallel   torch's own (torch.distributed.tensor.experimental), zigzag under a mask,
                       contiguous without

A pattern that a package does not have is no row. None of them is imported before it is asked for.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.attention_case import AttentionCase, Inputs, Output
from bench.providers.attention import Call, StockAttention, called
from bench.providers.base import Setup, Unsupported
from bench.providers.torch_distributed import TorchDistributed


class FlashAttn(StockAttention):
    """Keys gathered, then flash-attn on a contiguous part: its causal mask is bottom-right."""

    package = "flash_attn"

    def __init__(self, setup: Setup) -> None:
        import flash_attn

        super().__init__(setup)
        self._package = flash_attn
        self.name = "flash-attn"

    def prepare(self, case: AttentionCase, inputs: Inputs) -> Call:  # type: ignore[override]
        rows, last, gathered = self.part_of(case)
        window = (case.window, 0) if case.window >= 0 else (-1, -1)
        dense, packed = self._package.flash_attn_func, self._package.flash_attn_varlen_func
        first = int(rows[0])
        documents = [
            (begin, end) for begin, end in pairwise(case.borders) if begin < last and end > first
        ]
        start, device = documents[0][0], inputs.q.device
        q_lengths = [min(end, last) - max(begin, first) for begin, end in documents]
        k_lengths = [min(end, last) - begin for begin, end in documents]
        cu_q, cu_k = (_summed(lengths, device) for lengths in (q_lengths, k_lengths))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (gathered(x)[:, :last] for x in (k, v))
            if case.pattern != "documents":
                out: Tensor = dense(q, k, v, causal=case.causal, window_size=window)
                return out
            out = packed(
                q[0], k[0, start:], v[0, start:], cu_q, cu_k, max(q_lengths), max(k_lengths),
                causal=True,
            )  # fmt: skip
            return out.unsqueeze(0)

        return called(case, inputs, rows, attend)


class RingFlashAttn(TorchDistributed):
    """ring-flash-attn."""

    stock = True

    def __init__(self, setup: Setup) -> None:
        import ring_flash_attn

        self.backend = "nccl" if setup.device.type == "cuda" else "gloo"
        super().__init__(setup)
        self._package = ring_flash_attn
        self.name = "ring-flash-attn"

    def prepare(self, case: AttentionCase, inputs: Inputs) -> Call:  # type: ignore[override]
        if case.pattern == "window":
            raise Unsupported("ring-flash-attn has no window across ranks")
        if case.sizes.rows % (2 * case.world):
            raise Unsupported(f"{case.sizes.rows} rows on {case.world} ranks")
        package, group = self._package, self.group
        rows = _cut("zigzag" if case.pattern == "causal" else "contiguous", case, self.setup.rank)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            func = package.ring_flash_attn_func
            if case.pattern == "causal":
                func = package.zigzag_ring_flash_attn_func
            out: Tensor = func(q, k, v, causal=case.causal, group=group)
            return out

        def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = package.llama3_flash_attn_varlen_func(
                q[0], k[0], v[0], cu_q, cu_k, most_q, most_k, heads_k_stride=1,
                local_k_slice=kept, causal=True, group=group,
            )  # fmt: skip
            return out.unsqueeze(0)

        if case.pattern != "documents":
            return called(case, inputs, rows, attend)
        borders = torch.tensor(case.borders, dtype=torch.int32, device=inputs.q.device)
        cu_q, cu_k, most_q, most_k, kept = package.llama3_flash_attn_prepare_cu_seqlens(
            borders, True, self.setup.rank, case.world
        )
        return called(case, inputs, rows, attend_packed)


class ContextParallel(TorchDistributed):
    """torch's context_parallel, which takes the place of scaled_dot_product_attention."""

    stock = True

    def __init__(self, setup: Setup) -> None:
        self.backend = "nccl" if setup.device.type == "cuda" else "gloo"
        super().__init__(setup)
        self.name = "torch context_parallel"

    def prepare(self, case: AttentionCase, inputs: Inputs) -> Call:  # type: ignore[override]
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental import context_parallel

        if case.pattern in ("window", "documents"):
            raise Unsupported(f"context_parallel takes no mask, which {case.pattern} needs")
        if case.sizes.rows % (2 * case.world):
            raise Unsupported(f"{case.sizes.rows} rows on {case.world} ranks")
        mesh = DeviceMesh.from_group(self.group, inputs.q.device.type)
        rows = _cut("zigzag" if case.causal else "contiguous", case, self.setup.rank)
        each = case.sizes.heads // case.sizes.kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(each, 2) for x in (k, v))  # it knows no grouped heads
            heads = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            # Looked up in its module, where context_parallel puts another in its place.
            attention = functional.scaled_dot_product_attention
            return attention(*heads, is_causal=case.causal).transpose(1, 2)

        call = called(case, inputs, rows, attend)
        # It wants something to cut, and takes rows for zigzag where that divides by twice the
        # ranks; without a causal mask it refuses those.
        length = case.sizes.rows if case.causal else case.world
        something = torch.empty(length, dtype=torch.uint8, device=inputs.q.device)

        def inside() -> Output:
            with context_parallel(mesh, buffers=[something], buffer_seq_dims=[0]):
                return call()  # backward too

        return inside


def _cut(sharding: str, case: AttentionCase, rank: int) -> Tensor:
    """The rows of a rank."""
    from pyparallel.attention import Sharding

    return Sharding.of(sharding, case.sizes.rows, case.world).rows(rank)


def _summed(lengths: list[int], device: Any) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)

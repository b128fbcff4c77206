"""Contestants of suite `attention`: ours, stock PyTorch, and one process on the whole sequence.

Stock PyTorch is what one writes with it: rows in contiguous parts, keys and values gathered by gloo
(NCCL on CUDA), scaled_dot_product_attention with the mask that a part needs, made beforehand; in
backward, a reduce-scatter of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.attention_case import AttentionCase, Inputs, Output
from bench.providers.base import Provider, Setup, Unsupported
from bench.providers.torch_distributed import (
    TorchDistributed,
    all_gather_flat,
    reduce_scatter_flat,
)

Call = Callable[[], Output]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Gather = Callable[[Tensor], Tensor]


def called(case: AttentionCase, inputs: Inputs, rows: Tensor, attend: Attend) -> Call:
    """A call on some rows of the whole, forward or with gradients, which are new in each."""
    own = rows.to(inputs.q.device)
    q, k, v, dout = (x.index_select(1, own) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))

    def forward() -> Output:
        with torch.no_grad():
            return Output(rows, {"out": attend(q, k, v)})

    def train() -> Output:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        return Output(rows, {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))})

    return train if case.train else forward


def sharding_of(case: AttentionCase) -> Any:
    """Ours: zigzag parts under a causal mask; else contiguous ones with even work."""
    from pyparallel.attention import Sharding

    rows, world = case.sizes.rows, case.world
    if case.pattern == "causal":
        return Sharding.of("zigzag", rows, world)
    return Sharding.balanced(
        rows, world, cu_seqlens=case.borders if case.pattern == "documents" else None,
        causal=case.causal, window_size=(case.window, -1),
    )  # fmt: skip


class SequenceParallel(TorchDistributed):
    """Ours."""

    name = "attention"
    backend = "pyparallel"

    def __init__(self, setup: Setup) -> None:
        import pyparallel.comm  # noqa: F401  registers the backend

        super().__init__(setup)

    def prepare(self, case: AttentionCase, inputs: Inputs) -> Call:  # type: ignore[override]
        from pyparallel.attention import sequence_parallel_attention
        from pyparallel.attention.transport import transport_of

        cut = sharding_of(case)
        borders = case.borders if case.pattern == "documents" else None
        options: dict[str, Any] = {
            "sharding": cut.name,
            "causal": case.causal,
            "window_size": (case.window, -1),
            "cu_seqlens": borders,
        }

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = sequence_parallel_attention(q, k, v, group=self.group, **options)
            assert isinstance(out, Tensor)
            return out

        call = called(case, inputs, cut.rows(self.setup.rank), attend)
        traffic = transport_of(self.group, inputs.q.device).traffic
        self.case = case

        def counted() -> Output:
            before = traffic.bytes_sent
            output = call()
            self.bytes_sent = traffic.bytes_sent - before
            return output

        return counted


class StockAttention(TorchDistributed):
    """Keys gathered, then torch's own attention on a contiguous part."""

    stock = True

    def __init__(self, setup: Setup) -> None:
        self.backend = "nccl" if setup.device.type == "cuda" else "gloo"
        self.name = f"torch+{self.backend}"
        super().__init__(setup)

    def part_of(self, case: AttentionCase) -> tuple[Tensor, int, Gather]:
        """This rank's rows, one behind the last key that they see, and what gathers keys."""
        total, world, group = case.sizes.rows, case.world, self.group
        if total % world:
            raise Unsupported(f"{total} rows on {world} ranks")
        part = total // world
        begin = self.setup.rank * part

        class Gathered(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                whole = x.new_empty((total, *x.shape[2:]))
                all_gather_flat(whole, x[0].contiguous(), group=group)
                return whole.unsqueeze(0)

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
                own = dy.new_empty((part, *dy.shape[2:]))
                reduce_scatter_flat(own, dy[0].contiguous(), group=group)
                return own.unsqueeze(0)

        rows = torch.arange(begin, begin + part)
        return rows, begin + part if case.causal else total, Gathered.apply

    def prepare(self, case: AttentionCase, inputs: Inputs) -> Call:  # type: ignore[override]
        rows, last, gathered = self.part_of(case)
        mask = None
        if case.causal and not (self.setup.rank == 0 and case.pattern == "causal"):
            mask = case.visible(rows, torch.arange(last)).to(inputs.q.device)
        first_of_causal = case.causal and mask is None

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (gathered(x)[:, :last] for x in (k, v))
            return torch_attention(q, k, v, mask, first_of_causal)

        return called(case, inputs, rows, attend)


class OneProcess(Provider):
    """Ours on the whole sequence, on each rank by itself, with that rank's threads."""

    name = "one_process"

    def prepare(self, case: AttentionCase, inputs: Inputs) -> Call:  # type: ignore[override]
        from pyparallel.attention import sequence_parallel_attention, simulate

        group = simulate(1, lambda group: group)[0]
        options: dict[str, Any] = {
            "causal": case.causal,
            "window_size": (case.window, -1),
            "cu_seqlens": case.borders if case.pattern == "documents" else None,
        }

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = sequence_parallel_attention(q, k, v, group=group, **options)
            assert isinstance(out, Tensor)
            return out

        return called(case, inputs, torch.arange(case.sizes.rows), attend)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)

"""What the ops should give, in float64 in one process, and how far off they may be.

A problem is drawn from a seed, so every rank draws all ranks' tensors and knows the whole answer.
Bound of a product (architecture of the numbers in docs/ops.md): elementwise
    |ours - ref| <= |stock - ref| + sqrt(K) eps32 (|A| |B|)
where stock is torch's matmul per rank in the dtype, then a sum over ranks in rank order in float32
that is rounded once. Float64 products: 2 (K + 2) eps64 (|A| |B| + |ref|). Gradients in float64 are
compared at 1e-12 of their size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps


def draw(seed: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """Random normal tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(list(shape), generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum over ranks as stock gives it: in rank order, float32 for 16 bits, rounded once."""
    wide = torch.float64 if parts[0].dtype is torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def limit_of(stock: Tensor, ref: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The bound on |ours - ref| for a sum of products with `a` [..., K] and `b` [N, K]."""
    k = a.shape[-1]
    sizes = a.double().abs() @ b.double().abs().t()
    if stock.dtype is torch.float64:  # the reference errs as much: worst cases of both
        return 2 * (k + 2) * torch.finfo(torch.float64).eps * (sizes + ref.abs())
    return (stock.double() - ref).abs() + k**0.5 * EPS32 * sizes


def assert_within(ours: Tensor, ref: Tensor, limit: Tensor, what: str = "") -> None:
    """Says the worst element and its share of the limit."""
    assert ours.shape == ref.shape, (what, ours.shape, ref.shape)
    if not ours.numel():
        return
    error = (ours.double() - ref).abs()
    assert torch.isfinite(ours).all(), what
    share = error / limit.clamp_min(1e-300)
    share[error == 0] = 0
    worst = int(share.argmax())
    assert share.flatten()[worst] <= 1, (
        f"{what}: element {worst}: {ours.flatten()[worst]} for {ref.flatten()[worst]}, "
        f"{share.flatten()[worst]:.3g} of what is allowed"
    )


def assert_close64(ours: Tensor, ref: Tensor, what: str = "") -> None:
    """Float64 results whose sums may run in another order: 1e-12 of the largest value."""
    assert ours.shape == ref.shape, (what, ours.shape, ref.shape)
    if ours.numel():
        scale = float(ref.abs().max().clamp_min(1))
        assert float((ours - ref).abs().max()) <= 1e-12 * scale, what

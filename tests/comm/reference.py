"""What the collectives must give: plain, in one process, from the inputs of all ranks.

Reductions have two references. `exact` follows the documented arithmetic step by step (rank order,
16-bit floats accumulated in 32, one rounding), and is met bit for bit. `float64` is independent of
that; the distance to it is bounded by the rounding of n - 1 additions and of the result.
"""

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

# Other values than a result can have by chance, to be found where nothing was written.
POISON = 77


def data(shape: Sequence[int], dtype: torch.dtype, *seed: object) -> Tensor:
    """Random values; the same for the same seed, on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((dtype, *seed)).encode()))
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    limits = torch.iinfo(dtype)
    low, high = max(limits.min, -(2**62)), min(limits.max, 2**62)  # what randint takes
    return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    value = float("nan") if dtype.is_floating_point else POISON
    return torch.full(tuple(shape), value).to(dtype)


# --- layouts: a tensor with the same elements, lying differently


def _transposed(x: Tensor) -> Tensor:
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


def _strided(x: Tensor) -> Tensor:
    wide = torch.zeros((*x.shape, 2), dtype=x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def _offset(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(3, dtype=x.dtype), x.reshape(-1)])[3:].view(x.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": _transposed,
    "strided": _strided,
    "offset": _offset,
}


# --- reductions


def defined_ops(dtype: torch.dtype) -> list[str]:
    if dtype.is_floating_point:
        return ["sum", "avg", "min", "max", "product", "premul_sum"]
    if dtype is torch.bool:
        return ["sum", "min", "max", "product", "band", "bor", "bxor"]
    return ["sum", "avg", "min", "max", "product", "band", "bor", "bxor"]


def factor_of(rank: int) -> float:
    """Each rank's own factor of premul_sum: exact in every float type."""
    return 0.5 * (rank + 1)


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def exact(inputs: Sequence[Tensor], op: str) -> Tensor:
    """The reduction by the documented arithmetic."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        op = {"sum": "bor", "product": "band"}.get(op, op)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    values = [x.to(wide) for x in inputs]
    if op == "premul_sum":
        values = [x * factor_of(r) for r, x in enumerate(values)]
    result = values[0]
    for x in values[1:]:
        result = _COMBINE[op](result, x)
    if op == "avg":
        result = (
            result / len(inputs)
            if wide.is_floating_point
            else torch.div(result, len(inputs), rounding_mode="trunc")
        )
    return result.to(dtype)


def float64(inputs: Sequence[Tensor], op: str) -> tuple[Tensor, Tensor]:
    """The reduction in float64, and the largest distance from it that rounding explains.

    Sums: each addition, product with a factor and division errs by eps of the accumulation type
    relative to the sum of magnitudes; products: by as many eps of the result. The result is rounded
    once to its own type (half an ulp, and half the least subnormal).
    """
    dtype, n = inputs[0].dtype, len(inputs)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    values = torch.stack([x.double() for x in inputs])
    if op == "premul_sum":
        values = torch.stack([x * factor_of(r) for r, x in enumerate(values)])
    magnitude = values.abs().sum(0)
    if op in ("sum", "premul_sum"):
        result = values.sum(0)
    elif op == "avg":
        result, magnitude = values.sum(0) / n, magnitude / n
    elif op == "product":
        result = values.prod(0)
        magnitude = result.abs()
    else:
        result = values.amin(0) if op == "min" else values.amax(0)
        magnitude = torch.zeros_like(result)
    info = torch.finfo(dtype)
    limit = (n + 1) * torch.finfo(wide).eps * magnitude
    if op not in ("min", "max"):
        limit = limit + info.eps / 2 * result.abs() + info.smallest_normal * info.eps
    return result, limit


def assert_same_bits(ours: Tensor, expected: Tensor, what: object) -> None:
    assert ours.dtype is expected.dtype, (what, ours.dtype, expected.dtype)
    assert ours.shape == expected.shape, (what, ours.shape, expected.shape)
    if not torch.equal(_bits(ours), _bits(expected)):
        wrong = (_bits(ours) != _bits(expected)).nonzero()[0].tolist()
        place = tuple(wrong[: ours.dim()])
        raise AssertionError(f"{what}: at {place} {ours[place]}, expected {expected[place]}")


def _bits(x: Tensor) -> Tensor:
    same_size = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()]
    return x.contiguous().view(same_size)


def assert_within(ours: Tensor, expected: Tensor, limit: Tensor, what: object) -> None:
    distance = (ours.double() - expected).abs()
    worst = (distance - limit).max() if distance.numel() else torch.tensor(0.0)
    assert not ours.isnan().any(), f"{what}: not a number"
    assert not bool(worst > 0), f"{what}: {worst.item()} beyond the bound"


def digest(x: Tensor) -> int:
    """To compare results of several ranks bit by bit."""
    return zlib.crc32(_bits(x.reshape(-1)).numpy().tobytes())

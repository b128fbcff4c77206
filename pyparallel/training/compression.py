"""Gradients in fewer bytes: what is sent in their place, and how it is read again.

    name      bytes per element       what is kept
    fp16      2                       11 bits; beyond 65504 infinite
    bf16      2                       8 bits
    int8      1 + 4 / block           8 bits of each block's largest
    fp8       1 + 4 / block           4 bits (e4m3), each block scaled to its largest
    topk      8 x ratio               the largest `ratio` of all elements
    powersgd  4 rank (m + n) / (m n)  a matrix m x n as a product of rank `rank`

What is lost in one step is added to the next one's gradient (error feedback; arXiv:1901.09847), so
that it is late and not gone. PowerSGD: arXiv:1905.13727; its first steps are whole (`warm_up`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["KINDS", "Codec", "Compression", "codec_of", "compression_of"]

KINDS = ("fp16", "bf16", "int8", "fp8", "topk", "powersgd")
_ONLY: Mapping[str, tuple[str, ...]] = {
    "block": ("int8", "fp8"),
    "ratio": ("topk",),
    "rank": ("powersgd",),
    "warm_up": ("powersgd",),
}


@dataclass(frozen=True)
class Compression:
    """How gradients travel.

    Attributes:
        kind: one of `KINDS`.
        block: of int8 and fp8: elements that share a scale (256).
        ratio: of topk: the part of the elements that is sent (0.01).
        rank: of powersgd (4).
        warm_up: of powersgd: steps at the start whose gradients are sent whole (10).
        error_feedback: False: what is lost is gone, and a copy of the gradients is saved.

    Raises:
        ValueError: at construction; an option that its kind does not have.
    """

    kind: str
    block: int | None = None
    ratio: float | None = None
    rank: int | None = None
    warm_up: int | None = None
    error_feedback: bool = True

    def __post_init__(self) -> None:
        misfits = []
        if self.kind not in KINDS:
            misfits.append(f"kind={self.kind!r} is not one of {', '.join(KINDS)}")
        for option, kinds in _ONLY.items():
            value = getattr(self, option)
            if value is not None and self.kind not in kinds:
                misfits.append(f"{option} is of {' and '.join(kinds)}, not of {self.kind}")
        for option, low in (("block", 1), ("rank", 1), ("warm_up", 0)):
            value = getattr(self, option)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= low):
                misfits.append(f"{option}={value!r}: a whole number, {low} or more, is expected")
        if self.ratio is not None and not 0 < self.ratio <= 1:
            misfits.append(f"ratio={self.ratio!r}: more than 0 and at most 1 is expected")
        if not isinstance(self.error_feedback, bool):
            misfits.append(f"error_feedback={self.error_feedback!r}: True or False is expected")
        if misfits:
            raise ValueError("Compression: " + "; ".join(misfits))


def compression_of(given: "Compression | str") -> Compression:
    """A name alone, or a `Compression`, with its defaults filled in."""
    made = Compression(given) if isinstance(given, str) else given
    if not isinstance(made, Compression):
        raise ValueError(f"compression={given!r}: a Compression, or one of {', '.join(KINDS)}")
    defaults: dict[str, Any] = {"block": 256, "ratio": 0.01, "rank": 4, "warm_up": 10}
    missing = {
        option: defaults[option]
        for option, kinds in _ONLY.items()
        if made.kind in kinds and getattr(made, option) is None
    }
    return replace(made, **missing)


class Codec:
    """Rows of float32 as bytes, and back.

    Args:
        dtype: that elements are stored in.
        block: elements that share a scale, a float32 behind the elements; 0: none, elements are
            only cast.
        largest: magnitude that a block's largest element is scaled to.
    """

    def __init__(self, dtype: torch.dtype, block: int = 0, largest: float = 0.0) -> None:
        self.dtype, self.block, self.largest = dtype, block, largest

    def row_bytes(self, columns: int) -> int:
        """Of a row of so many elements; with scales, whole blocks."""
        scales = columns // self.block * 4 if self.block else 0
        return columns * self.dtype.itemsize + scales

    def padded(self, columns: int) -> int:
        """The next number of elements that is whole blocks, and whose bytes scales may follow."""
        step = max(4, self.block)
        if step % 4:
            step *= 4
        return -(-columns // step) * step

    def encode(self, rows: Tensor) -> Tensor:
        """float32 [rows, columns] -> uint8 [rows, row_bytes]. Not finite: the whole block is NaN,
        here and on all other ranks."""
        if not self.block:
            return rows.to(self.dtype).view(torch.uint8)
        blocks = rows.view(len(rows), -1, self.block)
        scales = blocks.abs().amax(-1) / self.largest
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        unit = torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
        scaled = (blocks / unit).nan_to_num(0.0).clamp(-self.largest, self.largest)
        elements = scaled.round() if self.dtype == torch.int8 else scaled
        packed = elements.to(self.dtype).view(len(rows), -1).view(torch.uint8)
        return torch.cat([packed, scales.contiguous().view(torch.uint8)], dim=1)

    def decode(self, packed: Tensor) -> Tensor:
        """uint8 [rows, row_bytes] -> float32 [rows, columns]."""
        if not self.block:
            return packed.view(self.dtype).float()
        size = self.block * self.dtype.itemsize
        count = packed.shape[1] // (size + 4)
        elements = packed[:, : count * size].contiguous().view(self.dtype).float()
        scales = packed[:, count * size :].contiguous().view(torch.float32)
        blocks = elements.view(len(packed), count, self.block) * scales.unsqueeze(-1)
        return blocks.view(len(packed), -1)


def codec_of(compression: Compression) -> Codec | None:
    """None for kinds that do not send every element."""
    block = compression.block or 0
    return {
        "fp16": Codec(torch.float16),
        "bf16": Codec(torch.bfloat16),
        "int8": Codec(torch.int8, block, 127.0),
        "fp8": Codec(torch.float8_e4m3fn, block, 448.0),
    }.get(compression.kind)

"""What is measured (Case) and what came out (Row), and how they are written and read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

ITEM_SIZE = {"float32": 4, "bfloat16": 2}
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
LONG = {short: name for name, short in SHORT.items()}


@dataclass(frozen=True)
class Case:
    """One op at one size. `nbytes` is the whole buffer of a rank that holds all shares."""

    op: str
    nbytes: int
    dtype: str
    world: int

    @property
    def count(self) -> int:
        return self.nbytes // ITEM_SIZE[self.dtype]

    @property
    def label(self) -> str:
        size = f" {format_bytes(self.nbytes)}" if self.nbytes else ""
        return f"{self.op}{size} {SHORT[self.dtype]} x{self.world}"


@dataclass(frozen=True)
class Summary:
    """Microseconds of one call on the slowest rank, over `samples` samples."""

    p10: float
    p20: float
    median: float
    p80: float
    p90: float
    samples: int
    calls: int  # calls per sample


@dataclass
class Row:
    """One line of bench.json: ours against one peer, timed in the same processes, interleaved."""

    suite: str
    op: str
    api: str  # through which door ours was called: "direct" or "torch.distributed"
    shape: list[int]  # elements of each rank's share where there are shares, else of the buffer
    dtype: str
    world_size: int
    peer: str
    peer_us: Summary | None
    ours_us: Summary | None
    speedup: float | None  # peer median / ours median
    error: float | None  # of ours, relative to the sum of the magnitudes added up
    error_bound: float | None
    verified: bool  # ours: right on every rank, and bit-identical where ranks hold the same value
    peer_verified: bool
    bytes: int
    flops: int
    bound_us: float | None  # of the plain C++ copy-and-add on the same case, where it was timed
    note: str = ""
    busy: bool = False  # something else kept every core busy
    crowded: bool = False  # fewer cores than ranks
    size: str = ""  # of the case, where it is no number of bytes
    parts: dict[str, float] = field(default_factory=dict)  # figures beside the times, by name

    @property
    def size_text(self) -> str:
        return self.size or (format_bytes(self.bytes) if self.bytes else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Row:
        fields = dict(data)
        for key in ("peer_us", "ours_us"):
            fields[key] = Summary(**fields[key]) if fields[key] else None
        return Row(**fields)

    @property
    def case(self) -> Case:
        return Case(self.op, self.bytes, self.dtype, self.world_size)


@dataclass
class Outcome:
    """Everything one run of the benchmark found."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # ranks that died, cases never reached

    @property
    def ok(self) -> bool:
        return not self.problems and all(row.verified for row in self.rows)


def format_bytes(nbytes: int) -> str:
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def parse_bytes(text: str) -> int:
    """ "4K", "256KB", "64M", "4096" -> bytes (powers of 1024)."""
    upper = text.strip().upper().removesuffix("B")
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(upper[-1:], 1)
    digits = upper if scale == 1 else upper[:-1]
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"size {text!r}: want a positive number with K, M or G, such as 4K or 64M")
    return int(digits) * scale


def parse_shape(text: str) -> tuple[int, int, int]:
    """ "16x1024x4096" -> M, N, K of the whole op."""
    parts = text.strip().lower().split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"shape {text!r}: want M x N x K, such as 16x1024x4096")
    m, n, k = map(int, parts)
    return m, n, k


def parse_heads(text: str) -> tuple[int, int]:
    """ "8/2" -> heads of queries, heads of keys."""
    parts = text.strip().split("/")
    if len(parts) == 2 and all(p.isdigit() and int(p) > 0 for p in parts):
        heads, kv_heads = map(int, parts)
        if heads % kv_heads == 0:
            return heads, kv_heads
    raise ValueError(f"heads {text!r}: want those of queries, a multiple, / those of keys: 8/2")

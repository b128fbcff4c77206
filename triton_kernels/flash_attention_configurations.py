"""Which blocks attention is cut into: pure functions of head sizes, dtype and chip.

    attention_candidates(problem, chip)    every configuration, with the reason for leaving it out
    choose_attention(problem, device)      the first that is not left out
    backward_form(problem, device)         fused or split

The order is that of preference on a chip: blocks as large as its registers and shared memory take
without a spill (`python -m bench static` compiles and reads all that can be picked).
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from .configurations import CHIPS, Chip, chip_of
from .flash_attention_tiles import split_head

__all__ = [
    "AttentionCandidate",
    "AttentionChoice",
    "AttentionConfig",
    "AttentionProblem",
    "attention_candidates",
    "backward_form",
    "choose_attention",
    "choose_for_chip",
    "form_for_chip",
]

OPS = ("forward", "dkdv", "dq", "fused backward")


@dataclass(frozen=True)
class AttentionConfig:
    """How an attention kernel is cut and launched."""

    block_q: int = 128
    block_k: int = 128
    num_warps: int = 8
    num_stages: int = 2
    descriptors: bool = False  # blocks without a mask are loaded by TMA
    edge: int = 64  # blocks with a mask have so many rows: what a mask needs must fit registers too

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments of all kernels."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_K": self.block_k,
            "EDGE": self.edge,
            "DESCRIPTORS": self.descriptors,
        }

    def options(self) -> dict[str, Any]:
        """How they are compiled. Fusion is pinned: its default changes between Triton releases."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True)
class AttentionProblem:
    """What a choice sees. op: one of OPS; descriptors: whether all operands fit TMA."""

    op: str
    size: int  # of a head of q and k
    size_v: int
    dtype: str
    descriptors: bool = True
    scored: bool = False  # softcap, ALiBi or dropout: each score takes registers of its own

    @property
    def parts(self) -> int:
        """In how many parts the heads are held: one or two."""
        return 2 if split_head(self.size)[1] or split_head(self.size_v)[1] else 1

    @property
    def width(self) -> int:
        """The larger head, with its padding."""
        return max(sum(split_head(self.size)), sum(split_head(self.size_v)))


@dataclass(frozen=True)
class AttentionCandidate:
    """A configuration, or the reason for leaving it out."""

    config: AttentionConfig
    excluded: str = ""


@dataclass(frozen=True)
class AttentionChoice:
    """What a launcher is given, and why."""

    config: AttentionConfig
    reason: str


@dataclass(frozen=True)
class _Row:
    """block_q, block_k, warps, stages for heads of up to `width`, in up to `parts` parts."""

    width: int
    config: AttentionConfig
    parts: int = 2


def _rows(
    descriptors: bool, *rows: tuple[int, int, int, int, int, int], parts: int = 2
) -> tuple[_Row, ...]:
    return tuple(
        _Row(width, AttentionConfig(q, k, warps, stages, descriptors, edge), parts)
        for width, q, k, edge, warps, stages in rows
    )


# For each family and op: (up to this width of a head, block_q, block_k, edge, warps, stages).
# fmt: off
_SMALL = _rows(False, (256, 32, 32, 32, 8, 1))
_TABLE = {
    (80, "forward"): _rows(
        False, (16, 128, 64, 64, 8, 2), (128, 128, 64, 32, 8, 2), (192, 64, 32, 16, 8, 2),
        (256, 64, 32, 32, 8, 2),
    ),
    (80, "dkdv"): _rows(False, (128, 64, 64, 32, 8, 2), parts=1)
    + _rows(False, (128, 32, 64, 16, 8, 2)) + _SMALL,
    (80, "dq"): _rows(False, (128, 64, 64, 32, 8, 2)) + _SMALL,
    (80, "fused backward"): _rows(False, (128, 32, 64, 16, 8, 2), parts=1)
    + _rows(False, (80, 16, 16, 16, 8, 1), (256, 16, 32, 16, 8, 1)),
    (90, "forward"): _rows(
        True, (64, 128, 128, 64, 8, 3), (128, 128, 128, 64, 8, 2), (256, 128, 64, 32, 8, 2),
    ),
    (90, "dkdv"): _rows(True, (128, 64, 128, 32, 8, 2), (192, 32, 64, 16, 8, 2)) + _SMALL,
    (90, "dq"): _rows(True, (128, 128, 64, 32, 8, 2), (256, 64, 32, 16, 8, 2)),
    (90, "fused backward"): _rows(True, (128, 32, 64, 32, 8, 2), parts=1)
    + _rows(True, (128, 32, 64, 16, 8, 2)) + _SMALL,
    (100, "forward"): _rows(
        True, (128, 128, 128, 64, 8, 2), (192, 128, 64, 32, 8, 2), (256, 64, 32, 32, 8, 2),
    ),
    (100, "dkdv"): _rows(True, (128, 64, 128, 32, 8, 2), (256, 64, 64, 16, 8, 1)),
    (100, "dq"): _rows(True, (128, 128, 64, 32, 8, 2), (256, 64, 32, 32, 8, 2)),
    (100, "fused backward"): _rows(True, (128, 64, 64, 32, 8, 2), parts=1)
    + _rows(True, (128, 64, 64, 16, 8, 2)) + _SMALL,
}
# With softcap, ALiBi or dropout.
_SCORED = {
    "forward": _rows(True, (128, 64, 64, 32, 8, 2), parts=1)
    + _rows(True, (128, 64, 32, 32, 8, 2)) + _SMALL,
    "dkdv": _rows(False, (256, 32, 32, 32, 8, 1), parts=1)
    + _rows(False, (96, 16, 32, 16, 8, 1)) + _SMALL,
    "dq": _rows(True, (128, 64, 32, 32, 8, 2)) + _SMALL,
    "fused backward": _rows(False, (256, 32, 32, 32, 8, 1), parts=1)
    + _rows(False, (96, 16, 16, 16, 8, 1)) + _SMALL,
}
_SCORED_80 = _SCORED | {
    "dq": _rows(False, (128, 64, 32, 32, 8, 2), parts=1)
    + _rows(False, (128, 64, 32, 16, 8, 2)) + _SMALL,
    "fused backward": _rows(False, (128, 32, 32, 32, 8, 1), parts=1)
    + _rows(False, (96, 16, 16, 16, 8, 1), (256, 16, 32, 16, 8, 1)),
}
_FLOAT32 = {
    "forward": _rows(False, (128, 32, 32, 32, 8, 1), (256, 16, 16, 16, 4, 1)),
    "dkdv": _rows(False, (128, 16, 32, 16, 8, 1), (256, 16, 16, 16, 8, 1)),
    "dq": _rows(False, (128, 32, 32, 32, 4, 1), parts=1)
    + _rows(False, (128, 32, 32, 32, 8, 1), (256, 16, 16, 16, 8, 1)),
    "fused backward": _rows(
        False, (16, 32, 32, 32, 8, 1), (128, 16, 32, 16, 8, 1), (256, 16, 16, 16, 8, 1),
    ),
}
# sm_80's assembler would spill there to fit one program more.
_FLOAT32_80 = _FLOAT32 | {
    "dkdv": _rows(False, (128, 16, 32, 16, 8, 1), parts=1)
    + _rows(False, (256, 16, 16, 16, 8, 1)),
    "fused backward": _rows(False, (128, 32, 32, 32, 8, 1), parts=1)
    + _rows(False, (128, 16, 32, 16, 8, 1), (256, 16, 16, 16, 8, 1)),
}
# fmt: on


def attention_candidates(problem: AttentionProblem, chip: Chip) -> list[AttentionCandidate]:
    """All configurations of the chip's family for this op, the preferred ones first.

    Raises:
        ValueError: the op or the dtype is not one of these kernels.
    """
    if problem.op not in OPS or problem.dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(
            f"{problem}: op is one of {', '.join(OPS)}; dtype float32, float16 or bfloat16"
        )
    family = family_of(chip.arch)
    loads = problem.descriptors and family >= 90
    return [
        AttentionCandidate(
            replace(row.config, descriptors=row.config.descriptors and loads),
            _misfit(problem, row),
        )
        for row in _rows_of(problem, family)
    ]


def choose_for_chip(problem: AttentionProblem, chip: Chip) -> AttentionChoice:
    """The first configuration that fits, and why.

    Raises:
        ValueError: none fits; the text has each one's reason.
    """
    every = attention_candidates(problem, chip)
    for candidate in every:
        if not candidate.excluded:
            note = f"first of {len(every)} for sm_{family_of(chip.arch)}"
            return AttentionChoice(candidate.config, f"{note} that takes heads of {problem.width}")
    reasons = "; ".join(f"{c.config}: {c.excluded}" for c in every)
    raise ValueError(f"{problem} on {chip.name} (sm_{chip.arch}): {reasons}")


def choose_attention(problem: AttentionProblem, device: torch.device) -> AttentionChoice:
    """choose_for_chip of the device; a device that is no GPU runs Triton's interpreter."""
    return choose_for_chip(problem, _chip(device.type, device.index))


@lru_cache
def _chip(kind: str, index: "int | None") -> Chip:
    if kind != "cuda":
        return CHIPS["interpreter"]
    return chip_of(torch.cuda.current_device() if index is None else index)


def backward_form(problem: AttentionProblem, device: torch.device) -> str:
    """ "fused" or "split": which form of the backward (flash_attention_backward.py) is used where
    either may be."""
    return form_for_chip(problem, _chip(device.type, device.index))


def form_for_chip(problem: AttentionProblem, chip: Chip) -> str:
    """Split, unless fused's main loops need clearly fewer cycles for the same scores (a twentieth;
    the static table does not count what atomic adds wait for, and they make bits differ from run to
    run). Fused has two products fewer, but its atomic adds and its smaller blocks cost more, but
    for fp32 and for heads of 256 on sm_90.
    """
    wide = problem.width > 192 and family_of(chip.arch) == 90
    return "fused" if problem.dtype == "float32" or wide else "split"


def _misfit(problem: AttentionProblem, row: _Row) -> str:
    if problem.width > row.width:
        return f"heads of {problem.width}, up to {row.width} fit"
    if problem.parts > row.parts:
        return f"heads of {problem.size} and {problem.size_v} in two parts, one fits"
    return ""


def family_of(arch: int) -> int:
    """The architecture whose table serves: unknown chips take sm_80's plain pointers."""
    return {90: 90, 100: 100, 103: 100}.get(arch, 80)


def _rows_of(problem: AttentionProblem, family: int) -> tuple[_Row, ...]:
    """Those of float32 before those of a mask's features before those of the chip."""
    if problem.dtype == "float32":
        return (_FLOAT32_80 if family == 80 else _FLOAT32)[problem.op]
    if problem.scored:
        return (_SCORED_80 if family == 80 else _SCORED)[problem.op]
    return _TABLE[family, problem.op]

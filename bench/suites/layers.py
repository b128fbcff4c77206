"""Suite `layers`: a transformer's MLP and attention, our layers against torch's DTensor.

Blocks of Llama-3-8B, on CPU of an eighth of its width (bench/block_case.py), activations replicated
between them or, in prefill, cut along the sequence too. Decoding is forward only; prefill is
forward, and forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import device

from bench.block_case import (
    ATTENTION,
    EIGHTH,
    FORWARD,
    LLAMA_3_8B,
    MLP,
    OPS,
    SEQUENCE,
    TRAIN,
    BlockCase,
)
from bench.call_contest import CallContest
from bench.case import LONG
from bench.options import Options
from bench.page import Page
from bench.providers.base import Provider

TITLE = "Blocks of tensor-parallel layers"
DECODE, PREFILL = (1, 4, 16), (128, 512)
QUICK_DECODE, QUICK_PREFILL = (1, 16), (128,)


def cases(options: Options, world: int) -> list[BlockCase]:
    """Largest first: what they take beyond their share of the time is then known early."""
    decode, prefill = (QUICK_DECODE, QUICK_PREFILL) if options.quick else (DECODE, PREFILL)
    sizes = LLAMA_3_8B if options.device == "cuda" else EIGHTH
    found = [
        BlockCase(f"{block}_{what}", m, dtype, world, sizes, options.seed)
        for block in (MLP, ATTENTION)
        for what in (FORWARD, TRAIN, f"{SEQUENCE}_{FORWARD}", f"{SEQUENCE}_{TRAIN}")
        for m in ((*decode, *prefill) if what == FORWARD else prefill)
        for dtype in options.dtypes or LONG.values()
        if not options.ops or f"{block}_{what}" in options.ops
    ]
    return sorted(found, key=lambda case: -case.flops)


def pairs(options: Options) -> list[tuple[str, str]]:
    """(ours, peer) for each row of a case."""
    return [("layers", "dtensor")]


def contest(
    page: Page, found: Mapping[str, Provider], device: device, suite: str, options: Options
) -> CallContest:
    return CallContest(page, found, device, suite, options.busy)


__all__ = ["OPS", "TITLE", "cases", "contest", "pairs"]

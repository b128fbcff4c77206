"""Suite `attention`: a sequence cut over ranks, against stock PyTorch and one process.

Llama-3-8B's heads in bfloat16, on CPU a quarter of them in float32; causal, full, packed documents,
a window; forward, and forward and backward. Stock PyTorch gathers all keys and values and runs its
own attention on a contiguous part; on CUDA --peer adds packages of others (attention_peers.py of
the providers). Beside the times each row has our rate per rank, the time of one process on the
whole sequence (with one rank's threads, on every rank at once) and our scaling efficiency against
it, the bytes that the rank sends that sends most, and those of keys and values that some query of a
rank needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import device

from bench.attention_case import OPS, AttentionCase, Sizes
from bench.call_contest import CallContest
from bench.case import Row
from bench.options import Options
from bench.page import Page
from bench.providers import CUDA_PEERS
from bench.providers.attention import sharding_of
from bench.providers.base import Provider
from bench.timing import Budget

TITLE = "Attention over a sequence cut over ranks"
QUICK = (Sizes(2048, 8, 2, 64),)
CPU = tuple(Sizes(rows, 8, 2, 128) for rows in (8192, 16384))
CPU_FORWARD = (Sizes(32768, 8, 2, 128),)
FORWARD_ONLY = ("causal_forward", "full_forward")  # of those lengths
CUDA = tuple(Sizes(rows, 32, 8, 128) for rows in (16384, 65536))
PARTS = ("one_process",)
SECONDS = 90.0  # at most for one case


def cases(options: Options, world: int) -> list[AttentionCase]:
    """Largest first: what they take beyond their share of the time is then known early."""
    # GPUs have kernels for 16 bits only.
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    sizes = CUDA if options.device == "cuda" else QUICK if options.quick else CPU
    if options.rows:
        sizes = tuple(replace(sizes[0], rows=rows) for rows in options.rows)
    found = [
        AttentionCase(op, s, world, options.seed, dtype)
        for op in OPS
        for s in sizes
        if not options.ops or op in options.ops
    ]
    if sizes is CPU:
        asked = [op for op in FORWARD_ONLY if not options.ops or op in options.ops]
        found += [AttentionCase(op, s, world, options.seed) for op in asked for s in CPU_FORWARD]
    if options.dtypes and dtype not in options.dtypes:
        return []
    if options.heads:
        heads, kv_heads = options.heads
        found = [
            replace(case, sizes=replace(case.sizes, heads=heads, kv_heads=kv_heads))
            for case in found
        ]
    return sorted(found, key=lambda case: -case.flops)


def pairs(options: Options) -> list[tuple[str, str]]:
    """(ours, peer) for each row of a case."""
    asked = [peer for peer in options.peers if peer in CUDA_PEERS]
    return [("attention", peer) for peer in ("stock_attention", *asked)]


def parts(options: Options) -> tuple[str, ...]:
    """Providers that are timed beside the pairs."""
    return PARTS


class AttentionContest(CallContest):
    """Calls, and what is sent in them."""

    def run(self, case: Any, pairs: Sequence[tuple[str, str]], budget: Budget) -> list[Row]:
        rows = super().run(case, pairs, budget)
        ours: Any = self.trials["attention"]
        if not ours.verified:
            return rows
        sent = max(row[0] for row in self.page.exchange([float(ours.provider.bytes_sent)]))
        needed = needed_bytes(case)
        return [
            replace(row, parts={**row.parts, **figures(case, row, sent, needed)}) for row in rows
        ]


def needed_bytes(case: AttentionCase) -> int:
    """Of keys and values that some query of another rank sees, of the rank that sends most."""
    from pyparallel.attention import explain

    s, cut = case.sizes, sharding_of(case)
    return explain(
        (1, s.rows, s.heads, s.head_dim),
        (1, s.rows, s.kv_heads, s.head_dim),
        case.world,
        strategy="ring",
        causal=case.causal,
        window_size=(case.window, -1),
        sharding=cut.name,
        sizes=cut.sizes,
        cu_seqlens=case.borders if case.pattern == "documents" else None,
    ).bytes_needed


def figures(case: AttentionCase, row: Row, sent: float, needed: int) -> dict[str, float]:
    """The columns beside the times."""
    found = {"sent MB": sent / 2**20, "needed MB": needed / 2**20}
    if row.ours_us is not None:
        found["GFLOP/s"] = case.flops / row.ours_us.median / 1e3
        if "one_process" in row.parts and case.world > 1:
            alone = row.parts["one_process"] / case.world
            found["efficiency %"] = 100 * alone / row.ours_us.median
    return found


def medians_of_parts(medians: Mapping[str, float]) -> dict[str, float]:
    return {name: medians[name] for name in PARTS if name in medians}


def contest(
    page: Page, found: Mapping[str, Provider], device: device, suite: str, options: Options
) -> CallContest:
    return AttentionContest(page, found, device, suite, options.busy, PARTS, medians_of_parts)


__all__ = ["OPS", "TITLE", "cases", "contest", "pairs", "parts"]

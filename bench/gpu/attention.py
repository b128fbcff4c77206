"""Attention on one device: a ring of P ranks in turn against one whole call, torch's, flash-attn's.

Method. The P ranks of a zigzag ring run their steps one after another on the whole device, each hop
on the keys that it would have received, laid out beforehand: the time over that of one whole call
is what a ring costs beside its transfers (smaller steps, states stored and loaded, launches).
Forward is all steps and the end of each state; backward all steps that add to dq, dk and dv.
Llama-3-8B's heads in bfloat16. Medians, p10 and p90 of samples, CUDA events around each;
contestants take turns. Before anything is timed the ring's and the whole call's results are
compared with torch's: root mean square error within 7.2e-3 of the result's (attention_case.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.attention_case import LIMITS
from bench.gpu.kernels import quantiles
from bench.gpu.results import leave
from pyparallel.attention import Mask, Sharding, State, choose_engine, finish
from pyparallel.attention.needs import select_rows
from pyparallel.attention.plan import Facts, Plan

RANKS = 8
LENGTHS = (16384, 8192, 65536)  # most valuable first
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Hop:
    """A step of one rank: the keys that it meets, and where they lie."""

    rank: int
    source: int
    k: Tensor
    v: Tensor
    pieces: Any


class Ring:
    """P ranks' parts of one sequence on one device; one rank is the whole call."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, ranks: int, causal: bool):
        rows, heads, kv_heads = q.shape[1], q.shape[2], k.shape[2]
        self.cut = Sharding.of("zigzag", rows, ranks)
        self.plan = Plan(Facts(self.cut, self.cut, heads, kv_heads, causal, -1, -1), "ring", 1)
        self.mask = Mask(q.shape[3] ** -0.5, causal)
        self.engine, self.engine_reason = choose_engine(q, k, v, self.mask)
        parts = [self.cut.rows(rank).to(q.device) for rank in range(ranks)]
        self.q, self.dout, self.k, self.v = (
            [x.index_select(1, rows) for rows in parts] for x in (q, dout, k, v)
        )
        self.hops = [self._hop(rank, hop) for rank in range(ranks) for hop in range(ranks)]
        self._order = self.cut.order().to(q.device)

    def _hop(self, rank: int, hop: int) -> Hop:
        source = (rank - hop) % self.plan.world
        if hop == 0:
            return Hop(rank, rank, self.k[rank], self.v[rank], self.plan.keys(rank))
        part = self.plan.needs(rank, source)
        k, v = (select_rows(x[source], part).contiguous() for x in (self.k, self.v))
        return Hop(rank, source, k, v, part.pieces)

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        """(out, lse) of each rank."""
        states = [State.empty(q, self.v[0].shape[3]) for q in self.q]
        for hop in self.hops:
            if hop.pieces.rows:
                self.engine.forward_step(
                    self.q[hop.rank], hop.k, hop.v, self.plan.queries(hop.rank), hop.pieces,
                    self.mask, states[hop.rank],
                )  # fmt: skip
        return [finish(s, None, q.dtype) for s, q in zip(states, self.q, strict=True)]

    @cached_property
    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """lse and delta of each rank."""
        return [
            (lse, (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous())
            for (out, lse), dout in zip(self.forward(), self.dout, strict=True)
        ]

    def backward(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """dq, dk and dv of each rank in float32; those of other ranks' keys are added at once."""
        grads = [
            tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in own)
            for own in zip(self.q, self.k, self.v, strict=True)
        ]
        for hop in self.hops:
            if not hop.pieces.rows:
                continue
            dk, dv = grads[hop.rank][1:]
            if hop.source != hop.rank:  # they would travel home
                dk, dv = (
                    torch.zeros(x.shape, dtype=torch.float32, device=x.device)
                    for x in (hop.k, hop.v)
                )
            lse, delta = self.kept[hop.rank]
            self.engine.backward_step(
                self.dout[hop.rank], self.q[hop.rank], hop.k, hop.v, lse, delta,
                self.plan.queries(hop.rank), hop.pieces, self.mask, grads[hop.rank][0], dk, dv,
                deterministic=False,
            )  # fmt: skip
            if hop.source != hop.rank:
                at = 0
                for begin, end in self.plan.needs(hop.rank, hop.source).rows:
                    for mine, more in zip(grads[hop.source][1:], (dk, dv), strict=True):
                        mine[:, begin:end] += more[:, at : at + end - begin]
                    at += end - begin
        return [(dq, dk, dv) for dq, dk, dv in grads]

    def whole(self, parts: list[Tensor]) -> Tensor:
        """The ranks' rows in the order of the sequence."""
        return torch.cat(parts, 1).index_select(1, self._order)


@dataclass(frozen=True)
class Case:
    """One length and mask on a device."""

    rows: int
    causal: bool
    device: str
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    ranks: int = RANKS

    @property
    def flops(self) -> int:
        """Of the forward."""
        pairs = self.rows * (self.rows + 1) // 2 if self.causal else self.rows**2
        return 4 * self.head_dim * self.heads * pairs

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(self.rows)
        q, k, v, dout = (
            torch.randn(1, self.rows, heads, self.head_dim, device=self.device).bfloat16()
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        return q, k, v, dout


def _error(got: Tensor, want: Tensor) -> float:
    got, want = got.float(), want.float()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def errors(case: Case, ring: Ring, whole: Ring, stock: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative root mean square, of the ring and of the whole call, from torch's; by tensor."""
    found = {}
    for name, made in (("ring", ring), ("whole", whole)):
        out = made.whole([out for out, _ in made.forward()])
        grads = list(zip(*made.backward(), strict=True))
        tensors = {"out": out}
        tensors |= {n: made.whole(list(g)) for n, g in zip(("dq", "dk", "dv"), grads, strict=True)}
        found |= {f"{name} {n}": _error(x, stock[n]) for n, x in tensors.items()}
    return found


def contestants(case: Case) -> tuple[dict[str, Callable[[], Any]], dict[str, float], str]:
    """Calls by name, the errors of ours, and the engine."""
    q, k, v, dout = case.operands()
    ring, whole = (Ring(q, k, v, dout, ranks, case.causal) for ranks in (case.ranks, 1))

    def stock() -> Tensor:
        heads = (x.transpose(1, 2) for x in leaves)
        out = scaled_dot_product_attention(*heads, is_causal=case.causal, enable_gqa=True)
        return out.transpose(1, 2)

    def without_grad(call: Callable[[], Any]) -> Callable[[], Any]:
        def forward() -> Any:
            with torch.no_grad():
                return call()

        return forward

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = stock()
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    wanted = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    calls: dict[str, Callable[[], Any]] = {
        "whole forward": whole.forward,
        "ring forward": ring.forward,
        "torch forward": without_grad(stock),
        "whole backward": whole.backward,
        "ring backward": ring.backward,
        "torch backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        pass
    else:
        theirs = flash_attn_func(*leaves, causal=case.causal)
        calls["flash-attn forward"] = without_grad(
            lambda: flash_attn_func(*leaves, causal=case.causal)
        )
        calls["flash-attn backward"] = lambda: torch.autograd.grad(
            theirs, leaves, dout, retain_graph=True
        )
    return calls, errors(case, ring, whole, wanted), ring.engine_reason


def time_in_turn(
    calls: Mapping[str, Callable[[], Any]], device: str, samples: int
) -> dict[str, dict[str, float]]:
    """Microseconds of each call: median, p10, p90."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(samples + 2):
        for name, call in calls.items():
            if device == "cpu":
                start = time.perf_counter()
                call()
                took = (time.perf_counter() - start) * 1e6
            else:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                took = begin.elapsed_time(end) * 1e3
            if sample >= 2:  # the first two warm up
                times[name].append(took)
    return {name: quantiles(found) for name, found in times.items()}


def rows_of(case: Case, samples: int) -> list[dict[str, Any]]:
    calls, found, engine = contestants(case)
    worst = max(found, key=lambda name: found[name])
    verified = found[worst] <= LIMITS["bfloat16"]
    common = {
        "suite": "gpu_attention",
        "shape": [case.rows, case.heads, case.kv_heads, case.head_dim],
        "dtype": "bfloat16",
        "causal": case.causal,
        "ranks": case.ranks,
        "engine": engine,
        "verified": verified,
        "error": found[worst],
        "error_of": worst,
        "error_bound": LIMITS["bfloat16"],
    }
    if not verified:
        return [common | {"op": "forward and backward"}]
    times = time_in_turn(calls, case.device, samples)
    rows = []
    for op, factor in (("forward", 1.0), ("backward", 2.5)):
        us = {name.removesuffix(f" {op}"): t for name, t in times.items() if name.endswith(op)}
        rates = {name: case.flops * factor / t["median"] / 1e6 for name, t in us.items()}
        overhead = us["ring"]["median"] / us["whole"]["median"] - 1
        rows.append(common | {"op": op, "us": us, "tflops": rates, "ring_overhead": overhead})
    return rows


def measure(seconds: float, cases: list[Case], samples: int = 9) -> dict[str, Any]:
    """Rows until all cases are through or the time is; a case that fails costs only itself."""
    end = time.monotonic() + seconds
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    result: dict[str, Any] = {"rows": rows, "problems": problems, "left_out": 0}
    for case in cases:
        if time.monotonic() > end:
            result["left_out"] += 1
            continue
        try:
            rows += rows_of(case, samples)
        except (RuntimeError, ValueError) as error:
            problems.append(f"{case}: {error}")
        leave(result)  # what there is so far survives a kill
    problems += [f"{r['shape']}: {r['error_of']} is off by {r['error']:.2g}" for r in rows
                 if not r["verified"]]  # fmt: skip
    leave(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=70.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        leave({"skipped": "torch finds no CUDA device"})
        return
    cases = [Case(rows, causal, "cuda") for rows in LENGTHS for causal in (True, False)]
    result = measure(options.seconds, cases)
    for row in result["rows"]:
        rates = ", ".join(f"{n} {rate:.0f} TFLOP/s" for n, rate in row.get("tflops", {}).items())
        print(row["shape"], "causal" if row["causal"] else "full", row["op"], rates,
              f"ring +{100 * row['ring_overhead']:.1f} %" if rates else "WRONG")  # fmt: skip
    print("\n".join(result["problems"]))
    if result["problems"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

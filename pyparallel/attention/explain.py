"""explain(): what `sequence_parallel_attention` would do for some shapes, and why, with numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pyparallel.attention.cost import (
    MACHINES,
    NEAR,
    Estimate,
    choose,
    estimate,
    machine_of,
    plans_for,
)
from pyparallel.attention.engines import choose_engine
from pyparallel.attention.plan import Facts
from pyparallel.attention.request import check_operands, options_of
from pyparallel.attention.sharding import Sharding
from pyparallel.attention.shelf import Shelf
from pyparallel.attention.transport import transport_of
from pyparallel.errors import InvalidArgument

__all__ = ["AttentionExplanation", "StrategyEstimate", "explain"]


_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class StrategyEstimate:
    """One strategy at these shapes, forward."""

    name: str
    us: float  # estimated, of the slowest rank
    compute_us: float  # of it, the part that computes
    bytes_sent: int  # by the rank that sends most
    balance: float  # mean over largest work of a rank; 1 is even


@dataclass(frozen=True)
class AttentionExplanation:
    """What explain() found; print it, or take its fields (`to_dict` for JSON)."""

    what: str
    strategy: str
    reason: str
    engine: str
    estimates: tuple[StrategyEstimate, ...]
    bytes_needed: int  # by the rank that needs most: its keys of others, each once
    hidden_from: int  # tokens per rank from which a balanced ring's transfers are hidden, forward
    rates: str
    keys: str  # how they travel, of ring, all_gather and hybrid

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.what, f"  takes {self.strategy}: {self.reason}", f"  engine {self.engine}"]
        width = max(len(e.name) for e in self.estimates)
        for e in self.estimates:
            mark = "->" if e.name == self.strategy else "  "
            lines.append(
                f"  {mark} {e.name:{width}} {e.us:12.1f} us  compute {e.compute_us:12.1f} us  "
                f"sent {e.bytes_sent:>14,} bytes  balance {e.balance:.2f}"
            )
        lines.append(f"  keys and values that some query of a rank needs: {self.bytes_needed:,} "
                     "bytes at most")  # fmt: skip
        lines.append(
            f"  a balanced ring hides its transfers from {self.hidden_from:,} tokens per rank on"
        )
        lines.append(f"  keys are {self.keys}")
        lines.append(f"  estimated with {self.rates}")
        return "\n".join(lines)


def explain(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    group: Any,
    *,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    strategy: str = "auto",
    sharding: str = "zigzag",
    layout: str | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    per_document: bool = False,
    padded: bool = False,
    sizes: Sequence[int] | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    ulysses_size: int | None = None,
    engine: str | None = None,
) -> AttentionExplanation:
    """What `sequence_parallel_attention` does for these arguments, and why. Communicates nothing.

    Args:
        q_shape, k_shape: of the whole sequences, not of shards, in `layout`.
        group: as for the attention, or a number of ranks.
        v_head_dim: of the values; by default the keys'.
        dtype, device: of the tensors; "cpu" or "cuda".
        sizes: rows of each rank, of contiguous parts that are not even (`Sharding.balanced`).
        The rest: as for `sequence_parallel_attention`.

    Returns:
        An AttentionExplanation: the strategy with its reason, the engine, and of each strategy that
        was possible the estimated time, the bytes sent and the balance. It prints as a table.

    Raises:
        ValueError: for what the attention would refuse.
    """
    if device not in _DEVICES:
        raise InvalidArgument(f"device is {device!r}; expected one of {', '.join(_DEVICES)}")
    transport = None if type(group) is int else transport_of(group, torch.device(device))
    world = group if transport is None else transport.world_size
    shelf = Shelf() if transport is None else transport.shelf
    v_shape = [*k_shape[:-1], v_head_dim or k_shape[-1]]
    q, k, v = (
        torch.empty(tuple(s), dtype=dtype, device="meta") for s in (q_shape, k_shape, v_shape)
    )
    layout = check_operands(q, k, v, None, None, layout, cu_seqlens is not None)
    options = options_of(
        q.shape[-1],
        strategy=strategy,
        sharding=sharding,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        softmax_scale=None,
        dropout_p=dropout_p,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        per_document=per_document,
        padded=padded,
        deterministic=deterministic,
        ulysses_size=ulysses_size,
        engine=engine,
    )
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    elif layout == "thd":
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    batch, _, heads, d = q.shape
    kv_heads, d_v = v.shape[2:]
    cut_k = options.cu_seqlens if options.cu_seqlens_k is None else options.cu_seqlens_k
    on = 1 if strategy == "decode" else world
    facts = Facts(
        Sharding.of(sharding if on > 1 else "contiguous", q.shape[1], on,
                    cu_seqlens=options.cu_seqlens, per_document=on > 1 and per_document,
                    sizes=sizes if on > 1 else None),
        Sharding.of(sharding, k.shape[1], world, cu_seqlens=cut_k, per_document=per_document,
                    sizes=sizes),
        heads, kv_heads, causal, *options.window,
    )  # fmt: skip
    machine = machine_of(torch.device(device))
    problem = batch, d, d_v, dtype.itemsize, machine
    plan, _ = choose(facts, strategy, ulysses_size, *problem)
    shown = plans_for(facts, "decode" if strategy == "decode" else "auto", None)
    if plan not in shown:
        shown.append(plan)
    estimates = [estimate(p, *problem) for p in shown]
    taken = next(e for e in estimates if e.plan == plan)
    q, k, v = _on(device, q, k, v)
    _, why_engine = choose_engine(q, k, v, options.mask(None, 0), engine)
    ring = next((e for e in estimates if e.plan.strategy == "ring"), taken)
    rates = MACHINES[machine]
    flops = rates.flops if dtype.itemsize <= 2 else rates.wide_flops
    # Rows c >= k (F/B) (kv_heads/heads) (itemsize/2), k = 1 full, 2 causal: work over bytes.
    hidden = (2 if causal else 1) * flops / rates.bandwidth * kv_heads / heads
    return AttentionExplanation(
        f"sequence_parallel_attention: q {list(q_shape)}, k {list(k_shape)}, {dtype}, {device}, "
        f"{world} ranks, {sharding}{', causal' if causal else ''}"
        + (f", window {options.window}" if options.window != (-1, -1) else "")
        + (f", {len(facts.q.borders) - 1} documents" if cu_seqlens is not None else ""),
        taken.name,
        _reason(strategy, world, taken, estimates),
        why_engine,
        tuple(StrategyEstimate(e.name, e.us, e.compute_us, e.bytes_sent, e.balance)
              for e in sorted(estimates, key=lambda e: e.us)),
        ring.bytes_sent,
        round(hidden * dtype.itemsize / 2),
        f"{flops:.3g} FLOP/s and {rates.bandwidth:.3g} bytes/s a rank ({rates.source})",
        "sent" if shelf is None else shelf.told(device),
    )  # fmt: skip


def _on(device: str, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Stand-ins without rows, on the device that is asked about where it is there."""
    if device != "cpu" and not torch.cuda.is_available():
        return tensors
    return [torch.empty((x.shape[0], 0, *x.shape[2:]), dtype=x.dtype, device=device)
            for x in tensors]  # fmt: skip


def _reason(strategy: str, world: int, taken: Estimate, estimates: Sequence[Estimate]) -> str:
    if strategy == "decode":
        return "asked for; queries are on all ranks, and partial states are merged"
    if world == 1:
        return "one rank holds everything"
    others = [e for e in estimates if e is not taken]
    if strategy != "auto":
        best = min(estimates, key=lambda e: e.us)
        faster = "" if best is taken else f"; {best.name} is estimated at {best.us:.1f} us"
        return f"asked for, estimated at {taken.us:.1f} us{faster}"
    following = min(others, key=lambda e: e.us)
    waits = taken.us - taken.compute_us
    if following.us < taken.us:
        return (
            f"estimated at {taken.us:.1f} us, within {NEAR:.0%} of the {following.us:.1f} us of "
            f"{following.name}, and sends least: {taken.bytes_sent:,} bytes to "
            f"{following.bytes_sent:,}"
        )
    return (
        f"estimated at {taken.us:.1f} us, of which {waits:.1f} us no rank computes; next is "
        f"{following.name} at {following.us:.1f} us, which sends {following.bytes_sent:,} bytes "
        f"to {taken.bytes_sent:,}"
    )

"""What a call asks for, checked on its own rank: every misfit is collected, one error tells all."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyparallel.attention.cu_seqlens import host_lengths
from pyparallel.attention.mask import Mask
from pyparallel.attention.plan import STRATEGIES
from pyparallel.attention.sharding import SHARDINGS
from pyparallel.ops.checks import Misfits, check_floats

__all__ = ["LAYOUTS", "Options", "check_operands", "options_of"]

LAYOUTS = ("bshd", "bhsd", "thd")


@dataclass(frozen=True)
class Options:
    """The plain values of a call; hashable."""

    strategy: str
    sharding: str
    causal: bool
    window: tuple[int, int]
    softcap: float
    softmax_scale: float
    dropout_p: float
    cu_seqlens: tuple[int, ...] | None
    cu_seqlens_k: tuple[int, ...] | None
    per_document: bool
    padded: bool
    deterministic: bool
    ulysses_size: int | None
    engine: str | None

    def told(self) -> dict[str, Any]:
        """For ranks to compare. Of long lists of lengths, a digest."""
        fields: dict[str, Any] = dict(vars(self))
        for name in ("cu_seqlens", "cu_seqlens_k"):
            values = fields[name]
            if values is not None and len(values) > 12:
                digest = hashlib.sha256(repr(values).encode()).hexdigest()[:12]
                fields[name] = f"{len(values)} lengths up to {values[-1]}, sha256 {digest}"
        return fields

    def mask(self, alibi_slopes: Tensor | None, seed: int) -> Mask:
        return Mask(
            self.softmax_scale,
            self.causal,
            *self.window,
            self.softcap,
            alibi_slopes,
            self.dropout_p,
            seed,
        )


def options_of(
    d: int,
    *,
    strategy: Any,
    sharding: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    softmax_scale: Any,
    dropout_p: Any,
    cu_seqlens: Any,
    cu_seqlens_k: Any,
    per_document: Any,
    padded: Any,
    deterministic: Any,
    ulysses_size: Any,
    engine: Any,
) -> Options:
    """Checked; `d` is the head dim, for the default scale."""
    misfits = Misfits()
    names = ("auto", *STRATEGIES)
    if strategy not in names:
        misfits.add(f"strategy is {strategy!r}; expected one of {', '.join(names)}")
    if sharding not in SHARDINGS:
        misfits.add(f"sharding is {sharding!r}; expected one of {', '.join(SHARDINGS)}")
    for name, flag in {
        "causal": causal,
        "per_document": per_document,
        "padded": padded,
        "deterministic": deterministic,
    }.items():
        if not isinstance(flag, bool):
            misfits.add(f"{name} is {flag!r}; expected True or False")
    window = _window(window_size, misfits)
    softcap = _number("softcap", softcap, misfits, 0.0, math.inf, "0 (none) or more")
    dropout_p = _number("dropout_p", dropout_p, misfits, 0.0, 1.0, "0 or more, and less than 1")
    if softmax_scale is None:
        softmax_scale = d**-0.5 if d else 1.0
    else:
        softmax_scale = _number(
            "softmax_scale", softmax_scale, misfits, -math.inf, math.inf, "a finite number, or None"
        )
    lengths = _lengths(cu_seqlens, "cu_seqlens", misfits)
    lengths_k = _lengths(cu_seqlens_k, "cu_seqlens_k", misfits)
    if lengths_k is not None and (lengths is None or len(lengths) != len(lengths_k)):
        misfits.add(
            f"cu_seqlens_k tells of {len(lengths_k) - 1} documents, cu_seqlens of "
            f"{'none' if lengths is None else len(lengths) - 1}; pass both, of as many"
        )
    if lengths is None and cu_seqlens is None and (per_document is True or padded is True):
        misfits.add("per_document and padded say how documents lie: they need cu_seqlens")
    if ulysses_size is not None:
        if isinstance(ulysses_size, bool) or not isinstance(ulysses_size, int):
            misfits.add(f"ulysses_size is {ulysses_size!r}; expected an int, or None")
        elif strategy != "hybrid":
            misfits.add(f"ulysses_size is for strategy 'hybrid', not {strategy!r}")
    if strategy == "decode" and per_document is True:
        misfits.add("decode holds its queries on all ranks: per_document has nothing to cut")
    misfits.raise_any()
    return Options(
        strategy, sharding, causal, window, softcap, softmax_scale, dropout_p, lengths, lengths_k,
        per_document, padded, deterministic, ulysses_size, engine,
    )  # fmt: skip


def _lengths(values: Any, name: str, misfits: Misfits) -> tuple[int, ...] | None:
    try:
        return host_lengths(values, name)
    except ValueError as error:
        misfits.add(str(error))
        return None


def _window(window: Any, misfits: Misfits) -> tuple[int, int]:
    if (
        not isinstance(window, (tuple, list))
        or len(window) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) or n < -1 for n in window)
    ):
        misfits.add(
            f"window_size is {window!r}; expected (left, right), integers, -1 for unbounded"
        )
        return -1, -1
    return window[0], window[1]


def _number(
    name: str, value: Any, misfits: Misfits, low: float, high: float, expected: str
) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not (low <= value < high) or math.isinf(value):
        misfits.add(f"{name} is {value!r}; expected {expected}")
        return 0.0
    return float(value)


def check_operands(
    q: Any, k: Any, v: Any, sinks: Any, alibi_slopes: Any, layout: Any, documents: bool
) -> str:
    """The layout, checked with the tensors; `documents` says that there are cu_seqlens."""
    misfits = Misfits()
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x is None:
            misfits.add(f"{name} is None; expected a torch.Tensor")
    check_floats({"q": q, "k": k, "v": v}, misfits)
    misfits.raise_any()
    if layout is None:
        layout = "thd" if q.dim() == 3 else "bshd"
    if layout not in LAYOUTS:
        misfits.add(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
        misfits.raise_any()
    dims = len(layout)
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.dim() != dims:
            misfits.add(f"{name} has shape {list(x.shape)}; layout {layout!r} has {dims} dims")
    misfits.raise_any()
    at = {letter: layout.index(letter) for letter in layout}
    heads = at["h"]
    if k.shape[:-1] != v.shape[:-1]:
        misfits.add(
            f"k has shape {list(k.shape)}, v {list(v.shape)}; they may differ in the last dim only"
        )
    if q.shape[-1] != k.shape[-1]:
        misfits.add(f"q has head_dim {q.shape[-1]}, k {k.shape[-1]}; expected the same")
    if min(q.shape[-1], v.shape[-1], q.shape[heads], k.shape[heads]) < 1:
        misfits.add(
            f"q has shape {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected at "
            "least one head, and a head_dim of at least 1"
        )
    elif q.shape[heads] % k.shape[heads]:
        misfits.add(
            f"q has {q.shape[heads]} heads, k {k.shape[heads]}; expected a multiple (query head h "
            "meets key head h // (heads / kv_heads))"
        )
    if "b" in at:
        if q.shape[0] != k.shape[0]:
            misfits.add(f"q has a batch of {q.shape[0]}, k of {k.shape[0]}; expected the same")
        if documents and q.shape[0] != 1:
            misfits.add(
                f"q has a batch of {q.shape[0]}; packed documents (cu_seqlens) are a batch of 1, "
                "or layout 'thd'"
            )
    _check_extras(q, q.shape[heads], q.shape[0] if "b" in at else 1, sinks, alibi_slopes, misfits)
    misfits.raise_any()
    return str(layout)


def _check_extras(
    q: Tensor, heads: int, batch: int, sinks: Any, alibi_slopes: Any, misfits: Misfits
) -> None:
    if sinks is not None:
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
            misfits.add(f"sinks is {_kind(sinks)}; expected a floating-point tensor [{heads}]")
        else:
            if tuple(sinks.shape) != (heads,):
                misfits.add(
                    f"sinks has shape {list(sinks.shape)}; expected [{heads}], one per head of q"
                )
            if sinks.device != q.device:
                misfits.add(f"sinks is on {sinks.device}, q on {q.device}")
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, Tensor) or alibi_slopes.dtype != torch.float32:
            misfits.add(f"alibi_slopes is {_kind(alibi_slopes)}; expected a float32 tensor")
        else:
            if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
                misfits.add(
                    f"alibi_slopes has shape {list(alibi_slopes.shape)}; expected [{heads}] or "
                    f"[{batch}, {heads}]"
                )
            if alibi_slopes.device != q.device:
                misfits.add(f"alibi_slopes is on {alibi_slopes.device}, q on {q.device}")
            if alibi_slopes.requires_grad:
                misfits.add("alibi_slopes requires grad, and has no derivative; detach it")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return f"a {type(value).__name__}"

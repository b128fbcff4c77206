"""`sequence_parallel_attention`: attention over a sequence whose rows lie on the ranks of a group.

    arguments -> check (this rank) -> agree (all ranks) -> plan (cost.py) -> run (run.py)

Everything that can be wrong raises before a row moves, on every rank: what one rank sees is told to
the others, and what ranks must have in common is compared in one small collective, which also tells
how many rows each rank holds.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.autograd.function import once_differentiable

from pyparallel.attention.agreement import agree_on
from pyparallel.attention.compiled import compiled_attention
from pyparallel.attention.cost import MACHINES, choose, machine_of
from pyparallel.attention.engines import choose_engine
from pyparallel.attention.plan import Facts
from pyparallel.attention.positions import check_positions, digest_of
from pyparallel.attention.request import LAYOUTS, Options, check_operands, options_of
from pyparallel.attention.run import Attention, Kept
from pyparallel.attention.sharding import Sharding
from pyparallel.attention.transport import Transport, transport_of
from pyparallel.errors import InvalidArgument
from pyparallel.ops.autocast import casts
from pyparallel.ops.dispatch import announced

__all__ = ["sequence_parallel_attention"]

NAME = "sequence_parallel_attention"


@announced
def sequence_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any,
    strategy: str = "auto",
    sharding: str = "zigzag",
    layout: str | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    softmax_scale: float | None = None,
    cu_seqlens: "Tensor | Sequence[int] | None" = None,
    cu_seqlens_k: "Tensor | Sequence[int] | None" = None,
    per_document: bool = False,
    padded: bool = False,
    position_ids: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    ulysses_size: int | None = None,
    engine: str | None = None,
    **unknown: Any,
) -> "Tensor | tuple[Tensor, Tensor]":
    """Attention of this rank's queries to the keys of all ranks. Collective, and in backward too.

    Args:
        q: this rank's queries, [batch, rows, heads, head_dim] (see `layout`), any strides; float64,
            float32, float16 or bfloat16. Rows may differ between ranks, and be 0.
        k: this rank's keys, [batch, rows, kv_heads, head_dim]; heads is a multiple of kv_heads.
        v: this rank's values, as `k`, with a head_dim of its own. Sequences of queries and of keys
            may differ in length: the last query is beside the last key (bottom-right).
        group: see `pyparallel.ops`; or the group that `simulate` hands out.
        strategy: "ring", "all_gather", "ulysses", "hybrid" or "decode" (q whole and alike on all
            ranks, and so is the result); "auto" takes what `explain` tells, never "decode".
        sharding: which rows this rank holds: "contiguous", "zigzag" or "striped", as `shard` cuts.
            Contiguous parts may have any sizes.
        layout: "bshd", "bhsd", or "thd" for a packed sequence without batch dim; by default "bshd"
            with four dims, "thd" with three.
        causal, window_size, softcap, softmax_scale: see `pyparallel.attention.Mask`; a window is
            (left, right), inclusive, -1 for unbounded; the default scale is head_dim ** -0.5.
        sinks: [heads], scores of one more key without a value. Alike on all ranks; so is its
            gradient, which is summed over them. Values are compared, as those of alibi_slopes,
            under TORCH_DISTRIBUTED_DEBUG=DETAIL.
        alibi_slopes: float32 [heads] or [batch, heads], alike on all ranks; no derivative.
        dropout_p: of the weights. The same weights are dropped on any number of ranks.
        dropout_seed: 64 bits, alike on all ranks; by default drawn from rank 0's generator.
        cu_seqlens: where the documents of the whole packed sequence begin, and the last ends:
            [0, ..., total], a sequence or an integer tensor. A row sees its own document only.
        cu_seqlens_k: the same of the keys, if other than of the queries.
        per_document: each document is cut by itself (see `Sharding`).
        padded: rows behind the last document are padding: their result is 0, their lse -inf.
        position_ids: the positions that this rank's rows had in RoPE, integers [rows] or
            [batch, rows]: compared with those of the sharding (`position_ids`), nothing else.
        deterministic: backward adds in one fixed order; the result is bitwise repeatable.
        return_lse: also give the log-sum-exp of the scores.
        ulysses_size: of "hybrid": how many neighbouring ranks exchange heads.
        engine: one of `engine_names()`; by default the first that can.

    Under torch.autocast q, k and v are cast to its dtype.

    Returns:
        The result of this rank's rows, in q's layout, dtype and number of rows, with v's head_dim.
        With `return_lse`: also the natural log-sum-exp, differentiable, [batch, heads, rows]
        (thd: [heads, rows]), float32 (float64). Rows that see nothing: 0 and -inf.

    Raises:
        ValueError: arguments that do not fit; ranks whose arguments differ (`Mismatch`); rows that
            are not the shards of any such sequence. On every rank, before a row moves.
    """
    q, k, v = casts(q, k, v)
    if torch.compiler.is_compiling():
        if unknown:
            raise InvalidArgument(f"{NAME}: unknown keywords: {', '.join(sorted(unknown))}")
        shape = layout or ("thd" if q.dim() == 3 else "bshd")
        if shape not in LAYOUTS:
            raise InvalidArgument(
                f"{NAME}: layout is {layout!r}; expected one of {', '.join(LAYOUTS)}"
            )
        flags = {
            "causal": causal, "per_document": per_document, "padded": padded,
            "deterministic": deterministic, "return_lse": return_lse,
        }  # fmt: skip
        for name, flag in flags.items():  # the op's schema would take 1 for True
            if not isinstance(flag, bool):
                raise InvalidArgument(f"{NAME}: {name} is {flag!r}; expected True or False")
        out, lse = compiled_attention(
            _to_bshd(q, shape),
            _to_bshd(k, shape),
            _to_bshd(v, shape),
            group,
            dropout_seed,
            position_ids,
            sinks,
            alibi_slopes,
            cu_seqlens,
            cu_seqlens_k,
            {
                "strategy": strategy,
                "sharding": sharding,
                "causal": causal,
                "window_size": list(window_size),
                "softcap": float(softcap),
                "softmax_scale": softmax_scale,
                "dropout_p": float(dropout_p),
                "per_document": per_document,
                "padded": padded,
                "deterministic": deterministic,
                "ulysses_size": ulysses_size,
                "engine": engine,
            },
        )
        return _given(out, lse, shape, return_lse)
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    transport = transport_of(group, device)
    try:
        if unknown:
            raise InvalidArgument(f"unknown keywords: {', '.join(sorted(unknown))}")
        if not isinstance(return_lse, bool):
            raise InvalidArgument(f"return_lse is {return_lse!r}; expected True or False")
        layout = check_operands(q, k, v, sinks, alibi_slopes, layout, cu_seqlens is not None)
        options = options_of(
            q.shape[-1],
            strategy=strategy,
            sharding=sharding,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            per_document=per_document,
            padded=padded,
            deterministic=deterministic,
            ulysses_size=ulysses_size,
            engine=engine,
        )
        seed = _seed(options, dropout_seed)
        named = "drawn" if dropout_seed is None else dropout_seed
        positions = digest_of(position_ids, options.strategy)
        q, k, v = (_to_bshd(x, layout) for x in (q, k, v))
        choose_engine(q, k, v, options.mask(alibi_slopes, 0), engine)
    except Exception as error:
        raise transport.refused(NAME, error) from None
    call = agreed(transport, q, k, v, sinks, alibi_slopes, options, [seed, positions], named)
    out, lse = _Function.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
    return _given(out, lse, layout, return_lse)


def _to_bshd(x: Tensor, layout: str) -> Tensor:
    if layout == "bhsd":
        return x.transpose(1, 2)
    return x.unsqueeze(0) if layout == "thd" else x


def _from_bshd(x: Tensor, layout: str) -> Tensor:
    if layout == "bhsd":
        return x.transpose(1, 2)
    return x.squeeze(0) if layout == "thd" else x


def _given(
    out: Tensor, lse: Tensor, layout: str, return_lse: bool
) -> "Tensor | tuple[Tensor, Tensor]":
    out = _from_bshd(out, layout)
    if not return_lse:
        return out
    return out, lse.squeeze(0) if layout == "thd" else lse


def _seed(options: Options, asked: Any) -> int:
    """This rank's proposal, as a signed integer of 64 bits; rank 0's is taken."""
    if asked is not None:
        if isinstance(asked, bool) or not isinstance(asked, int) or not 0 <= asked < 2**64:
            raise InvalidArgument(f"dropout_seed is {asked!r}; expected an int of 64 bits, or None")
        return asked - 2**64 if asked >= 2**63 else asked
    if not options.dropout_p:
        return 0
    return int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))


@dataclass(frozen=True)
class _Seen:
    """What the agreement tells of each rank."""

    q_rows: list[int]
    k_rows: list[int]
    seed: int


def agreed(
    transport: Transport,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    options: Options,
    own: list[int],
    named_seed: Any,
) -> Attention:
    """The call that all ranks make, or an error on all of them. q, k and v are bshd.

    `own` is this rank's seed, and digest of its position_ids; `named_seed` the seed that the
    caller gave, or "drawn".
    """
    batch, _, heads, d = q.shape
    kv_heads, d_v = v.shape[2:]
    common = {
        "dtype": q.dtype,
        "device": q.device.type,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": d,
        "head_dim of v": d_v,
        **{
            name: "none" if x is None else f"{list(x.shape)} {x.dtype}{_values(x)}"
            for name, x in {"sinks": sinks, "alibi_slopes": alibi_slopes}.items()
        },
        # A rank without a gradient would not come to backward's messages.
        "a gradient is wanted": torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (q, k, v, sinks)),
        "dropout_seed": named_seed,
        **options.told(),
    }
    machine = list(MACHINES).index(machine_of(q.device))
    told = agree_on(transport, NAME, common, [q.shape[1], k.shape[1], *own, machine])
    seen = _Seen([t[0] for t in told], [t[1] for t in told], told[0][2])
    facts = _facts(options, seen, heads, kv_heads, transport.world_size)
    check_positions(NAME, facts.q, [t[3] for t in told])
    try:
        plan, _ = choose(
            facts, options.strategy, options.ulysses_size, batch, d, d_v, q.dtype.itemsize,
            list(MACHINES)[told[0][4]],
        )  # fmt: skip
    except ValueError as error:  # of what all ranks know: all raise
        raise InvalidArgument(f"{NAME}: {error}") from None
    mask = options.mask(alibi_slopes, seen.seed % 2**64)
    engine, _ = choose_engine(q, k, v, mask, options.engine)
    return Attention(plan, transport, engine, mask, options.deterministic)


def _values(x: Tensor) -> str:
    """For ranks to compare, where torch.distributed is to look closely: it waits for the device."""
    if get_debug_level() != DebugLevel.DETAIL:
        return ""
    plain = x.detach().to("cpu", torch.float64).contiguous().numpy().tobytes()
    return f", values of sha256 {hashlib.sha256(plain).hexdigest()[:12]}"


def _facts(options: Options, seen: _Seen, heads: int, kv_heads: int, world: int) -> Facts:
    """Raises alike on all ranks, which all see the same."""
    cu_k = options.cu_seqlens if options.cu_seqlens_k is None else options.cu_seqlens_k
    keys = _sharding(options, "k", seen.k_rows, cu_k, world)
    if options.strategy != "decode":
        queries = _sharding(options, "q", seen.q_rows, options.cu_seqlens, world)
    else:
        if len(set(seen.q_rows)) > 1:
            raise InvalidArgument(
                f"{NAME}: decode has the same queries on all ranks, but they have {seen.q_rows} "
                "rows"
            )
        # The one rank of this sharding is each.
        total = seen.q_rows[0]
        _check_end(options, "q", total, options.cu_seqlens)
        queries = Sharding.of("contiguous", total, 1, cu_seqlens=options.cu_seqlens)
    return Facts(queries, keys, heads, kv_heads, options.causal, *options.window)


def _sharding(
    options: Options, name: str, rows: list[int], cu: tuple[int, ...] | None, world: int
) -> Sharding:
    total = sum(rows)
    _check_end(options, name, total, cu)
    contiguous = options.sharding == "contiguous" and not options.per_document
    try:
        cut = Sharding.of(
            options.sharding,
            total,
            world,
            cu_seqlens=cu,
            per_document=options.per_document,
            sizes=rows if contiguous else None,
        )
    except ValueError as error:
        raise InvalidArgument(f"{NAME}: {error}") from None
    if list(cut.local_sizes) != rows:
        each = " of each document" if options.per_document else ""
        raise InvalidArgument(
            f"{NAME}: the ranks hold {rows} rows of {name}; {options.sharding} shards{each} of "
            f"{total} rows are {list(cut.local_sizes)}: cut them with pyparallel.attention.shard"
        )
    return cut


def _check_end(options: Options, name: str, total: int, cu: tuple[int, ...] | None) -> None:
    if cu and cu[-1] != total and not (options.padded and cu[-1] < total):
        hint = "" if cu[-1] > total else "; if the rest is padding, say padded=True"
        raise InvalidArgument(
            f"{NAME}: cu_seqlens ends at {cu[-1]}, but the ranks hold {total} rows of {name} "
            f"together{hint}"
        )


class _Function(torch.autograd.Function):
    """Forward and backward of `Attention`, as autograd sees them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Attention
    ) -> tuple[Tensor, Tensor]:
        out, lse, kept = call.forward(q, k, v, sinks)
        ctx.save_for_backward(out, lse, sinks, kept.q, kept.k, kept.v, kept.lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, sinks, *kept = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        grads = ctx.call.backward(dout, dlse, out, lse, sinks, Kept(*kept))
        return (*grads, None)

"""Attention between processes: every kind of group, and what cannot work raising on every rank.

Layers of proof: the strategies themselves are compared with the book over simulated ranks
(test_strategies.py); here real transports carry them. One start of processes per world size.
"""

import re

import pytest
import torch

from tests.attention.whole import Case, check, rms_error
from tests.launch import run_ranks
from tests.ops.seats import make_groups

OPTIONS = {
    "causal": {"causal": True, "sinks": True},
    "window": {"causal": True, "window_size": (4, 0), "dropout_p": 0.25, "dropout_seed": 9},
    "documents": {"causal": True, "cu_seqlens": [0, 3, 5, 9, 10, 17]},
    "bf16": {"dtype": torch.bfloat16},
}
OF_ALL_KINDS = ("causal", "documents")  # a communicator carries the others too
STRATEGIES = ("ring", "all_gather", "ulysses", "hybrid", "decode", "auto")


def cases():
    torch.manual_seed(7)
    return {name: Case.random(rows=17, heads=6, kv_heads=2, **o) for name, o in OPTIONS.items()}


def on_one_rank(rank, case, group, **more):
    from pyparallel.attention import sequence_parallel_attention

    options = {**case.options, **more, "return_lse": True}
    queries, keys = case.shardings(rank.world_size)
    mine = queries.rows(rank.rank)
    if more.get("strategy") == "decode":
        mine = torch.arange(case.q.shape[1])
    q = case.q[:, mine].clone().requires_grad_()
    k, v = (x[:, keys.rows(rank.rank)].clone().requires_grad_() for x in (case.k, case.v))
    sinks = None if case.sinks is None else case.sinks.clone().requires_grad_()
    out, lse = sequence_parallel_attention(q, k, v, group=group, sinks=sinks, **options)
    torch.autograd.backward([out, lse], [case.dout[:, mine], case.dlse[:, :, mine]])
    return (
        out.detach(),
        lse.detach(),
        q.grad,
        k.grad,
        v.grad,
        sinks.grad if sinks is not None else None,
    )


def every_strategy(rank):
    torch.set_num_threads(1)
    found = {}
    groups = make_groups(rank)
    for name, case in cases().items():
        for kind, group in groups.items():
            if kind != "communicator" and name not in OF_ALL_KINDS:
                continue
            for strategy in STRATEGIES:
                if strategy != "hybrid" or rank.world_size == 4:
                    found[name, kind, strategy] = on_one_rank(rank, case, group, strategy=strategy)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_kind_of_group_equals_simulated_ranks_bit_for_bit(world):
    every = run_ranks(every_strategy, world)
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    for name, case in cases().items():
        queries, keys = case.shardings(world)
        want = {s: case.simulated(world, strategy=s) for s in STRATEGIES
                if s != "hybrid" or world == 4}  # fmt: skip
        check(want["ring"], case.reference(), 1e-6 if name != "bf16" else 1e-2, name)
        for rank, found in enumerate(every):
            for (case_name, kind, strategy), tensors in found.items():
                if case_name != name:
                    continue
                for key, got in zip(names, tensors, strict=True):
                    whole = want[strategy].get(key)
                    if whole is None:
                        continue
                    if key != "dsinks" and (strategy != "decode" or key in ("dk", "dv")):
                        rows = (keys if key in ("dk", "dv") else queries).rows(rank)
                        whole = whole.index_select(2 if key == "lse" else 1, rows)
                    what = name, kind, strategy, key, rank
                    if kind == "gloo" and (key == "dsinks" or (strategy, key) == ("decode", "dq")):
                        assert rms_error(got, whole) <= 2e-7, what  # summed in gloo's own order
                    else:
                        assert torch.equal(got, whole), what


NAME = "sequence_parallel_attention"


# name -> (what rank 1 passes instead, what all read)
def x(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


WRONG_ON_ONE = {
    "dtypes": ({"v": x(1, 4, 2, 8, dtype=torch.bfloat16)}, r"v has dtype torch.bfloat16, q has"),
    "heads": ({"q": x(1, 4, 3, 8)}, r"q has 3 heads, k 2; expected a multiple"),
    "head_dim": ({"k": x(1, 4, 2, 6)}, r"q has head_dim 8, k 6"),
    "k and v": ({"v": x(1, 3, 2, 8)}, r"k has shape \[1, 4, 2, 8\], v \[1, 3, 2, 8\]"),
    "dims": ({"q": x(4, 4, 8)}, r"layout 'thd' has 3 dims"),
    "batch": ({"q": x(2, 4, 4, 8)}, r"q has a batch of 2, k of 1"),
    "no keys": ({"k": None}, r"k is None; expected a torch.Tensor"),
    "return_lse": ({"return_lse": 1}, r"return_lse is 1; expected True or False"),
    "no tensor": ({"q": [1.0]}, r"q is a list; expected a torch.Tensor"),
    "integers": ({"q": torch.ones(1, 4, 4, 8, dtype=torch.int32)}, r"q has dtype torch.int32"),
    "unknown": ({"windw": 3, "attn_bias": None}, r"unknown keywords: attn_bias, windw"),
    "strategy": ({"strategy": "rings"}, r"strategy is 'rings'; expected one of auto, ring"),
    "sharding": ({"sharding": "zig"}, r"sharding is 'zig'; expected one of contiguous"),
    "layout": ({"layout": "sbhd"}, r"layout is 'sbhd'; expected one of bshd, bhsd, thd"),
    "window": ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\); expected \(left, right\)"),
    "window of one": ({"window_size": 5}, r"window_size is 5; expected"),
    "softcap": ({"softcap": -1.0}, r"softcap is -1.0; expected 0"),
    "scale": ({"softmax_scale": float("inf")}, r"softmax_scale is inf; expected a finite"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p is 1.0; expected 0 or more, and less than 1"),
    "seed": ({"dropout_seed": -1}, r"dropout_seed is -1; expected an int of 64 bits"),
    "flag": ({"causal": 1}, r"causal is 1; expected True or False"),
    "sinks": ({"sinks": x(2)}, r"sinks has shape \[2\]; expected \[4\], one per head of q"),
    "alibi": ({"alibi_slopes": x(3)}, r"alibi_slopes has shape \[3\]; expected \[4\] or \[1, 4\]"),
    "alibi grad": ({"alibi_slopes": x(4).requires_grad_()}, r"alibi_slopes requires grad"),
    "lengths": ({"cu_seqlens": [[0, 3]]}, r"cu_seqlens is \[\[0, 3\]\]; expected integers"),
    "lengths of keys": ({"cu_seqlens_k": [0, 3]}, r"cu_seqlens_k tells of 1 documents"),
    "per document": ({"per_document": True}, r"per_document and padded .* need cu_seqlens"),
    "ulysses_size": ({"ulysses_size": 2}, r"ulysses_size is for strategy 'hybrid', not 'auto'"),
    "engine": ({"engine": "fast"}, r"engine is 'fast'; expected one of"),
}
# What each rank passes, all right by itself; `n` rows there are on rank n.
DIFFERENT = {
    "causal": (lambda r: {"causal": r == 0}, r"causal: rank 0 True, rank 1 False"),
    "heads": (lambda r: {"q": x(1, 4, 4 * (1 + r), 8)}, r"heads: rank 0 4, rank 1 8"),
    "lengths": (
        lambda r: {"cu_seqlens": [0, 2 + r, 8], "strategy": "ring"},
        r"cu_seqlens: rank 0 \(0, 2, 8\), rank 1 \(0, 3, 8\)",
    ),
    "seeds": (
        lambda r: {"dropout_p": 0.5, "dropout_seed": r},
        r"dropout_seed: rank 0 0, rank 1 1",
    ),
    "gradient": (
        lambda r: {"q": x(1, 4, 4, 8).requires_grad_(r == 0)},
        r"a gradient is wanted: rank 0 True, rank 1 False",
    ),
    "rows": (
        lambda r: (
            {"q": x(1, 4 - r, 4, 8), "strategy": "ring"}
            if r
            else {"q": x(1, 9, 4, 8), "strategy": "ring"}
        ),
        r"the ranks hold \[9, 3.*\] rows of q; zigzag",
    ),
    "short": (
        lambda r: {"cu_seqlens": [0, 3]},
        r"ends at 3, but the ranks hold \d+ rows of k.*say padded=True",
    ),
    "long": (lambda r: {"cu_seqlens": [0, 99]}, r"cu_seqlens ends at 99, but the ranks hold"),
    "ulysses": (
        lambda r: {"strategy": "hybrid", "ulysses_size": 5},
        r"ulysses_size is 5; expected a divisor",
    ),
    "decode": (
        lambda r: {"strategy": "decode", "q": x(1, 1 + r, 4, 8)},
        r"same queries on all ranks, but",
    ),
}

# Of `unshard`: what rank 1 passes instead of its 4 rows, what all read.
WRONG_SHARD = {
    "dims": (torch.tensor(1.0), {}, r"dim is 1; x has shape \[\]"),
    "no tensor": (None, {}, r"x is a NoneType; expected a torch.Tensor"),
    "lengths": (x(1, 4), {"cu_seqlens": [0.5]}, r"cu_seqlens is \[0.5\]; expected integers"),
    "other lengths": (x(1, 4), {"cu_seqlens": [0, 3]}, r"cu_seqlens: rank 0 None, rank 1 \(0, 3\)"),
    "total": (x(1, 4), {"total": 9}, r"total: rank 0 None, rank 1 9"),
    "per document": (x(1, 4), {"per_document": True}, r"per_document: rank 0 False, rank 1 True"),
    "rows": (x(1, 9), {}, r"the ranks hold \[4, 9.*\] rows; zigzag shards of"),
}


def misfits(rank):
    import torch.distributed as dist

    from pyparallel.attention import sequence_parallel_attention, unshard

    torch.set_num_threads(1)
    good = {"q": x(1, 4, 4, 8), "k": x(1, 4, 2, 8), "v": x(1, 4, 2, 8), "causal": True}
    read = []
    for kind, group in make_groups(rank).items():

        def call(given, group=group):
            arguments = {**good, **given}
            tensors = [arguments.pop(n) for n in "qkv"]
            return sequence_parallel_attention(*tensors, group=group, **arguments)

        for name, (given, text) in WRONG_ON_ONE.items():
            with pytest.raises(ValueError, match=NAME) as told:
                call(given if rank.rank == 1 else {})
            read.append((kind, name, text, str(told.value)))
            assert call({}).shape == (1, 4, 4, 8)
        for name, (given, text) in DIFFERENT.items():
            with pytest.raises(ValueError, match=NAME) as told:
                call(given(rank.rank))
            read.append((kind, name, text, str(told.value)))
            assert call({}).shape == (1, 4, 4, 8)
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # values of what all ranks hold are compared
        try:
            for name in ("sinks", "alibi_slopes"):
                values = torch.full((4,), 1.0 + rank.rank)
                with pytest.raises(ValueError, match=NAME) as told:
                    call({name: values})
                text = rf"{name}: rank 0 \[4\] torch.float32, values of sha256 \w+, rank 1 \[4\]"
                read.append((kind, name, text, str(told.value)))
                assert call({name: torch.ones(4)}).shape == (1, 4, 4, 8)
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
        for name, (shard, given, text) in WRONG_SHARD.items():
            with pytest.raises(ValueError, match="unshard") as told:
                unshard(*([shard, group] if rank.rank == 1 else [x(1, 4), group]),
                        **(given if rank.rank == 1 else {}))  # fmt: skip
            read.append((kind, name, text, str(told.value)))
            assert unshard(x(1, 4), group).shape == (1, 4 * rank.world_size)
    return read


@pytest.mark.parametrize("world", [2, 3])
def test_what_cannot_work_raises_on_every_rank_and_the_group_goes_on(world):
    for rank, read in enumerate(run_ranks(misfits, world)):
        for kind, name, text, told in read:
            assert re.search(text, told, re.DOTALL), (rank, kind, name, told)


def subgroup(rank):
    """A group of global ranks 1 and 3; a second attention of other heads in between."""
    import torch.distributed as dist

    from pyparallel.attention import sequence_parallel_attention

    torch.set_num_threads(1)
    torch.manual_seed(3)
    store = dist.PrefixStore("world", rank.store())
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    groups = [dist.new_group(ranks) for ranks in ([1, 3], [0, 2])]
    group = groups[0] if rank.rank % 2 else groups[1]
    cases = [Case.random(rows=16, heads=n, kv_heads=n, causal=True) for n in (12, 3)]
    results = []
    for case in cases * 2:
        for strategy in ("ring", "ulysses"):
            place = dist.get_rank(group)
            queries, keys = case.shardings(2)
            q = case.q[:, queries.rows(place)]
            k, v = (x[:, keys.rows(place)] for x in (case.k, case.v))
            out = sequence_parallel_attention(q, k, v, group=group, strategy=strategy, causal=True)
            results.append(torch.equal(
                out, case.simulated(2, strategy=strategy)["out"][:, queries.rows(place)]
            ))  # fmt: skip
    return all(results)


def test_subgroups_and_modules_of_other_heads_do_not_interfere():
    assert run_ranks(subgroup, 4) == [True] * 4

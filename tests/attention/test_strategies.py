"""Every strategy, sharding and feature over simulated ranks, against attention by the book.

Random float32 operands; the bound on the root mean square error of out, lse and all gradients,
relative to their own size, is 1e-6 (some 8 eps; their sums are over at most 40 terms).
"""

import math

import pytest
import torch

from pyparallel.attention import SHARDINGS, SimulatedGroup
from tests.attention.whole import Case, check

BOUND = 1e-6
ROWS_STRATEGIES = ("ring", "all_gather", "ulysses")
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (5, 0)},
    "both sides": {"window_size": (4, 3)},
    "softcap": {"causal": True, "softcap": 0.9, "softmax_scale": 0.7},
    "sinks": {"causal": True, "sinks": True},
    "alibi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "dropout": {"causal": True, "dropout_p": 0.4, "dropout_seed": 2**64 - 3},
    "documents": {"causal": True, "cu_seqlens": [0, 3, 5, 9, 10, 29]},
    "documents cut": {"cu_seqlens": [0, 3, 5, 9, 10, 29], "per_document": True},
    "padded": {"causal": True, "cu_seqlens": [0, 11, 11, 17], "padded": True, "sinks": True},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_strategies_equal_the_book(feature, world):
    torch.manual_seed(world)
    packed = "cu_seqlens" in FEATURES[feature]
    case = Case.random(batch=1 if packed else 2, rows=29, d=8, d_v=12, **FEATURES[feature])
    want = case.reference()
    strategies = [*ROWS_STRATEGIES, *(["hybrid"] if world == 4 else [])]
    for sharding in SHARDINGS:
        for strategy in strategies:
            found = case.simulated(world, strategy=strategy, sharding=sharding)
            check(found, want, BOUND, (sharding, strategy))
    if not case.options.get("per_document"):
        for sharding in SHARDINGS:
            found = case.simulated(world, strategy="decode", sharding=sharding)
            check(found, want, BOUND, (sharding, "decode"))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world"),
    [(8, 2, 4), (7, 7, 4), (28, 4, 8), (6, 2, 4), (6, 1, 3), (2, 1, 4), (1, 1, 3), (12, 3, 8)],
)
def test_ulysses_takes_any_heads(heads, kv_heads, world):
    torch.manual_seed(heads)
    case = Case.random(rows=21, heads=heads, kv_heads=kv_heads, causal=True, dropout_p=0.2,
                       dropout_seed=5, alibi_slopes=torch.rand(heads), sinks=True)  # fmt: skip
    want = case.reference()
    check(case.simulated(world, strategy="ulysses"), want, BOUND, "ulysses")
    if world % 2 == 0:
        found = case.simulated(world, strategy="hybrid", ulysses_size=2)
        check(found, want, BOUND, "hybrid of 2")


@pytest.mark.parametrize("total", [0, 1, 2, 3, 4, 10, 17, 30])
def test_any_length(total):
    """Not divisible by the ranks, shorter than them, empty; queries and keys of other lengths."""
    torch.manual_seed(total)
    for keys in {total, max(0, total - 3), total + 5}:
        for causal in (False, True):
            case = Case.random(rows=total, keys=keys, d=4, causal=causal)
            want = case.reference()
            for world, strategy, sharding in (
                (2, "ring", "zigzag"),
                (4, "ring", "zigzag"),
                (4, "all_gather", "striped"),
                (4, "ulysses", "contiguous"),
                (4, "hybrid", "zigzag"),
                (3, "decode", "zigzag"),
            ):
                found = case.simulated(world, strategy=strategy, sharding=sharding)
                check(found, want, BOUND, (total, keys, causal, world, strategy))


@pytest.mark.parametrize("window", [1, 3, 7, 8, 9])
def test_windows_across_ranks(window):
    torch.manual_seed(window)
    for size in ((window, 0), (window, window), (0, window)):
        case = Case.random(rows=32, causal=size[1] == 0, window_size=size)
        want = case.reference()
        for sharding in SHARDINGS:
            check(case.simulated(4, strategy="ring", sharding=sharding), want, BOUND, sharding)


def test_documents_without_queries_or_keys():
    """Zero-length sequences, forward and backward, and rows that see nothing."""
    torch.manual_seed(0)
    case = Case.random(rows=8, keys=12, causal=True, cu_seqlens=[0, 0, 5, 8, 8],
                       cu_seqlens_k=[0, 3, 6, 9, 12])  # fmt: skip
    want = case.reference()
    assert (want["lse"][:, :, :2] == -math.inf).all()
    for strategy in (*ROWS_STRATEGIES, "decode"):
        found = case.simulated(2, strategy=strategy)
        check(found, want, BOUND, strategy)
        assert (found["out"][:, :2] == 0).all()
        assert (found["dq"][:, :2] == 0).all()


def test_padding_is_neither_read_nor_given_gradients():
    """NaN in rows behind the last document, in rows that a rank holds alone too."""
    torch.manual_seed(0)
    for end, total, world in ((13, 16, 2), (3, 8, 2), (7, 10, 2), (0, 6, 3), (5, 16, 4)):
        case = Case.random(rows=total, causal=True, cu_seqlens=[0, end // 2, end], padded=True,
                           sinks=True)  # fmt: skip
        want = case.reference()
        for x in (case.q, case.k, case.v, case.dout, case.dlse.transpose(1, 2)):
            x[:, end:] = math.nan
        for strategy in (*ROWS_STRATEGIES, "decode"):
            for sharding in SHARDINGS:
                found = case.simulated(world, strategy=strategy, sharding=sharding)
                check(found, want, BOUND, (end, total, strategy, sharding))
                for name in ("out", "dq", "dk", "dv"):
                    assert (found[name][:, end:] == 0).all(), (name, strategy)
                assert (found["lse"][:, :, end:] == -math.inf).all()


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses", "hybrid", "decode"])
def test_nothing_is_used_before_it_has_arrived(strategy, monkeypatch):
    """Sends that read their tensors when they are waited for, into receivers that hold NaN until
    then, as all memory does that was not written: the bits of messages that are waited for at
    once, forward and backward."""
    torch.manual_seed(3)
    case = Case.random(rows=29, heads=6, kv_heads=2, causal=True, sinks=True)
    really = SimulatedGroup.exchange

    def at_once(group, sends, receives, tag):
        really(group, sends, receives, tag)()
        return lambda: None

    def late(group, sends, receives, tag):
        for message in receives:
            message.tensor.fill_(math.nan)
        return lambda: really(group, sends, receives, tag)()

    found = []
    for exchange, poison in ((at_once, False), (late, True)):
        monkeypatch.setattr(SimulatedGroup, "exchange", exchange)
        torch.use_deterministic_algorithms(poison)  # what is not written is NaN
        try:
            assert torch.empty(3).isnan().all() or not poison
            found.append(case.simulated(4, strategy=strategy))
        finally:
            torch.use_deterministic_algorithms(False)
    for name in ("out", "lse", "dq", "dk", "dv", "dsinks"):
        assert torch.equal(found[0][name], found[1][name]), name


def test_dtypes_of_results_and_gradients():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        case = Case.random(rows=12, dtype=dtype, sinks=True, causal=True)
        for strategy in (*ROWS_STRATEGIES, "decode"):
            found = case.simulated(2, strategy=strategy)
            for name in ("out", "dq", "dk", "dv", "dsinks"):
                assert found[name].dtype == dtype, (name, strategy)
            sums = torch.float64 if dtype == torch.float64 else torch.float32
            assert found["lse"].dtype == sums


def test_bits_of_a_sink_s_gradient_do_not_depend_on_the_strides_of_dout():
    torch.manual_seed(0)
    case = Case.random(rows=37, heads=4, kv_heads=2, d=24, sinks=True)
    for strategy in ("ring", "decode"):
        found = []
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)):
            back = [order.index(i) for i in range(4)]
            case.dout = case.dout.permute(order).contiguous().permute(back)
            found.append(case.simulated(2, strategy=strategy))
        for name in ("dsinks", "dq", "dk", "dv"):
            assert all(torch.equal(found[0][name], other[name]) for other in found), name

"""Suite `layers`: its cases and its float64 check in one process, then a small run on two ranks."""

from __future__ import annotations

import pytest
import torch

from bench import providers, runner
from bench.block_case import EIGHTH, LLAMA_3_8B, BlockCase, attend, share_of
from bench.options import Options
from bench.suites import layers

LACKS = "; ".join(filter(None, map(providers.missing, ("layers", "dtensor"))))


def test_sizes_are_one_model_scaled() -> None:
    for sizes in (EIGHTH, LLAMA_3_8B):
        assert sizes.heads * sizes.head_dim == sizes.hidden
        assert sizes.heads == 4 * sizes.kv_heads
        assert sizes.middle * 2 == 7 * sizes.hidden


def test_cases_of_each_kind_of_run() -> None:
    full = layers.cases(Options(), 2)
    quick = layers.cases(Options(quick=True), 2)
    assert set(quick) < set(full)
    assert {case.op for case in quick} == set(layers.OPS)
    for case in full:
        assert not (case.train and case.decode)
    assert {case.dtype for case in quick if case.decode} == {"float32", "bfloat16"}
    assert len({case.label for case in full}) == len(full)
    assert all(case.sizes == LLAMA_3_8B for case in layers.cases(Options(device="cuda"), 8))


@pytest.mark.parametrize("op", layers.OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_results_pass_and_wrong_ones_are_seen(op: str, dtype: str) -> None:
    case = BlockCase(op, 32 if op.endswith("train") else 2, dtype, 2)
    reference = case.reference(1, 0)
    good = [exact.to(getattr(torch, dtype)) for exact in reference.exact]
    assert len(good) == (1 if not case.train else 5 if case.block == "mlp" else 6)
    assert case.check(reference, good, stock=False).ok
    for i, tensor in enumerate(good):
        wrong = list(good)
        wrong[i] = tensor * 1.1
        assert not case.check(reference, wrong, stock=True).ok
        wrong[i] = tensor.clone()
        wrong[i].view(-1)[0] = float("nan")
        assert not case.check(reference, wrong, stock=True).ok
        wrong[i] = tensor[:-1]
        assert not case.check(reference, wrong, stock=True).ok
    assert not case.check(reference, good[:-1], stock=True).ok
    halves = [share_of(case, rank, "up_proj", torch.arange(6.0).view(3, 2)) for rank in (0, 1)]
    assert torch.equal(torch.cat(halves), torch.arange(6.0).view(3, 2))


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_our_attention_to_a_cache_is_the_block_s(tokens: int) -> None:
    from bench.providers.blocks import attend_to_cache

    torch.manual_seed(tokens)
    q, k, v = (torch.randn(2, tokens, heads * 8) for heads in (4, 2, 2))
    old = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    got = attend_to_cache(q, k, v, old, 8)
    for i in range(tokens):  # the i-th new token sees those before it
        before = [torch.cat((c, x[:, :i].view(2, i, 2, 8).transpose(1, 2)), 2)
                  for c, x in zip(old, (k, v), strict=True)]  # fmt: skip
        one = (x[:, i : i + 1] for x in (q, k, v))
        want = attend(*one, (before[0], before[1]), 8)
        torch.testing.assert_close(got[:, i : i + 1], want)


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_both_sides_are_verified_and_timed() -> None:
    options = Options(quick=True, worlds=(2,), dtypes=("bfloat16",), seconds=1.0, timeout=30.0)
    rows, problems = runner.run("layers", options, lambda _: None)
    assert not problems
    assert {row.op for row in rows} == set(layers.OPS)
    for row in rows:
        assert row.verified, row.note
        assert row.peer_verified, row.note
        assert row.speedup is not None
        assert (row.api, row.peer) == ("layers", "DTensor+gloo")

"""Suite `gemm`: its cases and its float64 check in one process, then small runs on two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from bench import cli, providers, runner
from bench.case import parse_shape
from bench.gemm_case import GATHER, OPS, REDUCE, ROWS, SCATTER, GemmCase, share
from bench.options import Options
from bench.suites import SUITES, WEIGHTS, gemm

STANDINS = "tests.bench.wrong_providers"
SMALL = Options(
    quick=True, worlds=(2,), shapes=((8, 64, 96),), dtypes=("float32",), seconds=0.3, timeout=20.0
)
LACKS = "; ".join(filter(None, map(providers.missing, ("ops", "stock_gemm"))))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 64])
def test_shares_cover_the_whole_in_order(total: int, world: int) -> None:
    parts = [share(total, world, rank) for rank in range(world)]
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(total))
    assert max(e - b for b, e in parts) - min(e - b for b, e in parts) <= 1


def right(case: GemmCase, rank: int) -> torch.Tensor:
    """What the op gives, by the plainest way: parts in rank order in float32, one rounding."""
    held = [case.inputs(r, 0) for r in range(case.world)]
    if case.op == GATHER:
        return linear(torch.cat([h.x for h in held]), held[rank].weight)
    whole = sum(linear(h.x, h.weight).float() for h in held)
    assert isinstance(whole, torch.Tensor)
    begin, end = share(case.m, case.world, rank) if case.op == SCATTER else (0, case.m)
    return whole.to(held[0].x.dtype)[begin:end]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_right_results_pass_and_wrong_ones_are_seen(op: str, dtype: str, world: int) -> None:
    case = GemmCase(op, 3 * ROWS, 40, 130, dtype, world)
    for rank in range(world):
        reference = case.reference(rank, 0)
        good = right(case, rank)
        verdict = case.check(reference, good, stock=False)
        assert verdict.ok, verdict
        assert case.check(reference, good, stock=True).error <= verdict.error
        off = good.clone()
        off[-1, -1] += 1.0
        assert not case.check(reference, off, stock=False).ok
        assert "column 39" in case.check(reference, off, stock=False).where or op == GATHER
        unseen = good.clone()
        unseen[good.shape[0] // 2 + 1] = float("nan")  # a row that may not be compared
        assert not case.check(reference, unseen, stock=False).ok
        assert not case.check(reference, good[:-1], stock=False).ok
        assert not case.check(reference, good.roll(1, 0), stock=True).ok


def test_the_bound_bites_on_a_sum_in_bfloat16() -> None:
    """Negative control: parts added in bfloat16 pass as stock's, not as ours."""
    case = GemmCase(REDUCE, 16, 64, 4096, "bfloat16", 8)
    held = [case.inputs(r, 0) for r in range(8)]
    narrow = linear(held[0].x, held[0].weight)
    for h in held[1:]:
        narrow = narrow + linear(h.x, h.weight)
    reference = case.reference(0, 0)
    assert not case.check(reference, narrow, stock=False).ok
    assert case.check(reference, narrow, stock=True).ok


def test_cases_of_each_kind_of_run() -> None:
    full = gemm.cases(Options(), 2)
    assert {c.op for c in full} == set(OPS)
    assert max(max(c.n, c.k) for c in full) == 4096
    assert {c.m for c in full if c.op == REDUCE} == {1, 4, 16, 128, 256, 512}
    quick = gemm.cases(Options(quick=True), 2)
    assert set(quick) < set(full)
    decode = [c for c in quick if c.decode]
    assert {c.op for c in decode} == {REDUCE}
    assert {(c.n, c.k) for c in decode} >= {(1024, 1024), (4096, 4096)}
    for op in OPS:
        assert any(c.op == op and not c.decode for c in quick)
    cuda = gemm.cases(Options(device="cuda"), 8)
    assert {(c.n, c.k) for c in cuda if c.op == GATHER} == set(gemm.CUDA_SHAPES)
    assert {(c.k, c.n) for c in cuda if c.op == SCATTER} == set(gemm.CUDA_SHAPES)
    assert max(c.m for c in cuda) == 32768
    assert gemm.pairs(Options(device="cuda"))[1] == ("ops", "symm_mem")
    for case in gemm.cases(Options(), 3):
        assert case.op == REDUCE or case.m % 3 == 0
    labels = [c.label for c in full]
    assert len(labels) == len(set(labels))


def test_figures() -> None:
    found = gemm.figures({"gemm": 100.0, "collective": 50.0, "ours": 120.0, "peer": 160.0})
    assert found == {"gemm": 100.0, "collective": 50.0, "sum": 150.0, "exposed %": 40.0}
    assert gemm.figures({"gemm": 100.0, "ours": 1.0}) == {"gemm": 100.0}
    ahead = gemm.figures({"gemm": 100.0, "collective": 50.0, "ours": 90.0})
    assert ahead["exposed %"] == 0.0


def test_shapes_are_read() -> None:
    assert parse_shape("16x1024X4096") == (16, 1024, 4096)
    for text in ("16", "16x0x3", "axbxc", "1x2x3x4", "-1x2x3"):
        with pytest.raises(ValueError, match="want M x N x K"):
            parse_shape(text)


def test_the_suites_of_a_quick_run_share_its_time() -> None:
    names = list(SUITES)
    assert set(WEIGHTS) == set(names)
    options = cli.options_from(cli.parser().parse_args(["--quick"]))
    plan = [cli.for_suite(name, names, options, False) for name in names]
    assert sum(o.seconds * len(o.worlds) for o in plan) == pytest.approx(cli.QUICK_SECONDS)
    alone = cli.for_suite("gemm", ["gemm"], options, False)
    assert alone.seconds * len(alone.worlds) == pytest.approx(cli.QUICK_SECONDS)
    named = cli.for_suite("gemm", names, replace(options, worlds=(2, 3), seconds=5.0), True)
    assert (named.worlds, named.seconds) == ((2, 3), 5.0)
    full = cli.options_from(cli.parser().parse_args([]))
    assert cli.for_suite("gemm", names, full, False) == full


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_the_real_ops_are_verified_and_timed() -> None:
    rows, problems = runner.run("gemm", replace(SMALL, seconds=2.0), lambda _: None)
    assert not problems
    assert [row.op for row in rows] == list(OPS)
    for row in rows:
        assert row.verified, row.note
        assert row.peer_verified, row.note
        assert row.speedup is not None
        assert (row.peer, row.api, row.size) == ("matmul+gloo", "ops", "8 x 64 x 96")
        assert list(row.parts) == ["gemm", "collective", "sum", "exposed %"]


def test_wrong_calls_are_marked_and_not_timed() -> None:
    for standin, said in (
        ("AddsOnEachRank", "rank 0: error"),
        ("OwnBits", "ranks hold different bits"),
    ):
        asked = replace(SMALL, ops=(REDUCE,), replace={"ops": f"{STANDINS}:{standin}"})
        (row,), problems = runner.run("gemm", asked, lambda _: None)
        assert not problems
        assert not row.verified
        assert row.ours_us is None
        assert said in row.note
        assert row.peer_us is not None  # the others go on

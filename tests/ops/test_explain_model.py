"""The model of GEMM and transfer times: pure functions, in one process.

Layers: the flow of pieces against a simulation by time steps; tiles and waves counted by hand; what
must hold for any shape (hypothesis); then published measurements, win or lose and order. Not here:
times of this library on an accelerator, which nobody has measured yet.
"""

import ast
import io
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import bench.model
from bench.published import LIBRARIES, OTHER, compared, misordered, rank_correlation, rows
from pyparallel.ops import chips, designs, model
from pyparallel.ops.chips import CHIPS, LINKS, machine_named
from pyparallel.ops.designs import DESIGNS, designs_of
from pyparallel.ops.model import OPS, Problem, flow, gemm_time, predict

H100 = machine_named("H100 NVLink")


def by_hand(first, second):
    """Time steps of 1: a piece is in one stage at a time, and leaves it when its time is over."""
    now, done, left = 0, 0, [list(first), list(second)]
    ready = [len(first), 0]
    while done < len(second):
        moved = True
        while moved:  # stages of no time pass at once
            moved = False
            for stage in (0, 1):
                index = len(first) - len(left[stage])
                if left[stage] and index < ready[stage] and left[stage][0] == 0:
                    left[stage].pop(0)
                    moved = True
                    if stage == 0:
                        ready[1] += 1
                    else:
                        done += 1
        if done == len(second):
            break
        for stage in (0, 1):
            index = len(first) - len(left[stage])
            if left[stage] and index < ready[stage]:
                left[stage][0] -= 1
        now += 1
    return now


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_pieces_flow_as_in_a_simulation(pieces):
    first, second = zip(*pieces, strict=True)
    # A piece may enter the second stage in the step after it left the first.
    assert flow(first, second) == by_hand(first, second)


@pytest.mark.parametrize(
    ("m", "n", "tile", "tiles", "waves"),
    [
        (4096, 6144, (128, 256), 768, 6),  # 5.8 waves of 132
        (8192, 3584, (128, 256), 896, 7),  # 6.8 waves
        (8192, 3696, (128, 256), 960, 8),  # 112 columns more: one more wave
    ],
)
def test_tiles_and_waves_by_hand(m, n, tile, tiles, waves):
    found = gemm_time(H100.chip, m, n, 8192, "bf16")
    assert (found.tile, found.tiles, found.waves, found.split) == (tile, tiles, waves, 1)
    loop = 2 * 128 * 256 * 8192 / (989.5e6 / 132 * 0.78)
    assert found.us == pytest.approx(model.LAUNCH_US + waves * (loop + model.TILE_US))


def test_a_skinny_gemm_is_bound_by_the_weight_it_reads():
    found = gemm_time(H100.chip, 1, 8192, 28672, "bf16")
    assert found.bound == "memory"
    least = 8192 * 28672 * 2 / 3352e3
    assert least < found.us < 1.5 * least


sizes = st.integers(1, 20000)


@given(sizes, sizes, sizes, st.sampled_from(sorted(CHIPS)), st.integers(1, 16))
@settings(max_examples=150, deadline=None)
def test_what_holds_for_any_shape(m, n, k, chip, world):
    machine = machine_named(chip)
    peak = machine.chip.dense_tflops["bf16"] * 1e6
    for op in OPS:
        problem = Problem(op, m, n, k, "bf16", world)
        plain = predict(problem, DESIGNS["plain"], machine)
        assert plain.hidden_us == pytest.approx(0)
        for design in designs_of(op):
            if design.transport not in machine.link.share:
                continue
            found = predict(problem, design, machine)
            parts = found.gemm_us + found.transfer_us + found.pieces_us - found.hidden_us
            parts += found.reduce_us + found.fixed_us + found.waits_for_host_us
            assert found.us == pytest.approx(parts)
            assert found.us >= max(found.gemm_us, found.transfer_us)
            assert found.us >= problem.flops / peak
            assert found.hidden_us + 1e-6 >= 0
            assert found.hidden_us <= min(found.gemm_us, found.transfer_us + found.pieces_us) + 1e-6


@given(sizes, sizes, sizes)
@settings(max_examples=100, deadline=None)
def test_no_gemm_gets_faster_by_a_larger_inner_size_or_fewer_sms(m, n, k):
    base = gemm_time(H100.chip, m, n, k, "bf16").us
    assert gemm_time(H100.chip, m, n, k, "bf16", taken_sms=16).us >= base - 1e-9
    assert gemm_time(H100.chip, m, n, k, "bf16", share=0.9).us >= base - 1e-9


@pytest.mark.parametrize("op", OPS)
def test_empty_problems_and_one_rank(op):
    for design in designs_of(op):
        empty = predict(Problem(op, 0, 64, 64, "fp32", 4), design, H100)
        assert empty.gemm_us == empty.transfer_us == 0
        alone = predict(Problem(op, 512, 512, 512, "fp32", 1), design, H100)
        assert alone.us == alone.gemm_us > 0


def test_shards_of_the_whole_are_rounded_up():
    assert Problem.of_whole("all_gather_matmul", 8, 10, 7, "bf16", 4).n == 3
    assert Problem.of_whole("matmul_reduce_scatter", 8, 10, 7, "bf16", 4).k == 2
    assert Problem("matmul_all_reduce", 2, 3, 4, "fp8", 2).moved_bytes == 12  # 16-bit products


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Problem("matmul", 1, 1, 1, "bf16", 2), "op 'matmul' is not one of all_gather"),
        (lambda: Problem(OPS[0], 1, 1, 1, "int8", 2), "dtype 'int8' is not one of"),
        (lambda: Problem(OPS[0], -1, 1, 1, "bf16", 2), "-1, 1, 1 on 2 ranks"),
        (lambda: machine_named("V100 NVLink"), "want a chip of A100"),
        (lambda: machine_named("L20 multimem"), "machine 'L20 multimem' is not known"),
        (lambda: LINKS["PCIe 4"].bytes_per_us("multimem"), "has no multimem; it has"),
        (
            lambda: predict(Problem(OPS[0], 1, 1, 1, "bf16", 2), DESIGNS["push"], H100),
            "push is no algorithm of all_gather_matmul",
        ),
    ],
)
def test_bad_requests_say_what_would_do(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_every_figure_has_a_source():
    for thing in (*CHIPS.values(), *LINKS.values()):
        assert all(thing.sources.values()), thing.name
        told = ", ".join(thing.sources)
        for field in (
            ("gbps", "share", "collective_us", "signal_us")
            if thing in (LINKS.values())
            else ("sms", "dense_tflops", "memory_gbps", "gemm_share")
        ):
            assert field in told, (thing.name, field)
    assert all(design.source and design.summary for design in DESIGNS.values())
    assert chips.chip_named("NVIDIA H100 80GB HBM3") is CHIPS["H100"]
    assert chips.chip_named("NVIDIA A100-SXM4-80GB") is CHIPS["A100"]
    assert chips.chip_named("NVIDIA GeForce GTX 1080") is None


@pytest.mark.parametrize("module", [chips, designs, model])
def test_the_model_needs_no_torch(module):
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.partition(".")[0]
            assert top in sys.stdlib_module_names or name.startswith("pyparallel.ops."), name


# --- published measurements


def test_win_or_lose_and_the_order_of_shapes_are_right():
    items = [compared(row) for row in rows()]
    assert len(items) == 24
    assert sum(c.agrees for c in items) >= 0.8 * len(items)
    assert bench.model.problems(items) == []
    for key, group in bench.model.by(items, "library", "hardware", "op").items():
        assert misordered(group) == [], key
    for key, least in (("flux", 0.95), ("triton-distributed", 0.95)):
        assert bench.model.correlation(bench.model.by(items, "library")[key]) >= least


def test_it_sees_why_the_shape_of_pull_request_166_loses():
    (item,) = (c for c in map(compared, rows()) if c.row.provenance == "PR #166")
    assert item.row.ratio == 0.52
    assert item.ratio < 0.7
    assert "loses: its fixed cost" in item.why
    assert "could be hidden" in item.why
    assert item.fused.waits_for_host_us > item.unfused.gemm_us


def test_what_took_no_part_in_the_fit_is_near():
    """Out of sample: unfused times within 10 %, fused ones within 30 %."""
    for row in OTHER:
        item = compared(row)
        assert row.unfused_ms is not None
        assert row.fused_ms is not None
        assert item.unfused.us == pytest.approx(1000 * row.unfused_ms, rel=0.10), row.label
        assert item.fused.us == pytest.approx(1000 * row.fused_ms, rel=0.30), row.label


def test_a_broken_model_is_told(monkeypatch):
    """Control: without what a design costs, the model fails its own checks."""
    free = {
        key: replace(d, fixed_us=0.0, host_us=0.0, host_rank_us=0.0, gemm_share=1.0)
        for key, d in LIBRARIES.items()
    }
    monkeypatch.setattr("bench.published.LIBRARIES", free)
    found = bench.model.problems([compared(row) for row in rows()])
    assert found
    assert not next(c for c in map(compared, rows()) if c.row.provenance == "PR #166").agrees


def test_the_table_prints_every_row():
    console = Console(file=io.StringIO(), width=220)
    assert bench.model.report(console) == []
    text = console.file.getvalue()
    for row in rows():
        assert f"{row.ratio:.2f}" in text
    assert "24 of 24" in text
    assert "In-sample" in text
    assert "fixed cost" in text


def test_ranks_with_ties():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == 1
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert rank_correlation([1, 1, 2], [5, 5, 6]) == 1
    orders = itertools.permutations(range(4))
    assert all(-1 <= rank_correlation([0, 1, 2, 3], list(o)) <= 1 for o in orders)

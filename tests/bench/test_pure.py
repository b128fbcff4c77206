"""The benchmark's parts in one process: pure integers, statistics, references, the written forms.

Runs with real ranks are in test_runs.py.
"""

from __future__ import annotations

import io
import math
import os
import random
import select
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress

from bench import cli, machine, providers
from bench.case import Case, parse_bytes
from bench.ops import OPS, layout, uneven
from bench.options import Options
from bench.page import Page, PageTimeout
from bench.reference import Inputs, bound, check
from bench.stats import median_uncertainty, quantile, summarize
from bench.suites import collectives
from bench.timing import Budget, Contestant, measure

WORLDS = (1, 2, 3, 5, 8)
COUNTS = (0, 1, 7, 64, 1000)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", OPS)
def test_pieces_fill_the_output_once_and_read_inside_the_inputs(
    op: str, count: int, world: int
) -> None:
    plans = [layout(op, count, world, rank) for rank in range(world)]
    for plan in plans:
        if plan.pieces:
            covered = [i for p in plan.pieces for i in range(p.start, p.start + p.count)]
            assert sorted(covered) == list(range(plan.out_count))
        for piece in plan.pieces:
            for source, offset in piece.sources:
                assert offset >= 0
                assert offset + piece.count <= plans[source].in_count
        for splits, total in ((plan.in_splits, plan.in_count), (plan.out_splits, plan.out_count)):
            assert not splits or total == 0 or sum(splits) == total


@pytest.mark.parametrize("world", WORLDS)
def test_each_element_of_an_all_to_all_has_one_destination(world: int) -> None:
    sent = [0] * world
    for rank in range(world):
        for piece in layout("all_to_all_uneven", 1000, world, rank).pieces:
            ((source, _),) = piece.sources
            sent[source] += piece.count
    assert sent == [1000] * world


def test_uneven_shares_differ_and_keep_the_whole() -> None:
    assert uneven(1000, 3) == (166, 333, 501)
    assert sum(uneven(7, 8)) == 7


def test_quantiles_agree_with_the_standard_library() -> None:
    values = sorted(random.Random(1).random() for _ in range(41))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    assert quantile(values, 0.1) == pytest.approx(deciles[0])
    assert quantile(values, 0.9) == pytest.approx(deciles[8])
    summary = summarize(values[::-1], 5)
    assert summary.median == pytest.approx(statistics.median(values))
    assert (summary.samples, summary.calls) == (41, 5)
    assert summary.p10 <= summary.p20 <= summary.median <= summary.p80 <= summary.p90


def test_the_interval_of_the_median_covers_it_as_often_as_it_claims() -> None:
    """95 % by design; the sample median lies within half a width or a width of the true one."""
    source = random.Random(2)
    hits, trials = 0, 400
    for _ in range(trials):
        samples = [source.lognormvariate(0.0, 0.5) for _ in range(40)]
        half = median_uncertainty(samples) * quantile(sorted(samples), 0.5)
        hits += abs(quantile(sorted(samples), 0.5) - 1.0) <= 2 * half
    assert hits >= 0.93 * trials
    assert median_uncertainty([1.0] * 5) == math.inf
    assert median_uncertainty([3.0] * 50) == 0.0


@pytest.mark.parametrize(("text", "value"), [("4K", 4096), ("64MB", 64 << 20), ("12", 12)])
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "K", "-4K", "0", "4X", "1.5M"])
def test_bad_sizes_say_what_is_wanted(text: str) -> None:
    with pytest.raises(ValueError, match="want a positive number"):
        parse_bytes(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_right_sums_pass_and_every_kind_of_wrong_one_is_seen(
    dtype: torch.dtype, world: int
) -> None:
    inputs = Inputs(dtype, seed=3)
    count = 300_000
    plan = layout("all_reduce", count, world, 0)
    wide = [inputs.window(r, 0, 0, count).double() for r in range(world)]
    total = sum(wide[1:], wide[0])
    limit = bound(dtype, world, wide_sum=True)
    result = total.to(dtype)
    verdict = check(result, plan, inputs, 0, limit)
    assert verdict.ok, verdict
    for index, value in ((0, math.nan), (count - 1, math.inf), (count // 2, 0.0)):
        wrong = result.clone()
        wrong[index] = value
        assert not check(wrong, plan, inputs, 0, limit).ok
    assert not check(result.roll(1), plan, inputs, 0, limit).ok
    if world > 1:
        missing = (total - wide[-1]).to(dtype)
        assert not check(missing, plan, inputs, 0, limit).ok


def test_the_bound_bites_on_a_bfloat16_sum_rounded_at_each_step() -> None:
    """Negative control: adding in bfloat16 is outside the bound of one rounding."""
    world, count = 8, 200_000
    inputs = Inputs(torch.bfloat16, seed=4)
    plan = layout("all_reduce", count, world, 0)
    narrow = inputs.window(0, 0, 0, count).clone()
    for rank in range(1, world):
        narrow += inputs.window(rank, 0, 0, count)
    assert not check(narrow, plan, inputs, 0, bound(torch.bfloat16, world, wide_sum=True)).ok
    assert check(narrow, plan, inputs, 0, bound(torch.bfloat16, world, wide_sum=False)).ok


def test_moved_data_must_be_equal_bit_for_bit() -> None:
    inputs = Inputs(torch.float32, seed=5)
    plan = layout("all_gather", 4096, 2, 0)
    right = torch.cat([inputs.window(r, 1, 0, 2048) for r in range(2)])
    assert check(right, plan, inputs, 1, 0.0).ok
    assert not check(right, plan, inputs, 0, 0.0).ok  # another buffer's data
    swapped = torch.cat([right[2048:], right[:2048]])
    assert check(swapped, plan, inputs, 1, 1.0).error == math.inf


def test_windows_of_ranks_and_variants_differ_and_wrap() -> None:
    inputs = Inputs(torch.float32, seed=6)
    long = inputs.window(3, 2, 0, 3_000_000)
    assert torch.equal(long[2_500_000:], inputs.window(3, 2, 2_500_000, 500_000))
    filled = torch.empty(3_000_000)
    inputs.fill(filled, 3, 2)
    assert torch.equal(filled, long)
    heads = {float(inputs.window(r, v, 0, 1)) for r in range(8) for v in range(4)}
    assert len(heads) == 32


def test_page_meets_exchanges_and_names_the_absent(tmp_path: Path) -> None:
    path, world = tmp_path / "page", 3
    Page.create(path, world)
    seen: list[list[list[float]]] = []

    def rank(r: int) -> None:
        page = Page(path, r, world, timeout=20)
        for i in range(200):
            got = page.exchange([r, i])
            assert got == [[s, i] for s in range(world)]
        seen.append(page.exchange([r + 0.5]))
        assert page.exchange_text(f"rank {r}" * (r % 2)) == ["", "rank 1", ""]
        page.close()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [[[0.5], [1.5], [2.5]]] * world
    Page.create(path, world)
    lonely = Page(path, 0, world, timeout=0.05)
    with pytest.raises(PageTimeout, match="rank 1 has not come"):
        lonely.align()
    lonely.close()


def test_labels() -> None:
    assert Case("all_reduce", 1 << 20, "bfloat16", 3).label == "all_reduce 1 MB bf16 x3"
    assert Case("barrier", 0, "float32", 2).count == 0


def test_timing_takes_samples_of_the_asked_length_and_of_the_slowest_rank(tmp_path: Path) -> None:
    """Two threads as ranks; rank 1 needs 300 us a call, and the first calls are slow on both."""
    Page.create(tmp_path / "page", 2)
    found: list[list[Contestant]] = []

    def rank(r: int) -> None:
        page = Page(tmp_path / "page", r, 2, timeout=20)
        made = 0

        def run(n: int) -> None:
            nonlocal made
            for _ in range(n):
                time.sleep(0.02 if made < 2 else 0.0003 * r)
                made += 1

        refreshed: list[int] = []
        contestants = [
            Contestant("a", run, max_calls=40, refresh=lambda: refreshed.append(1)),
            Contestant("b", lambda n: time.sleep(0.001 * n)),
        ]
        rounds = measure(page, contestants, Budget(1.0, sample_us=6000.0))
        assert len(refreshed) >= rounds
        found.append(contestants)
        page.close()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (a, b), (other, _) = found
    assert a.samples == other.samples
    assert len(a.samples) >= 3
    assert min(a.samples) >= 300.0
    assert a.calls * min(a.samples) >= 2000.0
    assert a.calls <= 40
    assert min(b.samples) >= 1000.0


@pytest.mark.parametrize("name", ["direct", "direct_nccl", "torch", "gloo", "nccl", "mpich"])
def test_every_general_contestant_has_every_op_of_the_table(name: str) -> None:
    pytest.importorskip("pyparallel._torch")
    kind = providers.load(providers.PROVIDERS[name].where)
    assert {op for op in OPS if not hasattr(kind, op)} == set(kind.lacks)


def test_what_is_compared_on_each_device() -> None:
    cpu = collectives.pairs(Options(peers=("mpich",)))
    assert cpu == [("direct", "gloo"), ("torch", "gloo"), ("direct", "mpich")]
    assert collectives.pairs(Options(device="cuda")) == [("direct_nccl", "nccl"), ("torch", "nccl")]


def test_the_full_suite_covers_every_op_size_and_dtype_and_the_quick_one_every_op() -> None:
    full, quick = Options(), Options(quick=True)
    found = {(c.op, c.nbytes, c.dtype) for c in collectives.cases(full, 3)}
    for op in OPS:
        for size in (4 << 10, 256 << 10, 64 << 20):
            for dtype in ("float32", "bfloat16"):
                assert op == "barrier" or (op, size, dtype) in found
    assert {c.op for c in collectives.cases(quick, 2)} == set(OPS)
    assert {c.op for c in collectives.cases(quick, 1)} == set(OPS) - {"send_recv", "exchange"}


def test_default_worlds_suit_a_run_of_minutes() -> None:
    """Two ranks and an oversubscribed world; no machine is asked for a rank per core of many."""
    assert [cli.default_worlds(cores) for cores in (1, 2, 6, 7, 8, 192)] == [
        *((2,), (2, 3), (2, 7), (2, 8), (2, 8), (2, 8)),
    ]


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert machine.usable_cores() == 1
    assert cli.options_from(cli.parser().parse_args(["--quick"])).worlds == (2,)


def test_a_log_shows_what_has_begun() -> None:
    text = io.StringIO()
    with Progress(console=Console(file=text, width=100)) as progress:
        display = cli._Display(progress, "collectives")
        display({"kind": "world", "world": 3})
        display({"kind": "total", "cases": 67})
        assert "collectives, 3 ranks: 67 cases" in text.getvalue()


def test_each_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def worlds(*words: str) -> tuple[int, ...]:
        return cli.options_from(cli.parser().parse_args(["--device", "cuda", *words])).worlds

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert worlds() == (4,)
    assert worlds("--world", "2", "4") == (2, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="2 ranks need a GPU each; torch sees 0"):
        worlds()


def test_processes_do_not_outlive_who_started_them() -> None:
    """Whoever it is, and however it ends."""
    code = (
        "import os, time\n"
        "from bench import machine\n"
        "pool = machine.processes(2)\n"
        "print(pool.submit(os.getpid).result(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        worker = os.pidfd_open(int(started.stdout.readline()))
        started.kill()
    try:
        assert select.select([worker], [], [], 10.0)[0]
    finally:
        os.close(worker)

"""Suite `pipeline`: its cases and its float64 check in one process, peak memory by hand, then a
small run on two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import providers, runner
from bench.case import Row
from bench.live_bytes import peak_bytes
from bench.options import Options
from bench.pipeline_case import CHUNKS, PipelineCase, Sizes, gpt, loss_fn
from bench.suites import pipeline
from bench.targets import target

LACKS = "; ".join(filter(None, map(providers.missing, ("pipeline", "stock_pipeline"))))
SMALL = Sizes(hidden=64, layers=8, batch=1, tokens=16, microbatches=4)


def test_cases_of_each_kind_of_run() -> None:
    for world in (2, 4):
        full, quick = (pipeline.cases(Options(quick=quick), world) for quick in (False, True))
        assert set(quick) < set(full)
        assert {case.op for case in full} == set(CHUNKS)
        assert {case.op for case in quick} == set(pipeline.QUICK_SCHEDULES)
        assert len({case.label for case in full}) == len(full)
        for case in full:
            assert sum(case.counts()) == case.sizes.layers + 2
            assert len(case.counts()) == case.stages
            assert min(case.counts()) >= 1
        heavy = [case for case in full if case.sizes == pipeline.heavy(case.stages)]
        assert {case.op for case in heavy} == set(pipeline.HEAVY_SCHEDULES)
        assert all(case.sizes.layers == case.stages for case in heavy)
    assert not pipeline.cases(Options(dtypes=("bfloat16",)), 2)


def test_right_results_pass_and_wrong_ones_are_seen() -> None:
    case = PipelineCase("1f1b", SMALL, 2)
    ids = case.inputs(0, 0)
    reference = case.reference(1, 0)
    model = gpt(SMALL, 0)
    for part in reversed(ids.split(SMALL.batch)):  # another order of adding up
        (loss_fn(model(part[:, :-1]), part[:, 1:]) / SMALL.microbatches).backward()
    good = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    good["loss"] = reference.exact["loss"].float()
    assert good.keys() == reference.exact.keys()
    assert case.check(reference, good, stock=True).ok
    for name, tensor in good.items():
        for wrong in (tensor * 1.01, tensor * float("nan"), tensor[None]):
            assert not case.check(reference, {**good, name: wrong}, stock=True).ok, name
    assert not case.check(reference, {}, stock=True).ok


def test_memory_is_what_lives_at_once() -> None:
    def call() -> None:
        a = torch.ones(1000)  # 4000 bytes
        b = a.view(10, 100) + 1  # 8000
        del a
        b.add_(1)  # in place: nothing new
        c = torch.cat((b, b))  # 12000
        del b, c

    def training() -> None:
        x = torch.ones(1000, requires_grad=True)
        (x * x).exp().sum().backward()

    cpu = torch.device("cpu")
    assert peak_bytes(call, cpu) == 12000
    # x, its square and that one's exponential, which backward needs, and the gradients of two.
    assert 4 * 4000 < peak_bytes(training, cpu) < 7 * 4000


def test_goals() -> None:
    row = Row(
        "pipeline", "1f1b", "pipeline", [8, 128, 8, 1, 64], "float32", 2, "torch.pipelining+gloo",
        None, None, None, None, None, True, True, 0, 0, None,
    )  # fmt: skip
    assert target(row) == 1.0
    heavy = pipeline.heavy(2)
    shape = PipelineCase("1f1b", heavy, 2).shape
    assert target(replace(row, shape=shape)) == 1.5
    assert target(replace(row, shape=shape, world_size=4, crowded=True)) == 1.0


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_both_sides_are_verified_and_timed() -> None:
    options = Options(quick=True, worlds=(2,), ops=("1f1b", "zb-v"), seconds=1.0, timeout=30.0)
    rows, problems = runner.run("pipeline", options, lambda _: None)
    assert not problems
    assert {row.op for row in rows} == {"1f1b", "zb-v"}
    assert {row.peer for row in rows} == {
        "torch.pipelining+gloo",
        "torch.pipelining+pyparallel",
    }
    for row in rows:
        assert row.verified, row.note
        assert row.peer_verified, row.note
        assert row.speedup is not None
        assert set(row.parts) == {"idle %", "simulated %", "sim/step %", "peak MB", "peer MB"}
        assert 0 < row.parts["peak MB"] < 100
        assert 0 < row.parts["simulated %"] < 100

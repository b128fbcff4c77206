"""Suite `train`: its cases and its float64 check in one process; the contest on two ranks, with
sequence and tensor parallel layouts of both sides right (the rest is run by `make bench`)."""

import math

import pytest

from bench import providers, runner
from bench.case import Row
from bench.options import Options
from bench.suites import train
from bench.targets import target
from bench.train_case import LAYOUTS, Output, Sizes, TrainCase

SMALL = Sizes(hidden=64, layers=2, samples=4, rows=12, microbatches=2)
LACKS = "; ".join(filter(None, map(providers.missing, ("train", "stock_train"))))


def test_cases_are_the_layouts_of_a_world():
    quick = train.cases(Options(quick=True), 2)
    assert [case.op for case in quick] == list(train.QUICK_LAYOUTS)
    full = {case.op for world in (2, 4) for case in train.cases(Options(), world)}
    assert full == set(LAYOUTS)
    assert not train.cases(Options(), 3)
    assert not train.cases(Options(dtypes=("bfloat16",)), 2)
    for case in train.cases(Options(), 4):
        assert math.prod(case.axes.values()) == 4


def test_a_wrong_gradient_is_found():
    case = TrainCase("dp2", SMALL, 2)
    reference = case.reference(0, 0)
    grads = {n: g.float() for n, g in reference.exact.items() if n != "loss"}
    loss = float(reference.exact["loss"])
    assert case.check(reference, Output(loss, lambda: grads), False).ok
    name = "model.layers.1.mlp.up_proj.weight"
    halved = {**grads, name: grads[name] / 2}
    verdict = case.check(reference, Output(loss, lambda: halved), False)
    assert not verdict.ok
    assert name in verdict.where
    assert not case.check(reference, Output(loss * 1.001, lambda: grads), False).ok
    short = {**grads, name: grads[name][1:]}
    assert "shape" in case.check(reference, Output(loss, lambda: short), False).where


def row(op: str, world: int, crowded: bool) -> Row:
    return Row(
        "train", op, "training", [4, 128, 4, 256], "float32", world, "torch+gloo", None, None,
        None, None, None, True, True, 0, 0, None, crowded=crowded,
    )  # fmt: skip


def test_goals():
    assert [target(row(op, 2, False)) for op in train.QUICK_LAYOUTS] == [1.0, 1.1, 1.1, 1.0]
    assert target(row("dp2-tp2", 4, True)) == 1.0


@pytest.mark.skipif(bool(LACKS), reason=LACKS or "-")
@pytest.mark.timeout(600)  # idle: 10 s
def test_both_sides_are_right_on_two_ranks():
    options = Options(quick=True, worlds=(2,), ops=("tp2", "sp2"), seconds=1.0, timeout=120.0)
    rows, problems = runner.run("train", options, lambda _: None)
    assert not problems
    assert {row.op for row in rows} == {"tp2", "sp2"}
    for one in rows:
        assert one.verified, one.note
        assert one.peer_verified, one.note
        assert one.speedup
        assert one.parts["tok/s"] > 0

"""Planning rows of the public fault list: inputs that broke other planners, with the right answer.
Numbers are those of the list. Layers of proof: pure numbers; all of it runs in CI."""

import re

import pytest

from pyparallel.planner import (
    CLUSTERS,
    CONVENTIONS,
    Job,
    Layout,
    ModelSpec,
    PlanError,
    evaluate,
    preset,
    violations,
)
from pyparallel.planner.collectives import group_of
from pyparallel.planner.stages import even_layers, stages_of

A100, H100 = CLUSTERS["a100-80"], CLUSTERS["h100"]
LLAMA = preset("llama-3-8b")
TINY = ModelSpec("tiny", 5, 64, 8, 100, kv_heads=2)


@pytest.mark.parametrize(("layers", "stages"), [(5, 2), (30, 4), (10, 3), (61, 8)])
def test_1_2_3_no_layer_is_dropped(layers, stages):
    assert sum(even_layers(layers, stages)) == layers
    held = [n for s in stages_of(ModelSpec("m", layers, 64, 4, 100), Layout(pp=stages))
            for n in s.layers]  # fmt: skip
    assert held == list(range(layers))


def test_5_a_stage_without_layers_is_refused_with_what_works():
    found = violations(Job(ModelSpec("m", 2, 64, 4, 100), 64, 8), H100, Layout(pp=4))
    assert "2 layers over pp 4" in found[0].text
    assert "nearest 2 stages" in found[0].text


@pytest.mark.parametrize("m", range(1, 9))
def test_12_13_every_number_of_microbatches_is_planned_or_refused_in_words(m):
    job = Job(TINY, 64, m)
    gpipe = evaluate(job, H100, Layout(pp=4, schedule="gpipe"))
    assert gpipe.time.step > 0
    if m < 4:
        with pytest.raises(PlanError, match=rf"m = {m} .*= {m} microbatch(es)? for pp 4.*gpipe"):
            evaluate(job, H100, Layout(pp=4))
    else:
        assert evaluate(job, H100, Layout(pp=4)).time.step > 0


def test_22_a_vocabulary_that_tp_does_not_divide_is_padded():
    plan = evaluate(Job(ModelSpec("m", 2, 64, 4, 50257), 64, 8), H100, Layout(tp=4))
    assert any("50257 is padded to 50260" in note for note in plan.notes)
    assert plan.memory.stages[0].local_parameters * 4 >= 2 * 50257 * 64


def test_23_kv_heads_fewer_than_tp_say_how_they_are_held():
    plan = evaluate(Job(TINY, 64, 8), H100, Layout(tp=4))
    assert any("2 kv heads for tp 4: each is held by 2 ranks" in note for note in plan.notes)


@pytest.mark.parametrize("zero", [2, 3])
def test_25_zero_2_and_3_with_a_pipeline_are_counted_and_noted(zero):
    job = Job(LLAMA, 8192, 64)
    one, more = (evaluate(job, A100, Layout(dp=4, pp=2, zero=z)) for z in (1, zero))
    assert more.time.volume["dp"] > 4 * one.time.volume["dp"]
    assert any("DeepSpeed refuses the combination" in note for note in more.notes)


def test_37_a_group_that_crosses_nodes_costs_more_than_one_that_does_not():
    """Ranks by topology: tp has stride 1, so it stays inside; with tp 16 it cannot."""
    inside = group_of(Layout(dp=2, tp=8), A100, "tp")
    crossing = group_of(Layout(tp=16), A100, "tp")
    assert (inside.crosses, crossing.crosses) == (False, True)
    job = Job(LLAMA, 8192, 64)
    whole = A100
    split = type(A100)("split", A100.gpu, 2, A100.intra, A100.inter)  # two devices to a node
    layout = Layout(dp=2, tp=8)
    near, far = (evaluate(job, c, layout).time for c in (whole, split))
    assert far.exposed["tp"] > 2 * near.exposed["tp"]


def test_38_memory_is_held_against_measurements():
    """The page does it: tests/bench/test_planner.py. Here: the parts add up to the whole."""
    plan = evaluate(Job(LLAMA, 8192, 64), H100, Layout(dp=8))
    for stage in plan.memory.stages:
        assert stage.total == sum(stage.parts.values())
        assert set(stage.parts) >= {"weights", "gradients", "optimizer", "activations", "margin"}


def test_39_the_batch_triangle_names_its_three_numbers():
    with pytest.raises(PlanError) as caught:
        evaluate(Job(LLAMA, 8192, 100), H100, Layout(dp=8, micro_batch=3))
    text = str(caught.value)
    assert re.search(r"global batch 100 .*micro batch 3 x dp 8", text)
    assert "nearest global batch 96 and 120" in text


@pytest.mark.parametrize(
    ("layout", "allowed"),
    [
        (Layout(pp=4, chunks=2), "for more take interleaved-1f1b"),
        (Layout(pp=4, schedule="zb-v", chunks=1), "zb-v has 2 stages per rank, not 1"),
        (Layout(pp=4, schedule="interleaved-1f1b", chunks=9), "nearest 32 stages"),
    ],
)
def test_40_virtual_pipelines_list_what_is_allowed(layout, allowed):
    found = " ".join(v.text for v in violations(Job(LLAMA, 8192, 64), H100, layout))
    assert allowed in found


def test_42_memory_pressure_of_zero_bubble_is_seen_before_it_runs():
    job = Job(preset("llama-2-13b"), 4096, 64)
    plain, double = (
        evaluate(job, H100, Layout(tp=2, pp=4, schedule=name)) for name in ("1f1b", "zb-h2")
    )
    assert double.time.bubble < plain.time.bubble
    assert double.memory.fullest.in_flight > 1.7 * plain.memory.fullest.in_flight


def test_48_every_mfu_has_its_convention():
    plan = evaluate(Job(LLAMA, 8192, 64), H100, Layout(dp=8, recompute="full"))
    assert set(plan.flops.mfu) == set(CONVENTIONS)
    assert plan.flops.mfu["6N"] < plan.flops.mfu["causal"] < plan.flops.mfu["full"]
    assert plan.flops.mfu["hardware"] > 1.25 * plan.flops.mfu["full"]
    assert all(len(text) > 40 for text in CONVENTIONS.values())


def test_49_the_first_stage_is_fuller_and_the_table_says_so():
    plan = evaluate(Job(LLAMA, 8192, 64), A100, Layout(tp=2, pp=4))
    totals = [stage.total for stage in plan.memory.stages]
    assert totals[0] == max(totals)
    assert totals[0] > 1.15 * totals[2]
    assert plan.to_json()["memory"]["fullest_rank"] == 0

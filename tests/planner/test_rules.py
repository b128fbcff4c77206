"""Layouts that cannot be are refused with the rule, the numbers and the nearest ones that can.
Layers of proof: pure numbers; all of it runs in CI."""

import pytest

from pyparallel.planner import CLUSTERS, Job, Layout, PlanError, evaluate, preset, violations
from pyparallel.planner.models import ModelSpec

H100 = CLUSTERS["h100"]
LLAMA = preset("llama-3-8b")
JOB = Job(LLAMA, 8192, 64)


@pytest.mark.parametrize(
    ("layout", "rule", "numbers"),
    [
        (Layout(tp=3), "heads", r"32 heads over tp 3 leave 2; nearest tp 2 and 4"),
        (Layout(dp=3), "batch", r"global batch 64 .* micro batch 1 x dp 3 .* 63 and 66.* 2 and 4"),
        (Layout(dp=2, micro_batch=3), "batch", r"micro batch 3 x dp 2"),
        (Layout(pp=33), "layers", r"32 layers over pp 33 x chunks 1 = 33 .* nearest 32 stages"),
        (Layout(pp=2, layers_per_stage=(16, 15)), "layers", r"\[16, 15\] has 2 stages and 31"),
        (
            Layout(dp=16, pp=8),
            "microbatches",
            r"m = 64 / \(1 x 16\) = 4 microbatches for pp 8.* nearest pp 4",
        ),
        (Layout(cp=3), "sequence", r"8192 tokens over cp 3 in 2 x cp chunks leave 2; nearest 8190"),
        (Layout(ep=4, dp=4), "ep", r"llama-3-8b has no experts"),
        (
            Layout(pp=3, schedule="dualpipev", chunks=3),
            "chunks",
            r"dualpipev has 2 stages per rank",
        ),
        (Layout(pp=2, schedule="1f1b", chunks=2), "chunks", r"for more take interleaved-1f1b"),
        (Layout(chunks=2), "chunks", r"2 chunks with pp 1 have no effect"),
        (Layout(zero=4), "zero", r"4 is not one of 0, 1, 2, 3"),
        (Layout(offload="all"), "offload", r"weights need zero 3"),
        (Layout(tp=0), "tp", r"tp=0; allowed are 1, 2, 3"),
        (Layout(recompute_layers=3), "recompute", r"recompute_layers 3 has no effect"),
        (Layout(group_size=4), "group_size", r"only interleaved-1f1b"),
    ],
)
def test_a_layout_that_cannot_be(layout, rule, numbers):
    found = violations(JOB, H100, layout)
    assert rule in [v.rule for v in found]
    with pytest.raises(PlanError, match=numbers):
        evaluate(JOB, H100, layout)


def test_all_broken_rules_are_named_at_once():
    found = {v.rule for v in violations(JOB, H100, Layout(tp=3, dp=5, pp=40))}
    assert {"heads", "batch", "layers"} <= found


def test_kv_heads_that_neither_divide_nor_are_divided():
    model = ModelSpec("m", 4, 96, 12, 100, kv_heads=4, head_dim=8)
    found = violations(Job(model, 96, 8), H100, Layout(tp=6))
    assert [v.rule for v in found if "kv" in v.rule] == ["kv heads"]
    assert "4 kv heads over tp 6: neither divides the other; nearest tp 2 and 4" in found[0].text


def test_fewer_kv_heads_than_ranks_is_allowed_and_noted():
    plan = evaluate(Job(LLAMA, 8192, 64), H100, Layout(tp=16))
    assert any("8 kv heads for tp 16: each is held by 2 ranks" in n for n in plan.notes)
    assert any("crosses nodes of 8" in n for n in plan.notes)


def test_a_vocabulary_that_does_not_divide_is_padded_and_noted():
    model = ModelSpec("m", 2, 64, 8, 50257)
    plan = evaluate(Job(model, 64, 8), H100, Layout(tp=4))
    assert any("50257 is padded to 50260 for tp 4" in n for n in plan.notes)


def test_zero_three_with_a_pipeline_counts_its_gathers_and_says_so():
    job = Job(LLAMA, 8192, 64)
    plan = evaluate(job, H100, Layout(dp=4, pp=2, zero=3))
    assert any("gathered twice, once per microbatch" in n for n in plan.notes)
    assert plan.time.volume["dp"] > 5 * evaluate(job, H100, Layout(dp=4, pp=2)).time.volume["dp"]


def test_gpipe_takes_fewer_microbatches_than_stages():
    job = Job(LLAMA, 8192, 2)
    assert not violations(job, H100, Layout(pp=4, schedule="gpipe"))
    assert [v.rule for v in violations(job, H100, Layout(pp=4))] == ["microbatches"]


def test_uneven_layers_are_planned_and_noted():
    job = Job(ModelSpec("m", 5, 64, 4, 100), 64, 8)
    plan = evaluate(job, H100, Layout(pp=2))
    assert sum(stage.layers for stage in plan.memory.stages) == 5
    assert any("5 layers over 2 stages are uneven" in n for n in plan.notes)


def test_a_dtype_that_the_device_lacks():
    with pytest.raises(PlanError, match="precision: a100-80 has no fp8 GEMM"):
        evaluate(Job(LLAMA, 8192, 8, "fp8"), CLUSTERS["a100-80"], Layout())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq": 0}, "seq=0: 1 or more"),
        ({"global_batch": 2.5}, "global_batch=2.5"),
        ({"precision": "bf8"}, "precision='bf8' is not one of bf16"),
        ({"attention": "fast"}, "attention='fast' is not one of flash, unfused"),
    ],
)
def test_a_job_that_cannot_be(given, message):
    with pytest.raises(PlanError, match=message):
        Job(**{"model": LLAMA, "seq": 8, "global_batch": 8, **given})

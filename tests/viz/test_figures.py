"""Figures of a plan: files are what they claim to be and say what the plan says."""

from xml.etree import ElementTree

import pytest

from pyparallel.planner import Job, Layout, cluster_named, evaluate, preset
from pyparallel.viz import VIEWS, plan_figure
from pyparallel.viz.views import compare, flow, overview, trend

JOB = Job(preset("llama-3-8b"), 4096, 64)
NODES = cluster_named("a100-80")
PLAN = evaluate(JOB, NODES, Layout(dp=4, tp=2, pp=4))
OTHER = evaluate(JOB, NODES, Layout(dp=16, tp=2, zero=3))


@pytest.mark.parametrize("view", VIEWS)
def test_figures_are_pictures(view):
    pytest.importorskip("matplotlib")
    png = plan_figure(view, PLAN, [OTHER], "png")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    svg = plan_figure(view, PLAN, [OTHER], "svg")
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = " ".join(root.itertext())
    assert PLAN.layout.label in text
    if view == "compare":
        assert OTHER.layout.label in text
        assert svg == plan_figure(view, PLAN, [OTHER], "svg")


def test_another_view_or_form_is_refused():
    with pytest.raises(ValueError, match="view 'pie', form 'png': views are overview, flow"):
        plan_figure("pie", PLAN)
    with pytest.raises(ValueError, match="form 'pdf'"):
        plan_figure("flow", PLAN, form="pdf")


def test_views_are_the_plan():
    data = overview(PLAN)
    assert [rank["total"] for rank in data["ranks"]] == [
        stage.total / 2**30 for stage in PLAN.memory.stages
    ]
    entries = compare([PLAN, OTHER])
    for entry, plan in zip(entries, (PLAN, OTHER), strict=True):
        assert sum(entry["time"].values()) == pytest.approx(plan.time.step, rel=1e-6)
        assert sum(entry["memory"].values()) == pytest.approx(entry["total"])
    here = next(p for p in trend(PLAN)["microbatches"] if p["x"] == 16)
    assert here["rate"] == pytest.approx(PLAN.tokens_per_second_per_gpu, rel=0.02)


def test_messages_leave_after_their_pass_and_come_before_their_use():
    data = flow(PLAN)
    passes = {(s[0], s[3], s[4]): (s[1], s[2]) for s in data["spans"]}
    assert len(data["spans"]) == 4 * 16 * 2
    assert len(data["messages"]) == 3 * 16 * 2
    for source, target, sent, used, microbatch, forward in data["messages"]:
        code = "F" if forward else "B"
        assert target == source + (1 if forward else -1)
        assert sent == passes[source, code, microbatch][1]
        assert used == passes[target, code, microbatch][0]
        assert sent <= used


def test_a_stage_sends_nothing_to_its_own_rank():
    """A V's two middle stages are on the last rank: 2 x 4 stages, 6 messages each way."""
    layout = Layout(dp=4, tp=2, pp=4, schedule="zb-v", chunks=2)
    data = flow(evaluate(JOB, NODES, layout))
    assert all(source != target for source, target, *_ in data["messages"])
    assert len(data["messages"]) == 6 * 16 * 2
    assert {span[3] for span in data["spans"]} == {"F", "I", "W"}


def test_a_long_step_is_cut_and_says_so():
    plan = evaluate(Job(preset("llama-3-70b"), 4096, 4096), NODES, Layout(dp=1, tp=8, pp=16))
    data = flow(plan)
    assert data["microbatches"] == 4096
    assert data["shown"] < 200
    assert len(data["spans"]) == 2 * 16 * data["shown"]

"""Drawings: every pass is in them once, where the simulation has it; files are what they claim to
be."""

import json
import re
import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from pyparallel.schedule import Costs, Kind, generate, simulate, with_steps, with_transfers
from pyparallel.viz import chrome_trace, timeline_png, timeline_svg
from pyparallel.viz.boxes import boxes

SVG = "{http://www.w3.org/2000/svg}"
STEP = simulate(
    with_steps(with_transfers(generate("dualpipe", 4, 8))),
    Costs(overlap=0.5, latency=0.25, reduce=1, step=2),
)


def passes(simulation):
    return [s for row in simulation.spans for s in row if not s.action.kind.is_transfer]


def test_boxes_are_the_passes_and_do_not_cover_each_other():
    drawn = boxes(STEP)
    assert len(drawn) == len(passes(STEP))
    for rank in range(4):
        line = sorted(box for box in drawn if box.rank == rank)
        for before, after in pairwise(line):
            apart = before.end <= after.start
            halves = (before.top, before.bottom, after.top, after.bottom) == (0, 0.5, 0.5, 1)
            assert apart or (halves and before.end == after.end)


def test_what_takes_no_time_is_not_drawn():
    result = simulate(with_steps(generate("1f1b", 2, 2)))
    assert len(boxes(result)) == len(passes(result)) - 4


def test_svg_is_well_formed_and_has_every_pass():
    root = ElementTree.fromstring(timeline_svg(STEP))
    groups = root.findall(f"{SVG}g")
    assert len(groups) == len(passes(STEP))
    titles = [group.find(f"{SVG}title").text for group in groups]
    assert "0F0 on rank 0: 0 to 1" in titles
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert x + float(rect.get("width")) <= width
        assert y + float(rect.get("height")) <= height
    assert timeline_svg(STEP) == timeline_svg(STEP)


def test_svg_escapes_what_a_file_may_name():
    """A schedule's name may come from anywhere."""
    named = generate("1f1b", 2, 2)
    bad = type(named)("<script>&\"'", named.rows, 2, 2, named.held)
    text = timeline_svg(simulate(bad))
    assert "<script>" not in text
    assert ElementTree.fromstring(text).find(f"{SVG}title").text.startswith("<script>&\"'")


def test_svg_of_many_passes_has_no_text_that_does_not_fit():
    result = simulate(generate("1f1b", 8, 400))
    root = ElementTree.fromstring(timeline_svg(result))
    assert root.findall(f"{SVG}g")
    assert not root.findall(f"{SVG}g/{SVG}text")
    with pytest.raises(ValueError, match="width=100: the labels alone take 130"):
        timeline_svg(result, width=100)


def test_png_is_a_picture_of_the_size_asked_for():
    pytest.importorskip("matplotlib")
    data = timeline_png(STEP, title="a title", width=500)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 500


def test_png_without_matplotlib_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib, or write an SVG"):
        timeline_png(STEP)


def test_trace_has_every_action_and_an_arrow_per_message():
    trace = json.loads(json.dumps(chrome_trace(STEP, unit=2)))
    events = trace["traceEvents"]
    whole = [e for e in events if e["ph"] == "X"]
    assert len(whole) == sum(map(len, STEP.spans))
    assert max(e["ts"] + e["dur"] for e in whole) == pytest.approx(STEP.step_time * 2e6)
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    sends = sum(s.action.kind.is_send for row in STEP.spans for s in row)
    assert starts.keys() == ends.keys()
    assert len(starts) == sends
    for number, start in starts.items():
        assert ends[number]["ts"] >= start["ts"]
        assert ends[number]["pid"] != start["pid"]
    lines = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert lines == {
        f"rank {r}, stages {a}, {b}" for r, (a, b) in enumerate([(0, 3), (1, 2), (1, 2), (0, 3)])
    }
    with pytest.raises(ValueError, match="unit=0"):
        chrome_trace(STEP, unit=0)


def test_kinds_have_colours_of_their_own():
    used = {
        re.search(r"^\d+([A-Z]+)", box.title)[1]: box.colour for box in boxes(STEP) if not box.chunk
    }
    assert set(used) >= {"F", "B", "I", "W", "REDUCE", "STEP"}
    assert len(set(used.values())) == len(used)
    assert Kind.FORWARD.code in used

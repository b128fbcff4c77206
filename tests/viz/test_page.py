"""The page of a plan. Layers of proof: its text (CI); a real headless Chromium that shows every
view and uses every control (CI where Chromium is, which .ci/run installs if it can)."""

import json
import re
from contextlib import contextmanager
from pathlib import Path
from string import Formatter

import pytest

from pyparallel.planner import Job, Layout, cluster_named, evaluate, preset
from pyparallel.planner.notes import SENTENCES
from pyparallel.viz import plan_page
from tests.viz.browser import chromium

PAGE = Path(__file__).resolve().parents[2] / "pyparallel" / "viz" / "page"
WORDS = json.loads((PAGE / "words.json").read_text(encoding="utf-8"))
VIEWS = ("overview", "flow", "compare", "trend")
JOB = Job(preset("llama-3-8b"), 4096, 64)
NODES = cluster_named("h100")


def planned(**choices):
    return evaluate(JOB, NODES, Layout(**choices))


PLAN = planned(dp=4, tp=2, pp=4, cp=2)
OTHERS = [
    planned(dp=8, tp=2, pp=2, schedule="interleaved-1f1b", chunks=2),
    planned(dp=32, zero=3, recompute="full"),
    planned(dp=4, tp=1, pp=8, schedule="zb-h1"),
]


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(plan_page(PLAN, OTHERS), encoding="utf-8")
    return path


@contextmanager
def opened(browser, file, **context):
    """The page in a tab of its own; an error in its console, or a request for anything but the file
    itself, fails the test."""
    wrong, asked = [], []
    session = browser.new_context(**{"locale": "en-US", "color_scheme": "light", **context})
    page = session.new_page()
    page.set_default_timeout(40_000)  # of a machine that is busy with other tests
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    yield page
    session.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [file.as_uri()]


def until(page, condition):
    """Waits for it; playwright's own way is an eval, which the page's policy forbids."""
    for _ in range(800):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"after 40 s not yet: {condition}")


def series(page, chart):
    return page.evaluate(f"charts.get('{chart}').getOption().series")


def test_words_are_complete_in_both_languages():
    english, chinese = WORDS["en"], WORDS["zh"]
    assert set(english) == set(chinese)
    holes = re.compile(r"\{\w+\}")
    for key, text in english.items():
        assert set(holes.findall(text)) == set(holes.findall(chinese[key])), key
    same = {key for key, text in english.items() if text == chinese[key]}
    assert same <= {"rank", "logits"}
    used = set()
    for path in (*PAGE.glob("*.js"), PAGE / "page.html"):
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"""say\("(\w+)"|data-(?:word|label)="(\w+)\"""", text))
    assert {a or b for a, b in used} <= set(english)


def test_every_note_of_the_planner_has_its_chinese():
    chinese = json.loads((PAGE / "notes.zh.json").read_text(encoding="utf-8"))
    assert set(chinese) == set(SENTENCES)
    for key, text in SENTENCES.items():
        holes = {name for _, name, _, _ in Formatter().parse(text) if name}
        assert set(re.findall(r"\{(\w+)\}", chinese[key])) == holes, key


def test_notes_are_read_in_the_page_s_language(browser, tmp_path):
    """Two notes, with numbers; a long step whose first microbatches are drawn says so."""
    plan = evaluate(Job(preset("llama-3-8b"), 4096, 2048), NODES, Layout(tp=16, pp=3))
    assert len(plan.notes) == 3
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan), encoding="utf-8")
    with opened(browser, path) as page:
        page.click("footer summary")
        assert page.inner_text("#notes").splitlines() == list(plan.notes)
        page.click("#tab-flow")
        title = page.inner_text("#flow-title")
        assert "as a step of their own" in title
        assert f"the whole step: {float(f'{100 * plan.time.bubble_share:.2g}'):g} % bubble" in title
        page.click("#language")
        written = page.inner_text("#notes").splitlines()
        assert "8 个 kv 头对 tp 16" in written[0]
        assert "每节点 8 个设备" in written[1]
        assert "450 GB/s" in written[1]
        assert all(re.search("[\u4e00-\u9fff]", line) and "{" not in line for line in written)


def test_one_file_that_loads_nothing(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_500_000
    ours = text.replace((PAGE / "vendor" / "echarts.min.js").read_text(encoding="utf-8"), "")
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", ours)
    assert "default-src 'none'" in text
    for name in ("NOTICE-echarts", "LICENSE-d3"):
        first = (PAGE / "vendor" / name).read_text(encoding="utf-8").split("\n")[0]
        assert first in text


def test_names_cannot_become_code():
    bad = "</script><script>alert(1)</script> & \"'"
    text = plan_page(PLAN, title=bad)
    assert "alert(1)</script>" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data[1])["title"] == bad


@pytest.mark.parametrize("look", [
    {"viewport": {"width": 1200, "height": 900}},
    {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "locale": "zh-CN"},
])  # fmt: skip
def test_every_view_is_drawn_and_fits(browser, file, look):
    with opened(browser, file, **look) as page:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = look.get("color_scheme") == "dark"
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark
        assert page.evaluate("document.documentElement.lang") == look.get("locale", "en")
        for view in VIEWS:
            page.click(f"#tab-{view}")
            assert (
                page.evaluate("document.documentElement.scrollWidth") <= look["viewport"]["width"]
            )
            seen = page.eval_on_selector_all(
                "section:not([hidden]) canvas",
                "all => all.map(c => new Set(c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data).size)",
            )
            assert seen, view
            assert max(seen) > 20, f"{view}: a blank canvas"
        assert page.locator("section:not([hidden])").count() == 1


WORDS_DRAWN = """[...charts.values()].filter(c => c.getDom().offsetParent).flatMap(c =>
  c.getZr().storage.getDisplayList().filter(e => e.type === "tspan" && !e.invisible &&
    !e.parent?.invisible && !e.__clipPaths?.length)
  .map(e => { const r = e.getBoundingRect().clone(); if (e.transform) r.applyTransform(e.transform);
              return [c.getDom().id + " " + e.style.text, r.x, r.y, r.width, r.height]; }))"""


@pytest.mark.parametrize("width", [360, 1200])
def test_no_word_is_drawn_over_another(browser, tmp_path, width):
    """Axes that end beside a round figure (80 GiB, of which 1.02 times), ranks of four digits."""
    layout = Layout(dp=64, tp=8, pp=4, recompute="full")
    plan = evaluate(Job(preset("llama-3-70b"), 8192, 2048), cluster_named("a100-80"), layout)
    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan, [PLAN]), encoding="utf-8")
    with opened(browser, path, viewport={"width": width, "height": 900}) as page:
        for view in VIEWS:
            page.click(f"#tab-{view}")
            drawn = page.evaluate(WORDS_DRAWN)
            assert len(drawn) > 5
            pairs = [
                (a[0], b[0])
                for i, a in enumerate(drawn)
                for b in drawn[:i]
                if a[0].split()[0] == b[0].split()[0]
                and abs(2 * (a[1] - b[1]) + a[3] - b[3]) < a[3] + b[3] + 4  # two pixels between
                and abs(2 * (a[2] - b[2]) + a[4] - b[4]) < a[4] + b[4] - 6
            ]
            assert pairs == [], view


def test_tabs_languages_and_themes_by_keyboard(browser, file):
    with opened(browser, file) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.focus("#tab-overview")
        for view in ("flow", "compare", "trend", "overview"):
            page.keyboard.press("ArrowRight")
            assert page.evaluate("document.activeElement.id") == f"tab-{view}"
            assert page.is_visible(f"#{view}")
        page.keyboard.press("End")
        assert page.is_visible("#trend")
        assert page.inner_text("#tab-trend") == WORDS["en"]["trend"]
        page.focus("#language")
        page.keyboard.press("Enter")
        assert page.inner_text("#tab-trend") == WORDS["zh"]["trend"]
        words = page.inner_text("#trend th >> nth=0")
        assert words == WORDS["zh"]["microbatches"]
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        page.focus("#theme")
        page.keyboard.press("Space")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert page.get_attribute("#theme", "aria-pressed") == "true"


def test_overview_lights_the_groups_of_a_device(browser, file):
    """dp 4, tp 2, cp 2, pp 4, tp fastest, then cp, dp, pp."""
    with opened(browser, file) as page:
        assert page.inner_text("#device") == WORDS["en"]["pick"]
        page.focus("#grid")
        for _ in range(6):
            page.keyboard.press("ArrowRight")
        assert page.inner_text("#device") == (
            "Device 5, node 0: tp 1, cp 0, dp 1, pp 0. tensor group: 4 5; context group: 5 7; "
            "data group: 1 5 9 13; pipeline group: 5 21 37 53"
        )
        lit = [i for i, box in enumerate(series(page, "grid")[0]["data"])
               if box["itemStyle"]["opacity"] == 1]  # fmt: skip
        assert lit == [1, 4, 5, 7, 9, 13, 21, 37, 53]
        page.click("#lit-dp")
        assert "data group" not in page.inner_text("#device")
        page.keyboard.press("Tab")
        page.focus("#grid")
        page.keyboard.press("End")
        assert page.inner_text("#device").startswith("Device 63, node 7")
        box = page.locator("#grid canvas").bounding_box()
        page.mouse.move(box["x"] + 20, box["y"] + 15)
        until(page, "document.getElementById('device').textContent.startsWith('Device 0')")
        bars = series(page, "memory")
        for rank, stage in enumerate(PLAN.memory.stages):
            drawn = sum(bar["data"][rank] for bar in bars)
            assert drawn == pytest.approx(stage.total / 2**30, rel=1e-6)
        assert bars[0]["markLine"]["data"][0]["xAxis"] == pytest.approx(79.6)


def test_flow_plays_pauses_and_steps(browser, file):
    with opened(browser, file) as page:
        page.click("#tab-flow")
        moment = "Number(document.getElementById('clock').value)"
        spoken = page.inner_text("#now")
        assert spoken.startswith("0 of")
        assert "rank 0: forward microbatch 0, stage 0" in spoken
        assert "rank 3: idle" in spoken
        page.click("#step")
        page.click("#step")
        after = page.inner_text("#now")
        assert after != spoken
        page.click("#back")
        assert page.inner_text("#now") != after
        page.click("#restart")
        assert page.inner_text("#now") == spoken
        page.select_option("#speed", "4")
        page.click("#play")
        assert page.inner_text("#play") == WORDS["en"]["pause"]
        until(page, f"{moment} > 20")
        page.click("#play")
        stopped = page.evaluate(moment)
        page.wait_for_timeout(150)
        assert page.evaluate(moment) == stopped
        page.focus("#timeline")
        page.keyboard.press("End")
        assert page.evaluate(moment) == 1000
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Home")
        page.keyboard.press(" ")
        until(page, f"{moment} > 5")
        page.click("#tab-trend")  # leaving stops it
        page.click("#tab-flow")
        assert page.inner_text("#play") == WORDS["en"]["play"]
        messages = "charts.get('timeline').getOption().series.find(s => s.id === 'messages').data"
        some = page.evaluate(f"{messages}.length")
        page.check("#messages")
        # m microbatches cross pp - 1 boundaries forward and as many back.
        m = PLAN.layout.microbatches(JOB)
        assert page.evaluate(f"{messages}.length") == 2 * 3 * m > some
        page.locator("#clock").fill("500")
        assert "of" in page.inner_text("#now")
        passes = "charts.get('timeline').getOption().series.find(s => s.id === 'passes').data"
        assert page.evaluate(f"{passes}.length") == 2 * 4 * m


def test_compare_orders_and_adds_up(browser, file):
    with opened(browser, file) as page:
        page.click("#tab-compare")
        plans = [PLAN, *OTHERS]
        keys = {
            "step": lambda p: p.time.step,
            "total": lambda p: p.memory.peak,
            "bubble": lambda p: p.time.bubble_share,
        }
        for order, key in keys.items():
            page.select_option("#order", order)
            expected = sorted(plans, key=key)
            labels = page.locator("#table tbody tr td:first-child").all_inner_texts()
            assert labels == [plan.layout.label for plan in expected]
            bars = series(page, "times")
            for i, plan in enumerate(expected):
                assert sum(bar["data"][i] for bar in bars) == pytest.approx(
                    plan.time.step, rel=1e-3
                )


def test_trend_changes_its_axis(browser, file):
    with opened(browser, file) as page:
        page.click("#tab-trend")
        for axis in ("microbatches", "devices", "sequence"):
            page.select_option("#axis", axis)
            points = page.evaluate(f"DATA.trend.{axis}")
            assert len(points) > 2
            assert page.locator("#points tbody tr").count() == len(points)
            assert series(page, "curves")[0]["data"] == [p["rate"] for p in points]


def test_sixteen_thousand_devices(browser, tmp_path):
    job = Job(preset("llama-3.1-405b"), 8192, 2048)
    layout = Layout(dp=128, tp=8, pp=16, zero=1, recompute="full")
    path = tmp_path / "large.html"
    path.write_text(plan_page(evaluate(job, NODES, layout)), encoding="utf-8")
    assert path.stat().st_size < 1_700_000
    with opened(browser, path) as page:
        page.focus("#grid")
        page.keyboard.press("End")
        assert page.inner_text("#device").startswith("Device 16383")
        page.click("#tab-flow")
        assert "16 ranks" in page.inner_text("#flow-title")

"""Takes the pictures of docs/pictures.md anew: `python docs/pictures/draw.py`.

Needs playwright, Debian's chromium and, for Chinese, a font (fonts-wqy-zenhei).
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from pyparallel.planner import Job, Layout, cluster_named, evaluate, preset
from pyparallel.viz import plan_page

FOLDER = Path(__file__).parent
WIDE: dict[str, Any] = {"viewport": {"width": 1100, "height": 700}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 780},
    "color_scheme": "dark",
    "locale": "zh-CN",
}


def page_of_an_example() -> str:
    """Llama 3 70B on 64 H100: 4 x 4 x 4 with full recompute, and three layouts beside it."""
    job = Job(preset("llama-3-70b"), 8192, 256)
    cluster = cluster_named("h100")
    layouts = (
        Layout(dp=4, tp=4, pp=4, recompute="full"),
        Layout(dp=4, tp=8, pp=2, schedule="interleaved-1f1b", chunks=2),
        Layout(dp=8, tp=8, pp=1, zero=3),
        Layout(dp=2, tp=4, pp=8, schedule="zb-h1"),
    )
    first, *others = (evaluate(job, cluster, layout) for layout in layouts)
    return plan_page(first, others)


def look(page: Page, view: str) -> None:
    """Turns to a view and puts it into a telling state."""
    page.click(f"#tab-{view}")
    if view == "overview":
        page.focus("#grid")
        for _ in range(6):
            page.keyboard.press("ArrowRight")
    if view == "flow":
        for _ in range(30):
            page.click("#step")


def pictures(page_file: Path) -> Iterator[tuple[str, bytes]]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        for suffix, context in (("", WIDE), ("-phone", PHONE)):
            page = browser.new_context(**{"color_scheme": "light", **context}).new_page()
            page.goto(page_file.as_uri())
            for view in ("overview", "flow", "compare", "trend"):
                look(page, view)
                yield f"{view}{suffix}.png", page.screenshot(full_page=True)
        browser.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.html"
        file.write_text(page_of_an_example(), encoding="utf-8")
        for name, picture in pictures(file):
            (FOLDER / name).write_bytes(picture)

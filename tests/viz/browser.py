"""A headless Chromium for the page's tests: Debian's, driven by playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; the test is skipped, with the reason, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium (.ci/run does)")
    with api.sync_playwright() as playwright:
        # CI runs as root in a container, where Chromium's own sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()

"""examples/tensor_parallel_hf.py as its first line says, and what docs/parallelize.md promises."""

import importlib.util
import re
from pathlib import Path

import pytest

from pyparallel.layers.parallelize_plan import ALIASES, STYLES
from tests.test_examples import torchrun

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (requirements.txt; it needs Python 3.11)",
)
def test_the_example_by_torchrun():
    printed = torchrun("examples/tensor_parallel_hf.py")
    for rank in (0, 1):
        assert re.search(rf"rank {rank} of 2: \d+ of \d+ parameters.*tokens alike", printed)
    assert "matmul_reduce_scatter" in printed


def test_the_page_has_every_style():
    page = (ROOT / "docs/parallelize.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert list(rows) == list(STYLES)
    assert all(f"`{alias}`" in page for alias in ALIASES)

"""examples/tensor_parallel_hf.py as its first line says, and what docs/parallelize.md promises."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyparallel.layers.parallelize_plan import ALIASES, STYLES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed (requirements.txt; it needs Python 3.11)",
)
def test_the_example_by_torchrun():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "examples/tensor_parallel_hf.py"),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert re.search(rf"rank {rank} of 2: \d+ of \d+ parameters.*tokens alike", done.stdout)
    assert "matmul_reduce_scatter" in done.stdout


def test_the_page_has_every_style():
    page = (ROOT / "docs/parallelize.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert list(rows) == list(STYLES)
    assert all(f"`{alias}`" in page for alias in ALIASES)

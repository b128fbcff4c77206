"""docs/sequence_parallel.md: its pictures are what the code draws; the example is equal."""

import importlib.util
from pathlib import Path

from pyparallel.attention import SHARDINGS
from pyparallel.attention.plan import STRATEGIES
from pyparallel.viz import sharding_svg
from tests.test_examples import torchrun

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_pictures_are_what_the_code_draws():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "sequence_parallel" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    made = dict(draw.pictures())
    assert {path.name for path in (DOCS / "sequence_parallel").glob("*.svg")} == set(made)
    page = (DOCS / "sequence_parallel.md").read_text()
    for name, svg in made.items():
        file = DOCS / "sequence_parallel" / name
        assert file.read_text() == svg, "run python docs/sequence_parallel/draw.py"
        assert f"(sequence_parallel/{name})" in page


def test_the_page_names_every_strategy_and_sharding():
    page = (DOCS / "sequence_parallel.md").read_text()
    assert all(f'| `"{name}"` |' in page for name in (*STRATEGIES, "auto"))
    assert all(f"- **{name}**" in page for name in SHARDINGS)


def test_a_picture_counts_each_rank_s_scores():
    svg = sharding_svg([0, 1, 1, 0], lambda q, k: k <= q, "zig & zag")
    assert "rank 0: 5</text>" in svg
    assert "rank 1: 5</text>" in svg
    assert "zig &amp; zag" in svg
    assert "query 1, key 0 of rank 0" in svg


def test_long_context_has_the_loss_of_one_process():
    printed = torchrun("examples/long_context.py")  # compares, and fails where they differ
    lines = [line for line in printed.splitlines() if "over 2 ranks" in line]
    assert len(lines) == 4, printed
    assert all(line.split()[3] == line.split()[7] for line in lines), lines
    assert "takes ring" in printed

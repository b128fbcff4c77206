"""Bytes of a step, measured, beside the planner's formula.

Layers: one process. Measured bytes are exact where they can be told by hand.
"""

import pytest
import torch
from torch import nn

from examples.llama import LlamaConfig
from examples.recompute_memory import main, measure
from pyparallel.training import StepMemory, measure_step


@pytest.fixture(autouse=True)
def _one_thread():
    """Products are small: several threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_bytes_are_those_of_the_tensors():
    """tanh(x w): x w is freed, tanh's output is kept; two gradients come in backward."""
    x, w = torch.randn(100, 100), nn.Parameter(torch.randn(100, 100))
    size = x.nbytes
    first = measure_step(lambda: torch.tanh(x @ w).sum())
    assert first == StepMemory(kept=size + 4, peak=2 * size + 8, left=size)
    second = measure_step(lambda: torch.tanh(x @ w).sum())
    assert (second.kept, second.left) == (size + 4, 0), "views, and what was there, count nothing"


def test_recompute_saves_what_the_formula_says(capsys):
    config = LlamaConfig(hidden_size=64, intermediate_size=176, num_hidden_layers=4)
    rows, _ = measure(config, 64, 2)
    by_mode = {row.mode: row for row in rows}
    none, full = by_mode["none"], by_mode["full"]
    # A layer's input each, [2, 64, 64] in float32: the layers' part of what full keeps.
    inputs = 4 * 2 * 64 * 64 * 4
    assert inputs < full.kept < 3 * inputs
    # The formula counts a fused layer: eager torch keeps silu's output and rotated halves besides.
    assert 1.0 <= none.kept / none.kept_formula <= 1.4
    assert 0.8 <= full.kept / full.kept_formula <= 1.1, "its logits are 16-bit and float32"
    assert 0.7 <= full.peak / full.peak_formula <= 1.3
    half = by_mode["every second layer"]
    assert abs(half.kept - (none.kept + full.kept) / 2) < 0.01 * none.kept
    assert full.kept < by_mode["mlp"].kept < none.kept
    assert by_mode["attention"].kept <= none.kept, "flash attention keeps no scores to save"
    main(["--hidden", "64", "--layers", "4", "--rows", "64"])
    printed = capsys.readouterr().out
    assert "Full recomputation leaves" in printed
    assert printed.count("(") == 7, "a formula beside each that has one"

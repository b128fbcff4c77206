"""What recomputing activations saves: measured, beside the planner's formula.

    python examples/recompute_memory.py [--hidden 128 --layers 6 --rows 256 --batch 2]

`kept` is what waits for backward after a forward, `peak` the most there was in a step, weights,
gradients and optimizer apart. The last column is of the whole: states of 16 bytes per parameter
(float32, AdamW) and the peak.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyparallel.planner import ModelSpec
from pyparallel.training import apply_recompute, expected_step, measure_step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.llama import Llama, LlamaConfig

MODES: list[tuple[str, str, dict[str, Any]]] = [
    ("none", "none", {}),
    ("attention", "selective", {}),
    ("mlp", "selective", {"modules": ["*.mlp"]}),
    ("every second layer", "full", {"every": 2}),
    ("full", "full", {}),
]


@dataclass(frozen=True)
class Row:
    """One way, in bytes; formula None where the planner has none."""

    mode: str
    kept: int
    peak: int
    kept_formula: float | None
    peak_formula: float | None


def measure(config: LlamaConfig, rows: int, batch: int) -> tuple[list[Row], int]:
    """A row per mode, and the states' bytes."""
    torch.manual_seed(0)
    model = Llama(config)
    tokens = torch.randint(config.vocab_size, (batch, rows))
    found = []
    for name, mode, options in MODES:
        twin = copy.deepcopy(model)
        apply_recompute(twin, mode, **options)

        def forward(twin: nn.Module = twin) -> torch.Tensor:
            return nn.functional.cross_entropy(twin(tokens).flatten(0, 1), tokens.flatten())

        forward().backward()  # gradients are there from now on
        memory = measure_step(forward)
        kept, peak = formula(config, rows, batch, name)
        found.append(Row(name, memory.kept, memory.peak, kept, peak))
    return found, 16 * sum(p.numel() for p in model.parameters())


def formula(
    config: LlamaConfig, rows: int, batch: int, mode: str
) -> tuple[float | None, float | None]:
    """The planner's (kept, peak) of the activations."""
    if mode in ("attention", "mlp"):  # it knows scores that are kept: here are none
        return None, None
    spec = ModelSpec(
        name="llama",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        gated=True,
    )
    again = {"none": 0, "full": spec.layers}.get(mode, (spec.layers + 1) // 2)
    return expected_step(spec, rows, batch, recomputed=again)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("hidden", 128), ("layers", 6), ("rows", 256), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    config = LlamaConfig(
        hidden_size=given.hidden,
        intermediate_size=8 * given.hidden // 3,
        num_hidden_layers=given.layers,
    )
    rows, states = measure(config, given.rows, given.batch)
    print(f"states {_mb(states)}; activations in MB, measured (formula):")
    print(f"{'recomputed':20}{'kept':>18}{'peak':>18}{'peak saved':>12}{'of all':>9}")
    most = rows[0].peak
    for row in rows:
        saved = most - row.peak
        print(
            f"{row.mode:20}{_both(row.kept, row.kept_formula):>18}"
            f"{_both(row.peak, row.peak_formula):>18}{saved / most:12.0%}"
            f"{saved / (states + most):9.0%}"
        )
    left = rows[-1].peak / most
    low, high = (share / (1 - left) for share in (0.6, 0.7))
    print(
        f"Full recomputation leaves {left:.0%} of the activations' peak. It saves 60 to 70 % of "
        "all "
        + (
            f"where activations are {low:.0%} to {high:.0%} of all without it; here they are "
            f"{most / (states + most):.0%}"
            if low < 1
            else "nowhere at this size: one layer's activations are too much of all"
        )
    )


def _both(measured: int, expected: float | None) -> str:
    return _mb(measured) + ("" if expected is None else f" ({_mb(expected)})")


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


if __name__ == "__main__":
    main()

"""Stages that are compiled: what they cannot do."""

import sys
from collections.abc import Mapping

from torch import nn

from pyparallel.schedule import Schedule

__all__ = ["check_compiled", "is_compiled"]


def is_compiled(module: nn.Module) -> bool:
    """By torch.compile(module) or module.compile(), it or a part of it."""
    return any(
        hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
        for inner in module.modules()
    )


def check_compiled(plan: Schedule, stages: Mapping[int, nn.Module]) -> None:
    """Of a plan with backwards in halves: a compiled backward is one piece, and with donated
    buffers it can run once only.

    Raises:
        ValueError: some stage would run its own twice.
    """
    config = sys.modules.get("torch._functorch.config")
    if not getattr(config, "donated_buffer", False):
        return
    # Stage 0 has no input half.
    compiled = [n for n, module in stages.items() if n and is_compiled(module)]
    if compiled:
        raise ValueError(
            f"{plan.name} has backwards in halves, and stages {compiled} are compiled: their "
            "backward is one piece, which may run once only. Take a schedule with whole "
            "backwards (1f1b, interleaved-1f1b), or set torch._functorch.config.donated_buffer "
            "= False before the first step; the piece then runs in both halves"
        )

"""A small checkpoint for tests of files: what is saved, and what comes back."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyparallel.training.checkpoint import Checkpointer


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [optimizer.state[p] for p in model.parameters()]
    return [
        *(t.clone() for t in model.state_dict().values()),
        *(s[name].clone() for s in states for name in sorted(s)),
        {k: v for k, v in optimizer.param_groups[0].items() if k != "params"},
    ]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(
        torch.equal(x, y) and x.dtype is y.dtype if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def load(directory: Path, **options: Any) -> tuple["int | None", list[Any], dict[str, Any]]:
    model, optimizer = trained(9)
    at: dict[str, Any] = {}
    with Checkpointer(directory) as checkpointer:
        step = checkpointer.load(model=model, optimizer=optimizer, at=at, **options)
    return step, contents(model, optimizer), at


def newest(directory: Path) -> Path:
    return max(p for p in directory.iterdir() if p.name[0].isdigit())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)

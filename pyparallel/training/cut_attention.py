"""Attention of a model over a sequence that is cut: its own attention proper is replaced.

transformers   the model's attention implementation, in its public registry
any other      each child module called `core_attention`: forward(query, key, value) of
               [batch, rows, heads, head_dim], key and value with fewer heads or as many, to the
               query's shape; causal unless an attribute `causal` says otherwise, with the
               probability `dropout` and the scale `softmax_scale` where it has these
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pyparallel.attention import hugging_face, sequence_parallel_attention
from pyparallel.errors import InvalidArgument

__all__ = ["CORE", "cut_attention"]

CORE = "core_attention"
_KNOWN = {"causal", "dropout", "softmax_scale", "training"}


class _CutAttention(nn.Module):
    """In place of a core attention: the same numbers, of this rank's rows."""

    def __init__(self, core: nn.Module, group: dist.ProcessGroup, strategy: str) -> None:
        super().__init__()
        self.group, self.strategy = group, strategy
        self.causal = bool(getattr(core, "causal", True))
        self.dropout = float(getattr(core, "dropout", 0.0))
        scale = getattr(core, "softmax_scale", None)
        self.softmax_scale = None if scale is None else float(scale)
        self.train(core.training)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = sequence_parallel_attention(
            query,
            key,
            value,
            group=self.group,
            strategy=self.strategy,
            causal=self.causal,
            dropout_p=self.dropout if self.training else 0.0,
            softmax_scale=self.softmax_scale,
        )
        assert isinstance(out, Tensor)
        return out


def cut_attention(model: nn.Module, group: dist.ProcessGroup, strategy: str = "auto") -> list[str]:
    """Makes every attention of the model one over the group's ranks. Gives the modules' names.

    Args:
        group: the ranks over which the sequence is cut, zigzag.
        strategy: as `sequence_parallel_attention` takes it.

    Raises:
        ValueError: there is no attention that is known, or one holds parameters.
    """
    asked: Any = model
    if hasattr(model, "set_attn_implementation"):
        name = f"pyparallel_sequence_{group.group_name}"
        hugging_face.register(name, group, strategy=strategy)
        asked.set_attn_implementation(name)
        return [""]
    found = [n for n, _ in model.named_modules() if n.rpartition(".")[2] == CORE]
    misfits = [
        f"{name} has parameters or modules of its own"
        for name in found
        if any(True for _ in model.get_submodule(name).children())
        or any(True for _ in model.get_submodule(name).parameters())
    ]
    if not found:
        misfits.append(
            f"{type(model).__name__} is no model of transformers, and no module of it is called "
            f"{CORE}: make attention proper a module of that name, forward(query, key, value) of "
            "[batch, rows, heads, head_dim]"
        )
    if misfits:
        raise InvalidArgument(f"sequence of the model cannot be cut: {'; '.join(misfits)}")
    for name in found:
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, CORE, _CutAttention(model.get_submodule(name), group, strategy))
    return found

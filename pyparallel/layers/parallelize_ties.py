"""Tied parameters: one in the whole model, and one in the sharded model."""

from collections.abc import Callable

from torch import nn

from pyparallel.layers.parallelize_report import ShardedEntry

__all__ = ["plan_ties"]


def plan_ties(
    model: nn.Module,
    entries: "dict[str, ShardedEntry]",
    styles: "dict[str, str]",
    misfits: "list[str]",
    changes: "list[Callable[[], None]]",
) -> None:
    """Ties again what is one parameter, after the changes to its modules.

    A misfit where the plan shards the owners of one parameter differently.
    """
    names: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append((path, name))
    for owners in names.values():
        if len(owners) < 2:
            continue
        kinds = {_shard(entries.get(path)) for path, _ in owners}
        if len(kinds) > 1:
            tied = [f"{path}.{name}" for path, name in owners]
            found = {path: styles.get(path, "none") for path, _ in owners}
            misfits.append(
                f"{' and '.join(tied)} are tied, but the plan has {found}; an embedding and a "
                "head stay tied as 'vocab' and 'colwise' or 'colwise_gather_output'"
            )
        elif kinds != {"whole"}:
            changes.append(_tied(model, owners))


def _shard(entry: "ShardedEntry | None") -> str:
    """What a module holds of its parameter; alike for those that can be tied."""
    style = "" if entry is None else entry.style
    if entry is not None and style in ("vocab", "colwise", "colwise_gather_output"):
        return f"rows {entry.local}"
    return style if style in ("rowwise", "rowwise_split_input", "experts") else "whole"


def _tied(model: nn.Module, owners: "list[tuple[str, str]]") -> "Callable[[], None]":
    def change() -> None:
        (first, name), *others = owners
        parameter = model.get_submodule(first)._parameters[name]
        for path, name in others:
            model.get_submodule(path)._parameters[name] = parameter

    return change

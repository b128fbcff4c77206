"""Causal language models of Hugging Face: found by their attributes, planned by their own plan.

The library does not import transformers: a model of it has a `config` with `model_type` and
`num_hidden_layers`, a base model named by `base_model_prefix`, and in that a list of as many
layers. Its own tensor-parallel plan is in `_tp_plan` and `config.base_model_tp_plan`; a model
without one is planned by the names of its layers' parts (`parallelize_blocks`).

What a layer's block does between its column- and row-parallel layers must work on a part of the
features. That is known of the structures in `parallelize_blocks`; other blocks are left whole.

Under sequence parallelism the stack of layers is cut from the rest of the model: masks, positions
and caches are made of whole sequences, and the norm and the head after the stack see them whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pyparallel.layers.parallelize_blocks import (
    MLPS,
    attention_of,
    experts_misfit,
    linear_size,
)
from pyparallel.layers.parallelize_mixins import CutBefore, JoinAfter, WholeSequence
from pyparallel.layers.parallelize_plan import ALIASES, STYLES, find
from pyparallel.layers.parallelize_report import ShardedEntry
from pyparallel.layers.parallelize_work import Work
from pyparallel.layers.place import Place
from pyparallel.layers.sequence import SequenceSharding

__all__ = ["AutomaticPlan", "Stack", "automatic_plan", "cut_stack", "fill_buffers", "stack_of"]


@dataclass(frozen=True)
class Stack:
    """The list of layers of a causal language model: its name, and theirs."""

    name: str
    layers: tuple[str, ...]


@dataclass
class AutomaticPlan:
    """Styles by module name; what was left whole, and why; notes on the model's own plan."""

    styles: dict[str, str]
    unsharded: dict[str, str]
    notes: list[str]


def stack_of(model: nn.Module) -> "Stack | None":
    """The layers of a Hugging Face model; None if it is none."""
    config = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not hasattr(config, "model_type") or not isinstance(layers, int):
        return None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return Stack(name, tuple(f"{name}.{i}" for i in range(layers)))
    return None


def automatic_plan(model: nn.Module, stack: Stack) -> AutomaticPlan:
    """What to shard of the model, by its own plan or, where it has none, by its structure."""
    plan = AutomaticPlan({}, {}, [])
    own = _own_plan(model)
    names = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    refused: dict[str, str] = {}  # modules of the plan with a style that is not known here
    if own:
        plan.notes.append("planned by the model's own tensor-parallel plan")
        for pattern, style in own.items():
            matching = find(pattern, names)
            style = ALIASES.get(style, style)
            for name in matching:
                if style in STYLES:
                    plan.styles[name] = style
                else:
                    refused[name] = style
            if not matching and not find(pattern, parameters):
                plan.notes.append(f"the model's plan has {pattern!r}, which matches no module")
    else:
        plan.notes.append("the model has no tensor-parallel plan: planned by its structure")
        for layer in stack.layers:
            plan.styles.update(_structure(model, layer))
    _plan_vocabulary(model, plan)
    for layer in stack.layers:
        for child, _ in model.get_submodule(layer).named_children():
            _keep_known(model, f"{layer}.{child}", plan, refused)
    return plan


def _own_plan(model: Any) -> dict[str, str]:
    """The model's own plan, patterns from the model down."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    whole = getattr(model, "_tp_plan", None) or {}
    if not isinstance(base, Mapping) or not isinstance(whole, Mapping):
        return {}
    inside = prefix and isinstance(getattr(model, prefix, None), nn.Module)
    return {(f"{prefix}.{key}" if inside else key): style for key, style in base.items()} | {
        **whole
    }


def _structure(model: nn.Module, layer: str) -> dict[str, str]:
    """Styles of a layer's parts by the names they have."""
    styles: dict[str, str] = {}
    for path, module in model.get_submodule(layer).named_modules(prefix=layer):
        attention = attention_of(module, model.config)
        if attention is not None:
            if not isinstance(attention, str):
                styles |= {f"{path}.{child}": "colwise" for child in attention.columns}
                styles[f"{path}.{attention.row}"] = "rowwise"
            continue
        if experts_misfit(module) == "":
            styles[path] = "experts"
            continue
        children = dict(module.named_children())
        for columns, row in MLPS:
            linears = [linear_size(children.get(name)) for name in (*columns, row)]
            if all(linears) and path.rpartition(".")[0]:
                styles |= {f"{path}.{child}": "colwise" for child in columns}
                styles[f"{path}.{row}"] = "rowwise"
                break
    return styles


def _plan_vocabulary(model: Any, plan: AutomaticPlan) -> None:
    """The embedding and the head, whatever the plan: both or, if they are tied, none."""
    embedding, head = (
        getattr(model, get)() if hasattr(model, get) else None
        for get in ("get_input_embeddings", "get_output_embeddings")
    )
    names = {id(module): name for name, module in model.named_modules()}
    able = isinstance(embedding, nn.Embedding) and not (
        embedding.max_norm or embedding.scale_grad_by_freq or embedding.sparse
    )
    if embedding is not None:
        name = names[id(embedding)]
        if able:
            plan.styles[name] = "vocab"
        else:
            plan.styles.pop(name, None)
            plan.unsharded[name] = f"{type(embedding).__name__} is no embedding that can be sharded"
    if head is None:
        return
    name = names[id(head)]
    tied = embedding is not None and getattr(head, "weight", None) is embedding.weight
    if linear_size(head) is None or (tied and not able):
        plan.styles.pop(name, None)
        plan.unsharded[name] = (
            "its table is that of an embedding that cannot be sharded"
            if tied and not able
            else f"{type(head).__name__} is no linear layer that is known"
        )
    else:
        plan.styles[name] = "colwise_gather_output"


def _keep_known(model: nn.Module, block: str, plan: AutomaticPlan, refused: dict[str, str]) -> None:
    """Drops a block's styles unless its structure is known to work on parts; says why."""
    styles = {name: style for name, style in plan.styles.items() if _inside(name, block)}
    module = model.get_submodule(block)
    heavy = [name for name, p in module.named_parameters() if p.dim() > 1]
    why = ""
    for name, style in refused.items():
        if _inside(name, block):
            why = f"the model's plan has {name} as {style!r}, which is not known here"
    if not why:
        why = _misfit_of_block(model, block, styles)
    if why:
        for name in styles:
            del plan.styles[name]
        if heavy:
            plan.unsharded[block] = why


def _misfit_of_block(model: nn.Module, block: str, styles: dict[str, str]) -> str:
    module = model.get_submodule(block)
    if not styles:
        found = attention_of(module, getattr(model, "config", None))
        if isinstance(found, str):
            return found
        return "its structure is not known" if any(True for _ in module.children()) else ""
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style != "experts"}
    for parent in sorted(parents):
        owner = model.get_submodule(parent)
        mine = {
            n.rpartition(".")[2]: s for n, s in styles.items() if n.rpartition(".")[0] == parent
        }
        attention = attention_of(owner, getattr(model, "config", None))
        if isinstance(attention, str):
            return attention
        if attention is not None:
            wanted = {**dict.fromkeys(attention.columns, "colwise"), attention.row: "rowwise"}
            if {n: s for n, s in mine.items() if s != "summed"} != wanted:
                return f"the plan has {mine} of it; its heads need {wanted}"
        elif not any(_is_mlp(owner, mine, columns, row) for columns, row in MLPS):
            return f"the plan has {mine} of {parent}, whose structure is not known"
    for name, style in styles.items():
        if style == "experts":
            misfit = experts_misfit(model.get_submodule(name))
            if misfit != "":
                return misfit or f"{name} has no stacked experts"
    return ""


def _is_mlp(owner: nn.Module, styles: dict[str, str], columns: tuple[str, ...], row: str) -> bool:
    """Whether an MLP's linear layers, all that has parameters in it, are styled as they must be."""
    if styles != {**dict.fromkeys(columns, "colwise"), row: "rowwise"}:
        return False
    children = dict(owner.named_children())
    others = [n for n, child in children.items() if n not in styles and _has_parameters(child)]
    sizes = {linear_size(children[name]) for name in columns}
    into = linear_size(children[row])
    return (
        not others
        and len(sizes) == 1
        and into is not None
        and {(into[1], s[1]) if s else None for s in sizes} == sizes
    )


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def cut_stack(work: Work, stack: Stack, place: Place, sequence: SequenceSharding) -> None:
    """The stack of layers on parts of the sequence: plans what its layers' parts need for it."""
    model = work.model
    first, last = (model.get_submodule(stack.layers[i]) for i in (0, -1))
    before, after = CutBefore(place, sequence), JoinAfter(place, sequence)

    def hook() -> None:
        first.register_forward_pre_hook(before, with_kwargs=True)
        last.register_forward_hook(after)

    work.changes.append(hook)
    work.entries[stack.name] = ShardedEntry(
        stack.name, "sequence cut", (), (), "split, gather", "all_gather"
    )
    for layer in stack.layers:
        for child, module in model.get_submodule(layer).named_children():
            block = f"{layer}.{child}"
            styles = {work.styles[name] for name in work.styles if _inside(name, block)}
            if styles and "experts" not in styles:
                continue  # its columns gather, its rows scatter
            if _is_pointwise(module):
                if _has_parameters(module):
                    work.sum_gradients(block)
                continue
            work.whole_sequence(block, WholeSequence(place, sequence))


def _is_pointwise(module: nn.Module) -> bool:
    """Norms, activations, dropouts: what treats each token by itself, with at most vectors."""
    return not any(True for _ in module.children()) and all(
        parameter.dim() <= 1 for parameter in module.parameters()
    )


def fill_buffers(model: Any) -> list[str]:
    """Computes the buffers on meta that no state dict has (rotary frequencies, scales).

    By the model's own `_init_weights`, if it has one. Gives the names of those it did not fill.
    """
    fill = getattr(model, "_init_weights", None)
    missing = []
    for path, module in model.named_modules():
        waiting = [
            name
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None and module._buffers[name].is_meta
        ]
        if fill is None:
            missing += [f"{path}.{name}" for name in waiting]
            continue
        for name in waiting:
            buffer = torch.empty_like(module._buffers[name], device="cpu")
            module._buffers[name] = (
                buffer.fill_(torch.nan) if buffer.is_floating_point() else buffer
            )
        if waiting:
            fill(module)
        for name in waiting:
            buffer = module._buffers[name]
            if not buffer.is_floating_point() or bool(buffer.isnan().any()):
                missing.append(f"{path}.{name}")
    return missing

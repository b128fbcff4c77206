"""`parallelize`: a model of any library becomes this rank's part of it, in place.

check      plan, types, sizes, ties: on this rank, nothing touched; a misfit tells all ranks
agree      plan, shapes and sampled values of all parameters are alike on all ranks
change     modules are replaced, one after another; each whole parameter goes as its shard comes
report     what was sharded, by which ops it communicates, what was not and why
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers import hugging_face
from pyparallel.layers.dropout import Dropout, RandomStreams
from pyparallel.layers.module import ShardedModule
from pyparallel.layers.parallelize_plan import resolve
from pyparallel.layers.parallelize_report import ParallelizeReport
from pyparallel.layers.parallelize_work import Work
from pyparallel.layers.place import Place, digest, gathered
from pyparallel.layers.sequence import SequenceSharding, sharding_of

__all__ = ["parallelize"]

SAMPLE = 64  # values per parameter that ranks compare


def parallelize(
    model: nn.Module,
    group: Any,
    plan: "Mapping[str, str] | None" = None,
    sequence_parallel: "bool | SequenceSharding" = False,
) -> ParallelizeReport:
    """Makes `model` this rank's part of it, in place. Collective over the group.

    model: alike on all ranks, values too (one seed, one checkpoint), or on meta; then fill it with
        load_full_state_dict.
    group: as in ColumnParallelLinear.
    plan: styles by name patterns. A pattern is a dotted name; `*` is any text within one part, `**`
        any parts. Styles: "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input",
        "vocab", "experts", "sequence" (norms on parts of the sequence), "summed", "replicated"
        (docs/parallelize.md). Without a plan: a Hugging Face causal language model, by its own plan
        or its structure.
    sequence_parallel: activations between sharded layers are this rank's part of the sequence: True
        is dim 0, or dim 1 of a Hugging Face model, whose stack of layers is then cut from the rest.

    Forward, loss and gradients are then those of the whole model; call it alike on all ranks.
    Attentions with q_proj, k_proj, v_proj, o_proj and head_dim keep whole heads on each rank, kv
    heads copied where they do not go up. Tied parameters stay tied.
    Gives a report; warns of what it could have sharded and did not. Raises ValueError, on all ranks
    and with the model as it was: for a plan that cannot be, a model that is parallelized already,
    and if ranks differ in plan, shapes or values.
    """
    place = Place(group)
    try:
        work, report = _planned(model, place, plan, sequence_parallel)
    except (TypeError, ValueError) as error:
        raise place.refused("parallelize", error) from None
    seed = _agree(work, place)
    report.notes += [
        f"{name} is on meta, and in no state dict: fill it before a forward"
        for name in hugging_face.fill_buffers(model)
    ]
    work.apply()
    _replace_dropouts(work, place, seed, report)
    _describe(work, report)
    if report.unsharded:
        warnings.warn(
            f"parallelize left {len(report.unsharded)} modules whole that hold matrices: "
            + "; ".join(f"{name}: {why}" for name, why in list(report.unsharded.items())[:4]),
            stacklevel=2,
        )
    return report


def _planned(
    model: nn.Module,
    place: Place,
    plan: "Mapping[str, str] | None",
    sequence_parallel: "bool | SequenceSharding",
) -> "tuple[Work, ParallelizeReport]":
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    sharded = [n for n, module in model.named_modules() if isinstance(module, ShardedModule)]
    if sharded:
        raise InvalidArgument(
            f"the model has sharded layers already, {sharded[:3]}; expected an unsharded model"
        )
    stack = hugging_face.stack_of(model)
    sequence = sharding_of(sequence_parallel)
    if sequence is not None and stack is not None:
        if sequence_parallel is True:
            sequence = SequenceSharding(dim=1)
        elif sequence.dim not in (1, -2):
            raise InvalidArgument(
                f"sequence_parallel has dim {sequence.dim}; activations of a Hugging Face model "
                "are [batch, sequence, features]: expected dim 1, or True"
            )
    report = ParallelizeReport()
    if plan is not None:
        styles = resolve(model, plan)
    elif stack is None:
        raise InvalidArgument(
            f"plan is None, and {type(model).__name__} is no Hugging Face causal language model "
            "(a config with model_type and num_hidden_layers, a list of as many layers); pass a "
            'plan, such as {"**.up": "colwise", "**.down": "rowwise"}'
        )
    else:
        found = hugging_face.automatic_plan(model, stack)
        styles, report.unsharded, report.notes = found.styles, found.unsharded, found.notes
        if not styles:
            raise InvalidArgument(
                f"nothing in {type(model).__name__} is known to be shardable: {found.unsharded}"
            )
    config = getattr(model, "config", None)
    work = Work(
        model, place, styles, sequence, config, layers=None if stack is None else stack.layers
    )
    work.plan()
    if sequence is not None and stack is not None:
        hugging_face.cut_stack(work, stack, place, sequence)
    work.raise_any()
    return work, report


def _agree(work: Work, place: Place) -> int:
    """Collective: raises on all ranks unless they have the same to do. Gives rank 0's seed."""
    text = repr((work.styles, work.sequence, _shapes(work.model)))
    samples = _samples(work.model)
    mine = [digest(text), digest(repr(samples)), torch.initial_seed() % 2**48]
    everyone = gathered(mine, place)
    for column, what in ((0, "plans, names, shapes, dtypes or kinds of devices"), (1, "values")):
        others = [rank for rank, row in enumerate(everyone) if row[column] != mine[column]]
        if not any(row[column] != everyone[0][column] for row in everyone):
            continue
        hint = f"this rank's plan is {work.styles}"
        if column:
            digests = gathered([digest(repr(value)) for _, value in samples], place)
            differ = [
                name for i, (name, _) in enumerate(samples) if len({row[i] for row in digests}) > 1
            ]
            hint = (
                f"{differ[0]} and {len(differ) - 1} more are not alike; seed all ranks alike, or "
                "load one checkpoint on all of them"
            )
        raise InvalidArgument(
            f"parallelize, group {place.name}, rank {place.rank}: ranks differ in {what}: {others} "
            f"from this one; {hint}"
        )
    return int(everyone[0][2])


def _shapes(model: nn.Module) -> "list[tuple[str, tuple[int, ...], str, str, bool]]":
    return [
        (name, tuple(p.shape), str(p.dtype), p.device.type, p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def _samples(model: nn.Module) -> "list[tuple[str, list[float]]]":
    """Some values of each parameter: enough to tell two seeds or checkpoints apart."""
    found = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue
        values = parameter.detach().flatten()
        step = max(1, values.numel() // SAMPLE)
        found.append((name, values[::step].to("cpu", torch.float64).tolist()))
    return found


def _replace_dropouts(work: Work, place: Place, seed: int, report: ParallelizeReport) -> None:
    """Dropouts draw from streams: alike where activations are alike, apart where they are parts."""
    kernels = [
        name
        for name, module in work.modules.items()
        if name in work.entries and (getattr(module, "attention_dropout", None) or 0.0) > 0.0
    ]
    if kernels:
        report.notes.append(
            f"{kernels[0]} and {len(kernels) - 1} more drop attention by torch's generator: seed "
            "it differently on the ranks for masks that are apart"
        )
    dropouts = {
        name: module
        for name, module in work.model.named_modules()
        if type(module) is nn.Dropout and module.p > 0
    }
    if not dropouts:
        return
    devices = {p.device for p in work.model.parameters() if not p.is_meta}
    report.streams = RandomStreams(seed, place.group, next(iter(devices), "cpu"))
    for name, module in dropouts.items():
        parts = work.on_parts(name)
        new = Dropout(module.p, report.streams, sharded=parts)
        new.train(module.training)
        parent, _, attribute = name.rpartition(".")
        work.model.get_submodule(parent)._modules[attribute] = new
        stream = "own" if parts else "shared"
        report.notes.append(f"{name} draws from the {stream} stream")


def _describe(work: Work, report: ParallelizeReport) -> None:
    report.sharded = [work.entries[name] for name in work.modules if name in work.entries]
    sharded = {name for name, entry in work.entries.items() if entry.local}
    for name, module in work.modules.items():
        if name in sharded or not any(True for _ in module.parameters(False)):
            continue
        if any(name == left or name.startswith(left + ".") for left in report.unsharded):
            continue
        planned = work.styles.get(name) == "replicated"
        report.whole[name] = "by the plan" if planned else "not in the plan, alike on all ranks"

"""State dicts of the whole model, in and out of ranks that hold parts of it.

    full_state_dict(model)              every rank gets what the unsharded model's state_dict() has
    load_full_state_dict(model, state)  every rank takes its shards of such a state
    materialize(model)                  a model made on "meta" begins, each rank its own shards only

The whole has no padding, no copies, and fused parts under their own names. What is not sharded
(any other module's parameters, norms) is as it is on this rank.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.module import ShardedModule
from pyparallel.layers.parameters import ParameterLayout, assemble, take
from pyparallel.layers.place import Place, digest, gathered
from pyparallel.ops.groups import seat_of

__all__ = ["Entry", "full_state_dict", "load_full_state_dict", "materialize", "state_entries"]


class Entry(NamedTuple):
    """One tensor of a module, and the keys it has in a state dict of the whole."""

    module: nn.Module
    name: str
    keys: list[str]
    layout: "ParameterLayout | None"  # None: no shard, not of a ShardedModule

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.name)
        return tensor

    @property
    def place(self) -> "Place | None":
        return self.module.place if isinstance(self.module, ShardedModule) else None

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the whole's tensors, in the order of `keys`."""
        if self.layout is None:
            return [tuple(self.tensor.shape)]
        whole = torch.empty(self.layout.whole_shape(self.tensor.shape), device="meta")
        return [tuple(piece.shape) for piece in self.layout.pieces(whole)]


def state_entries(model: nn.Module) -> "Iterator[Entry]":
    """Every parameter and persistent buffer, in a state dict's order; shared ones each time."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        path = f"{prefix}." if prefix else ""
        above = path[: path.rfind(".", 0, -1) + 1] if path else ""
        layouts = module.parameter_layouts() if isinstance(module, ShardedModule) else {}
        kept = {
            n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set
        }
        for name, tensor in [*module._parameters.items(), *kept.items()]:
            if tensor is None:
                continue
            layout = layouts.get(name)
            keys = [path + name]
            if layout is not None and layout.parts:  # parts are siblings of the fused module
                keys = [above + key for key in layout.keys(name)]
            yield Entry(module, name, keys, layout)


def _places(entries: "list[Entry]") -> list[Place]:
    """The groups of a model, each once, in the order of its modules."""
    return list({e.place.name: e.place for e in entries if e.place is not None}.values())


def _agree(place: Place, op: str, text: str, problem: str) -> None:
    """Collective: raises on all ranks if one has a problem, or if their texts differ."""
    error = InvalidArgument(problem) if problem else None
    if error is not None:
        raise place.refused(op, error)
    mine = digest(text)
    all_of_them = [row[0] for row in gathered([mine], place)]
    if len(set(all_of_them)) > 1:
        alike = [rank for rank, value in enumerate(all_of_them) if value == mine]
        raise InvalidArgument(
            f"{op}, group {place.name}, rank {place.rank}: ranks differ in names, shapes or "
            f"dtypes; only ranks {alike} agree with this one, whose first tensors are {text[:300]}"
        )


def _description(entries: "list[Entry]") -> str:
    return "; ".join(
        f"{key} {list(shape)} {entry.tensor.dtype}"
        for entry in entries
        for key, shape in zip(entry.keys, entry.shapes(), strict=True)
    )


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the unsharded model: names, shapes, dtypes, order. Collective.

    Every rank of every group in the model must call; all get the same tensors, new ones that share
    no memory with the model (tied parameters share one). Raises ValueError, on all ranks, if they
    hold different models, and if copies of a kv head have come to differ.
    """
    entries = list(state_entries(model))
    on_meta = [e.keys[0] for e in entries if e.tensor.is_meta]
    problem = f"{on_meta[:3]} are on meta; materialize(model) first" if on_meta else ""
    for place in _places(entries):
        _agree(place, "full_state_dict", _description(entries), problem)
    if problem:
        raise InvalidArgument(problem)
    state: dict[str, Tensor] = {}
    done: dict[int, list[Tensor]] = {}
    for _, of_module in itertools.groupby(entries, key=lambda entry: id(entry.module)):
        named: list[list[tuple[str, Tensor]]] = []
        for entry in of_module:
            pieces = done.get(id(entry.tensor))
            if pieces is None:
                pieces = done[id(entry.tensor)] = _gathered(entry)
            named.append(list(zip(entry.keys, pieces, strict=True)))
        for of_part in itertools.zip_longest(*named):  # weight, bias of the first part; of the next
            state.update(pair for pair in of_part if pair is not None)
    return state


def _gathered(entry: Entry) -> list[Tensor]:
    tensor, layout, place = entry.tensor.detach(), entry.layout, entry.place
    if layout is None or place is None or layout.dim is None or layout.partition is None:
        whole = tensor.clone(memory_format=torch.contiguous_format)
        return layout.pieces(whole) if layout is not None else [whole]
    partition = layout.partition
    sizes = [partition.local_size(rank) for rank in range(place.size)]
    shards = seat_of(place.name).engine.all_gather(tensor, layout.dim, sizes)
    whole, differs = assemble(shards, layout.dim, partition, check=", ".join(entry.keys))
    if differs:
        raise InvalidArgument(f"full_state_dict, group {place.name}: {differs}")
    pieces = layout.pieces(whole)
    return [piece.contiguous() for piece in pieces] if layout.transposed else pieces


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, state: "Mapping[str, Any]", *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Takes this rank's shards of a state dict of the unsharded model. Collective.

    state: alike on all ranks (a memory-mapped file, say): only what this rank keeps is copied.
    Of tied parameters one name is enough. Values are converted to the parameters' dtype. Parameters
    on meta are allocated, as shards, on the device of the state's tensors. Nothing is changed when
    something does not fit.
    Gives (missing keys, unexpected keys), which are empty unless strict is False. Raises
    ValueError, on all ranks, for missing or unexpected keys, for shapes, and if ranks differ.
    """
    entries = list(state_entries(model))
    expected = {key for entry in entries for key in entry.keys}
    # Checkpoints of tied parameters may have but one of their names.
    there = {id(e.tensor): e.keys for e in entries if all(key in state for key in e.keys)}
    entries = [
        e
        if any(key in state for key in e.keys)
        else e._replace(keys=there.get(id(e.tensor), e.keys))
        for e in entries
    ]
    missing, misfits = [], []
    for entry in entries:
        for key, shape in zip(entry.keys, entry.shapes(), strict=True):
            if key not in state:
                missing.append(key)
            elif tuple(state[key].shape) != shape:
                misfits.append(f"{key} has shape {list(state[key].shape)}; expected {list(shape)}")
    unexpected = [key for key in state if key not in expected]
    for entry in entries:
        absent = [key for key in entry.keys if key in missing]
        if absent and len(absent) < len(entry.keys):
            misfits.append(f"of the fused {entry.keys}, {absent} are missing")
    if strict:
        misfits += [f"missing: {missing[:8]}"] * bool(missing)
        misfits += [f"unexpected: {unexpected[:8]}"] * bool(unexpected)
    problem = "; ".join(misfits)
    text = _description(entries) + f"; missing {missing}; unexpected {unexpected}"
    for place in _places(entries):
        _agree(place, "load_full_state_dict", text, problem)
    if problem:
        raise InvalidArgument(problem)
    made: dict[int, nn.Parameter] = {}
    for entry in entries:
        if entry.keys[0] not in missing:
            _load(entry, [state[key] for key in entry.keys], made)
    return missing, unexpected


def _load(entry: Entry, pieces: "list[Tensor]", made: "dict[int, nn.Parameter]") -> None:
    old, layout, place = entry.tensor, entry.layout, entry.place
    if layout is not None and place is not None:
        if layout.transposed:
            pieces = [piece.t() for piece in pieces]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim or 0)
        shard = take(whole, layout, place.rank)
    else:
        shard = pieces[0]
    if not old.is_meta:
        old.copy_(shard)
    elif entry.name in entry.module._buffers:
        entry.module._buffers[entry.name] = shard.to(old.dtype, copy=True)
    else:  # tied parameters stay tied
        new = made.get(id(old))
        if new is None:
            new = nn.Parameter(shard.to(old.dtype, copy=True), old.requires_grad)
            made[id(old)] = new
            made[-id(old)] = nn.Parameter(old)  # keeps the old one, and so its id, until the end
        entry.module._parameters[entry.name] = new


@torch.no_grad()
def materialize(model: nn.Module, device: "torch.device | str" = "cpu") -> nn.Module:
    """Allocates what is on meta, shards only, and begins it as the unsharded model would.

    With ranks seeded alike, every rank gets its slices of what one process gets that builds the
    unsharded model after the same seed: modules draw one after another, in the order in which they
    were registered, by their own `reset_parameters`. Parameters that are tied are drawn once. Gives
    the model. Raises ValueError, before anything is changed, if a module with something on meta has
    no `reset_parameters`: load_full_state_dict fills such a model.
    """
    waiting = [m for m in model.modules() if _on_meta(m)]
    unable = sorted({type(m).__name__ for m in waiting if not hasattr(m, "reset_parameters")})
    if unable:
        raise InvalidArgument(
            f"modules of {unable} are on meta and have no reset_parameters(); use "
            "load_full_state_dict, or give them one"
        )
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for module in waiting:
        drawn = False
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) in made:
                module._parameters[name] = made[id(parameter)][1]
                continue
            new = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            made[id(parameter)] = (parameter, new)
            module._parameters[name] = new
            drawn = True
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
                drawn = True
        if drawn:
            reset: Any = module
            reset.reset_parameters()
    return model


def _on_meta(module: nn.Module) -> bool:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return any(tensor is not None and tensor.is_meta for tensor in tensors)

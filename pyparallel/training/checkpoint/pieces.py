"""What of a model this rank holds: views of its tensors, each with its place in the whole model.

A key is the name that the model has on one device, without sharding, stages or wrappers; fused
parts have their own names. Padding is in no piece. So two ranks of any two layouts mean the same
numbers by the same (key, offsets).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pyparallel.errors import InvalidArgument
from pyparallel.layers.parameters import REPLICATED, ParameterLayout
from pyparallel.layers.state import state_entries
from pyparallel.training.checkpoint.boxes import Box, Spot, spots

__all__ = ["Held", "Piece", "held_by", "local", "modules_of"]

# What wraps a module and adds a step to the names of what is in it.
WRAPPING = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"}


@dataclass(frozen=True)
class Piece:
    """A box of one of the model's tensors, as a view of what this rank holds."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    view: Tensor

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.view.shape))


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of this rank.

    Attributes:
        tensor: as the module has it (a DTensor where it is sharded by torch).
        keys: of the whole tensors that it holds parts of; several where it is fused.
        shapes: of these.
        names: all keys that each of `keys` has: more than one where it is tied.
        mine: where its local part lies, copies included: what is loaded.
        counted: without what another rank of its tensor parallel group holds too: what is saved.
    """

    tensor: Tensor
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    mine: tuple[Spot, ...]
    counted: tuple[Spot, ...]
    names: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """This rank has all of it, as it is."""
        only = self.mine[0] if len(self.mine) == 1 else None
        return only is not None and only.shape == tuple(self.tensor.shape) == only.sizes

    def renamed(self, keys: Sequence[str]) -> "Held":
        return replace(self, keys=tuple(keys))

    def pieces(self, tensor: Tensor, *, counted: bool, prefix: str = "") -> list[Piece]:
        """Of `tensor`: this one, or one that lies as it does (a state of its optimizer)."""
        return [
            Piece(prefix + self.keys[s.part], s.shape, s.offsets, _view(local(tensor), s))
            for s in (self.counted if counted else self.mine)
        ]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has, sharing memory with it."""
    part: Any = tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part  # type: ignore[no-any-return]


def _view(tensor: Tensor, spot: Spot) -> Tensor:
    if not spot.local.numel:
        return tensor.new_empty(spot.sizes)
    for dim, (start, length) in enumerate(zip(spot.local.offsets, spot.local.sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor.t() if spot.transposed else tensor


def modules_of(model: Any) -> list[nn.Module]:
    """This rank's modules of a model: itself, its stages, or what `checkpoint_modules()` gives.

    Raises:
        TypeError: it is nothing of this kind.
    """
    if hasattr(model, "checkpoint_modules"):
        return list(model.checkpoint_modules())
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, Iterable):
        modules = list(model)
        if all(isinstance(module, nn.Module) for module in modules):
            return modules
    raise TypeError(
        f"model is a {type(model).__name__}: an nn.Module is expected, a list of them (the stages "
        "of this rank), or an object with checkpoint_modules()"
    )


def held_by(modules: Iterable[nn.Module]) -> list[Held]:
    """Every parameter and persistent buffer of this rank, once.

    Raises:
        ValueError: something is on the meta device, or two tensors have one name.
    """
    by_tensor: dict[int, Held] = {}
    owner: dict[str, int] = {}
    on_meta, twice = [], []
    for module in modules:
        clean = _Names(module)
        for entry in state_entries(module):
            keys = tuple(clean(key) for key in entry.keys)
            tensor = entry.tensor
            if tensor.is_meta:
                on_meta.append(keys[0])
                continue
            for key in keys:
                if owner.setdefault(key, id(tensor)) != id(tensor):
                    twice.append(key)
            known = by_tensor.get(id(tensor))
            if known is None:
                rank = entry.place.rank if entry.place is not None else 0
                layout = entry.layout or REPLICATED
                known = _held(tensor, keys, tuple(entry.shapes()), layout, rank)
                by_tensor[id(tensor)] = known
            known.names.append(keys)
    if on_meta:
        raise InvalidArgument(f"{on_meta[:4]} are on the meta device: materialise the model first")
    if twice:
        raise InvalidArgument(f"the modules have several tensors of the names {twice[:4]}")
    return list(by_tensor.values())


def _held(
    tensor: Tensor,
    keys: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    layout: ParameterLayout,
    rank: int,
) -> Held:
    shape = tuple(tensor.shape)
    chunks: Any = getattr(tensor, "__create_chunk_list__", None)
    boxes = [Box.whole(shape)]
    if chunks is not None:
        boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in chunks()]
    (box,) = boxes  # a rank has one part of a DTensor
    mine = tuple(spots(layout, rank, shape, box, counted=False))
    return Held(tensor, keys, shapes, mine, tuple(spots(layout, rank, shape, box, counted=True)))


class _Names:
    """Keys without the steps that wrappers add."""

    def __init__(self, root: nn.Module) -> None:
        self._steps = set(_wrapping_steps(root))

    def __call__(self, key: str) -> str:
        path, kept = "", []
        for step in key.split("."):
            path = f"{path}.{step}" if path else step
            if path not in self._steps:
                kept.append(step)
        return ".".join(kept)


def _wrapping_steps(root: nn.Module) -> Iterator[str]:
    for prefix, module in root.named_modules(remove_duplicate=False):
        path = f"{prefix}." if prefix else ""
        if isinstance(module, DistributedDataParallel | DataParallel):
            yield f"{path}module"
        for name in WRAPPING & module._modules.keys():
            yield path + name

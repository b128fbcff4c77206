"""Random numbers of a layout: named streams, and dropout that every layout drops alike.

`RandomStreams` has generators by name, alike on all ranks or apart along some axes, and a place:
the step, samples and positions that pass just now. A `PlacedDropout` draws no numbers in turn:
whether an element is kept is a function of the seed, the layer, the step, and the element's place
in the whole (sample, position, feature). So dp, tp, sp, pp, microbatches and recompute change no
mask, and a run that resumes needs only its step.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pyparallel.attention.dropout import philox, threshold
from pyparallel.errors import InvalidArgument
from pyparallel.layers import Dropout
from pyparallel.layers.place import Place, gathered
from pyparallel.training.layout import AXES

if TYPE_CHECKING:
    from pyparallel.training.mesh import ParallelMesh

__all__ = ["PlacedDropout", "RandomStreams", "place_dropouts"]


@dataclass
class _Where:
    """What passes: of the step `step`, samples by their numbers, rows by their positions."""

    step: int
    samples: Tensor  # int64 [batch]
    positions: Tensor  # int64 [rows]
    uses: dict[str, int] = field(default_factory=dict)  # how often a layer has drawn here


class RandomStreams:
    """The random numbers of one rank of a mesh. Nothing is communicated.

    Args:
        seed: alike on all ranks; another seed gives unrelated numbers.
        mesh: None: one process.
        device: of the generators.
    """

    def __init__(
        self, seed: int, mesh: "ParallelMesh | None" = None, *, device: "torch.device | str" = "cpu"
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidArgument(f"seed is {seed!r}; expected an int")
        self.seed = seed
        self._device = torch.device(device)
        self._at = {axis: 0 if mesh is None else getattr(mesh.coordinates, axis) for axis in AXES}
        self._size = {axis: 1 if mesh is None else mesh.size(axis) for axis in AXES}
        self._streams: dict[str, torch.Generator] = {}
        self._apart: dict[str, tuple[str, ...]] = {}
        self._where: _Where | None = None

    # --- generators by name

    def stream(self, name: str, *, apart: Iterable[str] = ()) -> torch.Generator:
        """The generator of a name, made when it is first asked for.

        Args:
            apart: axes along which ranks get other numbers; over the others all get the same.

        Raises:
            ValueError: unknown axes, or other ones than the stream was made with.
        """
        axes = tuple(axis for axis in AXES if axis in set(apart))
        unknown = sorted(set(apart) - set(AXES))
        if unknown:
            raise InvalidArgument(f"stream {name!r}: apart has {unknown}; the axes are {AXES}")
        if name not in self._streams:
            place = " ".join(f"{axis} {self._at[axis]}" for axis in axes)
            seed = _mixed(self.seed, "stream", name, place)
            self._streams[name] = torch.Generator(self._device).manual_seed(seed)
            self._apart[name] = axes
        elif self._apart[name] != axes:
            raise InvalidArgument(
                f"stream {name!r} is apart along {self._apart[name] or 'no axis'}, and was asked "
                f"for apart along {axes or 'no axis'}; use another name"
            )
        return self._streams[name]

    def adopt(self, name: str, generator: torch.Generator, *, apart: Iterable[str] = ()) -> None:
        """Seeds a generator of somebody else's (torch.default_generator, say) as the stream of this
        name; it is saved, restored and recomputed with the others.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._streams:
            raise InvalidArgument(f"stream {name!r} exists; adopt it before it is asked for")
        seed = self.stream(name, apart=apart).initial_seed()
        self._streams[name] = generator.manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's streams are. With streams apart along an axis, each of its ranks has a
        state of its own to save."""
        return {
            "seed": self.seed,
            "streams": {
                name: {
                    "apart": {axis: self._at[axis] for axis in self._apart[name]},
                    "sizes": {axis: self._size[axis] for axis in self._apart[name]},
                    "state": generator.get_state(),
                }
                for name, generator in self._streams.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_layout: bool = False) -> None:
        """Goes on from a `state_dict` of the same rank.

        Args:
            other_layout: the state may be of another layout. Streams without axes go on, and so
                does placed dropout, which has no state but the seed; streams apart along axes whose
                sizes have changed begin anew.

        Raises:
            ValueError: the state is another rank's, or (without other_layout) another layout's.
        """
        misfits, states = [], {}
        for name, one in state["streams"].items():
            axes = one["apart"]
            sizes = {axis: self._size[axis] for axis in axes}
            if sizes != one["sizes"]:
                if not other_layout:
                    misfits.append(
                        f"stream {name!r} is of a layout with {one['sizes']}, this one has "
                        f"{sizes}; other_layout=True begins it anew"
                    )
            elif any(self._at[axis] != at for axis, at in axes.items()):
                own = {axis: self._at[axis] for axis in axes}
                misfits.append(f"stream {name!r} is of the rank at {axes}, this one is at {own}")
            else:
                states[name] = one
        if misfits:
            raise InvalidArgument(f"RandomStreams: {'; '.join(misfits)}")
        self.seed = int(state["seed"])
        for name, one in states.items():
            self.stream(name, apart=one["apart"]).set_state(one["state"])

    # --- the place of what passes

    @contextmanager
    def at(
        self,
        *,
        step: int,
        samples: "Tensor | Sequence[int]",
        positions: "Tensor | Sequence[int]",
    ) -> Iterator[None]:
        """Around a forward of one microbatch: what this rank has of it.

        Args:
            step: of the optimizer.
            samples: [batch], numbers of the samples in the step's global batch.
            positions: [rows], of this rank's rows of the sequence (`attention.position_ids`). With
                `tp_sequence_parallel`, of the rows before tp cuts them.
        """
        before = self._where
        self._where = _Where(
            int(step),
            torch.as_tensor(samples, dtype=torch.int64),
            torch.as_tensor(positions, dtype=torch.int64),
        )
        try:
            yield
        finally:
            self._where = before

    @property
    def where(self) -> _Where:
        """
        Raises:
            RuntimeError: outside of `at`.
        """
        if self._where is None:
            raise RuntimeError(
                "random numbers of a place are wanted, and nothing passes: run the forward within "
                "RandomStreams.at(step=..., samples=..., positions=...)"
            )
        return self._where

    def key(self, name: str) -> int:
        """63 bits for a kernel with a generator of its own (attention's `dropout_seed`): a function
        of the seed, the name, the step, the first sample, and how often it was asked for here."""
        where = self.where
        first = int(where.samples[0]) if len(where.samples) else 0
        return _mixed(self.seed, "key", name, where.step, first, self._use(name))

    def _use(self, name: str) -> int:
        uses = self.where.uses
        uses[name] = uses.get(name, 0) + 1
        return uses[name]

    # --- recompute

    def recompute(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For torch.utils.checkpoint's context_fn: first pass, repeated pass."""
        return nullcontext(), self._again(*self._now())

    def _now(self) -> tuple[dict[str, Tensor], _Where | None]:
        states = {name: generator.get_state() for name, generator in self._streams.items()}
        where = self._where
        if where is not None:
            where = _Where(where.step, where.samples, where.positions, dict(where.uses))
        return states, where

    @contextmanager
    def _again(self, states: dict[str, Tensor], where: _Where | None) -> Iterator[None]:
        before = self._now()[0], self._where
        self._set(states)
        self._where = where
        if where is not None:  # a graph that is kept may be recomputed more than once
            self._where = _Where(where.step, where.samples, where.positions, dict(where.uses))
        try:
            yield
        finally:
            self._set(before[0])
            self._where = before[1]

    def _set(self, states: dict[str, Tensor]) -> None:
        for name, state in states.items():
            self._streams[name].set_state(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RandomStreams":
        return self  # a copied model draws from the same streams


class PlacedDropout(nn.Module):
    """Zeroes elements with probability p and scales the others by 1 / (1 - p), in training.

    An element is kept where Philox4x32-10 (pyparallel.attention.dropout) of its (feature, position,
    sample, use), keyed by seed, name and step, reaches the threshold of p.

    Args:
        name: of the layer, alike on all ranks; other layers have other names.
        place: of a tensor parallel group where inputs may be parts; None: they are whole.
    """

    def __init__(
        self, p: float, streams: RandomStreams, name: str, *, place: Place | None = None
    ) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise InvalidArgument(f"p is {p}; expected a probability, 0 to 1")
        self.p, self.streams, self.name, self.place = p, streams, name, place
        self._offsets: dict[tuple[int, int, int], tuple[int, int]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, rows, features], or a part of the rows or features of a tp group.

        Raises:
            ValueError: x is not what passes just now.
        """
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        where, use = self.streams.where, self.streams._use(self.name)
        if x.dim() != 3 or x.shape[0] != len(where.samples):
            raise InvalidArgument(
                f"{self.name}: dropout got a tensor of shape {list(x.shape)}; expected is "
                f"[{len(where.samples)}, rows, features], of the samples that pass"
            )
        row, feature = self._offset(x, len(where.positions))
        if not 0 <= row <= len(where.positions) - x.shape[1]:
            raise InvalidArgument(
                f"{self.name}: dropout got {x.shape[1]} rows, and {len(where.positions)} positions "
                "pass"
            )
        seed = _mixed(self.streams.seed, "dropout", self.name, where.step)
        positions = where.positions.to(x.device)[row : row + x.shape[1]]
        features = torch.arange(feature, feature + x.shape[2], device=x.device)
        words = philox(
            (
                features,
                positions[:, None],
                where.samples.to(x.device)[:, None, None],
                torch.full((), use, device=x.device),
            ),
            seed,
        )
        kept = (words >= threshold(self.p)).to(x.dtype)
        return x * kept.div_(1.0 - self.p)

    def _offset(self, x: Tensor, positions: int) -> tuple[int, int]:
        """Of the first row and feature, by what the ranks of the tp group have; asked for once per
        size."""
        if self.place is None or self.place.size == 1:
            return 0, 0
        key = (x.shape[1], x.shape[2], positions)
        if key not in self._offsets:
            sizes = gathered([x.shape[1], x.shape[2]], self.place)
            before = sizes[: self.place.rank]
            rows = sum(row for row, _ in sizes) == positions
            self._offsets[key] = (
                sum(row for row, _ in before) if rows else 0,
                0 if rows else sum(feature for _, feature in before),
            )
        return self._offsets[key]

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


def place_dropouts(model: nn.Module, streams: RandomStreams) -> list[str]:
    """Replaces the model's dropouts (nn.Dropout, and layers.Dropout that `parallelize` has put in)
    by placed ones, named as the modules are. Gives their names.

    On the whole model, parallelized or not, before it is cut into stages: names are then the same
    at every layout.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Dropout, Dropout) and getattr(module, "p", 0.0) > 0.0
    }
    for name, module in found.items():
        sharded = isinstance(module, Dropout) and module.sharded
        place = module.streams.place if isinstance(module, Dropout) and sharded else None
        probability = float(getattr(module, "p", 0.0))
        new = PlacedDropout(probability, streams, name, place=place)
        new.train(module.training)
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent)._modules[attribute] = new
    return list(found)


def _mixed(*parts: Any) -> int:
    text = "pyparallel random " + " | ".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

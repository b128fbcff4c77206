"""State beside model and optimizer: random streams, a position in the data, a loss scale.

Anything with state_dict() and load_state_dict(), or a dictionary, of plain data. What all ranks
have alike is kept once. What differs is kept once for each coordinate along the fewest axes that
tell it apart: random numbers that differ by dp rank, say, once per dp rank.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from pyparallel.errors import InvalidArgument
from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.pieces import Piece
from pyparallel.training.checkpoint.plain import bytes_of, decoded, encoded

__all__ = ["Saved", "Snapshot", "check_target", "classes", "snapshot", "tensor_pieces"]

Place = Mapping[str, int]  # coordinates of a rank: axis -> number


@dataclass(frozen=True)
class Snapshot:
    """A state of this rank: JSON, the tensors in it (copies), and a digest of both."""

    value: Any
    tensors: tuple[Tensor, ...]
    digest: str


def snapshot(name: str, target: Any) -> Snapshot:
    """
    Raises:
        TypeError: it has no state, or one that is no plain data.
    """
    if hasattr(target, "state_dict"):
        target = target.state_dict()
    elif not isinstance(target, dict):
        raise TypeError(f"{name} is a {type(target).__name__}: expected state_dict(), or a dict")
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> int:
        tensors.append(tensor.detach().to("cpu", copy=True).contiguous())
        return len(tensors) - 1

    value = encoded(target, keep, name)
    digest = hashlib.sha256(json.dumps(value).encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return Snapshot(value, tuple(tensors), digest.hexdigest())


def classes(digests: Sequence[str], places: Sequence[Place]) -> tuple[list[str], list[int]]:
    """The fewest axes that tell the ranks' states apart, and the first rank of each class.

    digests and places: of all ranks, in rank order.
    """
    axes = list(places[0])
    for count in range(len(axes) + 1):
        for chosen in combinations(axes, count):
            first: dict[tuple[int, ...], int] = {}
            for rank, place in enumerate(places):
                at = tuple(place[axis] for axis in chosen)
                if digests[first.setdefault(at, rank)] != digests[rank]:
                    break
            else:
                return list(chosen), list(first.values())
    raise AssertionError("two ranks have the same coordinates")


def tensor_pieces(name: str, number: int, tensors: Sequence[Tensor]) -> list[Piece]:
    """The tensors of a state's class, as pieces to be written."""
    return [
        Piece(f"state.{name}.{number}.{n}", tuple(t.shape), (0,) * t.dim(), t)
        for n, t in enumerate(tensors)
    ]


def check_target(name: str, target: Any) -> None:
    """
    Raises:
        TypeError: nothing can be loaded into it.
    """
    if not hasattr(target, "load_state_dict") and not isinstance(target, dict):
        raise TypeError(
            f"{name} is a {type(target).__name__}: expected load_state_dict(), or a dict"
        )


class Saved:
    """A state as a checkpoint has it, for this rank: which of its classes, and their tensors."""

    def __init__(
        self,
        name: str,
        entry: Any,
        target: Any,
        place: Place,
        sizes: Place,
        saved_sizes: Place,
        stored: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> None:
        """
        Raises:
            CheckpointError: the entry is no such thing.
            ValueError: it was kept for other sizes of its axes, and the target cannot take that.
        """
        self.name, self.target, self.sizes = name, target, sizes
        self.pieces: list[Piece] = []
        try:
            axes, values = list(entry["axes"]), list(entry["values"])
            at = [dict(zip(axes, value["at"], strict=True)) for value in values]
            self._values = [value["value"] for value in values]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"state {name!r} is described by what cannot be: {error}"
            ) from None
        self._at = at
        alike = all(saved_sizes.get(axis) == sizes.get(axis) for axis in axes)
        here = {axis: place.get(axis) for axis in axes}
        self._resharded = not alike
        if alike:
            self._chosen = [n for n, where in enumerate(at) if where == here]
            if len(self._chosen) != 1:
                raise CheckpointError(f"state {name!r} has {len(self._chosen)} values for {here}")
        elif hasattr(target, "load_resharded"):
            self._chosen = list(range(len(at)))
        else:
            was = {axis: saved_sizes.get(axis) for axis in axes}
            now = {axis: sizes.get(axis) for axis in axes}
            raise InvalidArgument(
                f"state {name!r} was kept for each rank along {axes} of sizes {was}, and they are "
                f"{now} now: load into an object with load_resharded(states, sizes), or load "
                "without it"
            )
        self._tensors: dict[tuple[int, int], Tensor] = {}
        for number in self._chosen:
            n = 0
            while (key := f"state.{name}.{number}.{n}") in stored:
                dtype, shape = stored[key]
                tensor = torch.empty(shape, dtype=dtype)
                self._tensors[number, n] = tensor
                self.pieces.append(Piece(key, shape, (0,) * len(shape), tensor))
                n += 1

    def load(self) -> None:
        """Into the target, once its tensors are filled."""
        states = []
        for number in self._chosen:
            try:
                state = decoded(self._values[number], lambda n: self._tensors[number, n])  # noqa: B023
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise CheckpointError(f"state {self.name!r} is no plain data: {error}") from None
            states.append((self._at[number], state))
        if self._resharded:
            self.target.load_resharded(states, dict(self.sizes))
        elif hasattr(self.target, "load_state_dict"):
            self.target.load_state_dict(states[0][1])
        else:
            self.target.clear()
            self.target.update(states[0][1])

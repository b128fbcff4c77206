"""Where a layer stands: its group, and this rank in it."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from pyparallel.ops.engines import Native, Torch
from pyparallel.ops.groups import group_name, seat_of

__all__ = ["Place", "digest", "gathered"]


class Place:
    """A group, this process's `rank` in it, its `size`, and the `name` by which ops know it.

    Keeps the group alive. A copy of a layer (copy.deepcopy) stands in the same place.
    """

    def __init__(self, group: Any) -> None:
        seat = seat_of(group)
        self.group = group
        self.rank: int = seat.rank
        self.size: int = seat.world_size
        self.name = group_name(group)

    def refused(self, op: str, error: Exception) -> Exception:
        """Tells the other ranks, so that they raise and do not wait; gives what to raise here."""
        return seat_of(self.name).refused(op, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Place":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a layer of a process group cannot be pickled: its ranks are processes; save its "
            "state_dict(), or full_state_dict(model), and build it anew"
        )


def digest(text: str) -> int:
    """48 bits of a text, for `gathered`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")


def gathered(numbers: "list[int]", place: Place) -> "list[list[int]]":
    """Collective: all ranks' whole numbers, as many each, below 2**53 (float64 is exact)."""
    if place.size == 1:
        return [numbers]
    engine = seat_of(place.name).engine
    if isinstance(engine, Torch):  # its collectives may be those of a device
        engine = Native(engine.agreement)
    table: Tensor = engine.all_gather(
        torch.tensor([numbers], dtype=torch.float64), 0, [1] * place.size
    )
    return [[int(value) for value in row] for row in table.tolist()]

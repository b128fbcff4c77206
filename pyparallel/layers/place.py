"""Where a layer stands: its group, and this rank in it."""

from typing import Any

from pyparallel.ops.groups import group_name, seat_of

__all__ = ["Place"]


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

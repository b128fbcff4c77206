"""A schedule: for each rank the actions it takes, in order. Data only; whatever runs it decides
nothing.

Passes take a schedule and give a new one (transfers.py, steps.py); validate.py proves it,
simulate.py gives it times, forms.py and torch_csv.py write and read it, pyparallel.viz draws it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pyparallel.schedule.actions import Action, Kind
from pyparallel.schedule.errors import ScheduleError

__all__ = ["Channel", "Schedule"]


class Channel(NamedTuple):
    """One stream of messages: between two ranks, what enters (or whose gradient leaves) one stage.

    Messages of a channel have one shape and go in the order of their microbatches' sends. A
    transport that has tags may use one tag per channel; on one without, all channels of a pair of
    ranks share a FIFO, and that order is right too (the validator proves it).

    Attributes:
        source, target: the ranks.
        kind: SEND_ACTIVATION or SEND_GRADIENT.
        stage: the sender's stage.
    """

    source: int
    target: int
    kind: Kind
    stage: int


@dataclass(frozen=True)
class Schedule:
    """Rows of actions, one row per rank.

    Attributes:
        name: what it is called, for messages and drawings.
        rows: `rows[r]` is what rank r does, in order.
        stages: how many stages the model is cut into; ranks hold one or more.
        microbatches: how many microbatches a step has.
        held: `held[r]` are the stages of rank r, lowest first: its chunks 0, 1, ... A stage is held
            even where no microbatch comes by (DualPipe with one microbatch).
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    stages: int
    microbatches: int
    held: tuple[tuple[int, ...], ...]

    @classmethod
    def from_rows(cls, name: str, rows: Iterable[Iterable[Action]]) -> "Schedule":
        """A schedule of these rows, its stages and microbatches being those that occur in them."""
        whole = tuple(tuple(row) for row in rows)
        passes = [action for row in whole for action in row if action.kind.is_compute]
        return cls(
            name,
            whole,
            stages=max((action.stage for action in passes), default=-1) + 1,
            microbatches=max((action.microbatch for action in passes), default=-1) + 1,
            held=tuple(
                tuple(sorted({action.stage for action in row if action.kind.is_compute}))
                for row in whole
            ),
        )

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def has_transfers(self) -> bool:
        """True once communication has been inserted: before that, rows are compute only."""
        return any(action.kind.is_transfer for row in self.rows for action in row)

    @cached_property
    def placement(self) -> dict[tuple[int, int], int]:
        """(stage, microbatch) -> the rank that passes it. Of one stage, microbatches may differ
        (DualPipe holds every stage twice)."""
        forward = Kind.FORWARD
        return {
            (action.stage, action.microbatch): action.rank
            for row in self.rows
            for action in row
            if action.kind is forward
        }

    def peer(self, action: Action) -> int:
        """The rank at the other end of a transfer.

        Raises:
            ScheduleError: the action is no transfer, or there is no stage at the other end.
        """
        if not action.kind.is_transfer:
            raise ScheduleError(f"{action} on rank {action.rank} is no transfer: it has no peer")
        step = action.kind.direction if action.kind.is_send else -action.kind.direction
        other = self.placement.get((action.stage + step, action.microbatch))
        if other is None:
            raise ScheduleError(
                f"{action} on rank {action.rank} has no peer: no rank passes microbatch "
                f"{action.microbatch} through stage {action.stage + step} (stages are 0 to "
                f"{self.stages - 1})",
                action.rank,
            )
        return other

    def channel(self, action: Action) -> Channel:
        """The stream a transfer belongs to; the same for a send and its receive."""
        peer = self.peer(action)
        if action.kind.is_send:
            return Channel(action.rank, peer, action.kind, action.stage)
        sender = action.stage - action.kind.direction
        return Channel(peer, action.rank, action.kind.counterpart, sender)

    def compute_only(self) -> "Schedule":
        """The same without communication, reductions and optimizer steps."""
        rows = tuple(tuple(a for a in row if a.kind.is_compute) for row in self.rows)
        return replace(self, rows=rows)

    def first(self, microbatches: int) -> "Schedule":
        """The same without the later microbatches. What remains keeps its order, so it stays right:
        no microbatch waits for another one's results."""
        return replace(
            self,
            rows=tuple(_kept(row, microbatches) for row in self.rows),
            microbatches=min(self.microbatches, microbatches),
        )


def _kept(row: Iterable[Action], microbatches: int) -> tuple[Action, ...]:
    """Actions of the first microbatches; one that ran together with a dropped one runs alone."""
    kept: list[Action] = []
    joined = False
    for action in row:
        keep = action.microbatch < microbatches
        if joined and not keep:
            kept[-1] = kept[-1]._replace(with_next=False)
        if keep:
            kept.append(action)
        joined = keep and action.with_next
    return tuple(kept)

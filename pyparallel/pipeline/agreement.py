"""What the ranks of a pipeline tell each other around a step: a few numbers each, and where one has
failed, the reasons, so that all raise."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["Agreement", "GroupAgreement", "Ours", "PipelineError"]


class PipelineError(RuntimeError):
    """A step failed on some rank: raised on all of them, with every failed rank's reason. Gradients
    hold parts of the step: zero them before the next one. The group stays usable."""


class Agreement(Protocol):
    """How numbers and texts of all ranks are gathered, in rank order."""

    def numbers(self, own: Sequence[int]) -> list[list[int]]: ...

    def texts(self, own: str) -> list[str]: ...


class Ours:
    """All ranks are in this process: what it knows is what all know."""

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        return [list(own)]

    def texts(self, own: str) -> list[str]:
        return [own]


class GroupAgreement:
    """Over a process group. Both calls are collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device

    def numbers(self, own: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(own, dtype=torch.int64, device=self.device)
        every = mine.new_empty(self.group.size(), len(own))
        dist.all_gather(list(every.unbind()), mine, group=self.group)
        return [list(row) for row in every.tolist()]

    def texts(self, own: str) -> list[str]:
        data = own.encode()
        sizes = [row[0] for row in self.numbers([len(data)])]
        words = max(sizes) // 8 + 1  # eight bytes a number
        padded = data.ljust(words * 8, b"\0")
        numbers = [
            int.from_bytes(padded[i : i + 8], "little", signed=True)
            for i in range(0, len(padded), 8)
        ]
        return [
            b"".join(n.to_bytes(8, "little", signed=True) for n in row)[:size].decode()
            for row, size in zip(self.numbers(numbers), sizes, strict=True)
        ]

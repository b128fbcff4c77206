"""Which samples come next: an order that does not depend on how many ranks read it.

    order = ElasticSampler(len(dataset), global_batch=64, mesh=mesh, seed=1)
    for numbers in order:                       # this rank's samples of each step, without end
        batch = dataset[numbers]

A position is how many samples all ranks have read: a job that goes on with other ranks reads on
where the last one stopped, each sample of an epoch once.
"""

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["ElasticSampler"]


class ElasticSampler:
    """Numbers of samples, shuffled anew in each epoch, the same for any number of ranks.

    A step's samples are `global_batch` positions in a row; the data parallel ranks take equal
    pieces of them in rank order. A batch may begin in one epoch and end in the next.

    Args:
        samples: in the data set.
        global_batch: samples of a step, of all ranks together: stays when the ranks change.
        mesh: the ParallelMesh, whose dp axis is taken; None: rank and size.
        rank, size: of the data parallel ranks.
        seed: of the order; None: the data set's own order, in every epoch.

    Attributes:
        consumed: samples that all ranks have read.

    Raises:
        ValueError: there are no samples, or the ranks do not divide the batch.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        *,
        mesh: Any = None,
        rank: int = 0,
        size: int = 1,
        seed: "int | None" = 0,
    ) -> None:
        if mesh is not None:
            rank, size = mesh.coordinates.dp, mesh.size("dp")
        if samples < 1 or global_batch < 1:
            raise ValueError(f"{samples} samples in batches of {global_batch}; expected 1 or more")
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} data parallel ranks")
        if global_batch % size:
            fits = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
            raise ValueError(
                f"a batch of {global_batch} samples has no equal pieces for {size} data parallel "
                f"ranks: their gradients are averaged, so they need as many each; {fits} ranks fit"
            )
        self.samples, self.global_batch, self.seed = samples, global_batch, seed
        self.rank, self.size = rank, size
        self.consumed = 0
        self._order: tuple[int, torch.Tensor] | None = None  # of the epoch that was read last

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.next()

    def next(self) -> list[int]:
        """This rank's samples of the next step."""
        each = self.global_batch // self.size
        first = self.consumed + self.rank * each
        self.consumed += self.global_batch
        return [self._at(position) for position in range(first, first + each)]

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.samples)
        if self.seed is None:
            return place
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._order = epoch, torch.randperm(self.samples, generator=generator)
        return int(self._order[1][place])

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks."""
        return {"consumed": self.consumed, "samples": self.samples, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`, with any number of ranks.

        Raises:
            ValueError: it is of another number of samples: the order would be another one.
        """
        if state["samples"] != self.samples:
            raise ValueError(
                f"the position is one among {state['samples']} samples, and there are "
                f"{self.samples}"
            )
        self.consumed, self.seed = int(state["consumed"]), state["seed"]
        self._order = None

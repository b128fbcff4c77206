"""Text that every machine with Python has, as bytes: the standard library's own sources.

    corpus = Corpus.of_standard_library(folder)        memory-mapped; made once, by whoever is first
    batches = Batches(corpus.part("train"), rows=256, samples=16, seed=0)
    tokens, labels = batches.next(dp_rank, dp_size)    int64 [own samples, rows]

A position in the data is one number, of samples of the whole run. Ranks take parts of each global
batch by their dp coordinate: at any number of ranks, and after any change of it, no sample is left
out and none comes twice in an epoch.
"""

import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["CLASSES", "Batches", "Corpus"]

CLASSES = 256  # a token is a byte
_HELD_BACK = 0.05  # the last part is for evaluation
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Bytes, uint8 [n], of which no process holds a copy."""

    data: Tensor

    @classmethod
    def of_standard_library(cls, folder: Path) -> "Corpus":
        """Every module of Python's standard library but its tests, in the order of their names,
        each behind a zero byte. The file is made in `folder` where it is not there yet."""
        root = Path(sysconfig.get_paths()["stdlib"])
        name = f"python-{'.'.join(map(str, sys.version_info[:3]))}.bytes"
        path = folder / name
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            found = (p for p in root.rglob("*.py") if not _SKIPPED & set(p.relative_to(root).parts))
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                for source in sorted(found, key=lambda p: p.relative_to(root).as_posix()):
                    file.write(b"\0" + source.read_bytes())
            Path(file.name).replace(path)  # whole or not at all, whoever else writes it
        return cls.of_file(path)

    @classmethod
    def of_file(cls, path: Path) -> "Corpus":
        """Any file.

        Raises:
            ValueError: it is empty.
        """
        size = path.stat().st_size
        if not size:
            raise ValueError(f"{path} is empty")
        return cls(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))

    def part(self, name: str) -> Tensor:
        """ "train", or the held back "evaluation"."""
        border = int(len(self.data) * (1 - _HELD_BACK))
        return {"train": self.data[:border], "evaluation": self.data[border:]}[name]


class Batches:
    """Samples of so many rows, in an order of their own in each epoch.

    Args:
        data: uint8 [n].
        rows: tokens of a sample.
        samples: of a global batch, over all ranks.
        seed: of the order.

    Raises:
        ValueError: the data has no sample of so many rows.
    """

    def __init__(self, data: Tensor, rows: int, samples: int, seed: int) -> None:
        self.data, self.rows, self.samples, self.seed = data, rows, samples, seed
        self.per_epoch = (len(data) - 1) // rows
        if self.per_epoch < 1 or samples < 1:
            raise ValueError(
                f"{len(data)} bytes have {self.per_epoch} samples of {rows} rows and a label each, "
                f"and a batch of {samples} is wanted"
            )
        self.position = 0  # samples of the run so far
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def next(self, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """The part of the next global batch that is one dp rank's: tokens, and the byte after each.
        Parts are as even as they go, the larger first."""
        each, more = divmod(self.samples, ranks)
        first = rank * each + min(rank, more)
        numbers = range(self.position + first, self.position + first + each + (rank < more))
        self.position += self.samples
        rows = [self._sample(number) for number in numbers]
        whole = torch.stack(rows) if rows else torch.empty(0, self.rows + 1, dtype=torch.int64)
        return whole[:, :-1], whole[:, 1:]

    def _sample(self, number: int) -> Tensor:
        epoch, within = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order, self._epoch = torch.randperm(self.per_epoch, generator=generator), epoch
        begin = int(self._order[within]) * self.rows
        return self.data[begin : begin + self.rows + 1].long()

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks, and at any number of them."""
        return {"position": self.position, "seed": self.seed, "rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError: the state is of samples in another order or of another size.
        """
        for name in ("seed", "rows"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the data's state is of {name}={state[name]}, and this run has "
                    f"{getattr(self, name)}: samples would come twice, or never"
                )
        self.position = int(state["position"])

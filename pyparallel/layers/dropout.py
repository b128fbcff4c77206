"""Dropout whose masks agree where tensors are replicated and differ where they are sharded.

`RandomStreams` has two generators: `shared` gives the same numbers on all ranks, `own` others on
each. Both are apart from torch's global generator, so that nothing else (a data loader, an
initialisation on one rank) brings the shared one out of step.
"""

import hashlib
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from pyparallel.errors import InvalidArgument
from pyparallel.layers.place import Place

__all__ = ["Dropout", "RandomStreams"]


class RandomStreams:
    """The random streams of one rank of a group: `shared` and `own`, torch.Generators.

    seed: alike on all ranks; another seed, another rank or another stream gives unrelated numbers.
    device: where the numbers are needed. Nothing is communicated.

    Recomputed activations need the masks of the first pass:
    torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False, context_fn=streams.recompute).
    """

    def __init__(self, seed: int, group: Any, device: Any = "cpu") -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidArgument(f"seed is {seed!r}; expected an int")
        self.place = Place(group)
        self.shared = torch.Generator(device).manual_seed(_mixed(seed, "shared"))
        self.own = torch.Generator(device).manual_seed(_mixed(seed, f"rank {self.place.rank}"))

    def state_dict(self) -> dict[str, Any]:
        """Where the streams are; of this rank."""
        return {
            "shared": self.shared.get_state(),
            "own": self.own.get_state(),
            "rank": self.place.rank,
            "ranks": self.place.size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of the same rank. ValueError if it is another's."""
        where = (state["rank"], state["ranks"])
        if where != (self.place.rank, self.place.size):
            raise InvalidArgument(
                f"the state is of rank {where[0]} of {where[1]}, but this is rank "
                f"{self.place.rank} of {self.place.size}"
            )
        self._set((state["shared"], state["own"]))

    def recompute(self) -> "tuple[AbstractContextManager[None], AbstractContextManager[None]]":
        """Contexts for torch.utils.checkpoint's context_fn: first pass, repeated pass."""
        return nullcontext(), _Again(self)

    def _get(self) -> tuple[Tensor, Tensor]:
        return self.shared.get_state(), self.own.get_state()

    def _set(self, states: tuple[Tensor, Tensor]) -> None:
        self.shared.set_state(states[0])
        self.own.set_state(states[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> "RandomStreams":
        return self  # a copied model draws from the same streams: two would repeat each other


class _Again(AbstractContextManager[None]):
    """Within it the streams are where they were when it was made; after it, where before it.

    May be entered more than once: a graph that is kept is recomputed for each backward.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._first = streams._get()
        self._before: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self._before.append(self._streams._get())
        self._streams._set(self._first)

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        traceback: "TracebackType | None",
    ) -> None:
        self._streams._set(self._before.pop())


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the others by 1 / (1 - p), in training.

    sharded: whether the inputs are parts (of the sequence, of heads or features), which need masks
    of their own, or alike on all ranks, which need the same mask. It has no default, since the
    wrong one does not fail: it makes replicated activations differ, or masks repeat.
    """

    def __init__(self, p: float, streams: RandomStreams, *, sharded: bool) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise InvalidArgument(f"p is {p}; expected a probability, 0 to 1")
        self.p = p
        self.sharded = sharded
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        generator = self.streams.own if self.sharded else self.streams.shared
        kept = torch.empty_like(x, requires_grad=False, memory_format=torch.contiguous_format)
        kept.bernoulli_(1.0 - self.p, generator=generator)
        return x * kept.div_(1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, sharded={self.sharded}"


def _mixed(seed: int, what: str) -> int:
    digest = hashlib.sha256(f"pyparallel dropout {seed} {what}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

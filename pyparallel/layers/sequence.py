"""Sequence parallelism: along which dim activations are sharded, and into which sizes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from pyparallel.errors import InvalidArgument
from pyparallel.layers.partition import even_sizes

__all__ = ["SequenceSharding"]


@dataclass
class SequenceSharding:
    """How activations between layers are sharded; the layers of one model share one object.

    dim     of the activations: 0 for [sequence, batch, features], 1 for [batch, sequence, features]
    length  of the whole sequence. What cuts a sequence (an embedding, a row-parallel layer) sets
            it; set it yourself when the model's input is cut already, and ranks do not divide it.
            None: all shards are of one size

    Shards differ by at most one, the larger first: 10 on 4 ranks are 3, 3, 2, 2.
    """

    dim: int = 0
    length: int | None = None

    def sizes(self, ranks: int) -> list[int] | None:
        """Every rank's size, None if all are alike."""
        if self.length is None or self.length % ranks == 0:
            return None
        return even_sizes(self.length, ranks)

    def cut(self, shape: tuple[int, ...], ranks: int) -> list[int] | None:
        """The sizes of the shards of a whole of `shape`, which is remembered."""
        self.length = shape[self.axis(shape)]
        return self.sizes(ranks)

    def recompute(self) -> "tuple[AbstractContextManager[None], AbstractContextManager[None]]":
        """For torch.utils.checkpoint's `context_fn`: what is recomputed sees today's length.

        Needed where another length comes before this one's backward; without it the layers raise.
        """
        return nullcontext(), self._of_length(self.length)

    @contextmanager
    def _of_length(self, length: "int | None") -> Iterator[None]:
        before, self.length = self.length, length
        try:
            yield
        finally:
            self.length = before

    def axis(self, shape: tuple[int, ...]) -> int:
        """`dim` as an index of `shape`, whose last dimension holds the features."""
        last = len(shape) - 1
        if not -len(shape) <= self.dim < len(shape) or self.dim % len(shape) == last:
            raise InvalidArgument(
                f"the sequence is dim {self.dim}, but the activations have shape {list(shape)}; "
                f"expected a dim before the last, 0 to {last - 1}"
            )
        return self.dim % len(shape)


def sharding_of(sequence_parallel: "bool | SequenceSharding") -> "SequenceSharding | None":
    """What a layer's argument `sequence_parallel` means."""
    if isinstance(sequence_parallel, SequenceSharding):
        return sequence_parallel
    if not isinstance(sequence_parallel, bool):
        raise InvalidArgument(
            f"sequence_parallel is {sequence_parallel!r}; expected True, False or a "
            "SequenceSharding"
        )
    return SequenceSharding() if sequence_parallel else None

"""`VocabParallelEmbedding`: each rank holds the rows of some tokens.

rank r    rows of its own tokens, zeros for all others    [.., hidden]
forward   sum over ranks: one of them is not zero, so the bits are those of the whole table
backward  every rank keeps the gradients of its own tokens; nothing is sent
          (sequence_parallel: the parts' gradients are gathered first)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyparallel import ops
from pyparallel.errors import InvalidArgument
from pyparallel.layers.linear import ColumnParallelLinear
from pyparallel.layers.module import InitMethod, ShardedModule
from pyparallel.layers.parameters import ParameterLayout
from pyparallel.layers.partition import Partition
from pyparallel.layers.sequence import SequenceSharding, sharding_of

__all__ = ["VocabParallelEmbedding", "tie"]


class VocabParallelEmbedding(ShardedModule):
    """An embedding whose rows are spread over the ranks; the vocabulary need not divide.

    Args:
        num_embeddings, embedding_dim: of the whole table.
        group: as in ColumnParallelLinear.
        padding_idx: a token whose row begins at zero and gets no gradient.
        sequence_parallel: give this rank's part of the sequence (True: along dim 0; or the model's
            `SequenceSharding`), which need not divide.
        multiple_of: pads each rank's rows to a multiple: zeros, never trained, in no state dict.
        init_method: fills a whole table; None: as torch.nn.Embedding.
        device, dtype: of the table.

    forward(ids): integers [...], alike on all ranks; gives [..., embedding_dim], alike on all ranks
    or this rank's part of the sequence. Raises ValueError for an id that is none of num_embeddings
    (on CUDA a device-side assertion: a look at the values would stall).
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        group: Any,
        *,
        padding_idx: "int | None" = None,
        sequence_parallel: "bool | SequenceSharding" = False,
        multiple_of: int = 1,
        init_method: "InitMethod | None" = None,
        device: Any = None,
        dtype: "torch.dtype | None" = None,
    ) -> None:
        super().__init__(group)
        for name, size in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidArgument(f"{name} is {size!r}; expected an int of 1 or more")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise InvalidArgument(
                    f"padding_idx is {padding_idx}; expected {-num_embeddings} to "
                    f"{num_embeddings - 1}"
                )
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.sequence = sharding_of(sequence_parallel)
        self.init_method = init_method
        self.partition = Partition.even(num_embeddings, self.place.size, multiple_of=multiple_of)
        layout = ParameterLayout(0, self.partition)
        self._shard("weight", (num_embeddings, embedding_dim), layout, device, dtype)
        self.reset_parameters()

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, group: Any, **options: Any
    ) -> "VocabParallelEmbedding":
        """This rank's rows of an existing table; `options` as in the constructor.

        Keeps values, dtype, device (meta too), requires_grad and padding_idx. Raises ValueError for
        max_norm, scale_grad_by_freq and sparse, which need the whole table.
        """
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, name, None):
                raise InvalidArgument(
                    f"the embedding has {name}={getattr(embedding, name)}, which a table spread "
                    "over ranks does not support"
                )
        rows, columns = embedding.weight.shape
        layer = cls(
            rows, columns, group, padding_idx=embedding.padding_idx, device="meta", **options
        )
        layer._set_whole("weight", embedding.weight, embedding.weight.requires_grad)
        return layer

    def _init_whole(self, name: str, whole: Tensor) -> None:
        (self.init_method or nn.init.normal_)(whole)
        if self.padding_idx is not None:
            whole[self.padding_idx].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        self._check(ids)
        tokens = self.partition.contiguous(self.place.rank)
        weight = self._trained("weight")
        assert weight is not None
        if not weight.shape[0]:  # fewer tokens than ranks: a row to look up, never used
            weight = functional.pad(weight, (0, 0, 0, 1))
        outside = (ids < tokens.start) | (ids >= tokens.stop)
        local = (ids - tokens.start).masked_fill(outside, 0)
        padding = self.padding_idx
        padding = padding - tokens.start if padding is not None and padding in tokens else None
        rows = functional.embedding(local, weight, padding)
        rows = rows.masked_fill(outside[..., None], 0.0)
        if self.sequence is None:
            return ops.all_reduce(rows, self.place.name)
        try:
            axis = self.sequence.axis(rows.shape)
        except InvalidArgument as error:
            raise self._refused(error) from None
        sizes = self.sequence.cut(rows.shape, self.place.size)
        return ops.reduce_scatter(rows, self.place.name, axis, sizes)

    def _check(self, ids: Tensor) -> None:
        self._tensor(ids, "ids")
        if ids.dtype not in (torch.int64, torch.int32):
            error = f"ids have dtype {ids.dtype}; expected torch.int64 or torch.int32"
            raise self._refused(InvalidArgument(error))
        if ids.device != self.weight.device:
            error = f"ids are on {ids.device}, the table on {self.weight.device}"
            raise self._refused(InvalidArgument(error))
        if torch.compiler.is_compiling() or ids.is_meta or not ids.numel():
            return
        wrong = (ids < 0) | (ids >= self.num_embeddings)
        if ids.is_cuda:
            torch._assert_async(~wrong.any(), f"an id is none of {self.num_embeddings}")
        elif bool(wrong.any()):
            error = f"id {ids[wrong][0].item()} is none of 0 to {self.num_embeddings - 1}"
            raise self._refused(InvalidArgument(error))

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, rank={self.place.rank} of "
            f"{self.place.size}, holds={'x'.join(map(str, self.weight.shape))}"
        )


def tie(embedding: VocabParallelEmbedding, head: ColumnParallelLinear) -> None:
    """Makes the head use the embedding's table, as models with tied embeddings do.

    Raises ValueError unless both hold the same rows of tables of one shape.
    """
    ours, theirs = embedding.parameter_layouts()["weight"], head.parameter_layouts()["weight"]
    if ours != theirs or embedding.weight.shape != head.weight.shape:
        raise InvalidArgument(
            f"cannot tie an embedding that holds {list(embedding.weight.shape)} of "
            f"{list(ours.whole_shape(embedding.weight.shape))} to a head that holds "
            f"{list(head.weight.shape)} of {list(theirs.whole_shape(head.weight.shape))}; "
            "both need the same sizes and the same multiple_of"
        )
    head.weight = embedding.weight

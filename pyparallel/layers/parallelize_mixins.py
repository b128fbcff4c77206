"""What a module of another library becomes where it is kept: its own class and one of these.

A model's own modules know things that a replacement would not (a norm that adds one to its weight,
an embedding that scales): `become(module, Mixin)` keeps the object, its forward and its attributes,
and puts the mixin's methods before those of its class.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyparallel import ops
from pyparallel.layers.embedding import VocabParallelEmbedding
from pyparallel.layers.linear import ColumnParallelLinear, product
from pyparallel.layers.module import ShardedModule
from pyparallel.layers.parameters import ParameterLayout
from pyparallel.layers.partition import Partition
from pyparallel.layers.place import Place
from pyparallel.layers.sequence import SequenceSharding
from pyparallel.ops.autocast import casts
from pyparallel.ops.main_grad import behind

__all__ = [
    "BlockInput",
    "ColumnOfBlock",
    "CutBefore",
    "JoinAfter",
    "ScaledVocabRows",
    "ShardedExperts",
    "SummedGradients",
    "WholeSequence",
    "become",
    "cut_sequence",
    "join_sequence",
]


_made: dict[tuple[type, type], type] = {}  # one type per pair: a model's layers stay of one


def become(module: nn.Module, mixin: type, *, behind: bool = False) -> None:
    """Puts the mixin's methods before those of the module's class; `behind`: before its bases'."""
    kind = type(module)
    pair = (kind, mixin) if behind else (mixin, kind)
    if pair not in _made:
        _made[pair] = type("Sharded" + kind.__name__, pair, {"__module__": kind.__module__})
    module.__class__ = _made[pair]


class SummedGradients(nn.Module):
    """Parameters that all ranks hold and each uses on its part: gradients are summed over ranks.

    In every backward pass, once. So a norm's weight on parts of the sequence, or on some heads,
    gets the gradient of all.
    """

    place: Place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = {n: p for n, p in self._parameters.items() if p is not None and p.requires_grad}
        if not own or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with _exchanged(self, {n: ops.replicate(p, self.place.name) for n, p in own.items()}):
            return super().forward(*args, **kwargs)


@contextmanager
def _exchanged(module: nn.Module, tensors: "dict[str, Tensor]") -> Iterator[None]:
    """Within it, the module's parameters of these names are `tensors`."""
    own = {name: module._parameters[name] for name in tensors}
    for name in own:
        del module._parameters[name]
    module.__dict__.update(tensors)
    try:
        yield
    finally:
        for name in own:
            del module.__dict__[name]
        module._parameters.update(own)


class ScaledVocabRows(VocabParallelEmbedding, nn.Embedding):  # type: ignore[misc]
    """For a subclass of nn.Embedding: its `super().forward(ids)` is the vocabulary-parallel one.

    Behind the subclass, before nn.Embedding.
    """

    def adopt(self, rows: VocabParallelEmbedding) -> None:
        """Takes the parameters and the place of the layer that was made of this table."""
        for name in ("place", "_layouts", "partition", "padding_idx", "sequence", "init_method"):
            self.__dict__[name] = rows.__dict__[name]
        self._parameters["weight"] = rows.weight


class ColumnOfBlock(ColumnParallelLinear):
    """A column-parallel layer whose block has brought the whole input, and sums its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        (weight, into), bias = self._trained_into("weight"), self._trained("bias")
        self._check(x, self.in_features)
        x, weight, bias = casts(x, weight, bias)
        if into is None:
            return product(x, weight, bias)
        return behind([product(x, weight.detach(), bias)], [weight], x, [into])[0]


class ShardedExperts(ShardedModule):
    """Stacked gated experts, gate_up_proj [E, 2 I, H] and down_proj [E, H, I], I sharded.

    The same experts run on every rank, each with some of their middle features: what they give is
    a part of the sum. Tokens and routing weights are alike on all ranks; their gradients are summed
    on the way back.
    """

    def adopt(self, place: Place, partition: Partition) -> None:
        """Takes this rank's shards of its own parameters."""
        self.place = place
        self._layouts = {
            "gate_up_proj": ParameterLayout(1, Partition.joined([partition, partition])),
            "down_proj": ParameterLayout(2, partition),
        }
        for name in self._layouts:
            whole = self._parameters[name]
            assert whole is not None
            self._set_whole(name, whole, whole.requires_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        name = self.place.name
        args = tuple(_replicated(x, name) for x in args)
        kwargs = {key: _replicated(x, name) for key, x in kwargs.items()}
        return ops.all_reduce(super().forward(*args, **kwargs), name)


def _replicated(x: Any, name: str) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return ops.replicate(x, name)
    return x


# --- hooks: what comes into a block and goes out of it


class BlockInput:
    """Before a block whose columns all read its input: brings it once, for all of them.

    Without sequence parallelism the input is whole, and its gradient is summed over the ranks; with
    it the parts are gathered, and the gradient's are summed and scattered.
    """

    def __init__(self, place: Place, sequence: "SequenceSharding | None") -> None:
        self.place, self.sequence = place, sequence

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(args, kwargs, self._brought)

    def _brought(self, x: Tensor) -> Tensor:
        if self.sequence is None:
            return ops.replicate(x, self.place.name)
        dim, sizes = self.sequence.axis(x.shape), self.sequence.sizes(self.place.size)
        return ops.all_gather(x, self.place.name, dim, sizes)


class WholeSequence:
    """Around a module that needs the whole sequence and is not sharded: all ranks do the same."""

    def __init__(self, place: Place, sequence: SequenceSharding) -> None:
        self.place, self.sequence = place, sequence

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(args, kwargs, lambda x: join_sequence(x, self.place, self.sequence))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _first_of(output, lambda x: cut_sequence(x, self.place, self.sequence))


def cut_sequence(x: Tensor, place: Place, sequence: SequenceSharding) -> Tensor:
    """This rank's part of a replicated x; its gradient is gathered."""
    sizes = sequence.cut(x.shape, place.size)
    return ops.split(x, place.name, sequence.axis(x.shape), sizes)


def join_sequence(x: Tensor, place: Place, sequence: SequenceSharding) -> Tensor:
    """The whole of all ranks' parts, replicated; its gradient is alike on all ranks."""
    return ops.gather(x, place.name, sequence.axis(x.shape), sequence.sizes(place.size))


class CutBefore:
    """Before the first of a stack of layers: cuts the sequence."""

    def __init__(self, place: Place, sequence: SequenceSharding) -> None:
        self.place, self.sequence = place, sequence

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(args, kwargs, lambda x: cut_sequence(x, self.place, self.sequence))


class JoinAfter:
    """After the last of a stack of layers: joins the sequence."""

    def __init__(self, place: Place, sequence: SequenceSharding) -> None:
        self.place, self.sequence = place, sequence

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _first_of(output, lambda x: join_sequence(x, self.place, self.sequence))


def _with_first(args: Any, kwargs: Any, change: Any) -> Any:
    """The arguments of a call with its first tensor changed: the activations, in every block."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _first_of(output: Any, change: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

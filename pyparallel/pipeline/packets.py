"""What goes from stage to stage: any nest of tuples, lists and dictionaries, of tensors and plain
values, as tensors in order and a description in JSON."""

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Packet",
    "Shape",
    "TensorShape",
    "as_bytes",
    "empty",
    "from_wire",
    "pack",
    "to_wire",
    "unpack",
]

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_ONE_TENSOR = '{"T": 0}'  # what most stages give; JSON would take longer than a small layer


@dataclass(frozen=True)
class TensorShape:
    """Of a tensor in a packet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Shape:
    """All about a packet but its tensors' numbers.

    Attributes:
        structure: the nest, as JSON; plain values are in it.
        tensors: in the order in which the nest has them.
        plain: it has plain values, which may be others in the next packet.
    """

    structure: str
    tensors: tuple[TensorShape, ...]
    plain: bool

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.tensors))})"

    @property
    def gradients(self) -> tuple[TensorShape, ...]:
        """The tensors whose gradients come back."""
        return tuple(tensor for tensor in self.tensors if tensor.differentiable)


@dataclass
class Packet:
    """A value between stages: its tensors, detached, and its shape."""

    shape: Shape
    tensors: list[Tensor]


def pack(value: Any, differentiable: bool) -> tuple[Shape, list[Tensor]]:
    """The shape of a value and its tensors, as they are.

    Raises:
        TypeError: something in it cannot travel; where it is, and what can.
    """
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        only = TensorShape(value.dtype, tuple(value.shape), differentiable and value.requires_grad)
        return Shape(_ONE_TENSOR, (only,), False), [value]
    tensors: list[Tensor] = []
    plain: list[Any] = []
    structure = json.dumps(_described(value, "the value", tensors, plain))
    shapes = tuple(
        TensorShape(t.dtype, tuple(t.shape), differentiable and t.requires_grad) for t in tensors
    )
    return Shape(structure, shapes, bool(plain)), tensors


# Not functions within functions: one that calls itself is a reference cycle, which would keep the
# tensors, and their graphs, until the garbage collector comes by.
def _described(part: Any, where: str, tensors: list[Tensor], plain: list[Any]) -> Any:
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.is_quantized:
            raise TypeError(f"{where} is a {part.layout} tensor: only dense ones can travel")
        tensors.append(part)
        return {"T": len(tensors) - 1}
    if part is None:
        return None
    if type(part) in (bool, int, float, str):
        plain.append(part)
        return {"V": part}
    if type(part) in (tuple, list):
        key = "t" if type(part) is tuple else "l"
        return {key: [_described(p, f"{where}[{i}]", tensors, plain) for i, p in enumerate(part)]}
    if type(part) is dict and all(type(key) is str for key in part):
        items = part.items()
        return {"d": [[k, _described(p, f"{where}[{k!r}]", tensors, plain)] for k, p in items]}
    raise TypeError(
        f"{where} is a {type(part).__name__}: between stages go tensors, None, bool, int, "
        "float, str, and tuples, lists and dictionaries (with str keys) of these"
    )


def unpack(shape: Shape, tensors: list[Tensor]) -> Any:
    """The value again."""
    if shape.structure == _ONE_TENSOR:
        return tensors[0]
    return _built(json.loads(shape.structure), tensors)


def _built(part: Any, tensors: list[Tensor]) -> Any:
    if part is None:
        return None
    ((key, value),) = part.items()
    if key == "T":
        return tensors[value]
    if key == "V":
        return value
    if key == "d":
        return {name: _built(inner, tensors) for name, inner in value}
    parts = [_built(inner, tensors) for inner in value]
    return tuple(parts) if key == "t" else parts


def to_wire(shape: Shape) -> bytes:
    rows = [
        [str(t.dtype).removeprefix("torch."), list(t.shape), t.differentiable]
        for t in shape.tensors
    ]
    return json.dumps([shape.structure, rows, shape.plain]).encode()


def from_wire(data: bytes) -> Shape:
    """What `to_wire` made; everything is checked, for it comes from another process.

    Raises:
        ValueError: it is no description of a packet.
    """
    try:
        structure, rows, plain = json.loads(data)
        tensors = tuple(TensorShape(_DTYPES[d], tuple(s), bool(g)) for d, s, g in rows)
        sizes = [size for tensor in tensors for size in tensor.shape]
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError(f"sizes {sizes}")
        shape = Shape(str(structure), tensors, bool(plain))
        unpack(shape, [torch.empty(0)] * len(tensors))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"a message that describes no packet: {error!r}") from error
    return shape


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes in one dimension, for a transport that knows no dtypes; a view where it is
    contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def empty(shape: TensorShape, device: torch.device) -> Tensor:
    return torch.empty(shape.shape, dtype=shape.dtype, device=device)

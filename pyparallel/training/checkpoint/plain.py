"""Plain data as JSON and tensors, and back: the same values and types, to the bit.

JSON has no bytes, tuples, infinities or keys that are numbers: those are written as {"$kind": ...}.
Nothing but data is known here: an object of any other type is refused, and reading makes nothing
but these types.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["bytes_of", "decoded", "encoded"]

DEEPEST = 64  # levels of a nested value


def encoded(value: Any, keep: Callable[[Tensor], int], where: str, depth: int = 0) -> Any:
    """`value` as JSON has it. `keep` takes each tensor and gives the number by which `decoded` will
    ask for it.

    Raises:
        TypeError: something in it is no plain data; says where and what.
    """
    if depth > DEEPEST:
        raise TypeError(f"{where} is nested more than {DEEPEST} levels deep")
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        return {"$tensor": keep(value)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [encoded(v, keep, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict):
        pairs = [
            (
                encoded(k, keep, f"a key of {where}", depth + 1),
                encoded(v, keep, f"{where}[{k!r}]", depth + 1),
            )
            for k, v in value.items()
        ]
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return dict(pairs)
        return {"$dict": [list(pair) for pair in pairs]}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint holds "
        "None, bool, int, float, str, bytes, list, tuple, dict and tensors"
    )


def decoded(value: Any, tensor: Callable[[int], Tensor]) -> Any:
    """What `encoded` was given. `tensor` gives each tensor by its number.

    Raises:
        ValueError: it is no such thing.
    """
    if value is None or isinstance(value, bool | str | int | float):
        return value
    if isinstance(value, list):
        return [decoded(item, tensor) for item in value]
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where plain data was expected")
    kinds = [key for key in value if key.startswith("$")]
    if not kinds:
        return {key: decoded(item, tensor) for key, item in value.items()}
    if len(value) == 1:
        kind, inner = next(iter(value.items()))
        if kind == "$tensor" and type(inner) is int:
            return tensor(inner)
        if kind == "$bytes" and isinstance(inner, str):
            return bytes.fromhex(inner)
        if kind == "$float" and inner in ("nan", "inf", "-inf"):
            return float(inner)
        if kind == "$tuple" and isinstance(inner, list):
            return tuple(decoded(item, tensor) for item in inner)
        if kind == "$dict" and isinstance(inner, list):
            return {decoded(k, tensor): decoded(v, tensor) for k, v in inner}
    raise ValueError(f"unknown kind {kinds} in plain data")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor; they live as long as the view does."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)

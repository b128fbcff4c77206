"""Which engine runs an attention's steps, and why."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pyparallel.attention import native, plain, triton_engine
from pyparallel.attention.mask import Mask
from pyparallel.errors import InvalidArgument

__all__ = ["AttentionEngine", "choose_engine", "engine_names"]


@dataclass(frozen=True)
class AttentionEngine:
    """The two steps of one implementation, as plain.py describes them."""

    name: str
    forward_step: Callable[..., None]
    backward_step: Callable[..., None]
    # Why it cannot take these operands; empty: it can.
    unfit: Callable[[Tensor, Tensor, Tensor, Mask], str]
    reason: str  # why it is taken where it can be


_PLAIN = AttentionEngine(
    "plain",
    plain.forward_step,
    plain.backward_step,
    lambda q, k, v, mask: "",
    "plain torch takes every dtype and device",
)
_NATIVE = AttentionEngine(
    "native",
    native.forward_step,
    native.backward_step,
    native.unfit,
    "tiles in C++ on the CPU",
)
_TRITON = AttentionEngine(
    "triton",
    triton_engine.forward_step,
    triton_engine.backward_step,
    triton_engine.unfit,
    "Triton kernels on CUDA",
)
# The first that fits is taken.
_ENGINES: list[AttentionEngine] = [_NATIVE, _TRITON, _PLAIN]


def engine_names() -> list[str]:
    """All engines, those first that are tried first."""
    return [engine.name for engine in _ENGINES]


def choose_engine(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, name: str | None = None
) -> tuple[AttentionEngine, str]:
    """The engine for such operands, and why; `name` asks for one of `engine_names`.

    Raises:
        ValueError: `name` is no engine, or cannot take these operands.
    """
    passed: list[str] = []
    for engine in _ENGINES:
        if name is not None and engine.name != name:
            continue
        why = engine.unfit(q, k, v, mask)
        if not why:
            reason = "asked for" if name is not None else engine.reason
            return engine, "; ".join([*passed, f"{engine.name}: {reason}"])
        if name is not None:
            raise InvalidArgument(f"engine {name!r} cannot run this attention: {why}")
        passed.append(f"not {engine.name}: {why}")
    raise InvalidArgument(f"engine is {name!r}; expected one of {', '.join(engine_names())}")

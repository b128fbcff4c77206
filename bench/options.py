"""What a run was asked to do: made by the command line, handed to the ranks as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Options:
    quick: bool = False
    worlds: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()  # empty: all
    sizes: tuple[int, ...] = ()  # empty: the suite's own
    shapes: tuple[tuple[int, int, int], ...] = ()  # (M, N, K); empty: the suite's own
    rows: tuple[int, ...] = ()  # of suite attention; empty: the suite's own
    heads: tuple[int, ...] = ()  # of suite attention: of queries and of keys; empty: its own
    dtypes: tuple[str, ...] = ()  # empty: all
    peers: tuple[str, ...] = ()  # beyond stock PyTorch
    device: str = "cpu"
    busy: bool = False
    seconds: float = 0.0  # for the cases of one world size; 0: two per case
    timeout: float = 60.0  # of one wait between ranks
    seed: int = 0
    # Other code for a provider, as name -> module:class. The tests put wrong ones here.
    replace: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Options:
        for key in ("worlds", "ops", "sizes", "rows", "heads", "dtypes", "peers"):
            data[key] = tuple(data[key])
        data["shapes"] = tuple(tuple(shape) for shape in data["shapes"])
        return Options(**data)

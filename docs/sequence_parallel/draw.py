"""Draws the pictures of docs/sequence_parallel.md: `python docs/sequence_parallel/draw.py`."""

from collections.abc import Iterator
from pathlib import Path

from pyparallel.attention import Sharding
from pyparallel.viz import sharding_svg

ROWS, RANKS = 16, 4
HERE = Path(__file__).parent


def pictures() -> Iterator[tuple[str, str]]:
    """(name of the file, the picture)."""
    for name in ("contiguous", "zigzag", "striped"):
        yield f"{name}.svg", picture(f"{name}, causal", Sharding.of(name, ROWS, RANKS))
    cut = Sharding.of("contiguous", ROWS, RANKS)
    yield "window.svg", picture("contiguous, window of 3", cut, 3)
    borders = [0, 3, 5, 9, 16]
    cut = Sharding.of("contiguous", ROWS, RANKS, cu_seqlens=borders)
    yield "documents.svg", picture("contiguous, documents of 3, 2, 4 and 7", cut)
    cut = Sharding.of("zigzag", ROWS, RANKS, cu_seqlens=borders, per_document=True)
    yield "per_document.svg", picture("zigzag of each document", cut)


def picture(title: str, cut: Sharding, window: int = ROWS) -> str:
    owners = [0] * ROWS
    for rank in range(RANKS):
        for row in cut.rows(rank).tolist():
            owners[row] = rank
    document = [sum(row >= border for border in cut.borders[1:]) for row in range(ROWS)]
    return sharding_svg(
        owners,
        lambda q, k: document[q] == document[k] and q - window <= k <= q,
        title,
    )


if __name__ == "__main__":
    for name, text in pictures():
        (HERE / name).write_text(text)

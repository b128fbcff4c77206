"""Which tile, rank or chunk comes next: pure integer functions, one source for device and host.

A kernel calls them as they are; the host calls what `on_host` gives: the same source on Python
integers. They use only +, -, *, //, % on numbers that are not negative (a device rounds -1 // 2
towards zero, Python does not), and call nothing.

Every order visits each item exactly once, for all sizes: tests/triton_kernels/test_tile_order.py.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl  # noqa: F401  (the interpreter wants it among a function's globals)

__all__ = [
    "chunk_count",
    "farthest_first",
    "first_of_program",
    "grouped_tile",
    "nearest_first",
    "on_host",
    "tile_count",
]


def on_host(order: Any) -> Callable[..., Any]:
    """The order as a function of Python integers."""
    function: Callable[..., Any] = order.fn
    return function


@triton.jit
def tile_count(size, block):
    """Tiles of `block` that cover `size`."""
    return (size + block - 1) // block


@triton.jit
def chunk_count(rows, chunk_rows):
    """Chunks of a shard of `rows` rows: an empty shard has none."""
    return (rows + chunk_rows - 1) // chunk_rows


@triton.jit
def grouped_tile(index, tiles_m, tiles_n, group_m):
    """(tile_m, tile_n) of place `index` among tiles_m * tiles_n.

    Groups of `group_m` rows of tiles are walked column by column, so that programs which run
    together share operands in cache. The last group is as narrow as what is left: a fixed width
    there visits tiles twice and others never.
    """
    in_group = group_m * tiles_n
    group = index // in_group
    first_m = group * group_m
    width = group_m
    if tiles_m - first_m < group_m:
        width = tiles_m - first_m
    inside = index - group * in_group
    return first_m + inside % width, inside // width


@triton.jit
def first_of_program(before, program, programs):
    """Where `program` begins in a list that follows `before` items of earlier lists.

    Items are dealt in turn over all lists: item i of this list belongs to program
    (before + i) % programs. A program takes every `programs`-th item from the first on.
    """
    return (program + programs - before % programs) % programs


@triton.jit
def nearest_first(step, rank, world):
    """The rank visited at `step`: rank itself, then rank + 1, rank + 2, ... round the ring.

    At every step all ranks visit different ones, so no source is asked by two at once.
    """
    return (rank + step) % world


@triton.jit
def farthest_first(step, rank, world):
    """The rank visited at `step`: rank - 1 first (the farthest along the ring), rank itself last.

    What peers wait for is made before our own part, and at every step all ranks visit different
    ones.
    """
    return (rank + world - 1 - step) % world

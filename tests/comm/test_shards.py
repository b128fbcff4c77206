"""Pure integers: shards of any tensor along any dimension add up to the whole."""

import itertools
import math

import pytest

from pyparallel.comm.shards import shards_of_whole, whole_from_shard
from pyparallel.errors import InvalidArgument


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(24,), (24, 5), (3, 24, 2), (0, 24)])
def test_even_shards_divide_the_whole(shape, world_size):
    for dim in range(-len(shape), len(shape)):
        if shape[dim] % world_size:
            continue
        shards = shards_of_whole(shape, dim, None, world_size)
        assert sum(shards.counts) == math.prod(shape)
        assert len(set(shards.counts)) == 1
        assert shards.shard_shape(0)[shards.dim] * world_size == shape[dim]


def test_uneven_shards_round_trip():
    for sizes in itertools.product([0, 1, 5], repeat=3):
        whole = shards_of_whole((4, sum(sizes), 3), 1, sizes, 3)
        assert whole.counts == [12 * n for n in sizes]
        for rank in range(3):
            again = whole_from_shard(whole.shard_shape(rank), 1, sizes, rank, 3)
            assert again == whole


def test_a_scalar_counts_as_one_row():
    assert whole_from_shard((), 0, None, 1, 3).shape == (3,)


def test_a_remainder_is_refused_and_uneven_sizes_are_offered():
    with pytest.raises(InvalidArgument, match=r"does not divide by 4 .*sizes=\[3, 3, 2, 2\]"):
        shards_of_whole((10, 2), 0, None, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shards_of_whole((10,), 1, None, 2), r"dim is 1, .* \[10\]; expected -1 to 0"),
        (lambda: shards_of_whole((), 0, None, 1), "0-dimensional"),
        (lambda: shards_of_whole((10,), 0, [5, 4], 2), "add up to 9, but dim 0 of x is 10"),
        (lambda: shards_of_whole((10,), 0, [11, -1], 2), "none negative"),
        (lambda: shards_of_whole((10,), 0, [10], 2), "expected 2 sizes"),
        (lambda: whole_from_shard((4, 3), 0, [3, 4], 0, 2), r"sizes\[0\] is 3, but dim 0 .* is 4"),
    ],
)
def test_misfits_are_named(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()

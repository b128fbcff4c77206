"""How dimensions fall onto ranks: pure integers, every size and world size of a grid. All in CI."""

import itertools

import pytest

from pyparallel.errors import InvalidArgument
from pyparallel.layers.partition import Partition, Run, even_sizes, split_heads

WORLDS = [1, 2, 3, 4, 8]


def indices(partition: Partition, rank: int) -> list[int | None]:
    """The whole's index at each local index; None is padding."""
    found: list[int | None] = []
    for run in partition.runs[rank]:
        found += [*range(run.start, run.start + run.length), *[None] * run.padding]
    return found


def everything(partition: Partition) -> list[int | None]:
    return [i for rank in range(partition.world_size) for i in indices(partition, rank)]


@pytest.mark.parametrize("world", WORLDS)
def test_even_shards_are_the_whole_in_order(world):
    for size in [0, 1, 2, 7, 8, 10, 50257]:
        partition = Partition.even(size, world)
        assert everything(partition) == list(range(size))
        sizes = [partition.local_size(rank) for rank in range(world)]
        assert sizes == even_sizes(size, world)
        assert max(sizes) - min(sizes) <= 1
        assert not partition.shared
        assert not any(partition.is_padded(rank) for rank in range(world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("multiple", [2, 8, 64])
def test_padded_shards_are_of_one_size_and_lose_nothing(world, multiple):
    for size in [1, 7, 64, 100, 50257]:
        partition = Partition.even(size, world, multiple_of=multiple)
        real = [i for i in everything(partition) if i is not None]
        assert real == list(range(size))
        sizes = {partition.local_size(rank) for rank in range(world)}
        assert len(sizes) == 1
        assert sizes.pop() % multiple == 0
        for rank in range(world):
            padded = [i for i, whole in enumerate(indices(partition, rank)) if whole is None]
            assert [i for part in partition.padding(rank) for i in part] == padded
            assert partition.is_padded(rank) == bool(padded)
            assert partition.real_size(rank) == partition.local_size(rank) - len(padded)


def test_units_stay_whole():
    partition = Partition.even(5 * 64, 3, unit=64)
    assert [partition.local_size(rank) for rank in range(3)] == [128, 128, 64]


HEADS = [
    (heads, kv)
    for heads in [1, 2, 3, 4, 6, 8, 9, 12, 14, 32]
    for kv in range(1, heads + 1)
    if heads % kv == 0
]


@pytest.mark.parametrize("world", WORLDS)
def test_every_query_head_meets_its_own_kv_head(world):
    """On each rank, query head i // queries_per_kv reads the kv head it reads in the whole."""
    for heads, kv in HEADS:
        split = split_heads(heads, kv, 2, world)
        assert everything(split.query) == list(range(heads * 2))
        assert set(everything(split.kv)) == set(range(kv * 2))
        for rank in range(world):
            queries = [i // 2 for i in indices(split.query, rank)[::2]]
            kvs = [i // 2 for i in indices(split.kv, rank)[::2]]
            assert len(queries) == len(kvs) * split.queries_per_kv == split.query_heads(rank)
            assert len(kvs) == split.kv_heads(rank)
            for local, head in enumerate(queries):
                assert kvs[local // split.queries_per_kv] == head // (heads // kv)


@pytest.mark.parametrize(
    ("heads", "kv", "world", "queries", "kvs"),
    [
        (8, 2, 4, [2, 2, 2, 2], [1, 1, 1, 1]),  # fewer kv heads than ranks: each on two ranks
        (8, 2, 3, [3, 3, 2], [3, 3, 2]),
        (32, 8, 4, [8] * 4, [2] * 4),
        (14, 2, 4, [4, 4, 3, 3], [4, 4, 3, 3]),
        (2, 1, 4, [1, 1, 0, 0], [1, 1, 0, 0]),
    ],
)
def test_busiest_rank_decides(heads, kv, world, queries, kvs):
    split = split_heads(heads, kv, 16, world)
    assert [split.query_heads(rank) for rank in range(world)] == queries
    assert [split.kv_heads(rank) for rank in range(world)] == kvs


@pytest.mark.parametrize("world", WORLDS)
def test_copies_are_found_and_counted_once(world):
    for (heads, kv), dim in itertools.product(HEADS, [1, 3]):
        split = split_heads(heads, kv, dim, world)
        partition = Partition.joined([split.query, split.kv, split.kv])
        copies = everything(partition)
        twice = [i for i in range(partition.size) if copies.count(i) > 1]
        assert [i for part in partition.shared for i in part] == twice
        counted: list[int] = []
        for rank in range(world):
            mine = indices(partition, rank)
            for segment in partition.counted(rank):
                whole = range(segment.whole, segment.whole + segment.length)
                assert mine[segment.local : segment.local + segment.length] == list(whole)
                counted += whole
            places = {}
            for segment in partition.shared_segments(rank):
                for i in range(segment.length):
                    places[segment.local + i] = twice[segment.whole + i]
            expected = {i: whole for i, whole in enumerate(mine) if whole in set(twice)}
            assert places == expected
        assert sorted(counted) == list(range(partition.size))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: split_heads(6, 4, 8, 2), r"num_kv_heads could be one of \[1, 2, 3, 6\]"),
        (lambda: split_heads(0, 1, 8, 2), "expected 1 or more"),
        (lambda: Partition.even(10, 2, unit=4), "10 is no multiple of the unit 4"),
        (lambda: Partition.even(8, 2, unit=4, multiple_of=8), "cannot pad units"),
        (lambda: Partition.even(8, 2, multiple_of=0), "expected 1 or more"),
        (lambda: Partition.even(-1, 2), "expected >= 0"),
        (lambda: Partition(4, ((Run(0, 2),), (Run(3, 1),))), "no rank holds 2 to 3 of 4"),
        (lambda: Partition(4, ((Run(0, 5),),)), "does not lie in a whole of 4"),
        (
            lambda: Partition.joined([Partition.even(4, 2), Partition.even(4, 3)]),
            "over the same ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(InvalidArgument, match=says):
        make()

"""Orders visit everything exactly once: pure integers, the source that kernels run.

Layers of proof: all small sizes; random large ones; the order that broke elsewhere as a control.
That the device runs the same source is part of test_gemm.py (outputs are poisoned first).
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.triton_kernels import tile_order

grouped_tile = tile_order.on_host(tile_order.grouped_tile)
first_of_program = tile_order.on_host(tile_order.first_of_program)
nearest_first = tile_order.on_host(tile_order.nearest_first)
farthest_first = tile_order.on_host(tile_order.farthest_first)
tile_count = tile_order.on_host(tile_order.tile_count)
chunk_count = tile_order.on_host(tile_order.chunk_count)


def _is_permutation(order, tiles_m, tiles_n, group_m):
    visited = {order(i, tiles_m, tiles_n, group_m) for i in range(tiles_m * tiles_n)}
    return visited == set(itertools.product(range(tiles_m), range(tiles_n)))


def _fixed_width(index, tiles_m, tiles_n, group_m):
    """The fault: the last group as wide as the others."""
    group, inside = divmod(index, group_m * tiles_n)
    return group * group_m + inside % group_m, inside // group_m


def test_grouped_order_of_all_small_grids():
    for tiles_m, tiles_n, group_m in itertools.product(range(1, 14), range(1, 8), range(1, 11)):
        assert _is_permutation(grouped_tile, tiles_m, tiles_n, group_m), (tiles_m, tiles_n, group_m)


@pytest.mark.parametrize("size", [1152, 1280, 1536, 1664, 2560])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_grouped_order_where_groups_do_not_divide(size, block):
    tiles = tile_count(size, block)
    for group_m in (1, 4, 8):
        assert _is_permutation(grouped_tile, tiles, tiles, group_m)


def test_a_fixed_width_would_be_found():
    tiles = tile_count(1152, 128)
    assert not _is_permutation(_fixed_width, tiles, tiles, 8)


def test_a_group_walks_its_rows_first():
    assert [grouped_tile(i, 5, 2, 3) for i in range(10)] == [
        *((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)),
        *((3, 0), (4, 0), (3, 1), (4, 1)),
    ]


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 64), st.data())
@settings(max_examples=200, deadline=None)
def test_grouped_order_of_large_grids_is_injective(tiles_m, tiles_n, group_m, data):
    place = st.integers(0, tiles_m * tiles_n - 1)
    one, other = data.draw(place), data.draw(place)
    a = grouped_tile(one, tiles_m, tiles_n, group_m)
    b = grouped_tile(other, tiles_m, tiles_n, group_m)
    assert 0 <= a[0] < tiles_m
    assert 0 <= a[1] < tiles_n
    assert (a == b) == (one == other)


@pytest.mark.parametrize("order", [nearest_first, farthest_first])
def test_ring_orders_are_permutations_of_steps_and_of_ranks(order):
    for world in [*range(1, 17), 72]:
        ranks = set(range(world))
        assert all({order(s, r, world) for s in range(world)} == ranks for r in range(world))
        assert all({order(s, r, world) for r in range(world)} == ranks for s in range(world))


def test_rings_begin_and_end_at_home():
    for world, rank in ((w, r) for w in range(1, 9) for r in range(w)):
        assert nearest_first(0, rank, world) == rank
        assert farthest_first(world - 1, rank, world) == rank
        if world > 1:
            assert nearest_first(1, rank, world) == (rank + 1) % world


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 17),
)
@settings(max_examples=200, deadline=None)
def test_lists_are_dealt_to_programs_without_gap_or_repeat(lengths, programs):
    dealt = []
    for program in range(programs):
        before = 0
        mine = []
        for number, length in enumerate(lengths):
            first = first_of_program(before, program, programs)
            mine += [(number, i) for i in range(first, length, programs)]
            before += length
        dealt.append(mine)
    items = [(number, i) for number, length in enumerate(lengths) for i in range(length)]
    assert sorted(itertools.chain(*dealt)) == items
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1  # over all lists, not one by one


@given(st.integers(0, 2**31), st.integers(1, 2**20))
@settings(max_examples=200, deadline=None)
def test_counts_cover(size, block):
    for count in (tile_count, chunk_count):
        assert (count(size, block) - 1) * block < size <= count(size, block) * block

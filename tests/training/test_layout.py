"""Layouts of ranks, as pure integers.

Layers: known tables of 16 ranks in four orders; properties over all small layouts; messages.
"""

import random
import re
from itertools import permutations, product

import pytest

from pyparallel.training import AXES, ORDERS, Coordinates, ParallelConfig, check_batch

# 16 ranks, 2 along each axis: written by hand, from the digits of the rank. A group along the axis
# of stride s holds r and r + s.
STRIDES = {
    "tp-sp-pp-dp": {"tp": 1, "sp": 2, "pp": 4, "dp": 8},
    "megatron": {"tp": 1, "sp": 2, "dp": 4, "pp": 8},
    "torchtitan": {"tp": 1, "sp": 2, "dp": 4, "pp": 8},
    "pp-dp-sp-tp": {"pp": 1, "dp": 2, "sp": 4, "tp": 8},
}


@pytest.mark.parametrize("order", STRIDES)
def test_groups_of_sixteen_ranks(order):
    config = ParallelConfig(dp=2, tp=2, sp=2, pp=2, order=order)
    for axis, stride in STRIDES[order].items():
        expected = [[r, r + stride] for r in range(16) if not r // stride % 2]
        assert config.groups(axis) == expected
    assert config.groups("tp", "sp", "dp", "pp") == [list(range(16))]
    assert config.groups() == [[rank] for rank in range(16)]
    if order == "megatron":  # dp and sp: gradients; tp and pp: one model
        assert config.groups("dp", "sp")[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert config.groups("tp", "pp")[0] == [0, 1, 8, 9]
        assert config.coordinates(13) == Coordinates(pp=1, dp=1, sp=0, tp=1)
    if order == "tp-sp-pp-dp":
        assert config.groups("dp", "sp")[0] == [0, 2, 8, 10]
        assert config.coordinates(13) == Coordinates(dp=1, pp=1, sp=0, tp=1)


def layouts():
    for order in permutations(AXES):
        yield ParallelConfig(dp=2, tp=3, pp=2, order="-".join(order))
    sizes = [(1, 1, 1, 1), (3, 1, 1, 1), (2, 2, 3, 1), (1, 2, 5, 2)]
    for (dp, tp, sp, pp), order in product(sizes, STRIDES):
        yield ParallelConfig(dp=dp, tp=tp, sp=sp, pp=pp, order=order)


def test_coordinates_and_groups_are_consistent():
    """Rank and coordinates are inverse; the groups of every set of axes cut the world into equal
    parts; order along one axis is that of its coordinate."""
    for config in layouts():
        world = range(config.world_size)
        assert [config.rank(config.coordinates(r)) for r in world] == list(world)
        for number in range(16):
            axes = [a for i, a in enumerate(AXES) if number >> i & 1]
            groups = config.groups(*axes)
            assert sorted(r for g in groups for r in g) == list(world)
            assert {len(g) for g in groups} == {config.size(*axes)}
            for group in groups:
                fixed = {
                    tuple(getattr(config.coordinates(r), a) for a in AXES if a not in axes)
                    for r in group
                }
                assert len(fixed) == 1
                assert all(config.ranks(r, *axes) == group for r in group)
                if len(axes) == 1:
                    along = [getattr(config.coordinates(r), axes[0]) for r in group]
                    assert along == list(range(len(group)))


def test_neighbours():
    for config in layouts():
        for rank in range(config.world_size):
            near, here = config.neighbours(rank), config.coordinates(rank)
            ring = config.ranks(rank, "sp")
            assert near.ring_next == ring[(here.sp + 1) % config.sp]
            assert config.neighbours(near.ring_next).ring_previous == rank
            assert (near.previous_stage is None) == (here.pp == 0)
            assert (near.next_stage is None) == (here.pp == config.pp - 1)
            if near.next_stage is not None:
                assert config.neighbours(near.next_stage).previous_stage == rank
                assert config.coordinates(near.next_stage).pp == here.pp + 1


def test_names_of_orders():
    for name, order in ORDERS.items():
        named = ParallelConfig(dp=2, tp=2, sp=3, pp=2, order=name)
        assert named.table() == ParallelConfig(dp=2, tp=2, sp=3, pp=2, order=order).table()
    table = ParallelConfig(dp=2, pp=2, order="megatron").table()
    assert table.splitlines()[0].split() == ["rank", "pp", "dp", "sp", "tp"]
    assert table.splitlines()[3].split() == ["2", "1", "0", "0", "0"]
    assert "pp groups: 0 2 | 1 3" in table


def test_a_wrong_world_names_the_nearest_layouts():
    config = ParallelConfig(dp=2, tp=2, pp=2, zero=3, replicas=2)
    config.check(8)
    with pytest.raises(ValueError, match="2 x 2 x 1 x 2 = 8 ranks, and there are 12") as error:
        config.check(12)
    assert "Nearest layouts of 12: dp=3 tp=2 sp=1 pp=2" in str(error.value)
    for world in (*range(1, 25), 97, 128):
        for near in config.nearest(world):
            near.check(world)
            assert near.zero == 3
    assert config.nearest(16)[0] == ParallelConfig(dp=4, tp=2, pp=2, zero=3, replicas=2)
    assert config.nearest(8)[0] == config


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dp": 0}, "dp=0: a whole number, 1 or more"),
        ({"tp": True}, "tp=True"),
        ({"tp": 2.0}, r"tp=2\.0"),
        ({"order": "tp-cp-dp-pp"}, "the four axes tp, sp, pp, dp once each"),
        ({"order": "tp-sp-dp"}, "megatron, megatron-tp-pp-dp, torchtitan"),
        ({"order": 3}, "a string"),
        ({"zero": 4}, "zero=4: 0, 1, 2 or 3"),
        ({"dp": 6, "zero": 3, "replicas": 4}, "does not divide dp x sp = 6 x 1 = 6; 1, 2, 3, 6"),
        ({"dp": 4, "zero": 1, "replicas": 2}, "hybrid sharding is of zero 2 and 3"),
        ({"tp_sequence_parallel": True}, "no effect with tp=1"),
        ({"offload_optimizer": 1}, "True or False"),
        ({"microbatch_gathers": "no"}, "is not one of"),
        ({"zero": 3, "pp": 2, "microbatch_gathers": "refuse"}, "gathers its weights anew"),
        ({"zero": 2, "pp": 2, "microbatch_gathers": "refuse"}, "nothing is saved"),
    ],
)
def test_what_cannot_be(options, text):
    with pytest.raises(ValueError, match=text):
        ParallelConfig(**options)


def test_all_misfits_at_once():
    with pytest.raises(ValueError, match=r"dp=-1.*zero=7"):
        ParallelConfig(dp=-1, zero=7)


def test_misplaced_ranks_and_axes():
    config = ParallelConfig(dp=2, tp=2)
    for rank in (-1, 4, True, 1.0):
        with pytest.raises(ValueError, match="ranks 0 to 3"):
            config.coordinates(rank)
    with pytest.raises(ValueError, match="tp=-1 of 2, dp=2 of 2"):
        config.rank(Coordinates(dp=2, tp=-1))
    for axes in (("cp",), ("dp", "dp")):
        with pytest.raises(ValueError, match="expected some of"):
            config.ranks(0, *axes)


def test_batches():
    """The three numbers are named, and what would fit."""
    rng = random.Random(1)
    for _ in range(50):
        micro, count, dp = (rng.randint(1, 9) for _ in range(3))
        check_batch(micro * count * dp, micro, count, dp)
        with pytest.raises(ValueError, match="is not micro_batch x microbatches x dp"):
            check_batch(micro * count * dp + 1, micro, count, dp)
    text = (
        "global_batch=32 is not micro_batch x microbatches x dp = 2 x 3 x 4 = 24; global_batch=24 "
        "or microbatches=4 would fit"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        check_batch(32, 2, 3, 4)

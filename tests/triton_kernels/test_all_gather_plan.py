"""Layout and plan of all_gather_gemm.py: pure functions."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.triton_kernels import all_gather_plan as plans
from pyparallel.triton_kernels.all_gather_plan import AllGatherLayout, AllGatherPlan, Shards
from pyparallel.triton_kernels.gemm import TileConfig

TILES = TileConfig()


def _fields(layout):
    """(offset, bytes) of everything that a layout places."""
    yield layout.control, 8 * (plans.USED.value + layout.buffers)
    yield layout.failed, 8
    for source in range(layout.world):
        for chunk in range(layout.max_chunks):
            yield layout.pushed(source, chunk), 8
            yield layout.pulled(source, chunk), 8
        yield layout.ready + source * plans.LINE_BYTES, 8
        yield layout.done + source * plans.LINE_BYTES, 8
    for buffer in range(layout.buffers):
        yield layout.scales(buffer), layout.max_rows * 4
        yield layout.rows(buffer), layout.row_bytes


@given(
    st.builds(
        AllGatherLayout,
        world=st.integers(1, 9),
        row_bytes=st.integers(0, 10**7),
        max_rows=st.integers(0, 10**5),
        max_chunks=st.integers(1, 17),
        buffers=st.integers(1, 4),
    )
)
@settings(max_examples=40, deadline=None)
def test_fields_share_no_line(layout):
    fields = sorted([*_fields(layout), (layout.nbytes, 0)])
    for (offset, nbytes), (following, _) in itertools.pairwise(fields):
        assert offset % plans.LINE_BYTES == 0
        assert offset + nbytes <= following
    assert all(layout.rows(b) % 256 == 0 for b in range(layout.buffers))


@given(
    st.lists(st.integers(0, 10**5), min_size=1, max_size=9).map(tuple),
    st.integers(1, 2**15),
    st.sampled_from([16, 64, 128]),
)
@settings(max_examples=40, deadline=None)
def test_what_is_chosen_fits(sizes, bytes_of_row, block_m):
    layout = AllGatherLayout(len(sizes), sum(sizes) * bytes_of_row, sum(sizes))
    tiles = TileConfig(block_m=block_m)
    plan = plans.choose(tiles, sizes, bytes_of_row, layout)
    assert layout.why_not(sizes, bytes_of_row, plan.chunk_rows) == ""
    assert plan.chunk_rows % block_m == 0
    assert plan == plans.choose(tiles, sizes, bytes_of_row, layout)
    every = plans.candidates(tiles, sizes, bytes_of_row, layout)
    fitting = [candidate.plan for candidate in every if not candidate.excluded]
    assert plan in fitting
    assert len(set(fitting)) == len(fitting)
    assert len(every) == 10


def test_small_shards_are_pulled_and_large_ones_pushed_in_chunks():
    layout = AllGatherLayout(4, 1 << 30, 1 << 20)
    small = plans.choose(TILES, (16,) * 4, 8192, layout)
    assert (small.mode, small.chunk_rows) == ("pull", 128)
    large = plans.choose(TILES, (2048,) * 4, 16384, layout)
    assert (large.mode, large.chunk_rows) == ("push", 128)
    reasons = {c.excluded for c in plans.candidates(TILES, (16,) * 4, 8192, layout)}
    assert reasons == {"", "chunks as large as those of an earlier candidate"}


def test_what_does_not_fit_is_no_choice():
    layout = AllGatherLayout(2, row_bytes=100, max_rows=10)
    with pytest.raises(
        ValueError, match="12 rows of 10 bytes; the workspace holds 10 rows and 100"
    ):
        plans.choose(TILES, (6, 6), 10, layout)
    # 51200 columns are no matter of the workspace: only rows are gathered.
    assert plans.choose(TILES, (5, 5), 10, layout).chunk_rows == 128
    with pytest.raises(ValueError, match="world is 0; expected 1 or more"):
        AllGatherLayout(0, 1, 1)
    with pytest.raises(ValueError, match="20 buffers; 1 to 14 fit"):
        AllGatherLayout(2, 1, 1, buffers=20)


def test_shards():
    shards = Shards([3, 0, 5], "cpu")
    assert shards.starts == (0, 3, 3, 8)
    assert shards.table.tolist() == [0, 3, 3, 8]
    assert [shards.chunks(rank, 2) for rank in range(3)] == [
        [(0, 2), (2, 3)],
        [],
        [(3, 5), (5, 7), (7, 8)],
    ]
    for sizes in ((3, -1), (2**30, 2**30)):
        with pytest.raises(ValueError, match="expected 0 to 2\\^31 - 1 together"):
            Shards(sizes, "cpu")


def test_what_ranks_compare():
    """All that must be equal is in the signature; tiles are not."""
    plan = AllGatherPlan(TILES, 128)
    value = plan.signature((4, 4), 64)
    assert value == plans.with_tiles(plan, TileConfig(64)).signature((4, 4), 64)
    others = [
        AllGatherPlan(TILES, 64).signature((4, 4), 64),
        AllGatherPlan(TILES, 128, 1).signature((4, 4), 64),
        plan.signature((4, 5), 64),
        plan.signature((4, 4), 65),
    ]
    assert len({value, *others}) == 5

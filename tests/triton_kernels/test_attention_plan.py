"""Which blocks attention meets: pure integers, against a walk over all pairs of rows.

Layers: integers only (here). A plan must hold every visible pair exactly once, call full only what
every row of a tile sees, and hold no block that lies beyond the reach of all its rows.
"""

import random

import pytest
import torch

from pyparallel.triton_kernels.flash_attention_plan import (
    NO_LIMIT,
    device_plan,
    pieces_of,
    plan,
    reach,
    rows_outside,
)


def _pairs(own, other, before, after):
    """Rows (a, b) that see each other."""

    def rows(pieces):
        for begin, length, position, stride, document in pieces:
            for i in range(length):
                yield begin + i, position + i * stride, document

    others = list(rows(other))
    return {
        (a, b)
        for a, at, document in rows(own)
        for b, there, its in others
        if document == its and at - before <= there <= at + after
    }


def _check(own, other, before, after, own_block, other_block, edge, short):
    """The plan's blocks against the pairs."""
    want = _pairs(own, other, before, after)
    found = plan(own, other, before, after, own_block, other_block, edge, short)
    got, full, masked, owned = [], 0, 0, []
    for begin, rows, position, stride, document, first, last, _ in found.tiles:
        assert 0 < rows <= own_block
        owned += range(begin, begin + rows)
        by_row = {begin + i: position + i * stride for i in range(rows)}
        assert any(
            p[4] == document
            and p[0] <= begin
            and begin + rows <= p[0] + p[1]
            and position == p[2] + (begin - p[0]) * p[3]
            for p in own
        )
        for start, full_end, end, at, step in found.segments[first:last]:
            assert start <= full_end <= end
            assert start < end
            assert (full_end - start) % other_block == 0
            full += (full_end - start) // other_block
            masked += -(-(end - full_end) // edge)
            assert not (short and rows < own_block and full_end > start)
            seen = {
                (a, b)
                for a, position_a in by_row.items()
                for b in range(start, end)
                if position_a - before <= at + (b - start) * step <= position_a + after
            }
            unmasked = {(a, b) for a in by_row for b in range(start, full_end)}
            assert unmasked <= seen
            for block in range(full_end, end, edge):
                positions = [at + (b - start) * step for b in range(block, min(block + edge, end))]
                low, high = min(by_row.values()) - before, max(by_row.values()) + after
                assert any(low <= one <= high for one in positions)
            got += seen
    assert sorted(owned) == sorted(b + i for b, n, *_ in own for i in range(n))
    assert len(got) == len(set(got))
    assert set(got) == want
    assert (found.full_blocks, found.masked_blocks) == (full, masked)
    work = [
        sum(
            full_end - start + -(-(end - full_end) // edge) * edge
            for start, full_end, end, *_ in found.segments[tile[5] : tile[6]]
        )
        for tile in found.tiles
    ]
    assert work == sorted(work, reverse=True)


def _layouts(seq, world):
    """Shards of rank 1 of `world`: contiguous, zigzag, striped, packed in documents, one padded."""
    part, half = seq // world, seq // (2 * world)
    yield [(0, part, part, 1, 0)]
    yield [(0, half, half, 1, 0), (half, half, seq - 2 * half, 1, 0)]
    yield [(0, part, 1, world, 0)]
    yield [(0, 5, 3, 1, 0), (5, part - 5, 0, 1, 1)]
    yield [(3, part - 7, 2, 1, 2)]


@pytest.mark.parametrize("blocks", [(16, 16, 16), (8, 4, 2), (4, 8, 4)])
def test_every_pair_once(blocks):
    for causal, left, right in (
        (False, -1, -1),
        (True, -1, -1),
        (True, 9, -1),
        (False, 3, 5),
        (False, 0, 0),
    ):
        before, after = reach(causal, left, right)
        for own in _layouts(96, 3):
            for other in (*_layouts(96, 3), *_layouts(64, 2)):
                _check(own, other, before, after, *blocks, False)
                _check(other, own, after, before, *blocks, True)


def test_random_pieces():
    generator = random.Random(5)

    def pieces():
        out, begin = [], 0
        for _ in range(generator.randint(0, 4)):
            begin += generator.randint(0, 3)
            length = generator.randint(1, 20)
            at = generator.randint(-9, 30)
            out.append((begin, length, at, generator.randint(1, 4), generator.randint(0, 1)))
            begin += length
        return out

    for _ in range(300):
        before = generator.choice([NO_LIMIT, generator.randint(0, 12)])
        after = generator.choice([NO_LIMIT, 0, generator.randint(-3, 12)])
        _check(
            pieces(),
            pieces(),
            before,
            after,
            8,
            generator.choice([4, 8, 16]),
            generator.choice([2, 4]),
            bool(before % 2),
        )


def test_nothing_to_do_is_no_block():
    """Keys after every query, other documents, no keys at all."""
    before, after = reach(True, -1, -1)
    for other in ([(0, 40, 100, 1, 0)], [(0, 40, 0, 1, 1)], []):
        found = plan([(0, 40, 0, 1, 0)], other, before, after, 16, 16, 16)
        assert found.segments == ()
        assert found.full_blocks == found.masked_blocks == 0
        assert all(tile[5] == tile[6] for tile in found.tiles)


def test_causal_work_is_half():
    """Of 32 x 32 blocks the 32 on the diagonal are masked, in halves, those before them whole."""
    before, after = reach(True, -1, -1)
    found = plan([(0, 4096, 0, 1, 0)], [(0, 4096, 0, 1, 0)], before, after, 128, 128, 64)
    assert (found.masked_blocks, found.full_blocks) == (64, 32 * 31 // 2)
    assert found.tiles[0][0] == 4096 - 128  # the longest first


def test_rows_outside():
    assert rows_outside([(2, 3, 0, 1, 0)], 9) == [(0, 2, 0, 1, -1), (5, 4, 0, 1, -1)]
    assert rows_outside([(0, 9, 0, 1, 0)], 9) == []
    assert rows_outside([], 4) == [(0, 4, 0, 1, -1)]
    with pytest.raises(ValueError, match="pieces reach row 9, the operand has 8 rows"):
        rows_outside([(0, 9, 0, 1, 0)], 8)


def test_tables_that_cannot_be():
    assert pieces_of(torch.tensor([[0, 4, 2, 1, 0], [4, 0, 0, 1, 0]])) == ((0, 4, 2, 1, 0),)
    for table in ([(0, 4, 0, 1, 0), (3, 4, 0, 1, 0)], [(0, 4, 0, 0, 0)], [(0, 4, 0, -1, 0)]):
        with pytest.raises(ValueError, match="its rows begin before"):
            pieces_of(table)
    with pytest.raises(ValueError, match="below 2\\^29"):
        pieces_of([(0, 4, 2**29, 1, 0)])


def test_a_plan_is_kept():
    arguments = (((0, 9, 0, 1, 0),), ((0, 9, 0, 1, 0),), 4, 0, 4, 4, 2, False, torch.device("cpu"))
    found, tiles, segments = device_plan(*arguments)
    assert device_plan(*arguments)[1] is tiles
    assert tiles.tolist() == [list(tile) for tile in found.tiles]
    assert segments.tolist() == [list(segment) for segment in found.segments]

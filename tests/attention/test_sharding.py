"""Which rank holds which rows: permutations for every length and number of ranks, and the helpers.

Layers of proof: pure integers over a grid, then the helpers between threads (simulated ranks).
"""

import pytest
import torch

from pyparallel.attention import (
    SHARDINGS,
    Mask,
    Sharding,
    position_ids,
    shard,
    shard_labels,
    simulate,
    unshard,
)

PACKED = ([0, 3, 5, 9, 10], [0, 4, 7], [0, 3], [0, 0, 5, 5, 9], [0])


def all_shardings(total, world, cu):
    for name in SHARDINGS:
        yield Sharding.of(name, total, world, cu_seqlens=cu)
        if cu is not None:
            yield Sharding.of(name, total, world, cu_seqlens=cu, per_document=True)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
def test_shards_are_a_permutation_and_pieces_say_where_rows_are(world):
    for total in [*range(20), 30, 33, 97]:
        for cu in (None, *(c for c in PACKED if c[-1] <= total)):
            for cut in all_shardings(total, world, cu):
                rows = [cut.rows(rank) for rank in range(world)]
                assert torch.cat(rows).sort().values.tolist() == list(range(total)), cut
                assert [len(r) for r in rows] == list(cut.local_sizes)
                assert torch.cat(rows)[cut.order()].tolist() == list(range(total))
                borders = cut.borders
                for rank in range(world):
                    told = {}
                    for begin, length, position, stride, document in cut.pieces(rank):
                        for i in range(length):
                            told[begin + i] = borders[document] + position + i * stride
                    real = [(i, r) for i, r in enumerate(rows[rank].tolist()) if r < borders[-1]]
                    assert sorted(told.items()) == real, (cut, rank)


def test_sizes_are_even():
    for total in range(40):
        for world in range(1, 9):
            for name in SHARDINGS:
                sizes = Sharding.of(name, total, world).local_sizes
                assert max(sizes) - min(sizes) <= 1 + (name == "zigzag"), (name, total, world)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_balanced_parts_have_as_much_work_as_whole_rows_allow(world):
    """No part is further from its share than the keys of one row, at each of its two ends."""
    torch.manual_seed(world)
    for documents in (0, 1, 2, 9):
        lengths = torch.randint(0, 60, (documents,)).cumsum(0).tolist()
        total = lengths[-1] + 7 if lengths else 7
        cu = [0, *lengths]
        for causal, window in (
            (True, (-1, -1)),
            (False, (-1, -1)),
            (True, (4, 0)),
            (False, (3, 2)),
        ):
            cut = Sharding.balanced(total, world, cu_seqlens=cu, causal=causal, window_size=window)
            mask = Mask(1.0, causal, *window)
            work = []
            for row in range(cu[-1]):
                begin, end = max(b for b in cu if b <= row), min(b for b in cu if b > row)
                seen = [k for k in range(begin, end) if -mask.before <= k - row <= mask.after]
                work.append(len(seen))
            parts = [sum(work[r] for r in cut.rows(rank).tolist() if r < cu[-1])
                     for rank in range(world)]  # fmt: skip
            assert sum(cut.local_sizes) == total
            assert max(abs(p - sum(work) / world) for p in parts) <= max(work, default=0), cut
    whole = torch.arange(9.0).view(1, 9)
    cut = Sharding.balanced(9, 2, cu_seqlens=[0, 2, 9])
    assert cut.sizes == (6, 3)  # 1 2 1 2 3 4 | 5 6 7: 13 of 31 keys, and not 18

    def rank(group):
        how = {"sharding": "contiguous", "cu_seqlens": [0, 2, 9]}
        part = shard(whole, group, sizes=cut.sizes, **how)
        ids = position_ids(9, group, sizes=cut.sizes, **how)
        labels = shard_labels(whole.long(), group, sizes=cut.sizes, **how)
        assert torch.equal(unshard(part, group, **how), whole)
        assert torch.equal(part, whole[:, cut.rows(group.rank)])
        return ids.tolist(), labels.tolist()

    got = simulate(2, rank)
    assert got[0] == ([0, 1, 0, 1, 2, 3], [[1, -100, 3, 4, 5, 6]])
    assert got[1] == ([4, 5, 6], [[7, 8, -100]])


def test_query_pieces_are_shifted_to_the_bottom_right():
    queries = Sharding.of("contiguous", 8, 2, cu_seqlens=[0, 0, 5, 8])
    keys = Sharding.of("contiguous", 9, 2, cu_seqlens=[0, 3, 6, 9])
    assert [tuple(p) for p in queries.pieces(0, keys)] == [(0, 4, -2, 1, 1)]
    assert [tuple(p) for p in queries.pieces(1, keys)] == [(0, 1, 2, 1, 1), (1, 3, 0, 1, 2)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("zig", 4, 2), "sharding is 'zig'; expected one of contiguous, zigzag, striped"),
        (("zigzag", 4, 0), "4 rows on 0 ranks"),
        (("zigzag", 4, 2, [1, 4]), r"cu_seqlens is \[1, 4\]; expected 0"),
        (("zigzag", 4, 2, [0, 3, 2]), "not going back"),
        (("zigzag", 4, 2, [0, 5]), "cu_seqlens ends at 5, but the ranks hold 4"),
        (("zigzag", 4, 2, None, True), "per_document .* needs cu_seqlens"),
        (("zigzag", 4, 2, None, False, [2, 2]), "sizes are for the contiguous"),
        (("contiguous", 4, 2, None, False, [1, 2]), r"sizes \[1, 2\] are not those of 2 parts"),
    ],
)
def test_misfits_are_refused(arguments, text):
    names = ("name", "total", "world_size", "cu_seqlens", "per_document", "sizes")
    given = dict(zip(names, arguments, strict=False))
    with pytest.raises(ValueError, match=text):
        Sharding.of(given.pop("name"), given.pop("total"), given.pop("world_size"), **given)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("cu", [None, [0, 3, 5, 9, 10], [0, 4, 7]])
def test_shard_and_unshard_are_each_other_s_inverse_with_gradients(world, cu):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 11, 3), torch.randn(2, 11, 3)

    def rank(group):
        whole = x.clone().requires_grad_()
        for name in SHARDINGS:
            for per_document in {False, cu is not None}:
                how = {"sharding": name, "cu_seqlens": cu, "per_document": per_document}
                part = shard(whole, group, **how)
                joined = unshard(part, group, **how)
                assert torch.equal(joined, whole)
                assert torch.equal(part, shard(x, (group.rank, group.world_size), **how))
                (grad,) = torch.autograd.grad((joined * weight).sum(), whole)
                assert torch.equal(grad, weight)

    simulate(world, rank)


def test_positions_and_labels_of_documents():
    tokens = torch.arange(100, 112).view(1, 12)
    cu = torch.tensor([0, 3, 5, 10], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1])
    labels = torch.tensor([[101, 102, -1, 104, -1, 106, 107, 108, 109, -1, -1, -1]])
    for name in SHARDINGS:
        for per_document in (False, True):
            how = {"sharding": name, "cu_seqlens": cu, "per_document": per_document}
            for rank in range(4):
                got = position_ids(12, (rank, 4), **how)
                assert torch.equal(got, shard(positions, (rank, 4), dim=0, **how))
                got = shard_labels(tokens, (rank, 4), ignore_index=-1, **how)
                assert torch.equal(got, shard(labels, (rank, 4), **how))
    assert shard_labels(tokens[:, :1], (0, 1)).tolist() == [[-100]]
    assert shard_labels(tokens[:, :0], (0, 2)).shape == (1, 0)


def test_unshard_refuses_shards_of_something_else():
    with pytest.raises(ValueError, match=r"the ranks hold \[3, 1\] rows; zigzag shards of 4 rows"):
        simulate(2, lambda group: unshard(torch.zeros(1, 3 - 2 * group.rank), group))
    with pytest.raises(ValueError, match="place must be a group"):
        unshard(torch.zeros(1, 3), (0, 2))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: shard(torch.ones(3), (0, 2)), r"dim is 1; x has shape \[3\]"),
        (lambda: shard([1, 2], (0, 2)), r"x is a list; expected a torch.Tensor"),
        (lambda: shard_labels(torch.tensor(1), (0, 2)), r"dim is -1; tokens has shape \[\]"),
        (lambda: position_ids(3.5, (0, 2)), r"total is 3.5; expected an int"),
        (lambda: simulate(2.5, len), r"world_size is 2.5; expected an int of at least 1"),
    ],
)
def test_helpers_refuse_what_they_cannot_cut(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_simulated_ranks_have_the_callers_autocast():
    with torch.autocast("cpu", torch.float16):
        inside = simulate(3, lambda _: torch.get_autocast_dtype("cpu"))
        assert simulate(3, lambda _: torch.is_autocast_enabled("cpu")) == [True] * 3
    assert inside == [torch.float16] * 3
    assert simulate(3, lambda _: torch.is_autocast_enabled("cpu")) == [False] * 3

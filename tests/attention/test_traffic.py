"""What is sent: only keys that some query of the receiver sees, into two buffers; and explain()."""

import itertools
import json

import pytest
import torch

from pyparallel.attention import SHARDINGS, Sharding, explain, sequence_parallel_attention, simulate
from pyparallel.attention.cost import MACHINES, NEAR
from pyparallel.attention.needs import needed, pairs
from pyparallel.attention.ring import _GRADIENTS, _KEYS
from tests.attention.whole import Case


def visible(queries, keys, rank, other, reach):
    """bool [rows of rank, rows of other], by the definition."""
    tables = []
    for pieces, rows in ((queries.pieces(rank, keys), queries.local_sizes[rank]),
                         (keys.pieces(other), keys.local_sizes[other])):  # fmt: skip
        at, document = torch.zeros(rows), torch.full((rows,), -1)
        for begin, length, position, stride, number in pieces:
            at[begin : begin + length] = position + stride * torch.arange(length)
            document[begin : begin + length] = number
        tables.append((at, document))
    (q_at, q_doc), (k_at, k_doc) = tables
    distance = k_at - q_at.unsqueeze(1)
    same = (q_doc.unsqueeze(1) == k_doc) & (k_doc >= 0)
    return same & (distance >= -reach[0]) & (distance <= reach[1])


@pytest.mark.parametrize("name", SHARDINGS)
def test_needs_and_pairs_are_those_of_the_definition(name):
    inf = float("inf")
    cases = [(17, 17, None), (9, 20, None), (16, 16, [0, 3, 5, 9, 14]), (20, 20, [0, 0, 13, 20])]
    for (rows, keys, cu), world, reach in itertools.product(
        cases, (1, 2, 3), ((inf, inf), (inf, 0), (4, 0), (2, 3), (inf, -1))
    ):
        q = Sharding.of(name, rows, world, cu_seqlens=cu)
        k = Sharding.of(name, keys, world, cu_seqlens=cu)
        for rank, other in itertools.product(range(world), repeat=2):
            seen = visible(q, k, rank, other, reach)
            part = needed(q.pieces(rank, k), k.pieces(other), *reach)
            taken = {row for begin, end in part.rows for row in range(begin, end)}
            wanted = set(seen.any(0).nonzero().flatten().tolist())
            assert wanted <= taken, (rows, keys, cu, world, reach)
            if name == "contiguous":
                assert wanted == taken
            assert part.count == len(taken) == part.pieces.rows
            assert pairs(q.pieces(rank, k), k.pieces(other), *reach) == int(seen.sum())


def sent(case, world, **more):
    return sum(t.bytes_sent for t in case.simulated(world, **more)["traffic"])


def forward_bytes(case, world, **more):
    def rank(group):
        queries, keys = case.shardings(world)
        q = case.q[:, queries.rows(group.rank)]
        k, v = (x[:, keys.rows(group.rank)] for x in (case.k, case.v))
        sequence_parallel_attention(q, k, v, group=group, **case.options, **more)
        return group.traffic.bytes_sent

    return sum(simulate(world, rank))


def bytes_needed(case, world):
    queries, keys = case.shardings(world)
    reach = case.mask.before, case.mask.after
    rows = sum(
        int(visible(queries, keys, r, s, reach).any(0).sum())
        for r, s in itertools.permutations(range(world), 2)
    )
    return rows * case.k.shape[2] * (case.k.shape[3] + case.v.shape[3]) * case.k.element_size()


def test_packed_documents_send_what_crosses_a_border():
    lengths = [37, 90, 3, 64, 50, 12, 100, 28]
    cu = [0, *itertools.accumulate(lengths)]
    for sharding in ("contiguous", "zigzag"):
        case = Case.random(rows=cu[-1], sharding=sharding, causal=True, cu_seqlens=cu)
        for world in (2, 4):
            for strategy in ("ring", "all_gather"):
                got, want = (
                    forward_bytes(case, world, strategy=strategy),
                    bytes_needed(case, world),
                )
                assert want <= got <= 1.2 * want, (sharding, world, strategy)
    aligned = Case.random(rows=64, sharding="contiguous", causal=True, cu_seqlens=[0, 16, 32, 64])
    assert forward_bytes(aligned, 2, strategy="ring") == 0


def test_bytes_scale_with_the_window_and_not_with_the_sequence():
    found = {}
    for window, rows in itertools.product((4, 8, 16), (128, 256)):
        case = Case.random(rows=rows, sharding="contiguous", causal=True, window_size=(window, 0))
        found[window, rows] = forward_bytes(case, 4, strategy="ring")
        assert found[window, rows] == bytes_needed(case, 4)
    for window in (4, 8, 16):
        assert found[window, 128] == found[window, 256] == window * found[4, 128] // 4


def test_gradients_travel_in_float32_to_the_owner_once():
    case = Case.random(rows=64, sharding="contiguous", dtype=torch.bfloat16)
    forward = forward_bytes(case, 4, strategy="ring")
    whole = sent(case, 4, strategy="ring")
    assert (
        whole == forward + forward + 2 * forward
    )  # keys again, and their gradients, twice as wide


def test_a_ring_has_two_receive_buffers():
    case = Case.random(rows=64, sharding="contiguous")
    keys = case.shardings(8)[1]

    def rank(group):
        buffers = {_KEYS: set(), _GRADIENTS: set()}
        exchange = group.exchange

        def watched(sends, receives, tag):
            buffers[tag] |= {m.tensor.untyped_storage().data_ptr() for m in receives}
            return exchange(sends, receives, tag)

        group.exchange = watched
        rows = keys.rows(group.rank)
        q, k, v = (x[:, rows].clone().requires_grad_() for x in (case.q, case.k, case.v))
        out = sequence_parallel_attention(q, k, v, group=group, strategy="ring",
                                          sharding="contiguous")  # fmt: skip
        held = {tag: len(found) for tag, found in buffers.items()}
        out.sum().backward()
        return held, {tag: len(found) for tag, found in buffers.items()}

    for held, after in simulate(8, rank):
        assert held == {_KEYS: 2, _GRADIENTS: 0}
        assert after[_GRADIENTS] == 1
        assert after[_KEYS] <= 4  # two of forward, two of backward


def test_equal_lengths_are_one_plan_whatever_object_they_come_in():
    from pyparallel.attention.cost import choose

    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    case = Case.random(rows=12)

    def rank(group, lengths):
        rows = Sharding.of("zigzag", 12, 2).rows(group.rank)
        q, k, v = (x[:, rows] for x in (case.q, case.k, case.v))
        return sequence_parallel_attention(q, k, v, group=group, cu_seqlens=lengths)

    first = simulate(2, lambda group: rank(group, cu))
    misses = choose.cache_info().misses
    for other in (cu.clone(), cu.long(), [0, 5, 12], (0, 5, 12)):
        again = simulate(2, lambda group, other=other: rank(group, other))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert choose.cache_info().misses == misses
    cu[1] = 6  # the same tensor, changed in place, is read again
    changed = simulate(2, lambda group: rank(group, cu))
    assert not torch.equal(first[0], changed[0])


# --- explain()


def test_explain_tells_choice_reason_and_numbers():
    told = explain((1, 131072, 32, 128), (1, 131072, 8, 128), 8, causal=True,
                   dtype=torch.bfloat16, device="cuda")  # fmt: skip
    names = [e.name for e in told.estimates]
    assert sorted(names) == ["all_gather", "hybrid 2 x 4", "hybrid 4 x 2", "ring", "ulysses"]
    assert told.estimates[0].us == min(e.us for e in told.estimates)
    near = [e for e in told.estimates if e.us <= (1 + NEAR) * told.estimates[0].us]
    taken = min(near, key=lambda e: (e.bytes_sent, e.us))
    assert told.strategy == taken.name == "ulysses"  # moves less from P > 1 + heads / kv_heads on
    assert f"{taken.us:.1f} us" in told.reason
    assert f"{taken.bytes_sent:,} bytes" in told.reason
    json.dumps(told.to_dict())
    text = str(told)
    assert f"-> {told.strategy}" in text
    assert "bytes" in text
    assert told.engine.split(":")[0] in text
    # Bytes of a zigzag ring: of 2c keys of each other rank, the later part only where it is seen.
    part, width = 131072 // 16, 8 * 256 * 2
    ring = next(e for e in told.estimates if e.name == "ring")
    assert ring.bytes_sent == told.bytes_needed == (7 + 7) * part * width
    # c >= 2 (F/B)(kv_heads/heads)
    rates = MACHINES["H100"]  # where there is no GPU, or one that is not known
    assert told.hidden_from == round(2 * rates.flops / rates.bandwidth / 4)
    assert rates.source in told.rates
    assert told.keys.startswith("fetched from symmetric memory by copy engine")


def test_rates_say_where_they_are_from():
    from pyparallel.ops.chips import CHIPS

    assert set(MACHINES) == {"cpu", *CHIPS}
    for name, rates in MACHINES.items():
        assert rates.flops > rates.wide_flops > 1e9, name
        assert rates.bandwidth > 1e9, name
        assert "assumed" in rates.source or "figure" in rates.source, name
    told = explain((1, 4096, 8, 64), (1, 4096, 8, 64), 2)
    assert f"{MACHINES['cpu'].wide_flops:.3g} FLOP/s" in told.rates
    assert told.keys == "sent"


def test_auto_follows_bytes_heads_and_documents():
    window = explain((1, 65536, 8, 64), (1, 65536, 8, 64), 4, causal=True, window_size=(256, 0))
    assert window.strategy in ("ring", "all_gather")  # not all heads of all rows
    unbalanced = explain((1, 65536, 32, 64), (1, 65536, 32, 64), 4, causal=True,
                         sharding="contiguous")  # fmt: skip
    ring = next(e for e in unbalanced.estimates if e.name == "ring")
    assert ring.balance == pytest.approx((4 + 1) / 2 / 4, abs=0.15)  # 4/(2*4-1) at the limit
    assert unbalanced.strategy in ("ulysses", "hybrid 2 x 2")  # which have the work even
    few = explain((1, 65536, 2, 64), (1, 65536, 1, 64), 8, causal=True)
    ulysses = next(e for e in few.estimates if e.name == "ulysses")
    assert ulysses.balance == 0.25  # two heads on eight ranks
    assert few.strategy == "ring"
    assert explain((1, 1, 8, 64), (1, 4096, 8, 64), 4, strategy="decode").strategy == "decode"
    assert explain((1, 9, 8, 64), (1, 9, 8, 64), 1).reason == "one rank holds everything"
    asked = explain((1, 4096, 8, 64), (1, 4096, 8, 64), 4, strategy="all_gather")
    assert asked.strategy == "all_gather"
    assert asked.reason.startswith("asked for")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"device": "tpu"}, "device is 'tpu'; expected one of cpu, cuda"),
        ({"strategy": "hybrid"}, "'hybrid' needs two factors larger than 1 of 3 ranks"),
        ({"window_size": 3}, "window_size is 3"),
        ({"cu_seqlens": [0, 99]}, "cu_seqlens ends at 99"),
    ],
)
def test_explain_refuses_what_the_attention_would(given, text):
    with pytest.raises(ValueError, match=text):
        explain((1, 16, 4, 8), (1, 16, 4, 8), 3, **given)

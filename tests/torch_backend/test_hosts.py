"""Groups that span hosts: shared memory inside each, gloo between them.

Layers: processes of one machine, their host identities set apart (PYPARALLEL_HOST_ID), each result
against the reference of one process and compared between ranks. Two network name spaces, and a link
that goes down, are tested in tests/hosts. All of it runs in CI.
"""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pyparallel.comm import Aborted, CommError, InvalidArgument, Mismatch
from tests.comm.reference import assert_same_bits, assert_within, data, digest, float64, poisoned
from tests.launch import Rank, run_ranks, spawn_ranks
from tests.torch_backend.groups import process_group
from tests.torch_backend.test_collectives import everyone, named

# The host of each rank: 2 + 2, a lone leader, ranks of a host not in one piece, three hosts.
PLACES = ["AABB", "ABB", "ABA", "ABC"]


def live_on(rank: Rank, places: str) -> None:
    os.environ["PYPARALLEL_HOST_ID"] = f"test-host-{places[rank.rank]}"


def reference(inputs: list[torch.Tensor], op: str, places: str) -> torch.Tensor:
    """The documented arithmetic: each host in rank order, then the hosts, one rounding."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    values = [x.to(wide) for x in inputs]
    if op == "premul_sum":
        values = [x * 0.5 * (r + 1) for r, x in enumerate(values)]
    combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(op, torch.add)
    partials = []
    for host in dict.fromkeys(places):
        ranks = [r for r, place in enumerate(places) if place == host]
        partial = values[ranks[0]]
        for r in ranks[1:]:
            partial = combine(partial, values[r])
        partials.append(partial)
    total = partials[0]
    for partial in partials[1:]:
        total = combine(total, partial)
    if op == "avg" and dtype.is_floating_point:
        total = total / len(inputs)
    elif op == "avg":
        total = torch.div(total, len(inputs), rounding_mode="trunc")
    return total.to(dtype)


def reductions(rank: Rank, places: str) -> list[int]:
    live_on(rank, places)
    me, world = rank.rank, rank.world_size
    digests = []
    with process_group(rank):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
            for op in ("sum", "avg", "max", "product", *(["premul_sum"] * dtype.is_floating_point)):
                for n in (0, 1, 1001):
                    inputs = everyone((n,), dtype, world, op)
                    expected = reference(inputs, op, places)
                    x = inputs[me].clone()
                    dist.all_reduce(x, named(op, me))
                    assert_same_bits(x, expected, ("all_reduce", op, dtype, n))
                    digests.append(digest(x))
                    if dtype.is_floating_point:
                        assert_within(x, *float64(inputs, op), ("all_reduce", op, dtype))
                    for root in range(world):
                        x = inputs[me].clone()
                        dist.reduce(x, root, named(op, me))
                        assert_same_bits(
                            x, expected if me == root else inputs[me], ("reduce", op, dtype, root)
                        )
                shards = everyone((world, 5), dtype, world, op)
                out = poisoned((5,), dtype)
                dist.reduce_scatter_tensor(out, shards[me].reshape(-1), named(op, me))
                assert_same_bits(out, reference(shards, op, places)[me], ("scatter", op, dtype))
        rows = [5, 3, 0, 2][:world]
        shards = [everyone((n,), torch.bfloat16, world, n) for n in rows]
        out = poisoned((rows[me],), torch.bfloat16)
        dist.reduce_scatter(out, [shard[me] for shard in shards])
        assert_same_bits(out, reference(shards[me], "sum", places), "uneven reduce_scatter")
    return digests


@pytest.mark.parametrize("places", PLACES)
def test_reductions(places):
    digests = run_ranks(reductions, len(places), places)
    assert all(d == digests[0] for d in digests), "ranks hold different bits"


def moves(rank: Rank, places: str) -> None:
    live_on(rank, places)
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        rows = [5, 3, 0, 2][:world]
        blocks = [data((n, 2), torch.float32, r) for r, n in enumerate(rows)]
        for root in range(world):
            x = blocks[root].clone() if me == root else poisoned(blocks[root].shape, torch.float32)
            dist.broadcast(x, root)
            assert_same_bits(x, blocks[root], ("broadcast", root))
            out = [poisoned((n, 2), torch.float32) for n in rows] if me == root else None
            dist.gather(blocks[me], out, root)
            for x, expected in zip(out or [], blocks, strict=False):
                assert_same_bits(x, expected, ("gather", root))
            x = poisoned((rows[me], 2), torch.float32)
            dist.scatter(x, blocks if me == root else None, root)
            assert_same_bits(x, blocks[me], ("scatter", root))
        out = [poisoned((n, 2), torch.float32) for n in rows]
        dist.all_gather(out, blocks[me])
        for x, expected in zip(out, blocks, strict=True):
            assert_same_bits(x, expected, "all_gather")
        whole = poisoned((3 * world,), torch.int64)
        dist.all_gather_into_tensor(whole, torch.arange(3) + 10 * me)
        expected = torch.cat([torch.arange(3) + 10 * r for r in range(world)])
        assert_same_bits(whole, expected, "all_gather_into_tensor")
        sent = [[(s + 2 * d) % 4 for d in range(world)] for s in range(world)]
        pieces = [
            [data((n, 2), torch.float32, s, d) for d, n in enumerate(sent[s])] for s in range(world)
        ]
        parts = [poisoned((sent[s][me], 2), torch.float32) for s in range(world)]
        dist.all_to_all(parts, pieces[me])
        for s in range(world):
            assert_same_bits(parts[s], pieces[s][me], "all_to_all")
        dist.barrier()


@pytest.mark.parametrize("places", PLACES)
def test_moves(places):
    run_ranks(moves, len(places), places)


def messages(rank: Rank, places: str) -> None:
    live_on(rank, places)
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        for n in (0, 5, 300_000):  # everyone to everyone, both directions at once
            others = [r for r in range(world) if r != me]
            got = {r: poisoned((n,), torch.float32) for r in others}
            ops = [dist.P2POp(dist.isend, data((n,), torch.float32, me, r), r) for r in others]
            ops += [dist.P2POp(dist.irecv, got[r], r) for r in others]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            for r in others:
                assert_same_bits(got[r], data((n,), torch.float32, r, me), ("message", n, r))
        if me == 0:  # tags pick the message, whatever the order
            sent = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (3, 1, 2)]
            for work in sent:
                work.wait()
        if me == 1:
            for tag in (1, 2, 3):
                x = torch.empty(2)
                dist.recv(x, 0, tag=tag)
                assert x.tolist() == [tag, tag]
        if me == 0:
            dist.send(torch.zeros(3), 1)
            dist.send(torch.ones(2), 1)
        if me == 1:
            with pytest.raises(Mismatch, match="3 x float32 were sent, 2 x float32"):
                dist.recv(torch.empty(2), 0)
            x = torch.empty(2)
            dist.recv(x, 0)
            assert x.tolist() == [1, 1]


def test_messages():
    run_ranks(messages, 3, "ABB")


def from_anybody(rank: Rank, places: str) -> None:
    """Rank 1 receives from any rank, of its host and of the other, by every kind of receive."""
    live_on(rank, places)
    me, world = rank.rank, rank.world_size
    others = [0, *range(2, world)]
    with process_group(rank):
        for n in (0, 3, 50_000):
            if me == 1:
                got = {dist.recv(x := poisoned((n,), torch.float32), tag=2): x for _ in others}
                assert sorted(got) == others
                for source, x in got.items():
                    assert_same_bits(x, data((n,), torch.float32, source, n), ("any", n, source))
            else:
                dist.send(data((n,), torch.float32, me, n), 1, tag=2)
            dist.barrier()  # inside a host a send does not wait: the next size would come early
        # Several at once, each done by another message; then by name, in the order of each source.
        if me == 1:
            x = [torch.zeros(1) for _ in range(2 * len(others))]
            works = [dist.irecv(t, tag=2) for t in x[: len(others)]]
            works[-1].get_future()
            dist.barrier()
            for work in works:
                work.wait()
            assert sorted(t.item() for t in x[: len(others)]) == [10 * r for r in others]
            dist.barrier()
            for t, source in zip(x[len(others) :], reversed(others), strict=True):
                dist.recv(t, source, tag=2)
                assert t.item() == 10 * source + 1
            with pytest.raises(Mismatch, match=r"1 x float32 were sent, 2 x float32|1 float32 el"):
                dist.recv(torch.zeros(2), tag=2)
        else:
            dist.barrier()
            dist.send(torch.tensor([10.0 * me]), 1, tag=2)
            dist.barrier()
            dist.send(torch.tensor([10.0 * me + 1]), 1, tag=2)
            if me == world - 1:
                dist.send(torch.zeros(1), 1, tag=2)
        dist.barrier()
        with pytest.raises(InvalidArgument, match="tags of messages between hosts"):
            dist.recv(torch.zeros(1), tag=-1)
        dist.barrier()
        # Nothing comes: an error at the deadline, which names what was waited for.
        group = dist.group.WORLD._get_backend(torch.device("cpu"))
        group.set_timeout(timedelta(seconds=0.7))
        with pytest.raises(CommError, match=r"from any rank|rank 1|closed"):
            dist.recv(torch.zeros(1), tag=3) if me == 1 else dist.recv(torch.zeros(1), 1, tag=4)


@pytest.mark.parametrize("places", ["AAB", "ABC", "ABBA"])
def test_receives_from_any_source(places):
    run_ranks(from_anybody, len(places), places)


def misfits(rank: Rank, places: str) -> None:
    live_on(rank, places)
    me = rank.rank
    with process_group(rank):
        with pytest.raises(Mismatch, match=r"rank 3 called all_reduce of 4"):
            dist.all_reduce(torch.zeros(3 + (me == 3)))
        with pytest.raises(Mismatch, match=r"ranks differ"):
            dist.all_reduce(torch.zeros(3)) if me == 1 else dist.broadcast(torch.zeros(3), 0)
        bad = torch.zeros(3, dtype=torch.bool if me == 2 else torch.float32)
        with pytest.raises(InvalidArgument if me == 2 else Mismatch, match="avg is not defined"):
            dist.all_reduce(bad, dist.ReduceOp.AVG)
        with pytest.raises(Mismatch, match=r"rank \d sends \d elements to rank \d"):
            dist.all_to_all_single(
                torch.zeros(4), torch.zeros(4 + (me == 0)), None, [1 + (me == 0), 1, 1, 1]
            )
        x = torch.ones(3)
        dist.all_reduce(x)  # the group is usable after all that
        assert x.tolist() == [4, 4, 4]


def test_misfits_raise_on_every_host():
    run_ranks(misfits, 4, "AABB")


def queued(rank: Rank, places: str) -> None:
    live_on(rank, places)
    me, world = rank.rank, rank.world_size
    with process_group(rank):
        xs = [torch.full((n,), float(me + 1)) for n in (3, 1000, 7)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        y = torch.full((2,), float(me))
        dist.all_reduce(y)  # after the queued ones
        for work in works:
            work.wait()
        for x in xs:
            assert bool((x == world * (world + 1) / 2).all())
        sub = dist.new_group([0, world - 1])
        if me in (0, world - 1):
            x = torch.tensor([float(me)])
            dist.all_reduce(x, group=sub)
            assert x.item() == world - 1


def test_queued_calls_and_sub_groups():
    run_ranks(queued, 3, "AAB")


def lost(rank: Rank, places: str, victim: int) -> str:
    live_on(rank, places)
    with process_group(rank, timeout=20):
        dist.all_reduce(torch.ones(3))
        rank.report("ready")
        try:
            while True:
                dist.all_reduce(torch.ones(200_000))
        except CommError as error:
            return str(error)


@pytest.mark.parametrize("victim", [0, 1, 3], ids=["leader", "follower", "far follower"])
def test_a_lost_rank_is_noticed_on_every_host(victim):
    with spawn_ranks(lost, 4, "AABB", victim, timeout=110) as ranks:
        for r in range(4):
            ranks.next_report(r, timeout=100)
        killed = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.wait([r for r in range(4) if r != victim])
        assert time.monotonic() - killed < 15  # the deadline of the calls is 20 s
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        assert outcome.ok, outcome.traceback
        assert outcome.value


def late(rank: Rank, places: str) -> tuple[str, str]:
    """Rank 3 does not come: every other rank raises within the deadline, naming it or its host."""
    live_on(rank, places)
    with process_group(rank) as group:
        dist.barrier()
        group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=2))
        if rank.rank == 3:
            rank.report("staying away")
            try:
                time.sleep(5)
                dist.all_reduce(torch.ones(3))
            except CommError as error:
                return "late", str(error)
        try:
            dist.all_reduce(torch.ones(3))
        except CommError as error:
            return type(error).__name__, str(error)
    return "no error", ""


def test_an_absent_rank_is_a_named_error_within_the_deadline():
    results = run_ranks(late, 4, "AABB")
    for rank, (kind, text) in enumerate(results):
        assert kind in ("Timeout", "Aborted", "PeerLost", "late"), (rank, kind, text)
        assert "rank 3" in text or "ranks 2, 3" in text, (rank, text)


def aborted(rank: Rank, places: str) -> str:
    live_on(rank, places)
    with process_group(rank) as group:
        dist.barrier()
        backend = group._get_backend(torch.device("cpu"))
        if rank.rank == 1:
            backend.abort()
        with pytest.raises(CommError) as caught:
            dist.all_reduce(torch.ones(3))
        if rank.rank == 1:
            assert isinstance(caught.value, Aborted)
        return str(caught.value)


def test_abort_wakes_every_host():
    texts = run_ranks(aborted, 4, "AABB")
    assert "rank 1" in texts[0]
    assert all(texts)

"""Groups: sub-groups, several at once from several threads, very many ranks, misfits of ranks."""

import itertools
import threading
import time

import pytest
import torch

from pyparallel import _core
from pyparallel.comm import Communicator, InvalidArgument, Mismatch, Timeout
from tests.comm.reference import POISON, assert_same_bits, data, exact
from tests.comm.threads import in_threads, run_threads
from tests.launch import Rank, run_ranks


def joined(rank: Rank) -> Communicator:
    return Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=30)


# --- sub-groups


def splits(rank: Rank) -> None:
    with joined(rank) as world:
        me = world.rank
        half = world.split(me % 2, name=f"half{me % 2}")
        assert (half.rank, half.world_size, half.name) == (me // 2, 2, f"half{me % 2}")
        x = half.all_gather(torch.tensor([me]))
        assert x.tolist() == [me % 2, me % 2 + 2]
        # key reverses the order; ties go by rank
        turned = world.split(7, key=-me)
        assert turned.all_gather(torch.tensor([me])).tolist() == [3, 2, 1, 0]
        assert turned.name == "world/7"
        # one rank takes no part
        alone = world.split(None if me == 0 else 1)
        assert (alone is None) == (me == 0)
        if alone is not None:
            assert alone.all_reduce(torch.tensor([me])).item() == 6
            inner = alone.split(alone.rank)
            assert inner.world_size == 1
            inner.close()
        # overlapping groups, used in turn, while the parent is used too
        for _ in range(10):
            assert half.all_reduce(torch.ones(1)).item() == 2
            assert world.all_reduce(torch.ones(1)).item() == 4
            assert turned.all_reduce(torch.ones(1)).item() == 4
        half.close()
        assert world.all_reduce(torch.ones(1)).item() == 4  # a closed part leaves the whole


def test_split():
    run_ranks(splits, 4)


def part_first(rank: Rank) -> None:
    """Ranks 0 and 1 of 3 use their own group first; the world's numbers stay in step."""
    with joined(rank) as world:
        part = world.split(0 if rank.rank < 2 else None)
        if part is not None:
            for _ in range(5):
                part.all_reduce(torch.ones(4))
        assert world.all_reduce(torch.ones(4)).tolist() == [3.0] * 4


def test_a_part_of_the_ranks_first_then_all():
    run_ranks(part_first, 3)


def failing_part(rank: Rank) -> None:
    with joined(rank) as world:
        part = world.split(rank.rank % 2)
        if rank.rank == 0:
            part.abort("enough")
        if rank.rank % 2 == 0:
            with pytest.raises(Exception, match="enough"):
                part.barrier()
        else:
            part.barrier()
        assert world.all_reduce(torch.ones(1)).item() == 4


def test_an_aborted_part_leaves_the_others():
    run_ranks(failing_part, 4)


# --- threads


def test_two_threads_as_two_ranks_release_the_gil():
    """Each waits inside the core for the other: with the GIL held neither would ever come."""

    def body(comm: Communicator) -> None:
        for _ in range(200):
            comm.all_reduce(torch.ones(10))
            comm.barrier()
        peer = 1 - comm.rank
        x = torch.ones(2_000_000)
        if comm.rank:
            comm.send(x, peer)
        else:
            comm.recv(x, peer)

    run_threads(2, body)


def test_several_communicators_from_several_threads():
    """Four groups over the same two ranks, each group used by a thread of its own."""
    ids = [Communicator.unique_id() for _ in range(4)]

    def seat(group: int, rank: int) -> None:
        with Communicator.from_id(ids[group], rank, 2, name=f"group{group}") as comm:
            for n in range(60):
                x = comm.all_reduce(torch.full((97 * (group + 1),), float(n + group)))
                assert x.tolist() == [2.0 * (n + group)] * x.numel()

    in_threads([lambda g=g, r=r: seat(g, r) for g in range(4) for r in range(2)])


def test_one_communicator_from_several_threads():
    """Calls run one at a time; equal calls may be made by any thread of a rank."""

    def body(comm: Communicator) -> None:
        def calls() -> None:
            for _ in range(50):
                assert comm.all_reduce(torch.ones(64))[0].item() == 2.0

        in_threads([calls] * 3)

    run_threads(2, body)


def test_messages_from_several_threads():
    def body(comm: Communicator) -> None:
        peer = 1 - comm.rank

        def conversation(tag: int) -> None:
            x = torch.zeros(500)
            for n in range(20):
                comm.send(torch.full((500,), float(n * tag)), peer, tag)
                comm.recv(x, peer, tag)
                assert x[0].item() == n * tag

        in_threads([lambda t=t: conversation(t) for t in range(4)])

    run_threads(2, body)


def test_a_call_given_up_behind_a_queued_one_breaks_the_group():
    """Otherwise this rank's next call would be added to a peer's call of before."""

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(4), async_op=True)
            with pytest.raises(Timeout, match="queued before this one"):
                comm.all_reduce(torch.full((4,), 5.0), timeout=0.1)
            assert "queued before this one" in comm.failure
        else:
            while not comm.failure:
                time.sleep(0.01)
            with pytest.raises(Timeout, match=r"queued before this one .*rank 0"):
                comm.all_reduce(torch.full((4,), 7.0))
        with pytest.raises(Timeout):
            comm.barrier()

    run_threads(2, body, timeout=5)


def test_all_ranks_that_have_not_come_are_named():
    def body(comm: Communicator) -> None:
        if comm.rank % 2 == 0:
            with pytest.raises(Timeout, match=r"rank 1 \(pid \d+\) absent .*; absent too: rank 3$"):
                comm.barrier(timeout=0.3)
        else:
            time.sleep(1.0)  # here, but silent

    run_threads(4, body)


def test_260_ranks_gather_each_their_own_value():
    """Rank numbers beyond 256: nothing is kept in a byte."""

    def body(comm: Communicator) -> bool:
        got = comm.all_gather(torch.tensor([comm.rank, -comm.rank]))
        expected = list(itertools.chain.from_iterable((r, -r) for r in range(260)))
        return got.tolist() == expected

    assert all(run_threads(260, body, timeout=100, run_timeout=110))


def test_more_ranks_than_fit_is_refused():
    with pytest.raises(InvalidArgument, match=r"ranks, at most \d+"):
        Communicator.from_id(Communicator.unique_id(), 0, 1_000_000)


# --- misfits between ranks: all raise, the group stays usable


def misfit(*calls, match: str, timeout: float = 20.0):
    """calls[r] is what rank r does."""

    def body(comm: Communicator) -> str:
        with pytest.raises(Mismatch, match=match) as caught:
            calls[comm.rank](comm)
        assert comm.failure == ""
        total = comm.all_reduce(torch.ones(3))
        assert total.tolist() == [float(comm.world_size)] * 3
        return str(caught.value)

    return run_threads(len(calls), body, timeout=timeout, run_timeout=15)


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize(
    ("usual", "odd", "match"),
    [
        (
            lambda c: c.all_reduce(torch.ones(4)),
            lambda c: c.all_gather(torch.ones(4)),
            "all_reduce.*all_gather|all_gather.*all_reduce",
        ),
        (
            lambda c: c.all_reduce(torch.ones(1000)),
            lambda c: c.all_reduce(torch.ones(1001)),
            "1001",
        ),
        (
            lambda c: c.all_reduce(torch.ones(500_000)),
            lambda c: c.all_reduce(torch.ones(3)),
            "500000",
        ),
        (
            lambda c: c.all_reduce(torch.ones(4)),
            lambda c: c.all_reduce(torch.ones(4).double()),
            "float64",
        ),
        (
            lambda c: c.all_reduce(torch.ones(4)),
            lambda c: c.all_reduce(torch.ones(4), "max"),
            "max",
        ),
        (lambda c: c.broadcast(torch.ones(4), 0), lambda c: c.broadcast(torch.ones(4), 1), "root"),
        (lambda c: c.barrier(), lambda c: c.all_reduce(torch.ones(4)), "barrier"),
        (
            lambda c: c.all_gather(torch.ones(2), sizes=[2, 2, 2]),
            lambda c: c.all_gather(torch.ones(2), sizes=[2 + (r != c.rank) for r in range(3)]),
            "block sizes differ",
        ),
        (
            lambda c: c.reduce_scatter(torch.ones(6)),
            lambda c: c.reduce_scatter(torch.ones(7), sizes=[1, 2, 4]),
            "reduce_scatter",
        ),
        (
            lambda c: c.all_to_all(torch.ones(6)),
            lambda c: c.all_to_all(torch.ones(6), in_sizes=[1, 2, 3], out_sizes=[2, 2, 2]),
            "all_to_all",
        ),
        (
            lambda c: c.gather(torch.ones(2)),
            lambda c: c.gather(
                torch.ones(2 if c.rank == 0 else 3), sizes=[2, 2, 2 + 7] if c.rank == 0 else None
            ),
            "gather",
        ),
        (
            lambda c: c.scatter(torch.ones(6) if c.rank == 0 else None, torch.ones(2)),
            lambda c: c.scatter(
                torch.ones(9) if c.rank == 0 else None, torch.ones(3)
            ),
            "scatter",
        ),
    ],
    ids=[
        "op", "size", "size large", "dtype", "reduction", "root", "barrier", "all_gather sizes",
        "reduce_scatter sizes", "all_to_all sizes", "gather sizes", "scatter sizes",
    ],
)  # fmt: skip
def test_a_misfit_raises_on_every_rank(usual, odd, match, bad):
    calls = [odd if r == bad else usual for r in range(3)]
    for text in misfit(*calls, match=match):
        assert "group threads" in text


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_misfit_says_which_ranks_have_which_value(bad):
    others = {0: "ranks 1-3", 1: "ranks 0, 2, 3", 3: "ranks 0-2"}[bad]
    for usual, odd, what, values in [
        (lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(5)),
         "element counts differ: ", ("4", "5")),
        (lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(4).half()),
         "dtypes differ: ", ("float32", "float16")),
        (lambda c: c.reduce(torch.ones(4)), lambda c: c.reduce(torch.ones(4), "max"),
         "reductions differ: ", ("sum", "max")),
        (lambda c: c.broadcast(torch.ones(4)), lambda c: c.broadcast(torch.ones(4), 2),
         "roots differ: ", ("0", "2")),
        (lambda c: c.all_gather(torch.ones(2)), lambda c: c.barrier(),
         "ranks called different operations: ", ("all_gather", "barrier")),
    ]:  # fmt: skip
        said = [f"{values[0]} on {others}", f"{values[1]} on rank {bad}"]
        expected = what + "; ".join(reversed(said) if bad == 0 else said)
        misfit(*[odd if r == bad else usual for r in range(4)], match=f"{expected}$")


def test_order_of_two_calls():
    first = lambda c: c.all_reduce(torch.ones(4))  # noqa: E731
    second = lambda c: c.broadcast(torch.ones(4))  # noqa: E731
    misfit(first, second, match="all_reduce.*broadcast|broadcast.*all_reduce")


def test_counts_travel_in_64_bits():
    """A header that says three thousand million elements (no data is touched) is named as that."""

    def body(comm: Communicator) -> None:
        count = 3_000_000_000 if comm.rank == 0 else 10
        x = torch.full((10,), POISON, dtype=torch.int8)
        with pytest.raises(Mismatch, match="3000000000"):
            comm._core.all_reduce(
                x.data_ptr(), x.data_ptr(), count, 4, 0, 1.0, comm._timeout_ms, False
            )
        assert x.tolist() == [POISON] * 10

    run_threads(2, body)


def test_binding_refuses_what_is_no_argument():
    def body(comm: Communicator) -> None:
        core = comm._core
        with pytest.raises(TypeError, match="takes 2 arguments, 1 given"):
            core.barrier(5)
        with pytest.raises(TypeError):
            core.all_reduce("p", 0, 0, 0, 0, 1.0, 5, False)
        with pytest.raises(OverflowError):
            core.all_reduce(0, 0, -1, 0, 0, 1.0, 5, False)
        with pytest.raises(InvalidArgument, match="unknown dtype 99"):
            core.broadcast(0, 0, 99, 0, 5, False)
        with pytest.raises(TypeError, match="a list of 1 entries, one per rank"):
            core.all_gather(0, 0, [0, 0], 0, 5, False)

    run_threads(1, body)
    with pytest.raises(InvalidArgument, match="128 bytes, got 5"):
        _core.Communicator.join(b"short", 0, 1, "x", 1000)


def test_results_are_the_same_in_groups_of_any_kind():
    """Processes or threads, inside a split or not: the same bits."""
    inputs = [data((10_001,), torch.bfloat16, r) for r in range(3)]
    expected = exact(inputs, "sum")
    lock = threading.Lock()
    seen = []

    def body(comm: Communicator) -> None:
        part = comm.split(0, key=comm.rank)
        ours = part.all_reduce(inputs[comm.rank].clone())
        with lock:
            seen.append(ours)

    run_threads(3, body)
    for ours in seen:
        assert_same_bits(ours, expected, "split")

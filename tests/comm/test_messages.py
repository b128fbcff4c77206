"""Send and receive: order, tags, sizes, both directions at once, batches."""

import time

import pytest
import torch

from pyparallel.comm import Communicator, InvalidArgument, Mismatch, Recv, Send, Timeout
from tests.comm.reference import DTYPES, LAYOUTS, assert_same_bits, data, poisoned
from tests.comm.threads import run_threads
from tests.launch import Rank, run_ranks


def joined(rank: Rank) -> Communicator:
    return Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=30)


def around(rank: Rank) -> None:
    """Every dtype and layout one rank further, everybody sending first."""
    with joined(rank) as comm:
        me, world = comm.rank, comm.world_size
        right, left = (me + 1) % world, (me - 1) % world
        for dtype in DTYPES:
            for layout, lay in LAYOUTS.items():
                for shape in [(5, 4, 3), (0, 3), ()]:
                    comm.send(lay(data(shape, dtype, me)), right, tag=3)
                    out = lay(poisoned(shape, dtype))
                    assert comm.recv(out, left, tag=3) == left
                    assert_same_bits(out, data(shape, dtype, left), (dtype, layout, shape))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_dtype_and_layout(world):
    run_ranks(around, world)


def both_ways(rank: Rank, count: int) -> None:
    """Ranks send to each other first, then receive: larger than any buffer."""
    with joined(rank) as comm:
        me, peer = comm.rank, 1 - comm.rank
        sending = comm.isend(data((count,), torch.float32, me), peer)
        out = poisoned((count,), torch.float32)
        assert comm.recv(out, peer) == peer
        sending.wait()
        assert_same_bits(out, data((count,), torch.float32, peer), count)
        # prev is next in a ring of two: the messages must not be swapped
        a, b = poisoned((count,), torch.float32), poisoned((count,), torch.float32)
        works = comm.batch(
            [
                Send(data((count,), torch.float32, me, "right"), peer, 1),
                Send(data((count,), torch.float32, me, "left"), peer, 2),
                Recv(a, peer, 1),
                Recv(b, peer, 2),
            ]
        )
        assert [work.wait() for work in works] == [None, None, peer, peer]
        assert_same_bits(a, data((count,), torch.float32, peer, "right"), "a")
        assert_same_bits(b, data((count,), torch.float32, peer, "left"), "b")


@pytest.mark.parametrize("count", [0, 1, 1000, 300_000, 3_000_001])
def test_both_directions_at_once(count):
    run_ranks(both_ways, 2, count)


def test_order_within_a_tag_and_freedom_between_tags():
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            for n in range(100):
                comm.send(torch.tensor([n]), 1, tag=n % 3)
        else:
            x = torch.zeros(1, dtype=torch.int64)
            for tag in (2, 0, 1):
                for n in range(tag, 100, 3):
                    comm.recv(x, 0, tag)
                    assert x.item() == n

    run_threads(2, body)


def test_any_source_names_the_sender():
    def body(comm: Communicator) -> None:
        if comm.rank:
            comm.send(torch.tensor([comm.rank * 10]), 0, tag=5)
            return
        x, seen = torch.zeros(1, dtype=torch.int64), set()
        for n in range(3):
            source = comm.irecv(x, tag=5).wait() if n % 2 else comm.recv(x, tag=5)
            assert x.item() == source * 10
            seen.add(source)
        assert seen == {1, 2, 3}

    run_threads(4, body)


def test_receives_may_be_posted_first_in_any_order():
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            outs = [torch.zeros(n + 1) for n in range(10)]
            works = [comm.irecv(out, 1, tag=n) for n, out in reversed(list(enumerate(outs)))]
            comm.barrier()
            for work in works:
                assert work.wait(20) == 1
            for n, out in enumerate(outs):
                assert out.tolist() == [float(n)] * (n + 1)
        else:
            comm.barrier()
            for n in range(10):
                comm.send(torch.full((n + 1,), float(n)), 0, tag=n)

    run_threads(2, body)


def test_an_asymmetric_batch_meets_single_calls():
    """Rank 0 batches a send and a receive, rank 1 a receive only; its send comes later."""

    def body(comm: Communicator) -> None:
        x = torch.zeros(4)
        if comm.rank == 0:
            works = comm.batch([Send(torch.ones(4), 1), Recv(x, 1)])
            for work in works:
                work.wait(20)
            assert x.tolist() == [2.0] * 4
        else:
            comm.batch([Recv(x, 0)])[0].wait(20)
            comm.send(2 * x, 0)

    run_threads(2, body)


def test_messages_and_collectives_at_once():
    """A receive that waits does not hold up collectives, and the other way round."""

    def body(comm: Communicator) -> None:
        peer, x = 1 - comm.rank, torch.zeros(1000)
        pending = comm.irecv(x, peer, tag=9)
        for _ in range(20):
            comm.all_reduce(torch.ones(1000))
        work = comm.all_reduce(torch.ones(100_000), async_op=True)
        comm.send(torch.full((1000,), 3.0), peer, tag=9)
        assert pending.wait(20) == peer
        assert work.wait(20)[0].item() == 2.0
        assert x.tolist() == [3.0] * 1000

    run_threads(2, body)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3, dtype=torch.int32)),
        (torch.ones(300_000), torch.ones(4)),
    ],
)
def test_another_size_or_dtype_raises_on_the_receiver(sent, expected):
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            work = comm.isend(sent, 1)
            comm.barrier()
            assert work is not None
        else:
            with pytest.raises(Mismatch, match=r"3|300000"):
                comm.recv(expected.clone(), 0, timeout=10)
            comm.barrier()

    run_threads(2, body)


@pytest.mark.parametrize("started", [False, True])
def test_a_message_that_never_comes_is_a_timeout(started):
    def body(comm: Communicator) -> None:
        if comm.rank == 0 and started:
            comm.timeout = 0.2  # the deadline of a wait that names none
            work = comm.irecv(torch.ones(3), 1, tag=4)
            with pytest.raises(Timeout, match=r"recv from rank 1 \(tag 4"):
                work.wait()
        elif comm.rank == 0:
            with pytest.raises(Timeout, match=r"recv from rank 1 \(tag 4"):
                comm.recv(torch.ones(3), 1, tag=4, timeout=0.2)
        else:
            time.sleep(0.8)  # here, but silent

    run_threads(2, body)


def test_a_receive_from_any_rank_keeps_the_message_it_was_given():
    """Its message is still arriving when another rank's of the same tag begins to arrive too."""
    short, long = 4 << 20, 32 << 20  # both larger than what is buffered between two ranks

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.barrier()
            from_any = torch.zeros(short, dtype=torch.uint8)
            behind_two = comm.irecv(torch.ones(1), 2, tag=92)  # makes the message before it come in
            first = comm.irecv(from_any, None, tag=5)
            behind_one = comm.irecv(torch.ones(1), 1, tag=91)
            assert first.wait(20) == 2
            assert behind_two.wait(20) == 2
            assert behind_one.wait(20) == 1
            rest = torch.zeros(long, dtype=torch.uint8)
            assert comm.recv(rest, None, tag=5, timeout=20) == 1
            assert bool((from_any == 2).all())
            assert bool((rest == 1).all())
        else:
            count = short if comm.rank == 2 else long
            message = torch.full((count,), comm.rank, dtype=torch.uint8)
            works = [comm.isend(message, 0, tag=5)]
            works.append(comm.isend(torch.ones(1), 0, tag=90 + comm.rank))
            comm.barrier()
            time.sleep(0.3)  # nobody helps: rank 0 finds a part of each message
            for work in works:
                work.wait(20)
        comm.barrier()

    run_threads(3, body)


def test_bad_calls_start_nothing():
    def body(comm: Communicator) -> None:
        x = torch.ones(3)
        with pytest.raises(InvalidArgument, match="to is 2"):
            comm.send(x, 2)
        with pytest.raises(InvalidArgument, match="source is -1"):
            comm.recv(x, -1)
        with pytest.raises(InvalidArgument, match="is a list"):
            comm.batch([Send(x, 1 - comm.rank), Send([1.0], 1 - comm.rank)])
        with pytest.raises(InvalidArgument, match="batch takes Send and Recv, got tuple"):
            comm.batch([Send(x, 1 - comm.rank), ("send", x, 1)])
        with pytest.raises(InvalidArgument, match="expanded"):
            comm.recv(torch.ones(1).expand(3), 1 - comm.rank)
        comm.send(torch.full((3,), 7.0), 1 - comm.rank)
        comm.recv(x, 1 - comm.rank)
        assert x.tolist() == [7.0] * 3  # the first message: none came from the refused batches

    run_threads(2, body)

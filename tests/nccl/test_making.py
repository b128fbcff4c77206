"""How communicators come to be: ids, blocking or not, settings, split, shrink, grow, stores."""

import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore

from pyparallel._core import nccl as core
from pyparallel.comm import nccl
from pyparallel.errors import InvalidArgument, Timeout, Unsupported
from tests.nccl.harness import Array, Seat, Standin, run_ranks, run_threads
from tests.nccl.libraries import Libraries


def total(seat: Seat, comm: nccl.NcclCommunicator, value: float) -> float:
    """The sum of everyone's value over `comm`."""
    x = np.array([value])
    comm.all_reduce(Array(x), stream=seat.stream)
    seat.wait()
    return float(x[0])


@pytest.mark.parametrize("blocking", [None, True, False])
@pytest.mark.parametrize("world", [1, 3])
def test_init(standin: Standin, world_folder: Path, world: int, blocking: bool | None) -> None:
    def body(seat: Seat) -> None:
        assert seat.comm.size == world
        assert seat.comm.blocking == bool(blocking)
        assert total(seat, seat.comm, seat.rank + 1) == world * (world + 1) / 2

    run_ranks(standin, world, body, blocking=blocking, name="tp")
    assert f"blocking={int(bool(blocking))}" in standin.last_config()
    log = standin.log()
    assert (
        log.count("CommInitRankConfig")
        == log.count("CommFinalize")
        == log.count("CommDestroy")
        == world
    )
    assert log.index("CommFinalize") < log.index("CommDestroy")  # row 86
    assert standin.alive() == 0
    assert list(world_folder.iterdir()) == []


@pytest.mark.parametrize("version", [2804, 21003, 21403])
def test_older_libraries(libraries: Libraries, version: int) -> None:
    """Before 2.14.3 there is no configuration and the library itself waits."""
    standin = Standin(libraries.build(version), libraries.cuda)
    standin.log()

    def body(seat: Seat) -> None:
        assert seat.comm.blocking == (version < 21403)
        assert total(seat, seat.comm, 1.0) == 2

    run_ranks(standin, 2, body)
    assert ("CommInitRank" in standin.log()) == (version < 21403)
    if version < 21403:
        with pytest.raises(Unsupported, match=r"needs ncclCommInitRankConfig.*2\.14\.3.*found"):
            run_ranks(standin, 1, lambda seat: None, blocking=False)


@pytest.mark.parametrize("blocking", [False, True])
def test_rank_that_does_not_come(standin: Standin, blocking: bool) -> None:
    """An error at the deadline, in both modes, and nothing is left running."""
    id = nccl.unique_id(standin.library)
    start = time.monotonic()
    with pytest.raises(Timeout, match=r"creating communicator tp \(rank 0 of 2\): not all"):
        nccl.NcclCommunicator(
            id, 0, 2, name="tp", timeout=0.5, blocking=blocking, library=standin.library
        )
    assert time.monotonic() - start < 5
    if not blocking:  # the handle is aborted; a call that blocks has given none yet
        wait_for(lambda: standin.alive() == 0)


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def test_wrong_arguments(standin: Standin) -> None:
    id = nccl.unique_id(standin.library)

    def make(*arguments, **options) -> None:
        nccl.NcclCommunicator(*arguments, **options, library=standin.library)

    with pytest.raises(InvalidArgument, match=r"rank 2 is not in 0\.\.1"):
        make(id, 2, 2)
    with pytest.raises(InvalidArgument, match="the size must be positive, got 0"):
        make(id, 0, 0)
    with pytest.raises(InvalidArgument, match="a unique id has 128 bytes, got 5"):
        make(b"short", 0, 1)
    with pytest.raises(InvalidArgument, match="a timeout of -1 s"):
        make(id, 0, 1, timeout=-1)
    with pytest.raises(nccl.NcclInvalidArgument, match="not a unique id of this library"):
        make(bytes(128), 0, 1)
    with pytest.raises(InvalidArgument, match="2 unique ids for 1 ranks"):
        make([id, id], 0, 1)


def test_library_that_makes_nothing(libraries: Libraries) -> None:
    """Success, and a null handle: what stubs of some libraries do."""
    empty = Standin(libraries.build(fault="null_comm"), libraries.cuda)
    with pytest.raises(nccl.NcclInternalError, match="reports success but gives no communicator"):
        run_ranks(empty, 1, lambda seat: None)


def test_several_ids(standin: Standin, libraries: Libraries) -> None:
    ids = [nccl.unique_id(standin.library) for _ in range(2)]

    def body(rank: int) -> int:
        with nccl.NcclCommunicator(ids, rank, 2, timeout=20, library=standin.library) as comm:
            return comm.size

    assert run_threads(2, body) == [2, 2]
    assert standin.log().count("CommInitRankScalable") == 2
    old = libraries.build(22005)
    with pytest.raises(Unsupported, match=r"ncclCommInitRankScalable is needed.*2\.23\.4"):
        nccl.NcclCommunicator(ids, 0, 2, library=nccl.open_library(old))


@pytest.mark.parametrize("blocking", [False, True])
def test_device_of_the_calling_thread(standin: Standin, blocking: bool) -> None:
    """Also when the call is made on a helper thread."""

    def body(rank: int) -> int:
        standin.set_device(rank + 3)
        comm = nccl.NcclCommunicator(
            id, rank, 2, timeout=20, blocking=blocking, library=standin.library, device=rank + 3
        )
        comm.close()
        return comm.device

    id = nccl.unique_id(standin.library)
    assert run_threads(2, body) == [3, 4]


def test_device_that_is_not_current(standin: Standin) -> None:
    def body(rank: int) -> None:
        standin.set_device(1)
        with pytest.raises(InvalidArgument, match="asked for device 2, NCCL took 1"):
            nccl.NcclCommunicator(
                nccl.unique_id(standin.library), 0, 1, device=2, library=standin.library
            )

    run_threads(1, body)
    assert standin.alive() == 0


# --- configuration


def test_fields_are_the_core_s() -> None:
    ours = {field.name for field in fields(nccl.NcclConfig)}
    assert ours | {"blocking"} == {name for name in dir(core.Config) if name[0] != "_"}


@pytest.mark.parametrize(
    ("config", "size", "version"),
    [
        ({}, 24, 21403),
        ({"min_ctas": 3}, 40, 21701),
        ({"split_share": 1}, 48, 21801),
        ({"traffic_class": 5}, 48, 22602),
        ({"comm_name": "tp", "min_ctas": 2}, 72, 22703),
        ({"channels_per_net_peer": 2}, 80, 22803),
        ({"num_rma_ctx": 1}, 88, 22902),
        ({"max_p2p_peers": 4}, 96, 23003),
        ({"graph_stream_ordering": 1}, 96, 23005),
    ],
)
def test_oldest_layout_that_fits(standin: Standin, config: dict, size: int, version: int) -> None:
    """Not the layout of the library that was found, which would make it read what is not there."""
    run_ranks(standin, 1, lambda seat: None, config=nccl.NcclConfig(**config))
    assert f"size={size} version={version} " in standin.last_config()
    for name in ("min_ctas", "traffic_class", "comm_name"):
        if name in config:
            assert f"{name}={config[name]}" in standin.last_config()


def test_field_that_the_library_is_too_old_for(libraries: Libraries) -> None:
    """Never ignored."""
    old = Standin(libraries.build(21805), libraries.cuda)
    with pytest.raises(Unsupported, match=r"ignore: comm_name \(since 2\.27\.3\).*NCCL 2\.18\.5"):
        run_ranks(old, 1, lambda seat: None, config=nccl.NcclConfig(comm_name="tp", min_ctas=1))
    oldest = Standin(libraries.build(2804), libraries.cuda)
    with pytest.raises(Unsupported, match=r"would ignore: min_ctas"):
        run_ranks(oldest, 1, lambda seat: None, config=nccl.NcclConfig(min_ctas=1))


# --- out of another


@pytest.mark.parametrize("blocking", [False, True])
def test_split(standin: Standin, blocking: bool) -> None:
    def body(seat: Seat) -> None:
        color = None if seat.rank == 3 else seat.rank % 2
        child = seat.comm.split(color, key=-seat.rank, name=f"half {color}")
        if color is None:
            assert child is None
            return
        members = [r for r in (2, 1, 0) if r % 2 == color]  # by key: the highest rank first
        assert (child.size, child.rank) == (len(members), members.index(seat.rank))
        assert child.blocking == blocking
        assert child.name == f"half {color}"
        assert total(seat, child, 10.0**seat.rank) == sum(10.0**r for r in members)
        again = seat.comm.split(0) if color is not None else None
        child.close()
        assert again is not None
        again.close()

    def with_all(seat: Seat) -> None:
        body(seat)
        if seat.rank == 3:
            assert seat.comm.split(None) is None

    run_ranks(standin, 4, with_all, blocking=blocking)
    assert standin.alive() == 0


def test_split_on_an_old_library(libraries: Libraries) -> None:
    old = Standin(libraries.build(21403), libraries.cuda)

    def body(seat: Seat) -> None:
        with pytest.raises(
            Unsupported, match=r"ncclCommSplit is needed.*2\.18\.1; found NCCL 2\.14"
        ):
            seat.comm.split(0)

    run_ranks(old, 1, body)


@pytest.mark.parametrize("blocking", [False, True])
def test_split_that_a_rank_misses(standin: Standin, blocking: bool) -> None:
    """A timeout on the others; the parent is then broken, and says so."""
    entered = threading.Event()

    def body(seat: Seat) -> None:
        if seat.rank == 1:
            entered.wait(20)
            seat.comm.abort()
            return
        seat.comm.timeout = 0.5
        with pytest.raises(Timeout, match="ncclCommSplit"):
            seat.comm.split(0)
        entered.set()
        assert "ncclCommSplit" in seat.comm.failure

    run_ranks(standin, 2, body, close=False, blocking=blocking)
    wait_for(lambda: standin.alive() == 0)


def test_shrink(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        if seat.rank == 1:
            return
        child = seat.comm.shrink([1], name="without 1")
        assert (child.size, child.rank) == (2, seat.rank // 2)
        assert total(seat, child, 1.0 + seat.rank) == 4
        child.close()
        with pytest.raises(InvalidArgument, match="called by the ranks that stay"):
            seat.comm.shrink([seat.rank])
        with pytest.raises(InvalidArgument, match="excluded rank 7"):
            seat.comm.shrink([7])
        with pytest.raises(InvalidArgument, match="without a rank to exclude"):
            seat.comm.shrink([])

    run_ranks(standin, 3, body)


@pytest.mark.parametrize("blocking", [False, True])
def test_shrink_after_a_failure(standin: Standin, blocking: bool) -> None:
    """A peer is lost, the failure is only recorded, and the others go on without it."""
    lost = threading.Event()

    def body(seat: Seat) -> None:
        if seat.rank == 2:
            lost.wait(20)
            return
        x = np.zeros(3)
        seat.comm.all_reduce(Array(x), stream=seat.stream)  # rank 2 never comes
        wait_for(lambda: seat.comm.failure != "")
        lost.set()
        assert "was launched and is not done after 0.5 s" in seat.comm.failure
        seat.comm.timeout = 20
        child = seat.comm.shrink([2], abort=True)
        assert total(seat, child, 1.0) == 2
        child.close()

    run_ranks(
        *(standin, 3, body), close=False, timeout=0.5, abort_on_error=False, blocking=blocking
    )


def test_grow(standin: Standin) -> None:
    ids: list[bytes] = []
    ready = threading.Event()

    def body(rank: int) -> None:
        if rank < 2:
            comm = nccl.NcclCommunicator(id, rank, 2, timeout=20, library=standin.library)
            if rank == 0:
                ids.append(comm.grow_id())
                ready.set()
            grown = comm.grow(3, ids[0] if rank == 0 else None, name="grown")
            comm.close()
        else:
            assert ready.wait(20)
            grown = nccl.NcclCommunicator.join_grown(
                ids[0], 2, 3, name="grown", timeout=20, library=standin.library
            )
        assert (grown.rank, grown.size, grown.name) == (rank, 3, "grown")
        seat = Seat(standin, grown, 7000 + rank)
        assert total(seat, grown, 2.0**rank) == 7
        grown.close()

    id = nccl.unique_id(standin.library)
    run_threads(3, body)
    assert standin.alive() == 0


def test_grow_to_fewer(standin: Standin) -> None:
    def body(seat: Seat) -> None:
        with pytest.raises(InvalidArgument, match="grow to 1 ranks, of which there are 1 now"):
            seat.comm.grow(1)

    run_ranks(standin, 1, body)


# --- stores


def test_from_store(standin: Standin) -> None:
    store = HashStore()

    def body(rank: int) -> int:
        comm = nccl.NcclCommunicator.from_store(
            store, rank, 3, name="pp", timeout=20, library=standin.library
        )
        with comm:
            return comm.size

    assert run_threads(3, body) == [3, 3, 3]


@pytest.mark.parametrize("absent", [0, 1])
def test_absent_rank_is_named(standin: Standin, absent: int) -> None:
    """A missing rank 0 too: nobody has an id then."""
    store = HashStore()

    def body(rank: int) -> None:
        rank = rank if rank < absent else rank + 1
        with pytest.raises(Timeout, match=rf"never came to the store: ranks \[{absent}\]"):
            nccl.NcclCommunicator.from_store(
                store, rank, 3, name="pp", timeout=1, library=standin.library
            )

    run_threads(2, body)

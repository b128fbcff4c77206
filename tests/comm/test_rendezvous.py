"""Finding each other: Store, file, id; missing ranks, wrong sizes, stale files, environments."""

import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore

from pyparallel import _core, _torch
from pyparallel.comm import Communicator, InvalidArgument, Mismatch, Timeout, Unsupported
from pyparallel.comm.rendezvous import Record, ranks_text
from pyparallel.comm.torch_backend import make_gloo
from tests.comm.threads import in_threads
from tests.launch import Rank, run_ranks, spawn_ranks


def by_store(rank: Rank) -> int:
    with Communicator.from_store(rank.store(), rank.rank, rank.world_size) as comm:
        return int(comm.all_reduce(torch.tensor(comm.rank + 1)))


def by_file(rank: Rank) -> int:
    path = rank.rendezvous
    with Communicator.from_file(path, rank.rank, rank.world_size) as comm:
        assert not Path(path).exists()
        return int(comm.all_reduce(torch.tensor(comm.rank + 1)))


@pytest.mark.parametrize("by", [by_store, by_file])
@pytest.mark.parametrize("world", [1, 3])
def test_processes_meet(by, world):
    assert run_ranks(by, world) == [world * (world + 1) // 2] * world


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_one_store_serves_many_groups(kind, tmp_path):
    store = {
        "hash": HashStore,
        "tcp": lambda: TCPStore("127.0.0.1", 0, 1, True),
        "file": lambda: FileStore(str(tmp_path / "store"), 2),
    }[kind]()

    def rank(number: int) -> None:
        for n in range(5):
            for name in ("a", "b"):
                with Communicator.from_store(store, number, 2, name=name) as comm:
                    assert comm.all_reduce(torch.tensor(n)).item() == 2 * n

    in_threads([lambda r=r: rank(r) for r in range(2)])


def test_one_file_serves_many_groups_in_turn(tmp_path):
    path = tmp_path / "meet"

    def rank(number: int) -> None:
        for n in range(30):
            with Communicator.from_file(path, number, 3, timeout=20) as comm:
                assert comm.all_reduce(torch.tensor(n)).item() == 3 * n

    in_threads([lambda r=r: rank(r) for r in range(3)])
    assert list(tmp_path.iterdir()) == []


# --- who is missing


def join(kind: str, store: HashStore, folder: Path, *args, **named) -> Communicator:
    if kind == "store":
        return Communicator.from_store(store, *args, **named)
    return Communicator.from_file(folder / "meet", *args, **named)


@pytest.mark.parametrize("missing", [0, 2])
@pytest.mark.parametrize("kind", ["store", "file"])
def test_a_missing_rank_is_named_with_those_that_came(missing, kind, tmp_path):
    store = HashStore()

    def rank(number: int) -> str:
        with pytest.raises(Timeout) as caught:
            join(kind, store, tmp_path, number, 3, name="tp", timeout=0.6)
        return str(caught.value)

    present = [r for r in range(3) if r != missing]
    start = time.monotonic()
    for text in in_threads([lambda r=r: rank(r) for r in present]):
        assert f"group tp: rank {missing} of world_size 3 did not come within 0.6 s" in text
        for r in present:
            assert f"rank {r} (pid {os.getpid()})" in text
    assert time.monotonic() - start < 5
    assert list(tmp_path.iterdir()) == []


def test_by_id_a_missing_rank_is_named():
    id = Communicator.unique_id()

    def rank(number: int) -> str:
        with pytest.raises(Timeout) as caught:
            Communicator.from_id(id, number, 3, timeout=0.6)
        return str(caught.value)

    for text in in_threads([lambda r=r: rank(r) for r in (0, 2)]):
        assert "rank 1" in text or "ranks 1" in text, text


@pytest.mark.parametrize("kind", ["store", "file"])
def test_a_wrong_world_size_is_named_at_once(kind, tmp_path):
    store = HashStore()

    def rank(number: int, world_size: int) -> str:
        with pytest.raises(Mismatch) as caught:
            join(kind, store, tmp_path, number, world_size, timeout=20)
        return str(caught.value)

    start = time.monotonic()
    texts = in_threads([lambda: rank(0, 2), lambda: rank(1, 3)])
    assert time.monotonic() - start < 5
    for text in texts:
        assert "has world_size 2" in text or "has 2" in text
        assert "has world_size 3" in text or "has 3" in text


def test_three_expected_two_started():
    """world_size 3 with two processes: both name rank 2."""
    with spawn_ranks(one_too_few, 2) as ranks:
        for outcome in ranks.wait():
            assert outcome.ok, outcome.traceback


def one_too_few(rank: Rank) -> None:
    with pytest.raises(Timeout, match="rank 2 of world_size 3 did not come"):
        Communicator.from_store(FileStore(rank.rendezvous), rank.rank, 3, timeout=3)


# --- stale files


def test_a_file_left_by_a_crash_does_no_harm(tmp_path):
    """Records of a dead process, garbage, half a line: none is believed, the file goes away."""
    path = tmp_path / "meet"
    script = (
        "import sys; from pyparallel.comm.boards import FileBoard\n"
        "from pyparallel.comm.rendezvous import Record\n"
        "for r in range(3): FileBoard(sys.argv[1], r).post(Record.own(r, 3))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
    with path.open("ab") as file:
        file.write(b'\x00\xff{"rank": 0}\n[1, 2]\n{"rank": 1, "world_')

    def rank(number: int) -> int:
        with Communicator.from_file(path, number, 3, timeout=20) as comm:
            return int(comm.all_reduce(torch.tensor(number)))

    assert in_threads([lambda r=r: rank(r) for r in range(3)]) == [3, 3, 3]
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_gave_up_does_not_hold_a_later_one(tmp_path):
    """Rank 1 comes, leaves at its deadline; then all come."""
    path = tmp_path / "meet"
    with pytest.raises(Timeout):
        Communicator.from_file(path, 1, 2, timeout=0.2)

    def rank(number: int) -> None:
        Communicator.from_file(path, number, 2, timeout=20).close()

    in_threads([lambda r=r: rank(r) for r in range(2)])


def by_torch_join(store: HashStore, rank: int, world_size: int, timeout: float) -> Communicator:
    limit = timedelta(seconds=timeout)
    return _core.Communicator.from_capsule(
        _torch.join(store, rank, world_size, "tp", limit, make_gloo)
    )


def by_from_store(store: HashStore, rank: int, world_size: int, timeout: float) -> Communicator:
    return Communicator.from_store(store, rank, world_size, name="tp", timeout=timeout)


@pytest.mark.parametrize("meet", [by_torch_join, by_from_store])
def test_a_rank_that_tries_again_meets_those_who_come_for_the_first_time(meet):
    """Rank 0 gives up twice, while rank 1 is patient; rank 2 comes when both are there again."""
    store = HashStore()
    tries = threading.Event()

    def impatient() -> None:
        for missing in ("1", "2"):
            with pytest.raises(Timeout, match=missing):
                meet(store, 0, 3, 0.2)
            tries.set()
        meet(store, 0, 3, 20).close()

    def patient() -> None:
        tries.wait(20)
        meet(store, 1, 3, 20).close()

    def late() -> None:
        time.sleep(0.7)
        meet(store, 2, 3, 20).close()

    in_threads([impatient, patient, late])

    def again(number: int) -> None:
        meet(store, number, 3, 20).close()

    in_threads([lambda r=r: again(r) for r in range(3)])


def test_who_gave_up_is_told_from_who_never_came():
    store = HashStore()
    with pytest.raises(Timeout, match=r"ranks 1 and 2 of world_size 3"):
        by_from_store(store, 0, 3, 0.1)
    with pytest.raises(Timeout, match=r"rank 2 of world_size 3 .*came and gave up: rank 0 \(pid"):
        by_from_store(store, 1, 3, 0.1)
    with pytest.raises(Timeout, match=r"not all ranks .* at once.*gave up: rank 0 .*, rank 1"):
        by_from_store(store, 2, 3, 0.1)


def test_two_processes_with_one_rank_are_named(tmp_path):
    path = tmp_path / "meet"
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mine = Record.own(0, 2)
        stat = Path(f"/proc/{sleeper.pid}/stat").read_bytes()
        started = int(stat.rpartition(b")")[2].split()[19])
        other = Record(0, 2, sleeper.pid, started, mine.pid_namespace, mine.host, mine.id)
        path.write_text(other.to_json() + "\n")
        with pytest.raises(Mismatch, match=rf"call themselves rank 0: pids {sleeper.pid} and"):
            Communicator.from_file(path, 0, 2, timeout=5)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_file_of_another_kind_or_user_is_refused(tmp_path):
    with pytest.raises(OSError, match="directory"):
        Communicator.from_file(tmp_path, 0, 1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(InvalidArgument, match="expected a regular file"):
        Communicator.from_file(fifo, 0, 1)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        Communicator.from_file(link, 0, 1)
    assert not (tmp_path / "elsewhere").exists()
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.touch()
        os.chown(theirs, 65534, 65534)
        with pytest.raises(InvalidArgument, match="found one of user 65534"):
            Communicator.from_file(theirs, 0, 1)


# --- hosts and environments


def other_environment(rank: Rank) -> int:
    os.environ["PYPARALLEL_SPIN_US"] = str(rank.rank * 7)
    os.environ["TMPDIR"] = f"/nowhere/{rank.rank}"
    os.environ[f"RANK_{rank.rank}"] = "x"
    return by_store(rank)


def test_ranks_with_different_environments_meet():
    with spawn_ranks(other_environment, 3) as ranks:
        assert [outcome.value for outcome in ranks.wait()] == [6, 6, 6]


def test_the_file_refuses_ranks_of_several_hosts_with_the_way_out(tmp_path):
    records = [Record.own(r, 2) for r in range(2)]
    path = tmp_path / "meet"
    other = json.loads(records[1].to_json())
    other["host"] = "another-host"
    path.write_text(json.dumps(other) + "\n")
    with pytest.raises(Unsupported, match="on several hosts; use Communicator.from_store"):
        Communicator.from_file(path, 0, 2, timeout=5)


@pytest.mark.parametrize(
    ("rank", "world", "message"),
    [
        (2, 2, "rank 2 of 2"),
        (-1, 2, "rank -1 of 2"),
        (0, 0, "rank 0 of 0"),
        ("0", 2, "rank is '0'; expected an int"),
        (0, 2.0, "world_size is 2.0; expected an int"),
        (True, 2, "rank is True"),
    ],
)
def test_ranks_that_cannot_be(rank, world, message, tmp_path):
    for join in (
        lambda: Communicator.from_id(Communicator.unique_id(), rank, world),
        lambda: Communicator.from_store(HashStore(), rank, world),
        lambda: Communicator.from_file(tmp_path / "x", rank, world),
    ):
        with pytest.raises(InvalidArgument, match=message):
            join()


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "{}", "{", "x" * 5000,
        json.dumps({**json.loads(Record.own(0, 1).to_json()), "pid": "1"}),
        json.dumps({**json.loads(Record.own(0, 1).to_json()), "id": "zz"}),
        json.dumps({**json.loads(Record.own(0, 1).to_json()), "more": 1}),
    ],
)  # fmt: skip
def test_what_is_no_record_is_none(text):
    assert Record.from_json(text) is None


def test_records_round_trip():
    record = Record.own(3, 8)
    assert Record.from_json(record.to_json()) == record
    assert record.alive()
    assert len(record.unique_id) == 128


def test_lists_of_ranks_read_well():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 2]) == "ranks 0 and 2"
    assert ranks_text(list(range(20))) == "ranks 0, 1, 2, 3, 4, 5 and 14 more"


def test_a_python_store_may_need_the_gil(tmp_path):
    """A rendezvous in one thread, Python at work in another: neither holds the other up."""
    store, stop = HashStore(), threading.Event()

    def busy() -> None:
        while not stop.wait(0.001):
            sum(range(1000))

    worker = threading.Thread(target=busy, daemon=True)
    worker.start()
    try:
        in_threads(
            [lambda r=r: Communicator.from_store(store, r, 2, timeout=20).close() for r in range(2)]
        )
    finally:
        stop.set()
        worker.join()

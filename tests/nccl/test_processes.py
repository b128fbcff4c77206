"""Ranks as processes over the stand-in: data, and processes that die, stop or leave.

torch is imported in each, so there are few of them.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyparallel._core import nccl as core
from pyparallel.comm import nccl
from pyparallel.errors import Timeout
from tests.launch import Rank, run_ranks, spawn_ranks
from tests.nccl.harness import Array, Standin
from tests.nccl.libraries import Libraries

STREAM = 16


def seat(rank: Rank, paths: tuple[str, str], folder: str, **options: Any) -> tuple[Any, Any]:
    """The stand-in and a communicator of all ranks, which meet through the run's store."""
    os.environ["STANDIN_DIR"] = folder
    core.use_driver(paths[1])
    standin = Standin(Path(paths[0]), Path(paths[1]))
    options = {"timeout": 20.0, "library": standin.library} | options
    comm = nccl.NcclCommunicator.from_store(rank.store(), rank.rank, rank.world_size, **options)
    return standin, comm


@pytest.fixture
def paths(libraries: Libraries) -> tuple[str, str]:
    return str(libraries.build()), str(libraries.cuda)


def exchange(rank: Rank, paths: tuple[str, str], folder: str) -> list[Any]:
    standin, comm = seat(rank, paths, folder, name="all")
    me, size = rank.rank, rank.world_size
    inputs = [np.random.default_rng(r).standard_normal(2000) for r in range(size)]
    mine, part, gathered = inputs[me].copy(), np.empty(1000), np.empty(2000 * size)
    comm.all_reduce(Array(mine), stream=STREAM)
    comm.reduce_scatter(Array(inputs[me][: 1000 * size]), Array(part), stream=STREAM)
    comm.all_gather(Array(inputs[me]), Array(gathered), stream=STREAM)
    other = np.empty(2000)
    with nccl.group():
        comm.send(Array(inputs[me]), (me + 1) % size, stream=STREAM)
        comm.recv(Array(other), (me - 1) % size, stream=STREAM)
    standin.synchronize(STREAM)
    assert np.array_equal(gathered, np.concatenate(inputs))
    assert np.array_equal(other, inputs[me - 1])
    limit = 2.0**-52 * np.sum(np.abs(inputs), axis=0) * size
    assert (np.abs(mine - np.sum(inputs, axis=0)) <= limit).all()
    whole = np.sum(inputs, axis=0)[1000 * me : 1000 * (me + 1)]
    assert (np.abs(part - whole) <= limit[1000 * me : 1000 * (me + 1)]).all()
    half = comm.split(0, key=-me, name="half")
    comm.close()
    half.close()
    return [mine.tobytes(), half.rank, standin.alive()]


def test_data_between_processes(paths: tuple[str, str], world_folder: Path) -> None:
    results = run_ranks(exchange, 2, paths, str(world_folder), timeout=100)
    assert results[0][0] == results[1][0]  # the same bits
    assert [result[1:] for result in results] == [[1, 0], [0, 0]]
    assert list(world_folder.iterdir()) == []


def with_a_lost_peer(rank: Rank, paths: tuple[str, str], folder: str) -> dict[str, Any]:
    """Three ways on, each with a communicator of its own: seconds it took, and what was said."""
    standin, comm = seat(rank, paths, folder)
    comms = {"watch": comm, "close": comm.split(0), "abort": comm.split(0)}
    x = np.ones(8)
    for comm in comms.values():
        comm.all_reduce(Array(x), stream=STREAM)
    standin.synchronize(STREAM)
    rank.report("joined")
    if rank.rank == 1:
        time.sleep(60)
    time.sleep(0.5)  # by now rank 1 is dead or stopped

    def watch() -> str:
        comms["watch"].timeout = 1.0
        comms["watch"].all_reduce(Array(x), stream=STREAM)
        while not comms["watch"].failure:
            time.sleep(0.01)
        standin.synchronize(STREAM)
        return str(comms["watch"].failure)

    def close() -> str:
        with pytest.raises(Timeout) as raised:
            comms["close"].close(timeout=1.0)
        return str(raised.value)

    def abort() -> str:
        comms["abort"].all_reduce(Array(x), stream=STREAM)
        comms["abort"].abort("enough")
        standin.synchronize(STREAM)
        return str(comms["abort"].failure)

    results = {}
    for call in (watch, close, abort):
        start = time.monotonic()
        said = call()
        results[call.__name__] = (time.monotonic() - start, said)
    return results


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_peer(paths: tuple[str, str], world_folder: Path, signal_number: int) -> None:
    """Rows 91 and 92: dead or stopped, the others get an error in time and can leave."""
    with spawn_ranks(with_a_lost_peer, 2, paths, str(world_folder), timeout=100) as ranks:
        for rank in range(2):
            assert ranks.next_report(rank, 60) == "joined"
        ranks.kill(1, signal_number)
        (outcome,) = ranks.wait([0])
    assert outcome.ok, outcome.traceback
    for how, text in (
        ("watch", "#2 was launched and is not done after 1 s"),
        ("close", "peers have not finished what was started"),
        ("abort", "enough"),
    ):
        seconds, said = outcome.value[how]
        assert text in said
        assert seconds < 4


SCRIPT = """
import os, sys, time
import numpy as np
from pathlib import Path
from pyparallel._core import nccl as core
from pyparallel.comm import nccl
from tests.nccl.harness import Array, Standin
core.use_driver(sys.argv[2])
standin = Standin(Path(sys.argv[1]), Path(sys.argv[2]))
id = nccl.unique_id(standin.library)
if sys.argv[3] == "peer":
    def other():
        comm = nccl.NcclCommunicator(id, 1, 2, library=standin.library, timeout=20)
        keep.append(comm)
    import threading
    keep = []
    threading.Thread(target=other, daemon=True).start()
    comm = nccl.NcclCommunicator(id, 0, 2, library=standin.library, timeout=20)
    comm.all_reduce(Array(np.ones(4)), stream=16)   # its peer never launches
else:
    comm = nccl.NcclCommunicator(id, 0, 1, library=standin.library, timeout=20)
print("alive", flush=True)
if sys.argv[3] == "raise":
    raise KeyError("at the end")
"""


@pytest.mark.parametrize(("how", "status"), [("alone", 0), ("peer", 0), ("raise", 1)])
def test_process_ends_with_a_live_communicator(
    paths: tuple[str, str], world_folder: Path, how: str, status: int
) -> None:
    """No wait, no crash: what is left is the operating system's."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *paths, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"STANDIN_DIR": str(world_folder)},
        cwd=Path(__file__).resolve().parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"alive\n"
        start = time.monotonic()
        _, error = process.communicate(timeout=30)
    assert process.returncode == status, error.decode()
    assert time.monotonic() - start < 5
    assert (b"KeyError" in error) == (how == "raise")

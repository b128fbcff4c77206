"""Waits and ends of SymmetricMemory on the CPU: deadlines, deaths, aborts, what is left afterwards.

Layers: processes as ranks, some of which stop, die or are dropped. All of it runs in CI.
"""

import contextlib
import gc
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

from pyparallel import _core
from pyparallel.comm import (
    Aborted,
    Closed,
    CommError,
    PeerLost,
    Timeout,
)
from pyparallel.comm.symmetric_memory import SymmetricMemory
from tests.launch import Rank, run_ranks, spawn_ranks
from tests.native import build
from tests.symmetric.test_host import joined

# --- waits: deadlines, deaths, aborts


def waits_for_nothing(rank: Rank) -> None:
    group = joined(rank)
    memory = SymmetricMemory(group, 4096, name="tp")
    begin = time.monotonic()
    if group.rank == 0:
        with pytest.raises(
            Timeout,
            match=r"wait_signal, symmetric memory of group tp \(generation \d+\), channel 3, "
            r"signal 1 from rank 1: not come after 0\.2 s; counter 0, expected 1; rank 1 \(pid",
        ):
            memory.wait_signal(1, 3, timeout=0.2)
        assert 0.2 <= time.monotonic() - begin < 5
    group.barrier()
    if group.rank == 1:
        memory.put_signal(0, 3)
    else:
        memory.wait_signal(1, 3)  # the same signal, after the timeout
    group.barrier()
    if group.rank == 0:
        memory.close()
        with pytest.raises(Closed, match="used after close"):
            memory.put_signal(1)
    else:
        with pytest.raises(PeerLost, match="has closed this memory"):
            memory.wait_signal(0)


def test_deadline_and_leaving() -> None:
    run_ranks(waits_for_nothing, 2)


def waits_for_a_dead_rank(rank: Rank) -> "tuple[float, str]":
    group = joined(rank)
    memory = SymmetricMemory(group, 4096)
    memory.barrier()
    rank.report("ready")
    if group.rank == 1:
        time.sleep(60)
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        memory.wait_signal(1) if group.rank == 0 else memory.barrier()
    return time.monotonic() - begin, f"{type(caught.value).__name__} {caught.value}"


def test_death_of_a_rank_ends_waits() -> None:
    with spawn_ranks(waits_for_a_dead_rank, 3) as ranks:
        for number in range(3):
            ranks.next_report(number)
        time.sleep(0.3)
        pid = ranks.pid(1)
        ranks.kill(1)
        outcomes = ranks.wait([0, 2])
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
        seconds, text = outcome.value
        assert seconds < 3
        assert "rank 1" in text
        assert str(pid) in text


# Ends the process at its first socket call after the variable is set: on the way into the memory.
DIES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
typedef int (*Call)(int, const struct sockaddr*, socklen_t);
static int go_on(const char* name, int fd, const struct sockaddr* address, socklen_t length) {
  if (getenv("DIES_IN_SOCKETS") != NULL) raise(SIGKILL);
  return ((Call)dlsym(RTLD_NEXT, name))(fd, address, length);
}
int bind(int fd, const struct sockaddr* a, socklen_t n) { return go_on("bind", fd, a, n); }
int connect(int fd, const struct sockaddr* a, socklen_t n) { return go_on("connect", fd, a, n); }
"""


def joins_with_one_that_dies(rank: Rank, dying: int) -> "tuple[float, str, int]":
    group = joined(rank)
    group.barrier()
    pid = group.pid_of(dying)
    if rank.rank == dying:
        os.environ["DIES_IN_SOCKETS"] = "1"
    begin = time.monotonic()
    with pytest.raises((PeerLost, Aborted)) as caught:
        SymmetricMemory(group, 4096)
    return time.monotonic() - begin, str(caught.value), pid


@pytest.mark.skipif(build.compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("dying", [0, 1])
def test_death_while_joining(dying: int, tmp_path: Path) -> None:
    """Rank 0 offers the memory's file and dies before that, rank 1 as it asks for it."""
    source, library = tmp_path / "dies.c", tmp_path / "dies.so"
    source.write_text(DIES)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    env = {"LD_PRELOAD": str(library)}
    with spawn_ranks(joins_with_one_that_dies, 3, dying, env=env) as ranks:
        outcomes = ranks.wait()
    assert outcomes[dying].exit_code == -9, outcomes[dying].traceback
    for outcome in outcomes[:dying] + outcomes[dying + 1 :]:
        assert outcome.ok, outcome.traceback
        seconds, text, pid = outcome.value
        assert seconds < 20  # a second or two, with load; the deadline is 40
        assert f"rank {dying} (pid {pid}" in text, text


def aborted(rank: Rank) -> None:
    group = joined(rank)
    memory = SymmetricMemory(group, 4096)
    if group.rank == 0:
        time.sleep(0.2)
        memory.abort("enough")
        assert "enough" in memory.failure
    else:
        with pytest.raises(Aborted, match="enough"):
            memory.wait_signal(0)
    group.barrier()  # the caller's group goes on


def test_abort_wakes_waiters() -> None:
    run_ranks(aborted, 2)


# --- life


def maps() -> "tuple[int, int]":
    """Mapped memory files, and open descriptors; a group opens some to watch processes, but few."""
    mapped = Path("/proc/self/maps").read_text()
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed by now
            links.append(str(link.readlink()))
    assert sum("pidfd" in link for link in links) < 8
    return mapped.count("memfd:pyparallel"), sum("pidfd" not in link for link in links)


def lives_and_dies(rank: Rank) -> None:
    group = joined(rank)
    SymmetricMemory(group, 4096).close()
    gc.collect()
    group.barrier()
    before, registered = maps(), _core.symmetric_registered()
    for turn in range(100):
        memory = SymmetricMemory(group, 100_000)
        tensor = memory.empty(10)
        if turn % 2:
            memory.close()
        del memory, tensor
    gc.collect()
    assert maps() == before, (maps(), before)
    assert _core.symmetric_registered() == registered

    # A tensor keeps the memory, its own and a peer's; the seat may go first.
    memory = SymmetricMemory(group, 100_000)
    mine = memory.empty(1000)
    theirs = memory.peer((group.rank + 1) % 2, mine)
    mine.fill_(group.rank)
    memory.barrier()
    memory.close()
    memory.close()
    del memory
    gc.collect()
    assert theirs.eq((group.rank + 1) % 2).all()
    assert _core.symmetric_find(mine.data_ptr(), 4000) is not None
    group.barrier()
    del mine
    assert _core.symmetric_registered() == registered + 1
    del theirs
    assert _core.symmetric_registered() == registered
    assert maps() == before, (maps(), before)


def test_nothing_is_left() -> None:
    # In fresh processes: what an earlier test left to background threads may close at any moment.
    with spawn_ranks(lives_and_dies, 2) as ranks:
        for outcome in ranks.wait():
            assert outcome.ok, outcome.traceback


def dropped_on_one_rank(rank: Rank) -> float:
    group = joined(rank)
    memory = SymmetricMemory(group, 4096)
    begin = time.monotonic()
    if group.rank == 0:
        del memory
        gc.collect()
    spent = time.monotonic() - begin
    group.barrier()
    return spent


def test_dropping_never_waits() -> None:
    assert max(run_ranks(dropped_on_one_rank, 2)) < 1


def forked(rank: Rank) -> int:
    group = joined(rank)
    memory = SymmetricMemory(group, 4096)
    tensor = memory.empty(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            memory.put_signal(0)
        except Closed as error:
            code = 0 if "fork" in str(error) else 2
        memory.close()
        del memory, tensor
        gc.collect()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    memory.barrier()  # the parent's seat is untouched by the child's close
    return status


def test_fork_is_no_rank() -> None:
    assert run_ranks(forked, 2) == [0, 0]


def seen_by_collectives(rank: Rank) -> "tuple":
    group = joined(rank)
    memory = SymmetricMemory(group, 4096)
    tensor = memory.empty(100)
    found = _core.symmetric_find(tensor[3:].data_ptr(), 388)
    segment, owner, size, device, offset, left, bases, multicast = found
    assert (owner, size, device, multicast) == (group.rank, 2, -1, 0)
    assert offset == memory.offset(tensor) + 12
    assert left == memory.nbytes - offset
    assert bases == memory.pointers().tolist()
    assert _core.symmetric_find(tensor.data_ptr(), memory.nbytes + 1) is None
    assert _core.symmetric_find(torch.ones(3).data_ptr(), 1) is None
    # A peer's part is not this rank's: only its owner publishes it.
    assert _core.symmetric_find(memory.peer(1 - group.rank, tensor).data_ptr(), 1) is None
    tensor.copy_(torch.arange(100) * (group.rank + 1.0))
    group.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(100) * 3.0)
    group.barrier()
    return (segment,)


def test_registry() -> None:
    results = run_ranks(seen_by_collectives, 2)
    assert results[0] == results[1]
    assert results[0][0] != 0

"""CUDA symmetric memory where something lacks or fails, over the stand-in for the driver.

Layers: each driver call failing on one rank leaves all ranks with the same error and nothing else;
what lacks costs only itself; then life: busy devices, forks, deaths. All of it runs in CI.
"""

import gc
import os
import re
import time
from pathlib import Path

import pytest

from pyparallel import _core
from pyparallel.comm import (
    CommError,
    Mismatch,
    NoMemory,
    Unsupported,
)
from tests.launch import Rank, run_ranks, spawn_ranks
from tests.native import build
from tests.symmetric.test_cuda import (
    CALLS,
    check_data,
    create,
    driver,
    joined,
    live,
    nothing_left,
)

pytestmark = pytest.mark.skipif(
    build.compiler() is None, reason="needs a C++ compiler (g++ or CXX)"
)

# --- what lacks and what fails


def fails_on_one_rank(rank: Rank, where: int, calls: "list[str]") -> "list[tuple]":
    """Each call failing on one rank: all ranks get the same lesser memory, or the same error."""
    driver()
    group = joined(rank)
    results: list[tuple] = []
    for number, call in enumerate(calls):
        driver(FAIL=f"{call}:801" if group.rank == where else "")
        try:
            memory = create(group)
        except CommError as error:
            text = str(error)
            assert "rank" in text or call.split("_")[0] in text, text
            results.append((call, type(error).__name__, ""))
        else:
            driver()
            check_data(group, memory, number)
            results.append((call, memory.kind, memory.multicast != 0))
            del memory
        driver()
        nothing_left()
        group.barrier()
    return results


@pytest.mark.parametrize("where", [0, 2])
def test_each_call_failing_on_one_rank(env: "dict[str, str]", where: int) -> None:
    skipped = {"cuGetErrorName", "cuGetErrorString", "cuInit", "cuDriverGetVersion"}
    skipped |= {"cuDeviceGetCount", "cuMemRelease", "cuCtxPopCurrent_v2"}
    skipped |= {"cuDevicePrimaryCtxRelease_v2", "cuMemUnmap", "cuMemAddressFree"}
    calls = [call for call in CALLS if call not in skipped]
    results = run_ranks(fails_on_one_rank, 3, where, calls, env=env, timeout=110)
    for number in range(len(calls)):
        outcomes = {result[number] for result in results}
        assert len(outcomes) == 1, outcomes  # the failing rank's class and way, on all
    by_call = {result[0]: result for result in results[1]}
    assert by_call["cuMulticastBindMem"] == ("cuMulticastBindMem", "posix fd", False)
    assert by_call["cuMemExportToShareableHandle"][1] == "cuda ipc"
    assert by_call["cuMemImportFromShareableHandle"][1] == "cuda ipc"
    assert by_call["cuMemAlloc_v2"] == ("cuMemAlloc_v2", "posix fd", True)


def explains(rank: Rank) -> "list[str]":
    """The likely causes that messages name."""
    group = joined(rank)
    texts = []
    driver(FAIL="cuMulticastBindMem:802" if rank.rank == 1 else "")
    texts.append(create(group).notes)
    driver(LACKS="vmm", FAIL="cuIpcGetMemHandle:1")
    with pytest.raises(Unsupported) as caught:
        create(group)
    texts.append(str(caught.value))
    driver(LACKS="peer")
    with pytest.raises(Unsupported) as caught:
        create(group)
    texts.append(str(caught.value))
    driver(MEMORY=str((1 << 22) if rank.rank == 1 else 1 << 30))
    with pytest.raises(NoMemory) as caught:
        create(group, nbytes=3 << 20)
    texts.append(str(caught.value))
    driver()
    with pytest.raises(Mismatch, match="kind of device"):
        create(group, device=-1 if rank.rank == 0 else 1)
    with pytest.raises(Mismatch, match="multicast"):
        create(group, multicast=rank.rank == 0)
    create(group)
    nothing_left()
    return texts


def test_messages_name_likely_causes(env: "dict[str, str]") -> None:
    for texts in run_ranks(explains, 2, env=env):
        assert "no multicast" in texts[0]
        assert "CUDA_ERROR_SYSTEM_NOT_READY (802): system not yet initialized" in texts[0]
        assert "fabric manager" in texts[0]
        assert "expandable_segments" in texts[1]
        assert "no way to share device memory" in texts[1]
        assert "no peer access" in texts[2]
        assert re.search(r"4194304 bytes needed, 2097152 bytes free of 4194304", texts[3])


def incomplete(rank: Rank) -> str:
    driver()
    group = joined(rank)
    try:
        memory = create(group)
    except Unsupported as error:
        return str(error)
    check_data(group, memory, 3)
    return f"{memory.kind}, multicast {memory.multicast != 0}: {memory.notes}"


def test_incomplete_drivers(standins: "dict[str, Path]") -> None:
    def texts(name: str) -> "list[str]":
        return run_ranks(incomplete, 2, env={"LD_LIBRARY_PATH": str(standins[name])})

    assert all("libcuda.so.1 lacks cuInit; a newer driver" in text for text in texts("BASE"))
    assert all(text.startswith("cuda ipc, multicast False") for text in texts("VMM"))
    assert all(text.startswith("posix fd, multicast False") for text in texts("MULTICAST"))


def driver_on_one_rank(rank: Rank) -> str:
    group = joined(rank)
    driver(FAIL="cuInit:100" if rank.rank == 1 else "")
    with pytest.raises(CommError) as caught:
        create(group)
    driver()
    check_data(group, create(group), 4)  # the driver may come later
    return f"{type(caught.value).__name__}: {caught.value}"


def test_no_device_on_one_rank(env: "dict[str, str]") -> None:
    fresh = {**env, "STANDIN_CUDA_DEVICES": "3"}  # processes that have not loaded it yet
    texts = run_ranks(driver_on_one_rank, 2, env=fresh)
    assert all(text.startswith("Unsupported") for text in texts)
    assert all("CUDA_ERROR_NO_DEVICE" in text for text in texts)


# --- life


def busy(rank: Rank, flag: str) -> float:
    driver()
    group = joined(rank)
    memory = create(group)
    group.barrier()
    Path(f"{flag}{rank.rank}").touch()
    driver(BUSY=f"{flag}{rank.rank}")
    begin = time.monotonic()
    del memory
    spent = time.monotonic() - begin
    assert not _core.drain_released_devices(200)
    assert live()["mapped"] == 3, "memory stays mapped while kernels may use it"
    Path(f"{flag}{rank.rank}").unlink()
    nothing_left()
    group.barrier()
    return spent


def test_dropping_never_waits_for_the_device(env: "dict[str, str]", tmp_path: Path) -> None:
    assert max(run_ranks(busy, 2, str(tmp_path / "busy"), env=env)) < 1


def forks(rank: Rank) -> int:
    driver()
    group = joined(rank)
    memory = create(group)
    before = live()
    child = os.fork()
    if child == 0:
        del memory
        gc.collect()
        os._exit(0 if live() == before else 1)  # the parent's driver is not touched
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    check_data(group, memory, 5)
    return status


def test_forked_child_leaves_the_driver_alone(env: "dict[str, str]") -> None:
    assert run_ranks(forks, 2, env=env) == [0, 0]


def dies(rank: Rank, call: str) -> "tuple[float, str]":
    group = joined(rank)
    rank.report("ready")
    driver(DIE=call if rank.rank == 1 else "")
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        create(group)
    spent = time.monotonic() - begin
    nothing_left()
    return spent, str(caught.value)


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemImportFromShareableHandle", "cuMulticastBindMem"]
)
def test_death_while_setting_up(env: "dict[str, str]", call: str) -> None:
    with spawn_ranks(dies, 3, call, env=env) as ranks:
        for number in range(3):
            ranks.next_report(number)
        pid = ranks.pid(1)
        outcomes = ranks.wait([0, 2])
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
        seconds, text = outcome.value
        assert seconds < 5
        assert str(pid) in text

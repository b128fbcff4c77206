"""CUDA symmetric memory between processes, over a stand-in for the driver (standin_cuda.cpp).

Layers: (1) our declarations against the toolkit's header, compiled; (2) every way of sharing, data
checked on all ranks, nothing left afterwards; (3) what lacks costs only itself, and each driver
call failing on one rank leaves all ranks with the same; (4) life: busy devices, forks, deaths. What
only a GPU can show is not here: coherence of devices, multicast loads and stores, speed.
"""

import ctypes
import ctypes.util
import gc
import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from pyparallel import _core
from pyparallel.comm import (
    CommError,
    Communicator,
    InvalidArgument,
    Mismatch,
    NoMemory,
    Unsupported,
)
from tests.launch import Rank, run_ranks, spawn_ranks
from tests.native import build

pytestmark = pytest.mark.skipif(
    build.compiler() is None, reason="needs a C++ compiler (g++ or CXX)"
)

HERE = Path(__file__).parent
NBYTES = 100_000
KINDS = [
    "handles",
    "reserved",
    "mapped",
    "allocations",
    "opened",
    "contexts",
    "current",
    "bindings",
]
CALLS = re.findall(
    r"^  X\((\w+),", (build.CSRC / "symmetric" / "cuda_abi.h").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def standins(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, Path]":
    """Folders with a libcuda.so.1: whole, and with parts missing."""
    folders = {}
    for name in ("WHOLE", "BASE", "VMM", "MULTICAST"):
        folders[name] = tmp_path_factory.mktemp(name.lower())
        command = [str(build.compiler()), *build.COMMON, "-O1", "-fPIC", "-shared"]
        if name != "WHOLE":
            command.append(f"-DSTANDIN_WITHOUT_{name}")
        library = folders[name] / "libcuda.so.1"
        subprocess.run(
            [*command, HERE / "standin_cuda.cpp", "-o", library], check=True, timeout=100
        )
    return folders


@pytest.fixture
def env(standins: "dict[str, Path]") -> "dict[str, str]":
    return {"LD_LIBRARY_PATH": str(standins["WHOLE"])}


def joined(rank: Rank, timeout: float = 30) -> Communicator:
    return Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=timeout)


def driver(**settings: str) -> None:
    """Sets what the stand-in does in this rank from now on; processes are used again."""
    for name in [name for name in os.environ if name.startswith("STANDIN_CUDA_")]:
        if name != "STANDIN_CUDA_DEVICES":
            del os.environ[name]
    for name, value in settings.items():
        os.environ[f"STANDIN_CUDA_{name}"] = value


def create(
    group: Communicator, device: "int | None" = None, nbytes: int = NBYTES, **kwargs: object
):
    ordinal = group.rank if device is None else device
    options = {"channels": 2, "multicast": True, "timeout_ms": 20_000, **kwargs}
    return _core.SymmetricMemory.create(group._core, nbytes, "tp", ordinal, **options)


def live() -> "dict[str, int]":
    count = ctypes.CDLL("libcuda.so.1").standin_live
    count.restype = ctypes.c_long
    return {kind: count(kind.encode()) for kind in KINDS}


def nothing_left() -> None:
    gc.collect()
    assert _core.drain_released_devices(10_000)
    assert live() == dict.fromkeys(KINDS, 0)


def check_data(group: Communicator, memory: "_core.SymmetricMemory", seed: int) -> None:
    """Random bytes of every rank seen by every rank, at both ends of the memory."""
    size = 3000
    for offset in (0, memory.bytes - size):
        mine = random.Random(f"{seed} {group.rank}").randbytes(size)
        ctypes.memmove(memory.data(group.rank) + offset, mine, size)
        memory.barrier(20_000)
        for peer in range(group.world_size):
            expected = random.Random(f"{seed} {peer}").randbytes(size)
            assert ctypes.string_at(memory.data(peer) + offset, size) == expected
        memory.barrier(20_000)
    for peer in range(group.world_size):  # fresh signal pages, after the data and apart from it
        assert memory.signal_page(peer) >= memory.data(peer) + memory.bytes
        assert not any(ctypes.string_at(memory.signal_page(peer), 64 * 2 * group.world_size))
    found = _core.symmetric_find(memory.data(group.rank) + 8, 8)
    assert found is not None
    assert found[1:5] == (group.rank, group.world_size, memory.device, 8)
    assert found[6] == [memory.data(peer) for peer in range(group.world_size)]
    assert found[7] == memory.multicast


# --- (1)


def test_declarations_match_the_toolkit() -> None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and Path(nvcc).parents[1]]
    include = next(
        (Path(h) / "include" for h in homes if h and (Path(h) / "include/cuda.h").exists()), 0
    )
    if not include:
        pytest.skip("needs cuda.h of a CUDA toolkit")
    source = HERE / "check_cuda_abi.cpp"
    command = [str(build.compiler()), *build.COMMON, f"-I{include}", "-fsyntax-only", source]
    subprocess.run(command, check=True, timeout=100)


def test_no_driver_is_told_in_the_loaders_words() -> None:
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has a driver")
    assert "libcuda.so.1: cannot open shared object file" in _core.cuda_driver_unavailable()


# --- (2) ways of sharing


def shares(rank: Rank, lacks: str) -> "tuple[str, bool, str, int]":
    driver(LACKS=lacks)
    group = joined(rank)
    memory = create(group)
    check_data(group, memory, 1)
    assert memory.bytes >= NBYTES
    offset = memory.allocate(5000, 256, 20_000)
    assert memory.allocate(1, 256, 20_000) == offset + 5120
    memory.put_signal((group.rank + 1) % group.world_size, 1)
    memory.wait_signal((group.rank - 1) % group.world_size, 1, 20_000)
    before = len(list(Path("/proc/self/fd").iterdir()))
    result = (memory.kind, memory.multicast != 0, memory.notes, memory.granularity)
    memory.barrier(20_000)
    memory.close()
    memory.close()
    del memory
    nothing_left()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    group.barrier()
    return result


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("lacks", "kind", "multicast"),
    [
        ("", "posix fd", True),
        ("multicast", "posix fd", False),
        ("posix_fd", "fabric", True),
        ("posix_fd fabric", "cuda ipc", False),
        ("vmm", "cuda ipc", False),
    ],
)
def test_ways_of_sharing(
    env: "dict[str, str]", lacks: str, kind: str, multicast: bool, world_size: int
) -> None:
    results = run_ranks(shares, world_size, lacks, env=env)
    assert all(result == results[0] for result in results)
    got_kind, got_multicast, notes, granularity = results[0]
    assert got_kind == kind
    assert got_multicast == (multicast and world_size > 1)
    assert granularity == (1 << 22 if got_multicast else 1 << 21 if kind != "cuda ipc" else 4096)
    if "multicast" in lacks and world_size > 1:
        assert "no multicast: the device or driver of rank 0 1" in notes


def one_device(rank: Rank) -> str:
    driver()
    group = joined(rank)
    memory = create(group, device=0)
    check_data(group, memory, 2)
    with pytest.raises(InvalidArgument, match=r"cuda:1, but the driver shows 1 devices"):
        create(group, device=1)
    return memory.notes


def test_ranks_that_share_a_device(env: "dict[str, str]") -> None:
    for notes in run_ranks(one_device, 2, env={**env, "STANDIN_CUDA_DEVICES": "1"}):
        assert notes == "no multicast: ranks share a device"


def cycles(rank: Rank) -> None:
    driver()
    group = joined(rank)
    create(group)
    nothing_left()
    group.barrier()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        create(group)
    nothing_left()
    assert abs(len(list(Path("/proc/self/fd").iterdir())) - before) <= 2  # process watches


def test_cycles_leak_nothing(env: "dict[str, str]") -> None:
    run_ranks(cycles, 2, env=env)


# --- (3) what lacks and what fails


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
        if len(outcomes) > 1:  # refused before anything began: the others hear why
            names = {outcome[1] for outcome in outcomes}
            assert names <= {"CudaError", "Mismatch", "Unsupported"}, outcomes
            assert all(name[0].isupper() for name in names)
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
    assert texts[0].startswith("Mismatch")
    assert texts[1].startswith("Unsupported")
    assert all("CUDA_ERROR_NO_DEVICE" in text for text in texts)


# --- (4) life


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

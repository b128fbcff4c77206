"""CUDA symmetric memory between processes, over a stand-in for the driver (standin_cuda.cpp).

Layers: (1) our declarations against the toolkit's header, compiled; (2) every way of sharing, data
checked on all ranks, nothing left afterwards. What fails, lacks and ends is in test_cuda_faults.py.
What only a GPU can show is not here: coherence of devices, multicast loads and stores, speed.
"""

import ctypes
import ctypes.util
import gc
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyparallel import _core
from pyparallel.comm import (
    Communicator,
    InvalidArgument,
)
from tests.launch import Rank, run_ranks
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
        create(group, device=rank.rank)  # rank 1's failure, on both
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

"""SymmetricMemory on the CPU: processes as ranks over one memory file.

Layers: (1) data, offsets and signals between processes, all ranks checked; (2) misfits and failures
that must raise on every rank; (3) Triton kernels, interpreted, that talk through it. Waits and ends
are in test_host_life.py, integers alone in test_native.py, CUDA in test_cuda.py. All runs in CI.
"""

import os
import re
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pyparallel.comm import (
    CommError,
    Communicator,
    InvalidArgument,
    Mismatch,
    NoMemory,
    Timeout,
    Unsupported,
)
from pyparallel.comm.symmetric_memory import SymmetricMemory
from tests.launch import Rank, run_ranks

WORLDS = [1, 2, 3, 5]


def joined(rank: Rank, timeout: float = 40) -> Communicator:
    return Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size, timeout=timeout)


def random_for(rank: int, shape: "tuple[int, ...]", *seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((rank, *seed)) & 0x7FFFFFFF)
    return torch.randint(-(2**62), 2**62, shape, generator=generator)


# --- (1) data, offsets, signals


def exchanges(rank: Rank) -> "list[list[int]]":
    """Each rank writes random bits; every rank reads every other's, through each kind of view."""
    group = joined(rank)
    me, world = group.rank, group.world_size
    offsets: list[list[int]] = []
    with SymmetricMemory(group, 300_001, channels=3) as memory:
        assert memory.nbytes >= 300_001
        assert memory.rank == me
        assert memory.world_size == world
        assert not memory.peer(me).any(), "fresh memory is zero"
        memory.barrier()
        tensors = []
        for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.float64):
            for shape in ((7, 5), (1,), (0, 4), (), (2, 3, 129)):
                tensor = memory.empty(shape, dtype=dtype)
                assert tensor.shape == shape
                assert tensor.dtype == dtype
                assert memory.offset(tensor) % 256 == 0
                offsets.append([memory.offset(tensor), tensor.numel() * tensor.element_size()])
                tensors.append(tensor)
        for number, tensor in enumerate(tensors):
            bits = random_for(me, (tensor.numel(),), number)
            tensor.copy_((bits % 2 if tensor.dtype == torch.bool else bits).reshape(tensor.shape))
        memory.barrier()
        for number, tensor in enumerate(tensors):
            for peer in range(world):
                bits = random_for(peer, (tensor.numel(),), number)
                expected = torch.empty_like(tensor)
                expected.copy_(
                    (bits % 2 if tensor.dtype == torch.bool else bits).reshape(tensor.shape)
                )
                assert torch.equal(memory.peer(peer, tensor), expected), (peer, number)
        # Strided and offset views find the same elements of the peer.
        last = tensors[-1]
        for view in (last.transpose(0, 2), last[1:, ::2, 3::7], last[:, 1]):
            for peer in range(world):
                index = torch.arange(last.numel()).reshape(last.shape)
                place = torch.as_strided(index, view.shape, view.stride(), view.storage_offset())
                expected = random_for(peer, (last.numel(),), len(tensors) - 1)[place].to(view.dtype)
                assert torch.equal(memory.peer(peer, view), expected)
        # Addresses: the table points at what the views show.
        table = memory.pointers(last)
        for peer in range(world):
            assert table[peer].item() == memory.peer(peer, last).data_ptr()
        assert memory.pointers().tolist() == [memory.peer(p).data_ptr() for p in range(world)]
        memory.barrier()
    return offsets


@pytest.mark.parametrize("world_size", WORLDS)
def test_data_and_offsets(world_size: int) -> None:
    results = run_ranks(exchanges, world_size)
    assert all(result == results[0] for result in results), "offsets differ between ranks"
    taken = sorted((offset, offset + max(size, 1)) for offset, size in results[0])
    assert all(a[1] <= b[0] for a, b in pairwise(taken)), "tensors overlap"


def signals_in_a_ring(rank: Rank) -> None:
    """Each rank passes a counter on, 200 rounds, with data written before each signal."""
    group = joined(rank)
    me, world = group.rank, group.world_size
    right, left = (me + 1) % world, (me - 1) % world
    with SymmetricMemory(group, 4096, channels=2) as memory:
        box = memory.empty(8, dtype=torch.int64)
        there = memory.peer(right, box)
        for turn in range(200):
            there.fill_(1000 * turn + me)
            memory.put_signal(right, 1)
            memory.wait_signal(left, 1)
            assert box.tolist() == [1000 * turn + left] * 8
            memory.put_signal(left, 0)  # read
            memory.wait_signal(right, 0)
        assert memory.signals[1, left, 0].item() == 200
        assert memory.signals.shape == (2, world, 8)
        memory.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_signals(world_size: int) -> None:
    run_ranks(signals_in_a_ring, world_size)


def groups_of_one_process(rank: Rank) -> "list[int]":
    """A group of two first, then the world: nothing of a group is counted for another."""
    group = joined(rank)
    pair = group.split(0 if group.rank < 2 else None)
    generations = []
    if pair is not None:
        with SymmetricMemory(pair, 1000) as small:
            small.empty(10).fill_(1)
            small.put_signal(1 - pair.rank)
            small.wait_signal(1 - pair.rank)
            generations.append(small.generation)
    first, second = SymmetricMemory(group, 5000), SymmetricMemory(group, 5000)
    one, two = first.empty(16), second.empty(16)
    one.fill_(group.rank)
    two.fill_(-group.rank)
    # Signals and barriers of one do not stand for those of the other.
    first.put_signal((group.rank + 1) % 3, 0)
    with pytest.raises(Timeout):
        second.wait_signal((group.rank + 2) % 3, 0, timeout=0.05)
    first.wait_signal((group.rank + 2) % 3, 0)
    first.barrier()
    second.barrier()
    for peer in range(3):
        assert first.peer(peer, one).eq(peer).all()
        assert second.peer(peer, two).eq(-peer).all()
    group.barrier()
    generations += [first.generation, second.generation]
    return generations


def test_overlapping_groups() -> None:
    """[0, 1] of three ranks, then all three; and one group within a larger world."""
    results = run_ranks(groups_of_one_process, 3)
    assert results[0][1:] == results[2], "generations differ between ranks"
    assert results[0][1] != results[0][2]


# --- (2) misfits and failures raise on every rank


def allocations_and_reuse(rank: Rank) -> None:
    group = joined(rank)
    me = group.rank
    memory = SymmetricMemory(group, 64 * 1024)
    page = memory.nbytes
    a, b = memory.empty(1000), memory.empty(1000)
    at = memory.offset(a)
    memory.free(a)
    assert memory.offset(memory.empty(10, alignment=4096)) == at, "the hole is used again"
    assert memory.used == 40 + 4000
    with pytest.raises(NoMemory, match=rf"{page} bytes needed, \d+ bytes free of {page}"):
        memory.empty(page, dtype=torch.uint8)
    with pytest.raises(Mismatch, match=r"400 \(alignment 256\) 404 \(alignment 256\)"):
        memory.empty(100 + me)
    with pytest.raises(InvalidArgument, match="alignment 8192"):
        memory.empty(1, alignment=8192)
    with pytest.raises(InvalidArgument if me == 1 else Mismatch, match="negative"):
        memory.empty(-1 if me == 1 else 1)
    with pytest.raises(TypeError if me == 1 else Mismatch, match=r"0\.5"):
        memory.empty(0.5 if me == 1 else 1)
    with pytest.raises(InvalidArgument if me == 1 else Mismatch, match="does not lie"):
        memory.free(torch.ones(3) if me == 1 else b)
    with pytest.raises(TypeError if me == 0 else Mismatch, match="expected a torch.dtype"):
        memory.empty(1, dtype="float32" if me == 0 else torch.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError if me == 0 else Mismatch, match="NoneType; expected a tensor"):
        memory.free(None if me == 0 else b)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument if me == 0 else Mismatch, match="timeout is -1"):
        memory.barrier(timeout=-1 if me == 0 else 20)
    with pytest.raises(InvalidArgument, match="no allocation starts"):
        memory.free(b[1:])
    with pytest.raises(InvalidArgument, match=r"expected 0 to 1"):
        memory.peer(2)
    with pytest.raises(InvalidArgument, match="channel 16, expected 0 to 15"):
        memory.put_signal(0, 16)
    with pytest.raises(InvalidArgument, match="rank -1, expected 0 to 1"):
        memory.wait_signal(-1)
    memory.free(b)  # still usable after all that
    memory.barrier()


def test_allocations() -> None:
    run_ranks(allocations_and_reuse, 2)


def bad_arguments(rank: Rank) -> None:
    group = joined(rank)
    me = group.rank
    with pytest.raises(Mismatch, match=r"number of bytes differs: 100 101 102"):
        SymmetricMemory(group, 100 + me)
    with pytest.raises(Mismatch, match=r"signal channels differs: 16 4 16"):
        SymmetricMemory(group, 100, channels=4 if me == 1 else 16)
    # A size computed as a float is refused, on every rank, and nobody waits.
    with pytest.raises(TypeError if me == 2 else Mismatch, match=r"524288\.0"):
        SymmetricMemory(group, 0.5 * 2**20 if me == 2 else 2**19)
    for wrong in (0, -1, 2**63):
        with pytest.raises(InvalidArgument, match=f"nbytes is {wrong}"):
            SymmetricMemory(group, wrong)
    with pytest.raises(InvalidArgument, match="exceed the address space"):
        SymmetricMemory(group, 2**62)
    with pytest.raises(InvalidArgument, match="channels"):
        SymmetricMemory(group, 1, channels=10**6)
    with pytest.raises(InvalidArgument if me == 1 else Mismatch, match="timeout is -1"):
        SymmetricMemory(group, 1, timeout=-1 if me == 1 else 20)
    with pytest.raises(TypeError if me == 1 else Mismatch, match="name is 7"):
        SymmetricMemory(group, 1, name=7 if me == 1 else "x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument if me == 0 else Mismatch, match="meta"):
        SymmetricMemory(group, 1, device="meta" if me == 0 else "cpu")
    # Nor does a call that does not bind to the signature leave the others alone.
    with pytest.raises(TypeError if me == 1 else Mismatch, match="unexpected keyword.*'sise'"):
        SymmetricMemory(group, 1, **({"sise": 3} if me == 1 else {}))
    memory = SymmetricMemory(group, 100)
    part = memory.empty(4)
    for call, right in ((memory.empty, (4,)), (memory.free, (part,)), (memory.barrier, ())):
        with pytest.raises(TypeError if me == 2 else Mismatch, match="unexpected keyword.*'sise'"):
            call(*right, **({"sise": 3} if me == 2 else {}))
    memory.barrier()
    memory.close()


def test_bad_arguments_raise_on_all_ranks() -> None:
    run_ranks(bad_arguments, 3)


def too_much(rank: Rank, nbytes: int) -> str:
    group = joined(rank)
    with pytest.raises(NoMemory) as caught:
        SymmetricMemory(group, nbytes)
    memory = SymmetricMemory(group, 4096)
    memory.peer(group.rank).fill_(1)  # what is granted can be touched
    memory.barrier()
    return str(caught.value)


def test_too_little_memory_says_needed_and_free() -> None:
    for text in run_ranks(too_much, 2, 1 << 45):
        assert re.search(r"not enough shared memory: 3518\d+ bytes needed, \d+ bytes free", text)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_too_small_tmpfs(tmp_path: Path) -> None:
    """A container's 64 MB /dev/shm in small: an error on every rank, not a bus error later."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        texts = run_ranks(too_much, 2, 64 << 20, env={"PYPARALLEL_SHM_DIR": str(tmp_path)})
        for text in texts:
            assert re.search(r"6\d{7} bytes needed, \d{7,8} bytes free", text)
            assert str(tmp_path) in text
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def only_one_lacks(rank: Rank) -> str:
    """Rank 1 has no room in its address space: the others are told instead of waiting for it."""
    import resource

    group = joined(rank)
    if group.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (128 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    begin = time.monotonic()
    with pytest.raises(CommError) as caught:
        SymmetricMemory(group, 256 << 20)
    assert time.monotonic() - begin < 10
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    SymmetricMemory(group, 1 << 20).barrier()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_failure_on_one_rank_raises_on_all() -> None:
    texts = run_ranks(only_one_lacks, 3)
    assert "rank 1 failed" in texts[0]
    assert "rank 1 failed" in texts[2]
    for text in texts:
        assert text.startswith("SystemCallError")
        assert "mmap" in text


# --- (3) interpreted kernels


def kernels_put_and_wait(rank: Rank) -> None:
    from tests.symmetric import kernels

    group = joined(rank)
    me, world = group.rank, group.world_size
    with SymmetricMemory(group, 64 * 1024, channels=2) as memory:
        inbox = memory.empty((2, world, 96))
        for turn in range(6):
            data = torch.randn(96, generator=torch.Generator().manual_seed(1000 * turn + me))
            if turn == 3 and me == 0:
                time.sleep(0.1)  # a straggler
            out = torch.full((96,), float("nan"))
            kernels.all_reduce(
                data, out, inbox[turn % 2], memory.pointers(inbox[turn % 2]), memory.signals,
                memory.signal_pointers, me, world, turn + 1,
            )  # fmt: skip
            expected = torch.zeros(96)
            for peer in range(world):
                seed = torch.Generator().manual_seed(1000 * turn + peer)
                expected += torch.randn(96, generator=seed)
            assert torch.equal(out, expected), "sums in rank order are the same bits"
        # What a kernel put, the host can wait for.
        for peer in range(world):
            for _ in range(6):
                memory.wait_signal(peer, 0)
        with pytest.raises(Timeout):
            memory.wait_signal((me + 1) % world, 0, timeout=0.05)
        memory.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_interpreted_kernels(world_size: int) -> None:
    run_ranks(kernels_put_and_wait, world_size, env={"TRITON_INTERPRET": "1"})


# --- hosts


def two_hosts(rank: Rank) -> str:
    group = joined(rank)
    os.environ["PYPARALLEL_HOST_ID"] = f"host{rank.rank}"
    try:
        with pytest.raises(Unsupported) as caught:
            SymmetricMemory(group, 1000)
    finally:
        del os.environ["PYPARALLEL_HOST_ID"]
    SymmetricMemory(group, 1000).close()
    return str(caught.value)


def test_ranks_of_several_hosts_are_refused() -> None:
    for text in run_ranks(two_hosts, 2):
        assert "rank 0 is on host0, rank 1 on host1" in text

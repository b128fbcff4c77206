"""What the tests of kernels on slots.py share: operands, references, and a rank's workspace."""

import random
import time

import torch

from pyparallel.comm import SymmetricMemory
from pyparallel.triton_kernels.workspace import Workspace

LONG_US = 200_000_000


def workspace_of(group, layout):
    """The memory, which must be kept, and this rank's view of it, poisoned where data goes."""
    memory = SymmetricMemory(group, layout.nbytes)
    workspace = Workspace.make(memory, layout)
    workspace.memory[layout.slots :].fill_(0xFF)  # NaN in every dtype
    memory.barrier()
    return memory, workspace


def operands(call, world, m, n, depths, dtype):
    """x_r [m, depths[r]] and w_r [n, depths[r]] of every rank, alike on all ranks."""
    generator = torch.Generator().manual_seed(7919 * call + world)
    xs = [torch.randn(m, k, generator=generator).to(dtype) for k in depths]
    ws = [torch.randn(n, k, generator=generator).to(dtype) for k in depths]
    return xs, ws


def reference(xs, ws):
    """The sum over ranks of x_r @ w_r^T in float64."""
    return sum(x.double() @ w.double().T for x, w in zip(xs, ws, strict=True))


def limit(xs, ws, dtype, slot_dtype=torch.float32):
    """|stock - ref| + sqrt(K) eps32 (|A| |B|), stock: torch's products in the dtype, summed in it.

    One ulp of a 16-bit result more: the interpreter rounds stores otherwise than torch. Slots of 16
    bits round each partial sum once more: half an ulp of each.
    """
    ref = reference(xs, ws)
    partials = [x @ w.T for x, w in zip(xs, ws, strict=True)]
    stock = partials[0].clone()
    for partial in partials[1:]:
        stock += partial
    magnitude = sum(x.double().abs() @ w.double().abs().T for x, w in zip(xs, ws, strict=True))
    depth = sum(x.size(1) for x in xs)
    out = (stock.double() - ref).abs() + depth**0.5 * torch.finfo(torch.float32).eps * magnitude
    if dtype != torch.float32:
        out += torch.finfo(dtype).eps * ref.abs()
    if slot_dtype != torch.float32:
        out += torch.finfo(slot_dtype).eps * sum(partial.double().abs() for partial in partials)
    return out


def straggle(call, rank, world):
    """One rank in turn comes late, now and then by more than a poll."""
    if call % world == rank:
        time.sleep(random.Random(call).choice([0.0, 0.002, 0.02]))


def poisoned(rows, columns, dtype):
    return torch.full((rows, columns), float("nan"), dtype=dtype)

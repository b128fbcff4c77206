"""A one-shot all-reduce in Triton over SymmetricMemory, for tests of its addresses and signals."""

import torch
import triton
import triton.language as tl

# Protocol "put": the counter of (channel 0, source) on each rank's page; p = number of this call
#   writer    stores its data into slot [me] of every rank's inbox, then adds 1, release, system
#             scope
#   reader    waits until all counters of its own page are >= p, acquire; then adds in rank order
#   reuse     two inboxes in turn: call p overwrites what call p - 2 left, which every rank has read
#             before it put its part of call p - 1, and that was waited for in call p - 1
#   progress  puts wait for nothing


@triton.jit
def _put(data, tables, pages, me, count: tl.constexpr, world: tl.constexpr):
    lane = tl.arange(0, 128)
    mask = lane < count
    value = tl.load(data + lane, mask=mask)
    for peer in range(world):
        slot = tl.load(tables + peer).to(tl.pointer_type(tl.float32)) + me * count
        tl.store(slot + lane, value, mask=mask)
        counter = tl.load(pages + peer).to(tl.pointer_type(tl.int64)) + me * 8
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="sys")


@triton.jit
def _take(out, inbox, page, phase, count: tl.constexpr, world: tl.constexpr):
    lane = tl.arange(0, 128)
    mask = lane < count
    total = tl.zeros((128,), tl.float32)
    for source in range(world):
        seen = tl.atomic_add(page + source * 8, 0, sem="acquire", scope="sys")
        while seen < phase:
            seen = tl.atomic_add(page + source * 8, 0, sem="acquire", scope="sys")
        total += tl.load(inbox + source * count + lane, mask=mask)
    tl.store(out + lane, total, mask=mask)


def all_reduce(
    data: torch.Tensor,
    out: torch.Tensor,
    inbox: torch.Tensor,
    tables: torch.Tensor,
    page: torch.Tensor,
    pages: torch.Tensor,
    me: int,
    world: int,
    phase: int,
) -> None:
    """`inbox` [world, count] is this rank's, `tables` all ranks' addresses of it."""
    count = data.numel()
    _put[(1,)](data, tables, pages, me, count, world)
    _take[(1,)](out, inbox, page, phase, count, world)

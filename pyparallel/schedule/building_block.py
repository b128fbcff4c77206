"""V-Half and V-Min (Qi et al., arXiv:2405.15362): one block of passes, repeated every six slots.

A microbatch makes six passes on a rank: forward, input half and weight half, through the chunk on
    the way down and the one on the way up (places as in ZB-V). If a block of these six fits into
    slots that differ modulo 6, the block of the next microbatch fits six slots later, and memory
    is the block's lifespan over 6: the shorter the block, the less is kept. A block is given by
    how many slots pass from one rank to the next on each of its four legs (forward down, forward
    up, backward down, backward up) and at the three turns. What is written down is each rank's
    order in these slots; when it runs, warm-up and end close up.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pyparallel.schedule.actions import Action
from pyparallel.schedule.zb_v import v_places

__all__ = ["PERIOD", "Block", "block_slots", "building_block_row"]

PERIOD = 6


class Block(NamedTuple):
    """Slots from rank to rank on the four legs, and at the three turns between them."""

    legs: tuple[int, int, int, int]
    turns: tuple[int, int, int]


def block_slots(block: Block, rank: int, ranks: int) -> tuple[int, int, int, int]:
    """Slot of the first microbatch's F down, F up, I up and I down on a rank."""
    forward_down, forward_up, backward_down, backward_up = block.legs
    hops = ranks - 1
    bottom = hops * forward_down + block.turns[0]  # forward turns upwards on the last rank
    loss = bottom + hops * forward_up + block.turns[1]  # the loss, on rank 0
    turn = loss + hops * backward_down + block.turns[2]  # backward turns upwards on the last rank
    return (
        rank * forward_down,
        bottom + (hops - rank) * forward_up,
        loss + rank * backward_down,
        turn + (hops - rank) * backward_up,
    )


def building_block_row(rank: int, ranks: int, microbatches: int, block: Block) -> Iterator[Action]:
    down, up = v_places(rank, ranks)
    slots = block_slots(block, rank, ranks)
    taken = {slot % PERIOD for slot in slots}
    free = [slot for slot in range(PERIOD) if slot not in taken]
    *_, up_i, down_i = slots
    up_w = min(_next_slot(up_i, residue) for residue in free)
    free.remove(up_w % PERIOD)
    down_w = _next_slot(down_i, free[0])
    passes = sorted(zip((*slots, up_w, down_w), (down.F, up.F, up.I, down.I, up.W, down.W),
                        strict=True), key=lambda entry: entry[0])  # fmt: skip
    timed = [(slot + PERIOD * j, take(j)) for slot, take in passes for j in range(microbatches)]
    yield from (action for _, action in sorted(timed, key=lambda entry: entry[0]))


def _next_slot(after: int, residue: int) -> int:
    """The first slot after `after` with this residue."""
    return after + 1 + (residue - after - 1) % PERIOD

"""V-Half (Qi et al., arXiv:2405.15362): half the activations of 1F1B, and half its bubble."""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action
from pyparallel.schedule.building_block import Block, building_block_row

__all__ = ["v_half_block", "v_half_row"]


def v_half_block(ranks: int) -> Block:
    """Legs of 1 and 2 slots: 6 p slots in all, a lifespan of p/2 microbatches. Of the turns that
    give distinct slots on every rank, these leave the smallest bubble (a test tries them all)."""
    return Block(legs=(1, 2, 1, 2), turns=(5, 1, 1) if ranks % 2 == 0 else (2, 1, 4))


def v_half_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    return building_block_row(rank, ranks, microbatches, v_half_block(ranks))

"""V-Min (Qi et al., arXiv:2405.15362): a third of 1F1B's activations, two thirds of its bubble."""

from collections.abc import Iterator

from pyparallel.schedule.actions import Action
from pyparallel.schedule.building_block import Block, building_block_row

__all__ = ["v_min_block", "v_min_row"]


def v_min_block(ranks: int) -> Block:
    """Legs of one slot, the shortest there are: 4 p slots in all, a lifespan of p/3 microbatches.
    Of the turns that give distinct slots on every rank, these leave the smallest bubble (a test
    tries them all)."""
    return Block(legs=(1, 1, 1, 1), turns=(1, 1, 1) if ranks % 3 else (5, 1, 3))


def v_min_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    return building_block_row(rank, ranks, microbatches, v_min_block(ranks))

"""The position in the data: no sample is lost or comes twice when the number of ranks changes.

Layers: one process, integers; every rank of every size is asked.
"""

import pytest
import torch

from examples.text import Batches

ROWS, SAMPLES = 4, 12


def made(samples_in_data=30, seed=3):
    """Sample i is ROWS bytes of i, so that a sample says which it is."""
    data = torch.arange(samples_in_data + 1).repeat_interleave(ROWS)[: samples_in_data * ROWS + 1]
    return Batches(data.to(torch.uint8), ROWS, SAMPLES, seed)


def step(size, state):
    """What all ranks of a step have, in order, and the state after it (the same on all)."""
    seen, states = [], []
    for rank in range(size):
        batches = made()
        batches.load_state_dict(state)
        tokens, labels = batches.next(rank, size)
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        seen += tokens[:, 0].tolist()
        states.append(batches.state_dict())
    assert all(other == states[0] for other in states)
    return seen, states[0]


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (1, 3), (5, 12), (16, 1)])
def test_a_change_of_ranks_in_the_middle_of_an_epoch(sizes):
    """Five steps of 12 samples are two epochs of 30; the size changes after every step."""
    state, seen = made().state_dict(), []
    for number in range(5):
        found, state = step(sizes[number % 2], state)
        assert len(found) == SAMPLES
        seen += found
    straight = made()
    alone = [i for _ in range(5) for i in straight.next()[0][:, 0].tolist()]
    assert seen == alone
    assert sorted(seen[:30]) == sorted(seen[30:]) == list(range(30))
    assert seen[:30] != seen[30:], "each epoch has an order of its own"


def test_another_order_is_refused():
    state = made(seed=4).state_dict()
    with pytest.raises(ValueError, match=r"seed=4, and this run has 3: samples would come twice"):
        made().load_state_dict(state)

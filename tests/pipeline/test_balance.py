"""Cuts: every part once, the optimum by brute force, and refusals that say what would work."""

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.pipeline.balance import balance, check_counts, counts_of_layout

SETTINGS = {"max_examples": 80, "deadline": None, "derandomize": True}


def every_cut(parts, stages):
    """All counts of `parts` in `stages`, empty stages included."""
    for inner in combinations_with_replacement(range(parts + 1), stages - 1):
        cuts = (0, *inner, parts)
        yield tuple(b - a for a, b in pairwise(cuts))


def stages_of(values, counts):
    taken = iter(values)
    return [sum(next(taken) for _ in range(count)) for count in counts]


@given(st.data())
@settings(**SETTINGS)
def test_the_optimum_by_brute_force(data):
    parts, stages = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    number = st.integers(0, 9)
    weights = data.draw(st.lists(number, min_size=parts, max_size=parts))
    memory = data.draw(st.lists(number, min_size=parts, max_size=parts))
    caps = data.draw(st.lists(st.integers(4, 30), min_size=stages, max_size=stages))
    empty = data.draw(st.booleans()) or stages > parts
    fits = [
        (max(stages_of(weights, counts)), sum(w * w for w in stages_of(weights, counts)))
        for counts in every_cut(parts, stages)
        if (empty or min(counts) > 0)
        and all(m <= c for m, c in zip(stages_of(memory, counts), caps, strict=True))
    ]
    arguments = {"memory": memory, "cap": caps, "allow_empty": empty}
    if not fits:
        with pytest.raises(ValueError, match="do not fit"):
            balance(weights, stages, **arguments)
        return
    counts = balance(weights, stages, **arguments)
    assert sum(counts) == parts
    assert len(counts) == stages
    found = stages_of(weights, counts)
    assert (max(found), sum(w * w for w in found)) == min(fits)
    assert all(m <= c for m, c in zip(stages_of(memory, counts), caps, strict=True))


def test_numbers_that_do_not_divide():
    """training.md 1, 2, 3: 5 layers on 2, 30 on 4, 10 on 3: none is dropped, none refused."""
    assert sorted(balance([1] * 5, 2)) == [2, 3]
    assert sorted(balance([1] * 30, 4)) == [7, 7, 8, 8]
    assert sorted(balance([1] * 10, 3)) == [3, 3, 4]


def test_embedding_and_loss_have_weight():
    assert balance([3, *[1] * 12, 3], 3) == (4, 6, 4)
    assert balance([0, *[1] * 12, 0], 3) == (5, 4, 5)


def test_layouts():
    kinds = ["E", *"t" * 14, "N", "L"]
    assert counts_of_layout("E t*3 | t*4 | t*4 | t*3 N L", kinds) == (4, 4, 4, 5)
    assert counts_of_layout("E|t*14||N L", kinds) == (1, 14, 0, 2)
    assert counts_of_layout("t t|t", ["t"] * 3) == (2, 1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("E t*2 | t N", "has 5 parts, the model has 6: 'E t.3 N L'"),
        ("E t*3 N L | t", "has more parts, the model has 6"),
        ("E t*999999", "part 4 is 't' there, 'N' in the model, which is 'E t.3 N L'"),
        ("t*3 | E N L", "part 0 is 't' there, 'E' in the model"),
        ("E t*x | N L", "'t.x' is no part such as t or t.3"),
        ("Ett", "'Ett' is no part"),
    ],
)
def test_layouts_that_do_not_fit_the_model(layout, message):
    with pytest.raises(ValueError, match=message):
        counts_of_layout(layout, ["E", "t", "t", "t", "N", "L"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balance([1, 1], 4), "4 stages for 2 parts.*nearest 2 stages, or allow_empty=True"),
        (lambda: balance([1, 1], 0), "0 stages: allowed are 1, 2, 3"),
        (lambda: balance([1, -1], 1), "weights has -1: finite numbers from 0"),
        (lambda: balance([1, float("nan")], 1), "weights has nan"),
        (lambda: balance([1, 2], 1, memory=[1]), "memory and cap go together"),
        (lambda: balance([1, 2], 1, memory=[1], cap=2), "memory has 1 values, expected are 2"),
        (lambda: balance([1, 2], 2, memory=[1, 2], cap=[2]), "cap has 1 values, expected are 2"),
        (lambda: balance([1, 2], 2, memory=[1, 9], cap=5), "do not fit .*part 1 needs 9"),
        (lambda: balance([1, 2, 3], 1, memory=[2, 2, 2], cap=5), "more stages or a higher cap"),
        (lambda: check_counts([3, 2], 6), r"counts \[3, 2\] take 5 parts, the model has 6"),
        (lambda: check_counts([3, -2], 1), "one number per stage is expected, 0 or more"),
        (lambda: check_counts([], 0), "one number per stage"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_empty_stages_where_they_are_asked_for():
    """training.md 5: two layers on four ranks."""
    counts = balance([1, 1], 4, allow_empty=True)
    assert sum(counts) == 2
    assert max(counts) == 1
    assert check_counts([1, 0, 0, 1], 2) == (1, 0, 0, 1)

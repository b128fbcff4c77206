"""What the tests of schedules share: all families with what they allow, and shapes to try."""

from hypothesis import strategies as st

from pyparallel.schedule import FAMILIES, Schedule, generate

# Few examples, no deadline: the machine may be busy. `hypothesis` shrinks what fails.
SETTINGS = {"max_examples": 100, "deadline": None, "derandomize": True}


def allowed(name: str, ranks: int) -> bool:
    return not (FAMILIES[name].even_ranks and ranks % 2)


def every(names=FAMILIES, ranks=(1, 2, 3, 4, 6), microbatches=(1, 2, 3, 5, 8, 13)):
    """All schedules of these sizes, fewer microbatches than ranks included."""
    for name in names:
        for p in ranks:
            for m in microbatches:
                if allowed(name, p):
                    yield generate(name, p, m)


@st.composite
def schedules(draw, ranks=16, microbatches=64, chunks=4) -> Schedule:
    """Any schedule the generators give within these sizes."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    p = draw(st.integers(1, ranks))
    if family.even_ranks:
        p += p % 2
    m = draw(st.integers(1, microbatches))
    v = draw(st.integers(1, chunks)) if family.chunks is None else None
    group = draw(st.none() | st.integers(p, 2 * p + 1)) if family.takes_group_size else None
    return generate(name, p, m, chunks=v, group_size=group)

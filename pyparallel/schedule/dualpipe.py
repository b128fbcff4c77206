"""DualPipe (DeepSeek-V3, arXiv:2412.19437, figure 5): microbatches enter at both ends of the
pipeline.

Every stage is held twice: rank i has stages i and p - 1 - i. Even microbatches enter on rank 0,
    odd ones on rank p - 1 (the figure numbers one stream after the other), and where the streams
    meet, a forward of one runs together with a backward of the other, each hiding the other's
    communication. Eight steps; `low` is the chunk that the stream of the rank's own end comes
    through, `high` the one for the stream of the far end.
"""

from collections.abc import Iterator, Sequence

from pyparallel.schedule.actions import Action, Place

__all__ = ["dualpipe_row", "eight_steps"]


def dualpipe_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """Needs an even number of ranks and an even number of microbatches, at least 2 `ranks`."""
    depth = min(rank, ranks - 1 - rank)  # from the nearer end
    low, high = Place(rank, depth, 0), Place(rank, ranks - 1 - depth, 1)
    streams = range(0, microbatches, 2), range(1, microbatches, 2)
    near, far = streams if rank < ranks // 2 else streams[::-1]
    return eight_steps(depth, ranks // 2, low, high, near, far)


def eight_steps(
    depth: int, depths: int, low: Place, high: Place, near: Sequence[int], far: Sequence[int]
) -> Iterator[Action]:
    """What the rank at `depth` of `depths` does; `near` goes through `low`, `far` through
    `high`."""
    low_f, high_f = map(low.F, near), map(high.F, far)
    low_b, high_b = iter(near), iter(far)  # each is passed as B, or as I and W
    left: list[Action] = []  # weight halves not yet done, oldest first

    def split(place: Place, j: int) -> Action:
        left.append(place.W(j))
        return place.I(j)

    def together(forward: Action, backward: Action) -> tuple[Action, Action]:
        return forward._replace(with_next=True), backward

    # 1: fill
    for _ in range(2 * (depths - depth - 1)):
        yield next(low_f)
    # 2: both streams forward
    for _ in range(depth + 1):
        yield from (next(low_f), next(high_f))
    # 3: the far stream's backward comes back
    for _ in range(depths - depth - 1):
        yield split(high, next(high_b))
        yield left.pop(0)
        yield next(high_f)
    # 4: steady, forward and backward together
    for i in range(len(near) - 2 * depths + depth + 1):
        if i == 0 and depth == depths - 1:  # in the middle nothing hides the first pair
            yield from (next(low_f), high.B(next(high_b)))
        else:
            yield from together(next(low_f), high.B(next(high_b)))
        yield from together(next(high_f), low.B(next(low_b)))
    # 5: the near stream's input has ended
    for _ in range(depths - depth - 1):
        yield high.B(next(high_b))
        yield from together(next(high_f), low.B(next(low_b)))
    # 6: backward only; the second half of it leaves its weight halves for the end
    whole = depth + 1
    for i in range(2 * (depth + 1)):
        place, of = (high, high_b) if i % 2 == 0 else (low, low_b)
        yield place.B(next(of)) if i < whole else split(place, next(of))
    # 7: the near stream's last backwards, weight halves between them
    for _ in range(depths - depth - 1):
        yield left.pop(0)
        yield split(low, next(low_b))
    # 8: the weight halves left
    yield from left

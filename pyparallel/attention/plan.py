"""How one attention is spread over ranks: who holds which rows and heads, who needs whose keys.

Ranks form a grid of U x R. The U ranks of a row (ranks nU .. nU + U - 1) exchange heads for rows,
as Ulysses does; then the R ranks of a column pass keys and values round, as a ring does. U = 1 is a
plain ring, R = 1 plain Ulysses; gathering all keys is a ring whose hops are all taken at once.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from pyparallel.attention.heads import HeadSplit
from pyparallel.attention.mask import Mask
from pyparallel.attention.needs import Part, needed, pairs
from pyparallel.attention.pieces import Pieces
from pyparallel.attention.sharding import Sharding

__all__ = ["STRATEGIES", "Facts", "Plan"]

STRATEGIES = ("ring", "all_gather", "ulysses", "hybrid", "decode")


@dataclass(frozen=True)
class Facts:
    """What all ranks know of a call, and what its plan is a pure function of."""

    q: Sharding  # of decode: all rows on one rank, which is each
    k: Sharding
    heads: int
    kv_heads: int
    causal: bool
    window_left: int
    window_right: int

    @cached_property
    def reach(self) -> tuple[float, float]:
        """How many positions before and after its own a query sees."""
        mask = Mask(1.0, self.causal, self.window_left, self.window_right)
        return mask.before, mask.after


@dataclass(frozen=True)
class Plan:
    """The work of one attention, for every rank; `strategy` is none of "auto"."""

    facts: Facts
    strategy: str
    ulysses: int  # U
    split: HeadSplit = field(init=False)

    def __post_init__(self) -> None:
        split = HeadSplit.of(self.facts.heads, self.facts.kv_heads, self.ulysses)
        object.__setattr__(self, "split", split)

    @property
    def world(self) -> int:
        return self.facts.k.world_size

    @property
    def outer(self) -> int:
        """R: how many ranks keys pass between."""
        return self.world // self.ulysses

    def row(self, rank: int) -> list[int]:
        """The ranks that exchange heads with `rank`, itself among them."""
        first = rank // self.ulysses * self.ulysses
        return list(range(first, first + self.ulysses))

    def column(self, rank: int) -> list[int]:
        """The ranks that exchange keys with `rank`, itself among them."""
        return list(range(rank % self.ulysses, self.world, self.ulysses))

    def queries(self, place: int) -> Pieces:
        """The queries of the ranks of row `place`, laid one after another."""
        return _row_pieces(self.facts.q, self.facts.k, self.ulysses, place)

    def keys(self, place: int) -> Pieces:
        """Their keys."""
        return _row_pieces(self.facts.k, None, self.ulysses, place)

    def key_shape(self, rank: int) -> tuple[int, int]:
        """Rows and heads of the keys that `rank` has for the ranks of its column."""
        begin, end = self.split.keys[rank % self.ulysses]
        return sum(self.facts.k.local_sizes[r] for r in self.row(rank)), end - begin

    def needs(self, to: int, of: int) -> Part:
        """Of the keys of row `of`, those that some query of row `to` sees."""
        return _needs(self.facts, self.ulysses, to, of)

    def pairs(self, to: int, of: int) -> int:
        """How many pairs of them see each other; each head has as many."""
        return _pairs(self.facts, self.ulysses, to, of)

    # --- what moves, counted in elements of one batch element

    def elements_sent(self, rank: int, d: int, d_v: int) -> int:
        """By `rank`, forward."""
        facts, place = self.facts, rank // self.ulysses
        if self.strategy == "decode":
            return facts.q.total * facts.heads * (d_v + 2) * (self.world - 1)
        mine = self.row(rank).index(rank)
        sent = 0
        for other in range(self.ulysses):
            if other != mine:
                (a, b), (c, e) = self.split.queries[other], self.split.keys[other]
                sent += facts.q.local_sizes[rank] * (b - a) * d
                sent += facts.k.local_sizes[rank] * (e - c) * (d + d_v)
                theirs = facts.q.local_sizes[self.row(rank)[other]]
                own = self.split.queries[mine]
                sent += theirs * (own[1] - own[0]) * d_v
        c, e = self.split.keys[mine]
        for other in range(self.outer):
            if other != place:
                sent += self.needs(other, place).count * (e - c) * (d + d_v)
        return sent

    def work(self, rank: int) -> int:
        """(Query, key, head) triples that `rank` computes."""
        facts, place = self.facts, rank // self.ulysses
        if self.strategy == "decode":
            queries = facts.q.pieces(0, facts.k)
            return pairs(queries, facts.k.pieces(rank), *facts.reach) * facts.heads
        a, b = self.split.queries[rank % self.ulysses]
        return sum(self.pairs(place, other) for other in range(self.outer)) * (b - a)


@lru_cache(maxsize=1024)
def _row_pieces(sharding: Sharding, keys: Sharding | None, ulysses: int, place: int) -> Pieces:
    ranks = range(place * ulysses, (place + 1) * ulysses)
    return Pieces.joined((sharding.pieces(r, keys), sharding.local_sizes[r]) for r in ranks)


@lru_cache(maxsize=8192)
def _needs(facts: Facts, ulysses: int, to: int, of: int) -> Part:
    queries = _row_pieces(facts.q, facts.k, ulysses, to)
    return needed(queries, _row_pieces(facts.k, None, ulysses, of), *facts.reach)


@lru_cache(maxsize=8192)
def _pairs(facts: Facts, ulysses: int, to: int, of: int) -> int:
    queries = _row_pieces(facts.q, facts.k, ulysses, to)
    return pairs(queries, _row_pieces(facts.k, None, ulysses, of), *facts.reach)

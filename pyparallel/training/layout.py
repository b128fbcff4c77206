"""Which rank does what: four axes over a world of ranks, as pure integers.

    dp  data parallel: ranks with other samples
    tp  tensor parallel: ranks that share each matrix
    sp  sequence parallel ("context parallel" elsewhere): ranks that share each sequence
    pp  pipeline parallel: ranks with other layers

A rank's number is a mixed-radix number whose digits are its coordinates. The order names the axes
from the fastest digit to the slowest: in "tp-sp-pp-dp", ranks 0 and 1 differ in tp.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

__all__ = ["AXES", "ORDERS", "Coordinates", "Neighbours", "ParallelConfig", "check_batch"]

AXES = ("tp", "sp", "pp", "dp")
DEFAULT_ORDER = "tp-sp-pp-dp"
# By name, as their defaults number ranks. Megatron-LM: "tp-cp-ep-dp-pp", and with
# --use-tp-pp-dp-mapping "tp-cp-ep-pp-dp". torchtitan's mesh, outermost first: pp, dp, cp, tp.
ORDERS: Mapping[str, str] = {
    "megatron": "tp-sp-dp-pp",
    "megatron-tp-pp-dp": "tp-sp-pp-dp",
    "torchtitan": "tp-sp-dp-pp",
}
GATHERS = ("price", "refuse", "allow")


@dataclass(frozen=True)
class Coordinates:
    """Of one rank, from 0 along each axis."""

    dp: int = 0
    tp: int = 0
    sp: int = 0
    pp: int = 0


@dataclass(frozen=True)
class Neighbours:
    """Ranks that one rank sends to and receives from.

    Attributes:
        previous_stage, next_stage: of the same pipeline; None at its ends.
        ring_previous, ring_next: around the sp ring; itself where sp is 1.
    """

    previous_stage: int | None
    next_stage: int | None
    ring_previous: int
    ring_next: int


@dataclass(frozen=True)
class ParallelConfig:
    """How a world of dp x tp x sp x pp ranks is laid out, and what is sharded over it.

    Attributes:
        dp, tp, sp, pp: sizes of the axes.
        order: axes from the fastest to the slowest, or a name of `ORDERS`.
        zero: over the dp x sp ranks are sharded: 0 nothing, 1 optimizer states, 2 gradients as
            well, 3 weights as well.
        replicas: hybrid sharding: what `zero` shards is sharded over dp sp / replicas ranks that
            lie next to each other, and copied `replicas` times.
        offload_optimizer: optimizer states (with zero 2 and 3 also the shards of gradients and
            weights) live in host memory.
        tp_sequence_parallel: activations outside the matrices are cut over the tp ranks as well.
        microbatch_gathers: zero 2 and 3 with a pipeline, whose microbatches gather weights or keep
            gradients whole: "price" (rank 0 warns of what it costs), "refuse", or "allow".

    Raises:
        ValueError: at construction; all misfits at once, with what would fit.
    """

    dp: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER
    zero: int = 0
    replicas: int = 1
    offload_optimizer: bool = False
    tp_sequence_parallel: bool = False
    microbatch_gathers: str = "price"

    def __post_init__(self) -> None:
        misfits = [
            f"{name}={value!r}: a whole number, 1 or more, is expected"
            for name in ("dp", "tp", "sp", "pp", "replicas")
            if not _counts(value := getattr(self, name))
        ]
        if not isinstance(self.order, str):
            misfits.append(f"order={self.order!r}: a string is expected")
        elif sorted(self._split_order()) != sorted(AXES):
            misfits.append(
                f"order={self.order!r}: expected {', '.join(ORDERS)}, or the four axes "
                f"{', '.join(AXES)} once each, fastest first, as in {DEFAULT_ORDER!r}"
            )
        if isinstance(self.zero, bool) or self.zero not in (0, 1, 2, 3):
            misfits.append(f"zero={self.zero!r}: 0, 1, 2 or 3 is expected")
        if self.microbatch_gathers not in GATHERS:
            misfits.append(
                f"microbatch_gathers={self.microbatch_gathers!r} is not one of {GATHERS}"
            )
        for name in ("offload_optimizer", "tp_sequence_parallel"):
            if not isinstance(getattr(self, name), bool):
                misfits.append(f"{name}={getattr(self, name)!r}: True or False is expected")
        if not misfits:
            misfits += self._contradictions()
        if misfits:
            raise ValueError("ParallelConfig: " + "; ".join(misfits))

    def _contradictions(self) -> Iterator[str]:
        if self.data % self.replicas:
            fit = ", ".join(str(d) for d in _divisors(self.data))
            yield (
                f"replicas={self.replicas} does not divide dp x sp = {self.dp} x {self.sp} = "
                f"{self.data}; {fit} would"
            )
        if self.replicas > 1 and self.zero < 2:
            yield (
                f"replicas={self.replicas} with zero={self.zero}: hybrid sharding is of zero 2 and "
                "3; with zero 0 and 1 gradients are whole on every rank"
            )
        if self.tp_sequence_parallel and self.tp == 1:
            yield "tp_sequence_parallel=True has no effect with tp=1"
        if self.pp > 1 and self.zero >= 2 and self.microbatch_gathers == "refuse":
            yield (
                f"zero={self.zero} with pp={self.pp}: {why_refused(self.zero)}; zero=0 and zero=1 "
                "do not, and microbatch_gathers='price' allows it and says what it costs"
            )

    def _split_order(self) -> list[str]:
        return ORDERS.get(self.order, self.order).split("-")

    @property
    def fastest_first(self) -> tuple[str, ...]:
        """The axes in the order of the rank's digits."""
        return tuple(self._split_order())

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.sp * self.pp

    @property
    def data(self) -> int:
        """Ranks that hold the same parameters and average their gradients: dp x sp."""
        return self.dp * self.sp

    @property
    def shards(self) -> int:
        """Ranks that what `zero` shards is cut over: dp x sp / replicas."""
        return self.data // self.replicas

    @property
    def label(self) -> str:
        """As messages have it: "dp=2 tp=2 sp=1 pp=1"."""
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in ("dp", "tp", "sp", "pp"))

    def size(self, *axes: str) -> int:
        """Ranks of a group over these axes; without axes 1."""
        return math.prod(getattr(self, axis) for axis in _known(axes))

    def check(self, world_size: int) -> None:
        """
        Raises:
            ValueError: the axes do not multiply to `world_size`; names the nearest layouts that do.
        """
        if self.world_size == world_size:
            return
        near = ", ".join(layout.label for layout in self.nearest(world_size))
        raise ValueError(
            f"ParallelConfig: {self.label} is a world of {self.dp} x {self.tp} x {self.sp} x "
            f"{self.pp} = {self.world_size} ranks, and there are {world_size}. Nearest layouts of "
            f"{world_size}: {near}"
        )

    def nearest(self, world_size: int, count: int = 3) -> list["ParallelConfig"]:
        """Layouts of a world that differ least from this one: in as few axes as possible, then by
        the smallest factors; dp is changed most readily, tp least."""
        if not _counts(world_size):
            raise ValueError(f"world_size={world_size!r}: a whole number, 1 or more, is expected")
        weights = {"dp": 1.0, "pp": 1.2, "sp": 1.4, "tp": 1.6}
        found = []
        for sizes in _factorizations(world_size):
            new = dict(zip(("dp", "tp", "sp", "pp"), sizes, strict=True))
            changed = {a: abs(math.log(new[a] / getattr(self, a))) for a in new}
            distance = (
                sum(1 for d in changed.values() if d > 0),
                round(sum(weights[a] * d for a, d in changed.items()), 9),
                sizes,
            )
            found.append((distance, new))
        layouts = []
        for _, new in sorted(found, key=lambda item: item[0])[:count]:
            data = new["dp"] * new["sp"]
            layouts.append(
                replace(
                    self,
                    dp=new["dp"],
                    tp=new["tp"],
                    sp=new["sp"],
                    pp=new["pp"],
                    replicas=math.gcd(self.replicas, data),
                    tp_sequence_parallel=self.tp_sequence_parallel and new["tp"] > 1,
                )
            )
        return layouts

    def coordinates(self, rank: int) -> Coordinates:
        """Of a rank, from 0.

        Raises:
            ValueError: there is no such rank.
        """
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank!r} is not in this layout of ranks 0 to {self.world_size - 1}"
            )
        digits = {}
        for axis in self.fastest_first:
            rank, digits[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**digits)

    def rank(self, coordinates: Coordinates) -> int:
        """Of coordinates.

        Raises:
            ValueError: a coordinate lies outside its axis.
        """
        misfits = [
            f"{axis}={getattr(coordinates, axis)!r} of {getattr(self, axis)}"
            for axis in AXES
            if not 0 <= getattr(coordinates, axis) < getattr(self, axis)
        ]
        if misfits:
            raise ValueError(f"{', '.join(misfits)}: coordinates count from 0 below the axis' size")
        rank, stride = 0, 1
        for axis in self.fastest_first:
            rank += getattr(coordinates, axis) * stride
            stride *= getattr(self, axis)
        return rank

    def ranks(self, rank: int, *axes: str) -> list[int]:
        """The group of a rank over some axes: those whose other coordinates are the same.

        Ascending, which is also the order of coordinates: the slowest of the axes in the layout's
        order counts most. Without axes, the rank alone.
        """
        here, varied = self.coordinates(rank), _known(axes)
        spans = [
            range(getattr(self, axis)) if axis in varied else (getattr(here, axis),)
            for axis in AXES
        ]
        return sorted(
            self.rank(Coordinates(**dict(zip(AXES, digits, strict=True))))
            for digits in product(*spans)
        )

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups over some axes, by their first rank: each rank is in one."""
        seen: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            group = self.ranks(rank, *axes)
            seen.setdefault(group[0], group)
        return list(seen.values())

    def neighbours(self, rank: int) -> Neighbours:
        """Stages before and after a rank's, and its neighbours on the sp ring."""
        stages, ring = self.ranks(rank, "pp"), self.ranks(rank, "sp")
        here = self.coordinates(rank)
        return Neighbours(
            previous_stage=stages[here.pp - 1] if here.pp else None,
            next_stage=stages[here.pp + 1] if here.pp + 1 < self.pp else None,
            ring_previous=ring[here.sp - 1],
            ring_next=ring[(here.sp + 1) % self.sp],
        )

    def table(self) -> str:
        """Rank and coordinates, a line each, and below them the groups of every axis."""
        axes = tuple(reversed(self.fastest_first))
        lines = ["rank  " + "  ".join(f"{axis:>3}" for axis in axes)]
        for rank in range(self.world_size):
            here = self.coordinates(rank)
            lines.append(f"{rank:4}  " + "  ".join(f"{getattr(here, axis):3}" for axis in axes))
        for axis in self.fastest_first:
            if getattr(self, axis) > 1:
                groups = " | ".join(" ".join(map(str, g)) for g in self.groups(axis))
                lines.append(f"{axis} groups: {groups}")
        return "\n".join(lines)


def check_batch(global_batch: int, micro_batch: int, microbatches: int, dp: int) -> None:
    """
    Raises:
        ValueError: global_batch is not micro_batch x microbatches x dp; says all numbers and which
            values of each would fit.
    """
    if global_batch == micro_batch * microbatches * dp:
        return
    fits = [f"global_batch={micro_batch * microbatches * dp}"]
    if global_batch % (micro_batch * dp) == 0:
        fits.append(f"microbatches={global_batch // (micro_batch * dp)}")
    if global_batch % (microbatches * dp) == 0:
        fits.append(f"micro_batch={global_batch // (microbatches * dp)}")
    raise ValueError(
        f"global_batch={global_batch} is not micro_batch x microbatches x dp = {micro_batch} x "
        f"{microbatches} x {dp} = {micro_batch * microbatches * dp}; {' or '.join(fits)} would fit"
    )


def why_refused(zero: int) -> str:
    if zero == 3:
        return "every microbatch of a stage gathers its weights anew"
    return "gradients of all microbatches are kept whole until the last, so nothing is saved"


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _known(axes: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown or len(set(axes)) != len(axes):
        raise ValueError(f"axes {', '.join(map(repr, axes))}: expected some of {AXES}, once each")
    return axes


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _factorizations(number: int) -> Iterator[tuple[int, int, int, int]]:
    for dp in _divisors(number):
        for tp in _divisors(number // dp):
            for sp in _divisors(number // dp // tp):
                yield dp, tp, sp, number // dp // tp // sp

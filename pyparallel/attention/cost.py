"""What each strategy would take, by a model of two numbers: F and B. The basis of "auto".

    F   pairs a second: 4 d FLOP each forward, at the rate that an attention kernel reaches
    B   bytes a second that one rank sends while it receives as many

    ring         the sum over hops of the longer of a hop's work and the next hop's transfer
    all_gather   all transfers, then all work
    ulysses      all transfers, then the work of the rank with the most heads
    hybrid       the transfers of heads, then a ring

of the slowest rank. A message costs its latency besides. Rates are rough, those of rank 0's machine
on all ranks, and meant to rank strategies, not to predict times: each row of MACHINES says where it
is from.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from pyparallel.attention.plan import Facts, Plan
from pyparallel.errors import InvalidArgument
from pyparallel.ops.chips import CHIPS, chip_named, machine_named

__all__ = ["MACHINES", "Estimate", "Rates", "choose", "estimate", "machine_of", "plans_for"]


@dataclass(frozen=True)
class Rates:
    """Of one kind of machine."""

    flops: float  # a second, of an attention kernel on 16-bit operands
    wide_flops: float  # on float32 and float64
    bandwidth: float  # bytes a second, one direction of one rank
    latency_us: float  # of one message, its launch included
    source: str


# Part of a chip's dense peak that an attention kernel reaches, and who says so.
_SHARES = {
    "A100": (0.65, "203 of 312 TFLOP/s: FlashAttention-2's own figure, d 128, full"),
    "H100": (0.455, "450 of 989: assumed of a kernel without warp roles"),
    "B200": (0.4, "900 of 2250: assumed"),
}
_LIKE = {"A800": "A100", "L20": "A100", "H800": "H100", "H200": "H100"}


def _rates(name: str) -> Rates:
    """Of a chip of pyparallel.ops, on its own link."""
    machine = machine_named(name)
    peak, link = machine.chip.dense_tflops, machine.link
    share, said = _SHARES[_LIKE.get(name, name)]
    like = f", as {_LIKE[name]}" if name in _LIKE else ""
    return Rates(
        peak["bf16"] * share * 1e12,
        peak["fp32"] * share * 1e12,
        link.bytes_per_us("copies") * 1e6,
        12.0,
        f"{name}, {share:g} of its dense peak ({said}{like}); {link.name}, "
        f"{link.share['copies']:g} of {link.gbps:g} GB/s (as pyparallel.ops has them); not "
        "measured on this machine",
    )


MACHINES = {
    "cpu": Rates(
        1.2e11,
        8e10,
        4e9,
        30.0,
        "an AVX-512 core of an EPYC in shared memory, docs/performance.md; assumed of other CPUs",
    ),
    **{name: _rates(name) for name in CHIPS},
}
UNKNOWN_CHIP = "H100"  # stands for one that is not in the table


@lru_cache(maxsize=64)
def machine_of(device: torch.device) -> str:
    """The row of MACHINES for a device; of CUDA's, H100's where the chip is not known."""
    if device.type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        return UNKNOWN_CHIP
    chip = chip_named(torch.cuda.get_device_name(device))
    return UNKNOWN_CHIP if chip is None else chip.name


NEAR = 0.1  # estimates no further apart do not rank strategies
_LOOKED_AT = 8  # ranks whose time is worked out; of more, that many spread evenly, and the last


@dataclass(frozen=True)
class Estimate:
    """One strategy at one call, forward."""

    plan: Plan
    us: float  # of the slowest rank
    compute_us: float  # of it, with nothing to wait for
    bytes_sent: int  # by the rank that sends most
    balance: float  # mean work over largest work; 1 is even

    @property
    def name(self) -> str:
        plan = self.plan
        if plan.strategy == "hybrid":
            return f"hybrid {plan.ulysses} x {plan.outer}"
        return plan.strategy


def plans_for(facts: Facts, strategy: str, ulysses: int | None) -> list[Plan]:
    """The plans that "auto", or a strategy asked for, leaves to choose from.

    Raises:
        ValueError: `ulysses`, the ranks that exchange heads, divides the ranks in no such way.
    """
    world = facts.k.world_size
    divisors = [u for u in range(2, world) if world % u == 0]
    if ulysses is not None and (ulysses < 1 or world % ulysses):
        raise InvalidArgument(
            f"ulysses_size is {ulysses}; expected a divisor of the {world} ranks: "
            f"{', '.join(map(str, [1, *divisors, world]))}"
        )
    if strategy == "decode":
        return [Plan(facts, "decode", 1)]
    if world == 1:
        return [Plan(facts, "ring", 1)]
    if strategy == "hybrid":
        if ulysses is not None:
            return [Plan(facts, "hybrid", ulysses)]
        if not divisors:
            raise InvalidArgument(
                f"strategy 'hybrid' needs two factors larger than 1 of {world} ranks, which has "
                "none; 'ring' and 'ulysses' take any number"
            )
        return [Plan(facts, "hybrid", u) for u in divisors]
    plans = {
        "ring": [Plan(facts, "ring", 1)],
        "all_gather": [Plan(facts, "all_gather", 1)],
        "ulysses": [Plan(facts, "ulysses", world)],
    }
    if strategy != "auto":
        return plans[strategy]
    return [plan for some in plans.values() for plan in some] + [
        Plan(facts, "hybrid", u) for u in divisors if u <= facts.heads
    ]


def estimate(plan: Plan, batch: int, d: int, d_v: int, itemsize: int, machine: str) -> Estimate:
    """What one plan would take, forward; `machine` is a row of MACHINES."""
    rates = MACHINES[machine]
    flops = rates.flops if itemsize <= 2 else rates.wide_flops
    world = plan.world
    ranks = sorted({*range(0, world, -(-world // _LOOKED_AT)), world - 1})
    scale = batch * 2 * (d + d_v) / flops * 1e6
    times, work, sent = [], [], []
    for rank in ranks:
        work.append(plan.work(rank))
        sent.append(plan.elements_sent(rank, d, d_v) * batch * itemsize)
        times.append(_time(plan, rank, sent[-1], work[-1] * scale, scale, batch * itemsize, d, d_v,
                           rates))  # fmt: skip
    most = max(work)
    balance = 1.0 if not most else sum(work) / len(work) / most
    return Estimate(plan, max(times), most * scale, max(sent), balance)


def _time(
    plan: Plan, rank: int, sent: int, compute: float, scale: float, itemsize: int, d: int,
    d_v: int, rates: Rates,
) -> float:  # fmt: skip
    """Microseconds of one rank: `compute` is that of its work, `scale` of one pair and head."""
    if plan.strategy in ("decode", "all_gather", "ulysses"):
        messages = 1 if plan.strategy == "decode" else 2 * (plan.world - 1)
        return sent / rates.bandwidth * 1e6 + messages * rates.latency_us + compute
    place = rank // plan.ulysses
    a, b = plan.split.queries[rank % plan.ulysses]
    c, e = plan.split.keys[rank % plan.ulysses]
    total = hops = 0.0
    for hop in range(plan.outer):
        source, following = (place - hop) % plan.outer, (place - hop - 1) % plan.outer
        work = plan.pairs(place, source) * (b - a) * scale
        transfer = 0.0
        if hop + 1 < plan.outer:
            count = plan.needs(place, following).count
            transfer = count * (e - c) * (d + d_v) * itemsize / rates.bandwidth * 1e6
            transfer += 2 * rates.latency_us if count else 0.0
            hops += count * (e - c) * (d + d_v) * itemsize
        total += max(work, transfer)
    exchanged = max(0.0, sent - hops)
    if plan.ulysses > 1:
        total += exchanged / rates.bandwidth * 1e6 + 4 * (plan.ulysses - 1) * rates.latency_us
    return total


@lru_cache(maxsize=1024)
def choose(
    facts: Facts,
    strategy: str,
    ulysses: int | None,
    batch: int,
    d: int,
    d_v: int,
    itemsize: int,
    machine: str,
) -> tuple[Plan, tuple[Estimate, ...]]:
    """The plan to take among those that `strategy` allows, and all of them.

    That of least estimated time; of those within NEAR of it, the one that sends least. Where only
    one is allowed nothing is estimated.
    """
    plans = plans_for(facts, strategy, ulysses)
    if len(plans) == 1:
        return plans[0], ()
    estimates = tuple(estimate(plan, batch, d, d_v, itemsize, machine) for plan in plans)
    quickest = min(e.us for e in estimates)
    near = [e for e in estimates if e.us <= quickest * (1 + NEAR)]
    return min(near, key=lambda e: (e.bytes_sent, e.us)).plan, estimates

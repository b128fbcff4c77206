"""Closed forms and published figures, exactly: tables/pipeline_schedule_formulas.csv row by row.

Conventions. Bubble: of a step that all ranks end at once, step time less busy time; for ZB-H2 and
ZB-V, whose ranks end at different times on purpose, the longest span of a rank less its busy time
(the cost in arXiv:2401.10241). Times are integers, so equality is exact. A stage of a schedule
with v chunks is 1/v of a stage of 1F1B, so its passes take 1/v of the time and keep 1/v of the
bytes: here a stage of 1F1B takes v times 1 instead. In the rows of DualPipe, B is a whole
backward and F&B a pair that runs together; PP is the number of stages.
"""

import csv
from itertools import product
from pathlib import Path

import pytest

from pyparallel.schedule import FAMILIES, Costs, generate, simulate, validate
from pyparallel.schedule.building_block import PERIOD, Block, block_slots, building_block_row
from pyparallel.schedule.interleaved import microbatch_groups
from pyparallel.schedule.schedule import Schedule
from pyparallel.schedule.v_half import v_half_block
from pyparallel.schedule.v_min import v_min_block

TABLE = Path(__file__).parent / "tables" / "pipeline_schedule_formulas.csv"
RANKS = (1, 2, 3, 4, 7, 8, 16)
EQUAL = (1, 1, 1)
# Passes of unequal length for which a formula holds as well.
UNEQUAL = [(2, 3, 1), (3, 4, 2), (5, 5, 3)]


def bubble(name, p, m, times=EQUAL, **options):
    """(idle time of a step, idle time of the longest span); the first is the same on every rank."""
    f, i, w = times
    costs = Costs(forward=f, backward_input=i, backward_weight=w)
    result = simulate(generate(name, p, m, **options), costs)
    assert len(set(result.bubble)) == 1, "ranks with equal work idle for equally long"
    return result.bubble[0], result.span_bubble


def kept(name, p, m, activation, weight, **options):
    """Per rank, the peak, with these bytes per stage and microbatch."""
    costs = Costs(activation_bytes=activation, weight_bytes=weight)
    return list(validate(generate(name, p, m, **options), costs).peak_bytes)


def test_the_table_has_no_row_without_a_test():
    with TABLE.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    names = {"Interleaved-1F1B": "interleaved-1f1b"}
    listed = {names.get(row["schedule"], row["schedule"].lower()) for row in rows}
    assert listed == set(FAMILIES) - {"looped-bfs"}
    for row in rows:
        family = FAMILIES[names.get(row["schedule"], row["schedule"].lower())]
        # DualPipeV is listed with 2 parameter copies because it is compared at PP/2 devices.
        assert int(row["param_copies"]) == (family.copies if family.name != "dualpipev" else 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("times", [EQUAL, *UNEQUAL])
def test_gpipe_and_1f1b(name, times):
    for p in RANKS:
        for m in (1, p, 2 * p + 3):
            assert bubble(name, p, m, times)[0] == (p - 1) * sum(times)
            expected = [m if name == "gpipe" else min(p - i, m) for i in range(p)]
            assert kept(name, p, m, 1, 1) == expected


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("times", [EQUAL, *UNEQUAL])
def test_interleaved(times, v):
    """A chunk takes 1/v of a stage, so in chunk times (p - 1)(F + B + W) / v is (p - 1)(f + b +
    w)."""
    for p in RANKS:
        for rounds in (1, 2, 3):
            m = p * rounds
            idle, _ = bubble("interleaved-1f1b", p, m, times, chunks=v)
            assert idle == (p - 1) * sum(times)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved_in_flight(v):
    """min(2(p - i - 1) + (v - 1) G + 1, m v) chunks, G the largest group; also for m not a
    multiple."""
    for p in (1, 2, 3, 5, 8):
        for m in range(1, 3 * p + 2):
            for size in (p, p + 1, 2 * p):
                group = max(size, *map(len, microbatch_groups(m, size)))
                expected = [min(2 * (p - i - 1) + (v - 1) * group + 1, m * v) for i in range(p)]
                assert kept("interleaved-1f1b", p, m, 1, 1, chunks=v, group_size=size) == expected
    # arXiv:2205.05198: 31 chunks of L/24 layers on stage 0 of p = 8, v = 3, the factor 1 + 7/24
    assert kept("interleaved-1f1b", 8, 64, 1, 1, chunks=3)[0] == 31


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_looped_bfs(v):
    for p in RANKS:
        for m in (p, 2 * p + 1):
            assert bubble("looped-bfs", p, m, chunks=v)[0] == (p - 1) * 3
            assert kept("looped-bfs", p, m, 1, 1, chunks=v) == [m * v] * p


@pytest.mark.parametrize("times", [EQUAL, *UNEQUAL, (2, 2, 1)])
def test_zb_h1(times):
    """(p - 1)(F + B - W); worker i from 1 keeps (p - i + 1) M_B + (i - 1) M_W."""
    f, b, w = times
    for p in RANKS:
        for m in (2 * p, 3 * p + 1):
            assert bubble("zb-h1", p, m, times)[0] == (p - 1) * (f + b - w)
            expected = [(p - i + 1) * 1000 + (i - 1) * 7 for i in range(1, p + 1)]
            assert kept("zb-h1", p, m, 1000, 7) == expected
        assert bubble("zb-h1", p, 2 * p)[0] == p - 1


@pytest.mark.parametrize("times", [EQUAL, *UNEQUAL, (2, 2, 1)])
def test_zb_h2(times):
    """(p - 1)(F + B - 2W), so 0 for equal passes; (2p - 2i + 1) M_B + (2i - 2) M_W."""
    f, b, w = times
    for p in RANKS:
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            assert bubble("zb-h2", p, m, times)[1] == (p - 1) * (f + b - 2 * w)
            expected = [(2 * p - 2 * i + 1) * 1000 + (2 * i - 2) * 7 for i in range(1, p + 1)]
            assert kept("zb-h2", p, m, 1000, 7) == expected


def test_zb_v():
    """0 for equal passes; p microbatch equivalents, which are 2p chunks, on every rank."""
    for p in RANKS:
        for m in (2 * p - 1, 2 * p, 3 * p + 1):
            assert bubble("zb-v", p, m)[1] == 0
            assert kept("zb-v", p, m, 1, 1) == [2 * p] * p


def test_v_half():
    """Published: about half of 1F1B's bubble and about p/2. Exactly: 3 (p - 1) chunk times, one
    less for even p, of the 6 (p - 1) that 1F1B idles; (p + 1)/2 equivalents on every rank."""
    for p in RANKS[1:]:
        for m in (3 * p, 4 * p + 1):
            assert bubble("v-half", p, m)[0] == 3 * (p - 1) - (p % 2 == 0)
            assert max(kept("v-half", p, m, 2, 0)) / 4 == (p + 1) / 2


def test_v_min():
    """Published: two thirds of 1F1B's bubble and about p/3. Exactly: 4 (p - 1) - 1 chunk times of
    the 6 (p - 1) that 1F1B idles; floor(p/3) + 1 equivalents."""
    for p in RANKS[1:]:
        for m in (3 * p, 4 * p + 1):
            assert bubble("v-min", p, m)[0] == 4 * (p - 1) - 1
            assert max(kept("v-min", p, m, 1, 0)) == 2 * (p // 3 + 1)


def _fits(block: Block, p: int) -> bool:
    slots = ({s % PERIOD for s in block_slots(block, rank, p)} for rank in range(p))
    return all(len(residues) == 4 for residues in slots)


@pytest.mark.parametrize("of", [v_half_block, v_min_block])
@pytest.mark.parametrize("p", [2, 3, 4, 6, 7])
def test_no_other_turns_leave_a_smaller_bubble(of, p):
    legs = of(p).legs
    idle = {}
    for turns in product(range(1, PERIOD + 1), repeat=3):
        block = Block(legs, turns)
        if _fits(block, p):
            rows = (building_block_row(r, p, 3 * p, block) for r in range(p))
            idle[turns] = simulate(Schedule.from_rows("block", rows)).bubble[0]
    assert of(p).turns in idle
    assert idle[of(p).turns] == min(idle.values())


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("times", [EQUAL, (2, 2, 1)])
def test_dualpipe(times, overlap):
    """(PP/2 - 1)(F&B + B - 3W) and PP + 1 activations on every rank, for m >= 2 PP.

    Where a pair takes less than its two passes, ranks are not equally busy: the outer ones run
        fewer pairs. The formula is then the bubble of the middle, which runs the most.
    """
    f, i, w = times
    costs = Costs(forward=f, backward_input=i, backward_weight=w, overlap=overlap)
    together = costs.pair(f, i + w)
    for stages in (2, 4, 6, 8, 16):
        for name, p in (("dualpipe", stages), ("dualpipev", stages // 2)):
            for m in (2 * stages, 4 * stages + 2):
                schedule = generate(name, p, m)
                assert schedule.stages == stages
                idle = simulate(schedule, costs).bubble
                assert max(idle) == (stages // 2 - 1) * (together + (i + w) - 3 * w)
                assert overlap or len(set(idle)) == 1
                assert kept(name, p, m, 1, 1) == [stages + 1] * p

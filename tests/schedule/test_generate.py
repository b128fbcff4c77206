"""Every generator gives right schedules, for any number of microbatches.

Layers: a complete grid of small sizes; drawn sizes up to p 16, v 4, m 64; refusals with what
    would work.
"""

import pytest
from hypothesis import given, settings

from pyparallel.schedule import (
    FAMILIES,
    Kind,
    Place,
    Schedule,
    ScheduleError,
    generate,
    simulate,
    validate,
    with_steps,
    with_transfers,
)
from pyparallel.schedule.interleaved import microbatch_groups
from tests.schedule.cases import SETTINGS, allowed, every, schedules


@pytest.mark.parametrize("name", FAMILIES)
def test_every_small_size_is_right_with_and_without_transfers(name):
    """m from 1 to 2p + 1: fewer microbatches than ranks never hang, one microbatch either
    (training.md 12, 13)."""
    for p in (1, 2, 3, 4, 5, 8):
        for m in range(1, 2 * p + 2):
            if allowed(name, p):
                schedule = generate(name, p, m)
                assert (schedule.ranks, schedule.microbatches) == (p, m)
                validate(schedule)
                validate(with_transfers(schedule))


@given(schedules())
@settings(**SETTINGS)
def test_drawn_sizes_are_right(schedule):
    whole = validate(schedule)
    plan = with_steps(with_transfers(schedule))
    report = validate(plan)
    assert report.in_flight == whole.in_flight
    assert plan.compute_only().rows == schedule.rows
    passes = [a for row in plan.rows for a in row if a.kind.is_compute]
    forwards = sum(a.kind is Kind.FORWARD for a in passes)
    assert forwards == schedule.stages * schedule.microbatches


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "looped-bfs"])
def test_chunks_and_any_microbatch_count(name, chunks):
    for p in (1, 2, 3, 5):
        for m in range(1, 3 * p + 2):
            schedule = generate(name, p, m, chunks=chunks)
            assert schedule.stages == p * chunks
            assert schedule.held[p - 1] == tuple(range(p - 1, p * chunks, p))
            validate(schedule)


def test_one_rank_has_no_bubble():
    for schedule in every(ranks=(1,)):
        assert simulate(schedule).bubble == (0,)


def test_microbatch_groups_cover_everything_once_and_fill_the_ranks():
    for microbatches in range(1, 65):
        for size in range(1, 20):
            groups = microbatch_groups(microbatches, size)
            assert [j for group in groups for j in group] == list(range(microbatches))
            lengths = set(map(len, groups))
            assert max(lengths) - min(lengths) <= 1
            assert min(lengths) >= min(size, microbatches)


def test_cutting_microbatches_off_leaves_the_rest_as_it_was():
    for schedule in every(ranks=(4,), microbatches=(13,)):
        cut = schedule.first(5)
        validate(cut)
        kept = [[(a.kind, a.stage, a.microbatch) for a in row if a.microbatch < 5]
                for row in schedule.rows]  # fmt: skip
        assert [[(a.kind, a.stage, a.microbatch) for a in row] for row in cut.rows] == kept
        assert cut.held == schedule.held


def test_a_pair_whose_second_half_is_cut_off_runs_alone():
    place = Place(0, 0)
    row = [place.F(1), place.B(0), place.F(0, with_next=True), place.B(1)]
    cut = Schedule.from_rows("pairs", [row]).first(1)
    assert cut.rows[0] == (place.B(0), place.F(0))


def test_reductions_wait_for_sends_that_others_wait_for():
    plan = with_steps(with_transfers(generate("1f1b", 2, 3)))
    assert [str(a) for a in plan.rows[1][-4:]] == ["1B2", "1SEND_B2", "1REDUCE", "1STEP"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1c", 4, 8), r"no schedule '1f1c'; there are gpipe, 1f1b, .*Nearest: '1f1b'"),
        (("1f1b", 0, 8), r"0 ranks: allowed are 1, 2, 3, \.\.\.; nearest 1"),
        (("1f1b", 4, 0), r"0 microbatches: allowed are 1, 2, 3, \.\.\.; nearest 1"),
        (("gpipe", -1, -2), r"-1 ranks.*-2 microbatches"),
        (("dualpipe", 5, 8), r"5 ranks: .*allowed are 2, 4, 6, \.\.\.; nearest 4 and 6"),
        (("dualpipe", 1, 8), r"1 ranks: .*nearest 2\."),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        generate(*arguments)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("1f1b", {"chunks": 2}, "2 chunks a rank: it has 1; for 2 take 'zb-v'"),
        ("zb-v", {"chunks": 3}, "3 chunks a rank: it has 2; for 3 take 'interleaved-1f1b'"),
        ("interleaved-1f1b", {"chunks": 0}, "0 chunks a rank: allowed are 1, 2, 3"),
        ("interleaved-1f1b", {"group_size": 3}, r"group_size 3 with 4 ranks.*nearest 4"),
        ("1f1b", {"group_size": 4}, "group_size 4 has no effect"),
    ],
)
def test_options_that_cannot_work_are_refused(name, options, message):
    """training.md 40: the error of a virtual pipeline that cannot be lists what can."""
    with pytest.raises(ScheduleError, match=message):
        generate(name, 4, 8, **options)

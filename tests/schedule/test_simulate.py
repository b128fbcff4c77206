"""The simulator: small cases by hand, identities that hold for all schedules, and its own speed."""

import itertools
import math
import time
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.schedule import (
    Costs,
    Kind,
    ScheduleError,
    generate,
    simulate,
    units,
    with_steps,
    with_transfers,
)
from pyparallel.schedule.units import message
from tests.schedule.cases import SETTINGS, every, schedules


def test_one_microbatch_by_hand():
    """Two stages: 2 there, a hop, 3 and 5 + 7 back, a hop, 4 + 6."""
    costs = Costs(
        forward=(2, 3), backward_input=(4, 5), backward_weight=(6, 7),
        latency=1, message_bytes=20, bandwidth=10,
    )  # fmt: skip
    result = simulate(generate("gpipe", 2, 1), costs)
    assert result.step_time == 2 + 3 + 3 + 5 + 7 + 3 + 4 + 6
    assert result.busy == (12, 15)
    assert result.bubble == (33 - 12, 33 - 15)
    assert result.starts == ([0, 23], [5, 8])
    assert result.ends == ([2, 33], [8, 20])
    halves = simulate(generate("zb-h1", 2, 1), costs)
    assert halves.step_time == 2 + 3 + 3 + 5 + 3 + 4 + 6, "the input's gradient leaves before W"


def test_steps_and_reductions_take_time():
    costs = Costs(reduce=(5, 7), step=(1, 2))
    plain = simulate(generate("1f1b", 2, 3), costs)
    whole = simulate(with_steps(generate("1f1b", 2, 3)), costs)
    assert whole.step_time == max(plain.ends[0][-1] + 6, plain.ends[1][-1] + 9)


def test_messages_that_do_not_overlap():
    """Both ranks stand still for each message of 1: there and back, rank 0 waits, then works on."""
    costs = Costs(latency=1, overlapped=False)
    result = simulate(generate("gpipe", 2, 1), costs)
    assert result.step_time == 1 + 1 + 1 + 2 + 1 + 2
    assert result.busy == (3, 3)
    for schedule in every(ranks=(2, 3, 4), microbatches=(1, 5, 8)):
        free = simulate(schedule, Costs(overlapped=False))
        assert free.step_time >= simulate(schedule).step_time
        slow = simulate(schedule, costs)
        beside = simulate(schedule, Costs(latency=1))
        assert slow.step_time >= beside.step_time
        assert slow.busy == beside.busy


def test_a_meeting_takes_as_long_as_its_longest_message():
    plan = with_transfers(generate("interleaved-1f1b", 2, 6, chunks=3))
    sizes = (2, 4, 6, 8, 10)
    result = simulate(plan, Costs(message_bytes=sizes, bandwidth=2, overlapped=False))
    mixed = 0
    for row, spans in zip(units(plan), result.spans, strict=True):
        timed = iter(spans)
        for unit in row:
            taken = {s.end - s.start for s in islice(timed, len(unit.actions))}
            if unit.meeting is not None:
                members = {sizes[message(a)[1] - (a.kind.direction < 0)] for a in unit.actions}
                assert taken == {max(members) // 2}
                mixed += len(members) > 1
    assert mixed > 2, "some meetings have messages of different sizes"


def test_fractions_stay_exact():
    costs = Costs(
        forward=Fraction(1, 3), backward_input=Fraction(1, 3), backward_weight=Fraction(1, 3)
    )
    result = simulate(generate("1f1b", 4, 8), costs)
    assert result.step_time == 8 + 3
    assert result.bubble_share == Fraction(3, 11)


@given(
    schedules(ranks=6, microbatches=12, chunks=3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
@settings(**SETTINGS)
def test_the_critical_path_is_a_chain_from_0_to_the_end(schedule, latency, issue, overlapped):
    costs = Costs(
        forward=2, backward_input=3, backward_weight=1,
        latency=latency, issue=issue, overlapped=overlapped,
    )  # fmt: skip
    result = simulate(schedule, costs)
    path = result.critical_path
    assert path[0].start == 0
    assert path[-1].end == result.step_time
    for before, after in itertools.pairwise(path):
        assert after.start - before.end in (0, latency), "nothing idles on the path"


def test_issuing_messages_takes_their_ranks_time():
    """F 2, B 3 + 1, a send or a posted receive 1, a message 5 on its way: by hand.

    rank 0: F0 0-2, send 2-3; rank 1: posts the receive 0-1, F0 8-10, B0 10-14, send 14-15; rank 0
    has posted its receive 3-4 and waits for 15 + 5: B0 20-24.
    """
    costs = Costs(forward=2, backward_input=3, backward_weight=1, latency=5, issue=1)
    result = simulate(generate("1f1b", 2, 1), costs)
    assert result.schedule.has_transfers
    assert result.starts == ([0, 2, 3, 20], [0, 8, 10, 14])
    assert result.ends == ([2, 3, 4, 24], [1, 10, 14, 15])
    assert result.busy == (6, 6)
    assert [str(span.action) for span in result.critical_path] == [
        "0F0", "0SEND_F0", "1F0", "1B0", "1SEND_B0", "0B0",
    ]  # fmt: skip
    uneven = Costs(latency=(1, 4), message_bytes=(0, 6), bandwidth=3)
    assert uneven.for_stages(3).hop == (1, 6)
    with pytest.raises(ScheduleError, match="latency has 1 values for 2 boundaries"):
        Costs(latency=(1,)).for_stages(3)
    with pytest.raises(ScheduleError, match="issue"):
        Costs(issue=-1)


@given(schedules(ranks=6, microbatches=12, chunks=3))
@settings(**SETTINGS)
def test_every_action_begins_as_early_as_it_can(schedule):
    """Nothing before its row allows, everything with its reason."""
    result = simulate(schedule, Costs(forward=2, backward_input=3, backward_weight=1, latency=1))
    ends = {span.end for spans in result.spans for span in spans}
    for spans in result.spans:
        before = (0, 0)
        for span in spans:
            together = (span.start, span.end) == before
            assert together or span.start >= before[1]
            assert together or {span.start, span.start - 1} & {before[1], *ends}
            before = (span.start, span.end)
    assert result.step_time == max(ends)
    assert min(result.bubble) >= 0


def test_pairs_hide_the_shorter_pass():
    for share, expected in ((0, 5), (1, 3), (Fraction(1, 2), 4)):
        costs = Costs(forward=2, backward_input=1, backward_weight=2, overlap=share)
        result = simulate(generate("dualpipev", 1, 4), costs)
        pairs = [s for s in result.spans[0] if s.action.with_next]
        assert {s.end - s.start for s in pairs} == {expected}


def test_peak_bytes_by_stage():
    """training.md 49: the first rank keeps more than the last."""
    costs = Costs(activation_bytes=(4, 3, 2, 1), static_bytes=10)
    result = simulate(generate("1f1b", 4, 8), costs)
    assert result.peak_bytes == (10 + 4 * 4, 10 + 3 * 3, 10 + 2 * 2, 10 + 1)
    halves = Costs(activation_bytes=10, weight_bytes=4)
    assert simulate(generate("zb-h1", 4, 8), halves).peak_bytes == (40, 34, 28, 22)


def test_memory_pressure_of_interleaved_zero_bubble_is_seen_before_it_runs():
    """training.md 42: what swapped a step from 128 to 13 tokens a second shows as bytes here."""
    keeps = {name: max(simulate(generate(name, 8, 32)).peak_bytes) for name in ("1f1b", "zb-h2")}
    assert keeps == {"1f1b": 8, "zb-h2": 15}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": -1}, "forward=-1: -1 is not finite and >= 0"),
        ({"forward": math.nan}, "forward=nan: nan is not finite"),
        ({"latency": math.inf}, "latency=inf: inf is not finite"),
        ({"backward_input": "3"}, "'3' is no number"),
        ({"forward": (1, True)}, "True is no number"),
        ({"overlap": 1.5}, "a share lies from 0 to 1"),
        ({"bandwidth": 0}, "no message would arrive"),
        ({"forward": -1, "step": -2}, "forward=-1.*; step=-2"),
    ],
)
def test_costs_that_cannot_be(options, message):
    with pytest.raises(ScheduleError, match=message):
        Costs(**options)


def test_costs_of_other_stages():
    schedule = generate("1f1b", 4, 8)
    with pytest.raises(ScheduleError, match=r"forward has 3 values for 4 stages: \(1, 2, 3\)"):
        simulate(schedule, Costs(forward=(1, 2, 3)))
    with pytest.raises(ScheduleError, match="message_bytes has 4 values for 3 boundaries"):
        simulate(schedule, Costs(message_bytes=(1, 2, 3, 4)))


def test_a_stage_out_of_range_is_named():
    schedule = generate("1f1b", 2, 2)
    wrong = schedule.rows[1][0]._replace(microbatch=5)
    rows = (schedule.rows[0], (wrong, *schedule.rows[1][1:]))
    with pytest.raises(ScheduleError, match=r"1F5 on rank 1: .* microbatches 0 to 1"):
        simulate(type(schedule)("x", rows, 2, 2, schedule.held))


def test_64_ranks_512_microbatches_2_chunks_in_under_a_second():
    """CPU time of the process, so that other work on the machine does not count."""
    schedule = generate("interleaved-1f1b", 64, 512, chunks=2)
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        result = simulate(schedule, Costs(latency=0.01))
        step = result.step_time
        best = min(best, time.process_time() - start)
    assert step > 2 * 512 * 3
    assert sum(a.kind is Kind.FORWARD for row in schedule.rows for a in row) == 64 * 512 * 2
    assert best < 1

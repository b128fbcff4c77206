"""Inserted communication: complete, in FIFO order, free of deadlock in the strictest transport.

The validator proves it in test_generate.py for every schedule; here are the properties it rests
on, and two transports of a few lines each that know nothing of the validator.
"""

import itertools
from collections import deque

import pytest
from hypothesis import given, settings

from pyparallel.schedule import (
    Costs,
    Kind,
    Place,
    Schedule,
    ScheduleError,
    generate,
    simulate,
    units,
    validate,
    with_transfers,
)
from pyparallel.schedule.dependencies import predecessor
from tests.schedule.cases import SETTINGS, every, schedules


def run_buffered(plan):
    """Ranks as programs; a send goes into the FIFO of its pair of ranks, a receive takes its
    head."""
    pipes, done, at = {}, set(), [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(plan.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind.is_send:
                    pipe = pipes.setdefault((rank, plan.peer(action)), deque())
                    pipe.append(
                        (action.kind, action.stage + action.kind.direction, action.microbatch)
                    )
                elif action.kind.is_recv:
                    pipe = pipes.get((plan.peer(action), rank))
                    if not pipe:
                        break
                    expected = (action.kind.counterpart, action.stage, action.microbatch)
                    assert pipe.popleft() == expected, "the head of the FIFO is another message"
                    done.add((rank, *expected))
                else:
                    check_input(plan, action, done)
                    done.add((rank, action.kind, action.stage, action.microbatch))
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in plan.rows], "stuck"
    assert not any(pipes.values()), "messages left over"


def check_input(plan, action, done):
    """What a pass needs was computed on its rank, or received there."""
    need = predecessor(action.kind, action.stage, plan.stages)
    if need is None:
        return
    kinds = {0: [Kind.FORWARD], 1: [Kind.BACKWARD, Kind.BACKWARD_INPUT]}[need[0]]
    here = {(action.rank, kind, need[1], action.microbatch) for kind in kinds}
    kind = Kind.SEND_ACTIVATION if need[0] == 0 else Kind.SEND_GRADIENT
    here.add((action.rank, kind, action.stage, action.microbatch))
    assert here & done, f"{action} runs before its input is there"


def run_batches(plan):
    """Each unit is one batch of sends and receives that both ranks must have reached, and that
    has the same messages on both sides; else the rank blocks."""
    rows, at = units(plan), [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                unit = row[at[rank]]
                if unit.partner is not None:
                    if at[unit.partner] == len(rows[unit.partner]):
                        break
                    other = rows[unit.partner][at[unit.partner]]
                    if other.partner != rank or content(other) != content(unit):
                        break
                    at[unit.partner] += 1
                at[rank] += 1
                moved = True
    assert at == [len(row) for row in rows], "stuck"


def content(unit):
    return sorted(
        (a.kind.direction, a.stage if a.kind.is_send else a.stage - a.kind.direction, a.microbatch)
        for a in unit.actions
    )


@given(schedules(ranks=8, microbatches=20, chunks=3))
@settings(**SETTINGS)
def test_runs_on_fifos_and_in_batches(schedule):
    plan = with_transfers(schedule)
    run_buffered(plan)
    run_batches(plan)


def test_any_times_order_the_messages_safely():
    for costs in (
        Costs(forward=3, backward_input=1, backward_weight=5, latency=2),
        Costs(forward=0, backward_input=0, backward_weight=0),
        Costs(forward=(1, 9, 0, 4), backward_input=(7, 0, 1, 1), backward_weight=0),
    ):
        for name in ("1f1b", "zb-h1", "zb-h2", "gpipe"):
            plan = with_transfers(generate(name, 4, 7), costs)
            validate(plan)
            run_buffered(plan)
            run_batches(plan)


def test_two_ranks_in_a_ring():
    """communication_and_gemm.md 108: with two ranks the next rank is also the one before.
    Activations and gradients of several boundaries share the pair, and none is taken for
    another."""
    for name, options in (
        ("interleaved-1f1b", {"chunks": 3}),
        ("looped-bfs", {"chunks": 2}),
        ("zb-v", {}),
        ("v-half", {}),
        ("dualpipe", {}),
        ("dualpipev", {}),
    ):
        plan = with_transfers(generate(name, 2, 6, **options))
        run_buffered(plan)
        run_batches(plan)
        channels = {plan.channel(a) for row in plan.rows for a in row if a.kind.is_transfer}
        assert len(channels) >= 2
        for row in plan.rows:
            for action in row:
                if action.kind.is_transfer:
                    assert plan.peer(action) == 1 - action.rank


def test_both_ends_name_the_same_channel():
    for schedule in every(ranks=(2, 4), microbatches=(3,)):
        plan = with_transfers(schedule)
        sends, receives = {}, {}
        for row in plan.rows:
            for action in row:
                if action.kind.is_transfer:
                    ends = sends if action.kind.is_send else receives
                    channel = plan.channel(action)
                    assert channel not in ends or action.microbatch not in ends[channel]
                    ends.setdefault(channel, []).append(action.microbatch)
        assert sends == receives


def test_no_transfer_where_stages_follow_on_one_rank():
    plan = with_transfers(generate("zb-v", 3, 6))
    last = [a for a in plan.rows[2] if a.kind.is_transfer]
    assert {a.stage for a in last if a.kind is Kind.RECV_ACTIVATION} == {2}, (
        "2 -> 3 stays on rank 2"
    )
    assert generate("gpipe", 1, 4).rows == with_transfers(generate("gpipe", 1, 4)).rows


def test_a_pair_that_runs_together_gets_its_inputs_before_and_sends_after():
    plan = with_transfers(generate("dualpipe", 4, 10))
    for row in plan.rows:
        for action, following in itertools.pairwise(row):
            if action.with_next:
                assert following.kind is Kind.BACKWARD


def test_meetings_are_the_same_on_both_sides():
    two_way = 0
    for schedule in every(ranks=(2, 3, 4), microbatches=(5, 8)):
        plan = with_transfers(schedule)
        seen: dict[int, list] = {}
        for row in units(plan):
            for unit in row:
                if unit.meeting is not None:
                    seen.setdefault(unit.meeting, []).append(unit)
        for first, second in seen.values():
            assert content(first) == content(second)
            two_way += len({a.kind.is_send for a in first.actions}) == 2
        assert [a for row in units(plan) for unit in row for a in unit.actions] == [
            a for row in plan.rows for a in row
        ]
    assert two_way > 100, "messages both ways at the same time share a meeting"


def test_messages_are_not_inserted_twice():
    plan = with_transfers(generate("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match=r"has transfers already; compute_only\(\)"):
        with_transfers(plan)


def test_questions_about_actions_that_have_no_answer():
    schedule = generate("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="0F0 on rank 0 is no transfer: it has no peer"):
        schedule.peer(schedule.rows[0][0])
    send = with_transfers(schedule).rows[0][1]
    assert send.kind is Kind.SEND_ACTIVATION
    with pytest.raises(ScheduleError, match="no rank passes microbatch 7 through stage 1"):
        schedule.peer(send._replace(microbatch=7))


def test_a_hand_written_schedule_that_cannot_run_gets_no_transfers_silently():
    place, other = Place(0, 0), Place(1, 1)
    wrong = Schedule.from_rows("wrong", [[place.B(0), place.F(0)], [other.F(0), other.B(0)]])
    with pytest.raises(ScheduleError, match="deadlock: 0B0 on rank 0"):
        with_transfers(wrong)


def test_transfers_do_not_change_the_times():
    for schedule in every(ranks=(3, 4), microbatches=(7,)):
        costs = Costs(forward=3, backward_input=2, backward_weight=4, latency=1)
        assert (
            simulate(with_transfers(schedule), costs).step_time
            == simulate(schedule, costs).step_time
        )

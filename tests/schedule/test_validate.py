"""The validator: every kind of fault is found, named, and marked in the grid.

Each fault is put into a right schedule; the same schedule without it passes.
"""

from dataclasses import replace

import pytest

from pyparallel.schedule import (
    Action,
    Costs,
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

A, B = Place(0, 0), Place(1, 1)


def two_ranks(*rows):
    return Schedule.from_rows("by hand", rows)


def edited(schedule, rank, edit):
    rows = [list(row) for row in schedule.rows]
    edit(rows[rank])
    return replace(schedule, rows=tuple(map(tuple, rows)))


def swap(i, j):
    def edit(row):
        row[i], row[j] = row[j], row[i]

    return edit


def refused(schedule, message, rank=None, position=None, mark=None):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    if rank is not None:
        assert (caught.value.rank, caught.value.position) == (rank, position)
        assert f">{mark or schedule.rows[rank][position]}<" in str(caught.value)
        assert f"rank {rank}" in str(caught.value)
    return str(caught.value)


def test_a_right_one_by_hand_passes():
    validate(two_ranks([A.F(0), A.B(0)], [B.F(0), B.B(0)]))


def test_backward_before_forward():
    refused(
        two_ranks([A.B(0), A.F(0)], [B.F(0), B.B(0)]), "deadlock: 0B0 on rank 0 waits for", 0, 0
    )
    refused(
        two_ranks([A.F(0), A.B(0)], [B.B(0), B.F(0)]), "1B0 on rank 1 waits for 1F0 on rank 1", 1, 0
    )


def test_weight_half_before_input_half():
    rows = [A.F(0), A.W(0), A.I(0)], [B.F(0), B.B(0)]
    refused(two_ranks(*rows), "0W0 on rank 0 waits for 0I0 on rank 0 at position 2", 0, 1)


def test_two_ranks_that_wait_for_each_other():
    """training.md 14: a circle of sends and receives is found without running it."""
    rows = [A.F(1), A.F(0), A.B(0), A.B(1)], [B.F(0), B.B(0), B.F(1), B.B(1)]
    validate(two_ranks(*rows))
    wrong = [A.F(0), A.B(0), A.F(1), A.B(1)], [B.F(1), B.B(1), B.F(0), B.B(0)]
    text = refused(two_ranks(*wrong), "deadlock", 0, 1)
    assert "0B0 on rank 0 waits for 1B0 on rank 1 at position 3" in text
    assert "1F1 on rank 1 waits for 0F1 on rank 0 at position 2" in text
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(two_ranks(*wrong))


@pytest.mark.parametrize("lost", [A.F(0), A.B(0)])
def test_a_missing_pass(lost):
    row = [a for a in (A.F(0), A.B(0), A.F(1), A.B(1)) if a != lost]
    wrong = two_ranks(row, [B.F(0), B.B(0), B.F(1), B.B(1)])
    refused(
        wrong, f"{lost}.*(is missing|is nowhere)" if lost.kind is Kind.BACKWARD else "is nowhere"
    )


def test_half_a_backward():
    refused(two_ranks([A.F(0), A.I(0)], [B.F(0), B.B(0)]), r"0W0 \(or 0B0\) is missing")


@pytest.mark.parametrize(
    "twice", [[A.F(0), A.F(0), A.B(0)], [A.F(0), A.B(0), A.B(0)], [A.F(0), A.B(0), A.I(0), A.W(0)]]
)
def test_twice(twice):
    text = refused(two_ranks(twice, [B.F(0), B.B(0)]), "has been done before")
    assert ">0" in text


def test_forward_and_backward_on_different_ranks():
    other = Place(1, 0, 0)
    rows = [A.F(0)], [other.B(0), B._replace(chunk=1).F(0), B._replace(chunk=1).B(0)]
    refused(two_ranks(*rows), "0B0: its forward 0F0 is on rank 0", 1, 0)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (A.F(0)._replace(rank=1), "is of rank 1, but stands in the row of rank 0"),
        (A.F(0)._replace(chunk=1), r"0F0 as chunk 1: the rank's chunks are stages \[0\]"),
        (A.F(7), "microbatches are 0 to 0"),
        (A.F(-1), "microbatches are 0 to 0"),
        (A.F(0)._replace(stage=5), "stages are 0 to 1"),
        (Action(0, Kind.REDUCE, 0, 3, 0), "REDUCE is of no microbatch, but has 3"),
        (A.F(0, with_next=True), "runs with the next action"),
    ],
)
def test_actions_that_cannot_be(action, message):
    right = two_ranks([A.F(0), A.B(0)], [B.F(0), B.B(0)])
    wrong = edited(right, 0, lambda row: row.append(action))
    refused(wrong, message, 0, 2)


def test_a_pair_that_waits_for_itself():
    row = [A.F(0, with_next=True), A.B(0)]
    refused(two_ranks(row), "deadlock", 0, 0)


def test_held_has_to_be_the_stages():
    right = generate("1f1b", 2, 2)
    refused(replace(right, held=((0,),)), "expected are the stages of 2 ranks")
    refused(replace(right, held=((1, 0), (1,))), "ascending")
    refused(replace(right, microbatches=0), "0 microbatches")


def test_claims_of_a_file_cost_nothing():
    """Any number of stages and microbatches can be claimed: the first missing pass is the
    answer."""
    huge = replace(generate("1f1b", 2, 2), stages=10**9, microbatches=10**9)
    refused(huge, "0F2 is missing: each of 1000000000 microbatches")


# Communication: faults in a plan of 1F1B on two ranks.
PLAN = with_transfers(generate("1f1b", 2, 3))
SENDS = [i for i, a in enumerate(PLAN.rows[0]) if a.kind is Kind.SEND_ACTIVATION]
RECEIVES = [i for i, a in enumerate(PLAN.rows[1]) if a.kind is Kind.RECV_ACTIVATION]


def test_the_plan_is_right():
    validate(PLAN)


def test_a_receive_without_its_send():
    """communication_and_gemm.md 106: one rank's batch has a message that the other's lacks."""
    text = refused(edited(PLAN, 0, lambda row: row.pop(SENDS[0])), "0F0 is never sent: 0SEND_F0")
    assert ">0F0<" in text


def test_a_send_without_its_receive():
    wrong = edited(PLAN, 1, lambda row: row.pop(RECEIVES[1]))
    refused(wrong, "1F1 is never given its input: 1RECV_F1 is missing")


def test_a_send_before_its_result():
    refused(edited(PLAN, 0, swap(0, SENDS[0])), "0SEND_F0 comes before 0F0", 0, 0)


def test_a_receive_after_its_use():
    i = RECEIVES[0]
    assert PLAN.rows[1][i + 1] == B.F(0)
    refused(edited(PLAN, 1, swap(i, i + 1)), r"1RECV_F0 comes after 1F0 \(position 0\)", 1, i + 1)


def test_a_message_nobody_needs():
    extra = Action(1, Kind.SEND_ACTIVATION, 1, 0, 0)
    refused(edited(PLAN, 1, lambda row: row.append(extra)), "carries what no rank needs")
    twice = edited(PLAN, 0, lambda row: row.append(row[SENDS[0]]))
    refused(twice, "has been done before")


def test_swapped_messages():
    """Right data for every pass, but on a channel without tags they would be exchanged."""
    plan = with_transfers(generate("gpipe", 2, 3))
    places = [i for i, a in enumerate(plan.rows[1]) if a.kind is Kind.RECV_ACTIVATION]
    first, second = places[:2]
    rows = list(plan.rows[1])
    rows.insert(first, rows.pop(second))
    wrong = replace(plan, rows=(plan.rows[0], tuple(rows)))
    refused(wrong, "1RECV_F1 is receive 0 from rank 0, but .* is 0SEND_F0: .* swapped", 1, first)


def test_sends_that_meet():
    """communication_and_gemm.md 105: both ranks send first and receive second. Side by side they
    are one meeting; with a pass between them nothing could go on."""
    one = [A.F(0), A.F(1), A.B(0), A.B(1)]
    plan = with_transfers(two_ranks(one, [B.F(0), B.B(0), B.F(1), B.B(1)]))
    first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    validate(reordered(plan, (first, second)))
    plan = with_transfers(two_ranks(one, [B.F(0), B.F(1), B.B(0), B.B(1)]))
    second = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    validate(reordered(plan, (first, second)))
    apart = "0F0 0SEND_F0 0F1 0RECV_B0 0B0 0SEND_F1 0RECV_B1 0B1"
    late = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    text = refused(reordered(plan, (apart, late)), "deadlock")
    assert "0RECV_B0 on rank 0 waits for 1SEND_B0 on rank 1" in text
    assert "1RECV_F1 on rank 1 waits for 0SEND_F1 on rank 0" in text


def test_a_batch_may_not_be_completed_by_a_later_one():
    """Rank 0 issues three messages side by side, rank 1 has a pass between them that needs the
    last: its first batch would have to end with a message of rank 0's third."""
    plan = with_transfers(generate("gpipe", 2, 3))
    first = "0F0 0F1 0F2 0SEND_F0 0SEND_F1 0RECV_B0 0SEND_F2 0B0 0RECV_B1 0B1 0RECV_B2 0B2"
    second = "1RECV_F0 1F0 1RECV_F1 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2"
    text = refused(reordered(plan, (first, second)), "deadlock")
    assert "0RECV_B0 on rank 0 waits for 1SEND_B0 on rank 1" in text
    first = first.replace("0RECV_B0 0SEND_F2", "0SEND_F2 0RECV_B0")
    validate(reordered(plan, (first, second)))


def reordered(plan, rows):
    """The plan with its rows in this order."""
    by_text = {str(a): a for row in plan.rows for a in row}
    return replace(plan, rows=tuple(tuple(by_text[t] for t in row.split()) for row in rows))


def test_reductions_and_steps():
    plan = with_steps(generate("zb-h1", 2, 3))
    validate(plan)
    last = len(plan.rows[0]) - 1
    assert str(plan.rows[0][last]) == "0STEP"
    refused(edited(plan, 0, lambda row: row.pop()), "0STEP is missing")
    refused(edited(plan, 0, swap(last, last - 1)), "0STEP comes before 0REDUCE", 0, last - 1)
    refused(edited(plan, 0, swap(last - 1, last - 2)), "0REDUCE comes before 0W2", 0, last - 2)
    refused(edited(plan, 0, lambda row: row.append(row[last])), "0STEP has been done before")
    with pytest.raises(ScheduleError, match="has reductions or steps already"):
        with_steps(plan)


def test_memory_limit():
    schedule = generate("1f1b", 4, 8)
    costs = Costs(activation_bytes=10, static_bytes=(1, 2, 3, 4))
    assert validate(schedule, costs, 41).peak_bytes == (41, 32, 23, 14)
    with pytest.raises(ScheduleError, match="rank 0 keeps 41 of 40, rank 1 keeps 32 of 31"):
        validate(schedule, costs, [40, 31, 30, 30])
    with pytest.raises(ScheduleError, match="2 values for 4 ranks"):
        validate(schedule, costs, [40, 31])


def test_the_grid_shows_the_neighbourhood_of_the_fault():
    schedule = edited(generate("1f1b", 4, 64), 2, swap(60, 63))
    text = refused(schedule, "deadlock")
    assert max(map(len, text.splitlines()[1:])) < 140, "a window, not all 128 columns"

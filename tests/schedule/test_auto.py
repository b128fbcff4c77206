"""Schedules made for given times: right, within memory, no worse than the named ones that fit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.schedule import Costs, ScheduleError, auto_schedule, generate, simulate, validate
from tests.schedule.cases import SETTINGS

TIME = st.integers(1, 9)


@st.composite
def problems(draw):
    """Uneven stages, slow links, memory from the least that can work upwards."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    stages = ranks * chunks
    of_stage = st.lists(TIME, min_size=stages, max_size=stages)
    kept = draw(of_stage)
    costs = Costs(
        forward=draw(of_stage),
        backward_input=draw(of_stage),
        backward_weight=draw(of_stage),
        latency=draw(st.integers(0, 3)),
        activation_bytes=kept,
        weight_bytes=[draw(st.integers(0, most)) for most in kept],
        static_bytes=draw(st.integers(0, 3)),
    )
    layout = draw(st.sampled_from(["loop", "v"]))
    limit = None
    if draw(st.booleans()):
        held = auto_schedule(ranks, 1, Costs(), chunks=chunks, layout=layout).held
        limit = [
            sum(kept[s] + costs.static_bytes for s in row) + draw(st.integers(0, 20))
            for row in held
        ]
    return ranks, draw(st.integers(1, 7)), costs, {
        "chunks": chunks, "layout": layout, "memory_limit": limit, "halves": draw(st.booleans()),
    }  # fmt: skip


@given(problems())
@settings(**{**SETTINGS, "max_examples": 30})
def test_right_and_within_memory(problem):
    """Also with just enough memory for one microbatch: nothing waits for memory for ever."""
    ranks, microbatches, costs, options = problem
    schedule = auto_schedule(ranks, microbatches, costs, **options)
    validate(schedule, costs, options["memory_limit"])
    assert schedule.microbatches == microbatches
    assert schedule.stages == ranks * options["chunks"]
    whole = all(a.kind.code in "FB" for row in schedule.rows for a in row)
    assert options["halves"] or whole


@pytest.mark.parametrize("barrier", [True, False])
def test_no_worse_than_named_schedules_with_the_same_places(barrier):
    costs = Costs(forward=(3, 5, 2, 4), backward_input=(4, 4, 3, 6), backward_weight=2, latency=1)
    double = Costs(forward=3, backward_input=4, backward_weight=2, latency=1)
    for names, given_costs, options in (
        (("gpipe", "1f1b", "zb-h1", "zb-h2"), costs, {}),
        (("zb-v", "v-half", "v-min", "dualpipev"), double, {"chunks": 2, "layout": "v"}),
        (("interleaved-1f1b", "looped-bfs"), double, {"chunks": 2}),
    ):
        auto = simulate(auto_schedule(4, 9, given_costs, barrier=barrier, **options), given_costs)
        for name in names:
            named = simulate(generate(name, 4, 9), given_costs)
            if barrier:
                assert auto.step_time <= named.step_time
            else:
                assert max(auto.span) <= max(named.span)


def test_uneven_stages_are_where_it_gains():
    """Stages of different lengths, as an embedding or a loss make them: shorter than any fixed
    order."""
    costs = Costs(forward=(3, 4, 5, 3), backward_input=(4, 1, 5, 2), backward_weight=(1, 1, 2, 4))
    auto = simulate(auto_schedule(4, 8, costs, memory_limit=4), costs)
    for name in ("gpipe", "1f1b", "zb-h1"):
        assert auto.step_time < simulate(generate(name, 4, 8), costs).step_time


def test_memory_trades_for_time():
    costs = Costs()
    times = [
        simulate(auto_schedule(4, 12, costs, memory_limit=limit, barrier=False)).span_bubble
        for limit in (1, 2, 4, 7)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0, "in the memory of ZB-H2 there is no bubble"
    assert times[0] > times[-2] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 0.5}, r"rank 0 has 0\.5, one microbatch needs 1"),
        ({"memory_limit": [1, 1, 0, 1]}, r"rank 2 has 0, one microbatch needs 1"),
        ({"memory_limit": [1, 1]}, "2 values for 4 ranks"),
        ({"layout": "w"}, "layout 'w': allowed are 'loop' and 'v'"),
        ({"chunks": 0}, r"0 chunks: allowed are 1, 2"),
        ({"costs": Costs(weight_bytes=2)}, "keeps 2 bytes for its weight half and 1 before"),
        ({"costs": Costs(forward=(1, 2))}, "forward has 2 values for 4 stages"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    options = {"costs": Costs(), **options}
    with pytest.raises(ScheduleError, match=message):
        auto_schedule(4, 8, **options)

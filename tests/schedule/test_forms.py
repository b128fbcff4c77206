"""Written forms: what is written is read back equal, and what is no schedule is refused with its
place.

torch's own loader reads what is exported, lowers it, and its lowering is read back and proved.
"""

import contextlib
import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.schedule import (
    FORMS,
    Schedule,
    ScheduleError,
    dumps,
    generate,
    loads,
    simulate,
    validate,
    with_steps,
    with_transfers,
)
from tests.schedule.cases import SETTINGS, every, schedules

OWN = ("text", "csv", "json")


@given(schedules(ranks=6, microbatches=12, chunks=3), st.text(max_size=12))
@settings(**SETTINGS)
def test_read_back_equal(schedule, name):
    schedule = Schedule(name, schedule.rows, schedule.stages, schedule.microbatches, schedule.held)
    for given_one in (schedule, with_steps(with_transfers(schedule))):
        for form in OWN:
            assert loads(dumps(given_one, form), form) == given_one


def test_the_text_form_is_for_people():
    assert dumps(with_transfers(generate("1f1b", 2, 2))) == (
        "# pyparallel schedule 1\n"
        'name: "1f1b"\n'
        "stages: 2\n"
        "microbatches: 2\n"
        "rank 0 holds 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "rank 1 holds 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1\n"
    )


def test_a_wrong_schedule_is_read_only_where_asked():
    text = dumps(generate("1f1b", 2, 1)).replace("0F0 0B0", "0B0 0F0")
    with pytest.raises(ScheduleError, match="deadlock: 0B0 on rank 0"):
        loads(text)
    assert str(loads(text, check=False).rows[0][0]) == "0B0"


TEXT = dumps(generate("zb-v", 2, 2))
JSON = json.loads(dumps(generate("1f1b", 2, 1), "json"))
CSV = dumps(generate("1f1b", 2, 1), "csv")


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("text", "", "line 1 is None, not '# pyparallel schedule 1'"),
        ("text", "# pyparallel schedule 2\n", "line 1 is '# pyparallel schedule 2'"),
        ("text", "# pyparallel schedule 1\nname: zb\n", "name 'zb' is no text in double quotes"),
        ("text", '# pyparallel schedule 1\nname: "x"\n', "None: expected is 'stages: ...'"),
        ("text", TEXT.replace("stages: 4", "stages: 0"), "stages '0' is no number from 1"),
        ("text", TEXT.replace("stages: 4", "stages: 9999999999"), "no number from 1 to 999999999"),
        ("text", TEXT.replace("microbatches: 2", "microbatches: ٣"), "'٣' is no number"),
        ("text", TEXT.replace("rank 1", "rank 7"), "expected is 'rank 1 holds STAGES: ACTIONS'"),
        ("text", TEXT.replace(" 0F0", " 0G0"), "position 0: '0G0' is no action such as 2F0"),
        ("text", TEXT.replace(" 0F0", " 0F"), "'0F': F needs a microbatch"),
        ("text", TEXT.replace(" 0F0", " 0REDUCE0"), "REDUCE is of no microbatch"),
        ("text", TEXT.replace(" 0F0", " 2F0"), r"'2F0': the rank holds stages \[0, 3\]"),
        ("text", TEXT.replace(" 0F0", " 0F" + "9" * 5000), "is no action"),
        ("json", "{", "no JSON"),
        ("json", "[" * 100_000, "no JSON"),
        ("json", "[]", r"the JSON is \[\], not an object"),
        ("json", "{}", "its format is None"),
        ("json", json.dumps({**JSON, "stages": True}), "stages True is no number"),
        ("json", json.dumps({**JSON, "stages": 2.0}), "stages 2.0 is no number"),
        ("json", json.dumps({**JSON, "stages": -2}), "stages -2 is no number"),
        ("json", json.dumps({**JSON, "name": 3}), "name is no text"),
        ("json", json.dumps({**JSON, "held": [[0]]}), "held has 1 ranks, rows 2"),
        ("json", json.dumps({**JSON, "held": 3}), "held is 3, not a list per rank"),
        ("json", json.dumps({**JSON, "rows": [["0F0"], [3]]}), "rows of rank 1 is .3., not a list"),
        ("json", json.dumps({**JSON, "rows": [[], []]}), "0F0 is missing"),
        ("csv", "x" * 200_000, "no CSV: field larger than field limit"),
        ("csv", "", "the first line without # is not rank,kind,stage"),
        ("csv", CSV.replace("0,F,0,0,0,0", "0,F,0,0,0"), "action 0 has 5 columns"),
        ("csv", CSV.replace("0,F,0,0,0,0", "0,F,0,0,0,2"), "with_next is '2', not 0 or 1"),
        ("csv", CSV.replace("0,F,0,0,0,0", "9,F,0,0,0,0"), "actions of rank 9, but comments for 2"),
        ("csv", CSV.replace("0,F,0,0,0,0", "0,F,0,0,4,0"), "0F0 on rank 0 has chunk '4'"),
        ("torch", "0F0,1X0", "rank 0, position 1: '1X0' is no action"),
        ("torch", "0F0,0B", "'0B' has no microbatch"),
        ("torch", "(0F0;)OVERLAP_F_B", "is no action"),
        ("torch", "(0UNSHARD;0F0)OVERLAP_F_B", "is no pair of passes"),
        ("torch", "", "0 ranks"),
        ("yaml", "", "no form 'yaml'; there are text, csv, json, torch"),
    ],
)
def test_what_is_no_schedule_is_refused(form, text, message):
    with pytest.raises(ScheduleError, match=message):
        loads(text, form)


@given(st.sampled_from(sorted(FORMS)), st.text(alphabet=string.printable, max_size=80), st.data())
@settings(**SETTINGS)
def test_broken_text_never_gives_another_error(form, noise, data):
    text = dumps(generate("1f1b", 2, 2), form)
    at = data.draw(st.integers(0, len(text)))
    for broken in (noise, text[:at], text[:at] + noise + text[at:]):
        with contextlib.suppress(ScheduleError):
            loads(broken, form)


# torch.distributed.pipelining


def _runtime(schedule, microbatches):
    """torch's schedule runtime over stages that only have what its loader asks for."""
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    class Stage:
        group, group_rank, has_backward = None, 0, True

        def __init__(self, index):
            self.stage_index, self.num_stages = index, schedule.stages
            self.group_size = schedule.ranks
            self.is_first, self.is_last = index == 0, index == schedule.stages - 1
            self.submod = torch.nn.Identity()

    return _PipelineScheduleRuntime([Stage(s) for s in schedule.held[0]], microbatches)


def test_torch_loads_lowers_and_dumps_it(tmp_path):
    """Ours -> torch's loader and lowering -> ours: the same passes, and torch's communication is
    right by our validator. Then with our communication -> torch -> ours: equal."""
    for schedule in every(ranks=(2, 4), microbatches=(8,)):
        if schedule.name == "dualpipe" or (schedule.name == "dualpipev" and not _torch_has_pairs()):
            continue
        path, dumped = tmp_path / "in.csv", tmp_path / "out.csv"
        runtime = _runtime(schedule, 8)
        path.write_text(dumps(schedule, "torch"), newline="")
        runtime._load_csv(str(path), format="compute_only")
        runtime._dump_csv(str(dumped), format="compute_comms")
        lowered = loads(dumped.read_text(), "torch")
        assert lowered.compute_only().rows == schedule.rows, schedule.name
        assert lowered.has_transfers
        simulate(lowered)

        plan = with_transfers(schedule)
        path.write_text(dumps(plan, "torch"), newline="")
        runtime._load_csv(str(path), format="compute_comms")
        if schedule.name != "dualpipev":  # torch's own dry run knows no pairs
            runtime._simulate()
        runtime._dump_csv(str(dumped), format="compute_comms")
        assert loads(dumped.read_text(), "torch").rows == plan.rows


def _torch_has_pairs():
    """torch 2.9 writes neither passes that run together nor its own schedules in this form."""
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    return issubclass(theirs.ScheduleZBVZeroBubble, theirs._PipelineScheduleRuntime)


def test_torch_s_own_schedules_are_read_and_proved(tmp_path):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not _torch_has_pairs():
        pytest.skip("this torch does not write its own schedules in the form that is read here")

    for name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV", "ScheduleInterleaved1F1B"):
        v_shaped = name != "ScheduleInterleaved1F1B"
        like = generate("zb-v" if v_shaped else "interleaved-1f1b", 4, 8)
        runtime = _runtime(like, 8)
        made = getattr(theirs, name)(runtime._stages, 8)
        made._dump_csv(str(tmp_path / "x.csv"), format="compute_only")
        read = loads((tmp_path / "x.csv").read_text(), "torch")
        validate(with_transfers(read))
        ours = {"ScheduleZBVZeroBubble": "zb-v", "ScheduleDualPipeV": "dualpipev"}.get(
            name, "interleaved-1f1b"
        )
        assert simulate(read).step_time == simulate(generate(ours, 4, 8)).step_time


def test_what_torch_cannot_hold_is_refused():
    with pytest.raises(ScheduleError, match="ranks 1 and 2 both hold stage 1.*dualpipev"):
        dumps(generate("dualpipe", 4, 8), "torch")
    with pytest.raises(ScheduleError, match="torch's form has no optimizer step"):
        dumps(with_steps(with_transfers(generate("1f1b", 2, 2))), "torch")
    with pytest.raises(ScheduleError, match="reductions only beside transfers"):
        dumps(with_steps(generate("1f1b", 2, 2)), "torch")

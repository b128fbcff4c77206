"""Choices: pure decisions from points and models, the file they come from, and what ranks agree on.

Layers: decisions in one process; the file against damage and strangers; three processes of which
each has another environment and another file. Times of real ops are in tests/bench.
"""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyparallel.comm import Communicator
from pyparallel.errors import InvalidArgument
from pyparallel.ops import choosing, rule
from pyparallel.ops.choosing import NOISE, Chooser, Policy, algorithms
from pyparallel.ops.groups import seat_of
from pyparallel.ops.host import ALGORITHMS, predict_host
from pyparallel.ops.model import OPS, Problem
from pyparallel.ops.rule import Point, Rule, load, machine_facts, save
from tests.launch import run_ranks

F32 = torch.float32


def point(us, op="matmul_all_reduce", m=16, n=1024, k=512, **changes):
    fields = {"op": op, "device": "cpu", "dtype": "fp32", "world": 2, "m": m, "n": n, "k": k}
    return Point(**{**fields, **changes}, us=us)


def chooser(*points, override="", machine="", world=2):
    return Chooser(None, Policy(tuple(points), "some points", override, machine), world)


class TestDecisions:
    def test_the_fastest_measured_is_chosen_and_the_reason_has_the_times(self):
        found = chooser(point({"plain": 40.0, "symmetric": 20.0, "chunked": 30.0})).choose(
            "matmul_all_reduce", 16, 1024, F32, "cpu"
        )
        assert (found.algorithm, found.basis) == ("symmetric", "measured")
        assert "symmetric 20 us, plain 40 us" in found.reason
        assert "M = 16, N = 1024" in found.reason
        assert [c.us for c in found.candidates] == pytest.approx([40.0, 20.0, 30.0])

    def test_a_difference_within_noise_is_no_reason_to_leave_plain(self):
        found = chooser(point({"plain": 40.0, "symmetric": 40.0 * (1 - NOISE / 2)})).choose(
            "matmul_all_reduce", 16, 1024, F32, "cpu"
        )
        assert found.algorithm == "plain"
        assert "by more than noise" in found.reason

    def test_what_is_slower_for_one_part_of_the_weight_is_not_chosen(self):
        """K may differ between ranks: the choice may not see it, and must be safe for all."""
        both = [
            point({"plain": 40.0, "symmetric": 10.0}, k=512),
            point({"plain": 40.0, "symmetric": 44.0}, k=4096),
        ]
        found = chooser(*both).choose("matmul_all_reduce", 16, 1024, F32, "cpu")
        assert found.algorithm == "plain"
        assert found.candidates[1].ratio == pytest.approx(1.1)

    def test_the_nearest_point_speaks_and_a_far_one_does_not(self):
        points = [
            point({"plain": 40.0, "symmetric": 20.0}, m=16),
            point({"plain": 400.0, "chunked": 200.0, "symmetric": 500.0}, m=512),
        ]
        made = chooser(*points)
        choose = lambda m: made.choose("matmul_all_reduce", m, 1024, F32, "cpu")  # noqa: E731
        assert [choose(m).algorithm for m in (16, 20, 400)] == ["symmetric", "symmetric", "chunked"]
        assert choose(1 << 20).basis == "model"
        other = made.choose("matmul_all_reduce", 16, 1024, torch.bfloat16, "cpu")
        assert other.basis == "model"
        assert made.choose("matmul_reduce_scatter", 16, 1024, F32, "cpu").basis == "model"
        assert choose(0).basis == "model"

    def test_overrides_in_their_order(self):
        made = chooser(override="symmetric, matmul_reduce_scatter=chunked")
        assert made.choose(OPS[0], 16, 64, F32, "cpu").basis == "environment"
        assert made.choose(OPS[0], 16, 64, F32, "cpu").algorithm == "symmetric"
        assert made.choose(OPS[1], 16, 64, F32, "cpu").algorithm == "chunked"
        asked = made.choose(OPS[1], 16, 64, F32, "cpu", algorithm="plain")
        assert (asked.algorithm, asked.basis) == ("plain", "argument")

    @pytest.mark.parametrize("op", OPS)
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_an_unknown_name_lists_those_that_would_do(self, op, device):
        for made, argument, what in (
            (chooser(), "fastest", "algorithm"),
            (chooser(override="fastest"), None, "PYPARALLEL_ALGORITHM"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                made.choose(op, 16, 64, F32, device, algorithm=argument)
            assert f"{what} is 'fastest'; {op} on {device} has" in str(caught.value)
            for name in algorithms(op, device):
                assert name in str(caught.value)

    def test_a_barred_name_says_why_and_is_never_chosen(self):
        made = chooser(point({"plain": 40.0, "symmetric": 20.0, "chunked": 30.0}))
        barred = {"symmetric": "the group spans hosts"}
        found = made.choose(OPS[2], 16, 1024, F32, "cpu", barred=barred)
        assert found.algorithm == "chunked"
        assert found.candidates[-1].us is None
        assert found.candidates[-1].basis == "the group spans hosts"
        with pytest.raises(InvalidArgument, match=r"the group spans hosts; use plain, chunked"):
            made.choose(OPS[2], 16, 1024, F32, "cpu", "symmetric", barred)
        only = made.choose(OPS[2], 16, 1024, F32, "cpu", None, {**barred, "chunked": "as well"})
        assert (only.algorithm, only.basis) == ("plain", "only")

    def test_bad_overrides_and_ops(self):
        with pytest.raises(InvalidArgument, match="want ALGORITHM or OP=ALGORITHM with OP of"):
            chooser(override="all_reduce=plain").choose(OPS[0], 1, 1, F32, "cpu")
        with pytest.raises(InvalidArgument, match="op 'gemm' is not one of"):
            chooser().choose("gemm", 1, 1, F32, "cpu")

    def test_one_rank_and_unknown_chips_stay_plain(self):
        alone = chooser(world=1).choose(OPS[0], 512, 512, F32, "cpu")
        assert (alone.algorithm, alone.basis) == ("plain", "only")
        found = chooser().choose(OPS[0], 8192, 8192, torch.bfloat16, "cuda")
        assert found.algorithm == "plain"
        assert "does not know this chip" in found.reason

    def test_on_a_known_chip_the_model_speaks(self):
        made = chooser(machine="H100", world=8)
        large = made.choose(OPS[0], 16384, 8192, torch.bfloat16, "cuda")
        assert large.basis == "model"
        assert {c.algorithm for c in large.candidates} == {"plain", "copies", "pull"}
        assert all(c.us for c in large.candidates)
        decode = made.choose(OPS[2], 8, 8192, torch.bfloat16, "cuda")
        assert decode.candidates[0].us is not None
        old = chooser(machine="A100", world=8).choose(OPS[2], 8, 8192, torch.bfloat16, "cuda")
        multimem = next(c for c in old.candidates if c.algorithm == "multimem")
        assert multimem.us is None  # no multicast on that link

    @given(
        st.integers(0, 1 << 16), st.integers(0, 1 << 14), st.sampled_from(OPS),
        st.sampled_from(["cpu", "cuda"]), st.sampled_from(["", "H100", "L20", "B200"]),
        st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    )  # fmt: skip
    @settings(max_examples=150, deadline=None)
    def test_any_call_gets_a_choice_that_is_never_slower_by_its_own_numbers(
        self, m, shared, op, device, machine, world, dtype
    ):
        found = chooser(machine=machine, world=world).choose(op, m, shared, dtype, device)
        assert found.algorithm in algorithms(op, device)
        times = {c.algorithm: c for c in found.candidates}
        if times["plain"].us is not None:
            assert times[found.algorithm].us <= times["plain"].us * (1 + NOISE)
        assert found.reason

    def test_a_choice_is_kept_and_the_memory_of_shapes_is_bounded(self):
        made = chooser()
        first = made.choose(OPS[0], 4, 64, F32, "cpu")
        assert made.choose(OPS[0], 4, 64, F32, "cpu") is first
        for m in range(1, 5000):
            made.choose(OPS[0], m, 64, F32, "cpu")
        assert len(made._memo) <= 4097


def test_the_model_of_the_host():
    for op in OPS:
        for name in ALGORITHMS:
            found = predict_host(Problem(op, 64, 1024, 512, "fp32", 2), name)
            assert found.us == pytest.approx(found.gemm_us + found.transfer_us + found.extra_us)
            alone = predict_host(Problem(op, 64, 1024, 512, "fp32", 1), name)
            assert alone.us == alone.gemm_us
    with pytest.raises(ValueError, match="'fused' is not one of plain, symmetric, chunked"):
        predict_host(Problem(OPS[0], 1, 1, 1, "fp32", 2), "fused")


class TestFile:
    POINT = point({"plain": 40.0, "symmetric": 20.0})

    def test_what_is_saved_comes_back_private_and_is_merged(self, tmp_path):
        path = tmp_path / "new" / "rule.json"
        assert load(path)[0] is None
        assert "nothing measured yet" in load(path)[1]
        save([self.POINT], path)
        save([replace(self.POINT, m=32), replace(self.POINT, us={"plain": 1.0})], path)
        found, why = load(path)
        assert found is not None
        assert sorted((p.m, p.us["plain"]) for p in found.points) == [(16, 1.0), (32, 40.0)]
        assert "2 points" in why
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert [p.name for p in path.parent.iterdir()] == ["rule.json"]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda text: text[:40], "no JSON"),
            (lambda text: "", "no JSON"),
            (lambda text: "[" * 100000, "no JSON"),
            (lambda text: "[]", "format 'list'"),
            (lambda text: text.replace('"format": 1', '"format": 9'), "format 9, want 1"),
            (lambda text: text.replace('"op": "matmul', '"op": "mm'), "op 'mm_all_reduce'"),
            (lambda text: text.replace('"m": 16', '"m": -16'), "m -16"),
            (lambda text: text.replace('"m": 16', '"m": 1e400'), "m inf"),
            (lambda text: text.replace('"plain": 40.0', '"plain": NaN'), "time of plain nan"),
            (lambda text: text.replace('"plain"', '"plane"'), "no time of plain"),
            (lambda text: text.replace('"us"', '"is"'), "want op, device"),
            (lambda text: text.replace('"points": [', '"points": 3, "x": ['), "no list of points"),
            (lambda text: text.replace('"torch": "', '"torch": "0.'), "measured with torch '0."),
            (lambda text: text.replace('"cpu": ', '"gpus": "8", "cpu": '), "measured with gpus"),
            (lambda text: text + " " * (1 << 20), "more than 1048576 bytes"),
        ],
    )
    def test_a_damaged_or_foreign_file_is_ignored_with_the_reason(self, tmp_path, change, said):
        path = save([self.POINT], tmp_path / "rule.json")
        path.write_text(change(path.read_text()))
        found, why = load(path)
        assert found is None
        assert said in why
        assert str(path) in why

    def test_only_a_plain_file_of_this_user_is_read(self, tmp_path):
        path = save([self.POINT], tmp_path / "rule.json")
        path.chmod(0o622)
        assert "others may write it (mode 622)" in load(path)[1]
        path.chmod(0o600)
        link = tmp_path / "link.json"
        link.symlink_to(path)
        assert load(link)[0] is None
        os.mkfifo(tmp_path / "pipe")
        assert "no plain file" in load(tmp_path / "pipe")[1]
        assert load(tmp_path)[0] is None
        (tmp_path / "gone.json").write_bytes(b"\xff\xfe")
        (tmp_path / "gone.json").chmod(0o600)
        assert load(tmp_path / "gone.json")[0] is None

    def test_where_it_is(self, monkeypatch, tmp_path):
        monkeypatch.delenv("PYPARALLEL_RULE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert rule.default_path() == tmp_path / "pyparallel" / "rule.json"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert rule.default_path() == Path.home() / ".cache/pyparallel/rule.json"
        monkeypatch.setenv("PYPARALLEL_RULE", "/elsewhere/x.json")
        assert rule.default_path() == Path("/elsewhere/x.json")
        monkeypatch.setenv("PYPARALLEL_RULE", "none")
        assert load(rule.default_path()) == (None, "PYPARALLEL_RULE is none")

    def test_the_policy_goes_over_the_wire_as_data(self):
        mine = Policy((self.POINT,), "why", "plain", "H100", "{}")
        assert Policy.from_bytes(mine.to_bytes()) == mine
        body = json.loads(mine.to_bytes())
        body["rule"]["points"][0]["us"]["plain"] = -1
        with pytest.raises(InvalidArgument, match="time of plain -1"):
            Policy.from_bytes(json.dumps(body).encode())


def _alike(rank, folder):
    """Each rank has a file and an environment of its own; all must do as rank 0 says."""
    times = (
        {"plain": 40.0, "symmetric": 20.0} if rank.rank == 0 else {"plain": 20.0, "symmetric": 40.0}
    )
    path = save([point(times, world=rank.world_size)], Path(folder) / f"{rank.rank}.json")
    os.environ["PYPARALLEL_RULE"] = str(path)
    os.environ["PYPARALLEL_ALGORITHM"] = "" if rank.rank == 0 else "chunked"
    found = []
    try:
        with Communicator.from_file(rank.rendezvous, rank.rank, rank.world_size) as comm:
            chooser = seat_of(comm).chooser
            assert seat_of(comm).chooser is chooser
            before = comm.sequence
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                choice = chooser.choose("matmul_all_reduce", 16, 1024, F32, "cpu")
            spent = comm.sequence - before
            chooser.choose("matmul_all_reduce", 32, 1024, F32, "cpu")
            assert comm.sequence == before + spent  # only the first choice talks
            found.append((choice.algorithm, choice.reason))
            assert spent == 2
            assert len(told) == (0 if rank.rank == 0 else 1)
            # An override that cannot be is an error on every rank, and the group goes on.
            os.environ["PYPARALLEL_ALGORITHM"] = "nosuch" if rank.rank == 0 else ""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    choosing.Chooser(comm).choose("matmul_all_reduce", 16, 1024, F32, "cpu")
                except InvalidArgument as error:
                    found.append(str(error))
            comm.barrier()
    finally:
        del os.environ["PYPARALLEL_RULE"], os.environ["PYPARALLEL_ALGORITHM"]
    return found


def test_all_ranks_choose_as_rank_0_does(tmp_path):
    found = run_ranks(_alike, 3, str(tmp_path), timeout=60)
    assert found[0] == found[1] == found[2]
    (algorithm, reason), error = found[0]
    assert algorithm == "symmetric"
    assert "symmetric 20 us, plain 40 us" in reason
    assert "PYPARALLEL_ALGORITHM is 'nosuch'" in error


def test_facts_name_what_a_measurement_depends_on():
    assert {"cpu", "cores", "pyparallel", "torch"} <= set(machine_facts())
    assert Rule.from_text(Rule((), machine_facts()).to_text()).facts == machine_facts()

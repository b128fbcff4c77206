"""Calibration: how times are taken, with calls that sleep; what it asks for; then the command."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyparallel.comm import Communicator
from pyparallel.errors import InvalidArgument
from pyparallel.ops import calibrate
from pyparallel.ops.choosing import algorithms
from pyparallel.ops.model import OPS, Problem
from pyparallel.ops.rule import load

ROOT = Path(__file__).resolve().parents[2]


def sleeping(times):
    def call(problem, group, rank, device, name):
        def run():
            if times[name] is None:
                raise InvalidArgument("not on this group")
            time.sleep(times[name])

        return run

    return call


@pytest.fixture
def alone(tmp_path):
    with Communicator.from_file(tmp_path / "meet", 0, 1) as comm:
        yield comm


def test_all_that_can_run_is_timed_in_turns(alone, monkeypatch):
    times = {"plain": 0.003, "symmetric": 0.001, "chunked": None}
    monkeypatch.setattr(calibrate, "_call", sleeping(times))
    work = [Problem(op, 8, 64, 64, "fp32", 2) for op in OPS]
    points = list(calibrate.measure(alone, alone, work, "cpu", 60.0))
    assert [p.op for p in points] == list(OPS)
    for point in points:
        assert set(point.us) == {"plain", "symmetric"}
        assert point.us["plain"] >= 3000
        assert 1000 <= point.us["symmetric"] < point.us["plain"]


def test_what_cannot_run_at_all_gets_no_point_and_time_ends(alone, monkeypatch):
    monkeypatch.setattr(calibrate, "_call", sleeping(dict.fromkeys(("plain", "symmetric"), 0.0)))
    work = [Problem(OPS[2], 8, 64, 64, "fp32", 2)] * 50
    assert list(calibrate.measure(alone, alone, work, "cpu", 0.0)) == []
    nothing = dict.fromkeys(algorithms(OPS[0], "cpu"))
    monkeypatch.setattr(calibrate, "_call", sleeping(nothing))
    assert list(calibrate.measure(alone, alone, work[:1], "cpu", 60.0)) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_measured(device, world):
    found = calibrate.problems(world, device, ["fp32", "bf16"], OPS)
    assert len(found) == len(set(found))
    assert {p.op for p in found} == set(OPS)
    assert {p.dtype for p in found} == {"fp32", "bf16"}
    assert min(p.m for p in found if p.op != OPS[2]) >= world
    assert {p.m for p in found if p.op == OPS[2]} == set(calibrate.ROWS[device])
    assert [p.flops for p in found] == sorted(p.flops for p in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "1"], "one rank has nothing to choose"),
        (["--seconds", "-1"], "want more than none"),
        (["--device", "cuda", "--world", "99"], "99 ranks need a GPU each; torch sees"),
    ],
)
def test_requests_that_make_no_sense(words, said, capsys):
    assert calibrate.main(words) == 2
    assert said in capsys.readouterr().err


def test_without_a_file_to_write_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setenv("PYPARALLEL_RULE", "none")
    assert calibrate.main([]) == 2
    assert "there is no file to write" in capsys.readouterr().err


def test_the_command_writes_a_file_that_is_then_in_use(tmp_path, monkeypatch, capfd):
    path = tmp_path / "cache" / "rule.json"
    monkeypatch.setenv("PYPARALLEL_RULE", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["--dtype", "fp32", "--op", "matmul_all_reduce", "--seconds", "1.5"]
    monkeypatch.setattr(calibrate, "_load", lambda: 0.5)
    assert calibrate.main(words) == 0, capfd.readouterr().err
    said = capfd.readouterr()
    assert f"written to {path}" in said.out
    assert "other programs take 50% of the cores" in said.err
    found, why = load(path)
    assert found is not None, why
    assert found.points
    for point in found.points:
        assert (point.op, point.world, point.dtype) == ("matmul_all_reduce", 2, "fp32")
        assert set(point.us) == set(algorithms(point.op, "cpu"))
    assert path.stat().st_mode & 0o777 == 0o600
    # A rank that fails ends the command: here it finds no memory to share.
    monkeypatch.setenv("PYPARALLEL_SHM_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(calibrate, "_load", lambda: 0.0)
    assert calibrate.main(words) == 1
    said = capfd.readouterr()
    assert "failed" in said.err
    assert "other programs" not in said.err


def test_a_busy_core_is_seen():
    ends = time.monotonic() + 20
    program = f"import time\nwhile time.monotonic() < {ends}: pass"
    loop = subprocess.Popen([sys.executable, "-c", program])
    try:
        cores = len(os.sched_getaffinity(0))
        while (share := calibrate._load(0.2)) < 0.5 / cores:
            assert time.monotonic() < ends, share
    finally:
        loop.kill()
        loop.wait()
    assert share <= 1


def test_a_folder_that_cannot_be_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYPARALLEL_RULE", str(tmp_path / "file" / "rule.json"))
    assert calibrate.main([]) == 2
    assert "no folder for" in capsys.readouterr().err

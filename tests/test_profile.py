"""`python -m pyparallel profile`: time is cut right, and told with what it rests on."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import profiler

from pyparallel import profile
from pyparallel.schedule import Costs, generate, simulate, with_transfers
from pyparallel.viz import chrome_trace


def event(name: str, category: str, start: float, length: float, **args: object) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length, "args": args}


def trace(rank: int, *events: dict) -> dict:
    return {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": list(events)}


def write(path: Path, content: dict) -> Path:
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def on_device(rank: int, slower: float = 1.0) -> dict:
    """100 us: compute 0 to 40 (one kernel inside another), tp 30 to 80, dp 70 to 90, idle."""
    return trace(
        rank,
        event("gemm", "kernel", 0, 40 * slower),
        event("norm", "kernel", 10, 5),
        event("ncclDevKernel_AllReduce", "kernel", 30, 50, **{"Process Group Description": "tp"}),
        event("ncclDevKernel_AllReduce", "kernel", 70, 20, **{"Process Group Description": "dp"}),
        event("copy", "gpu_memcpy", 99, 1),
        event("aten::mm", "cpu_op", 0, 99),  # a device's trace: the host is not counted
        {"ph": "i", "name": "[memory]", "ts": 5, "args": {"Total Allocated": 2**30 + rank}},
        {"ph": "i", "name": "[memory]", "ts": 6, "args": {"Total Allocated": 2**20}},
    )


def test_a_device(tmp_path):
    write(tmp_path / "rank1.json", on_device(1))
    write(tmp_path / "rank0.json.gz", on_device(0))
    times = profile.read_traces([tmp_path])
    assert [time.rank for time in times] == [0, 1]
    for time in times:
        assert time.span == pytest.approx(100e-6)
        assert time.compute == pytest.approx(41e-6)
        assert time.exposed == pytest.approx(50e-6)  # 40 to 90: the groups' overlap counts once
        assert time.hidden == pytest.approx(10e-6)
        assert time.idle == pytest.approx(9e-6)
        assert time.exposed_by_group == pytest.approx({"tp": 40e-6, "dp": 20e-6})
        assert time.peak_bytes == 2**30 + time.rank
    said = profile.advice(times)
    assert said[0].startswith("tp: 40 % ")
    assert "fewer tensor parallel ranks" in said[0]
    assert said[1].startswith("dp: 20 % ")
    assert "more samples per step" in said[1]
    assert len(said) == 2


def test_hosts_only(tmp_path):
    """On CPUs a collective is what the backend annotates; on its own thread it may be hidden."""
    content = trace(
        0,
        event("aten::mm", "cpu_op", 20, 40),
        event("c10d::allreduce_", "cpu_op", 60, 40),
        event("pyparallel:all_reduce, group 3 (global ranks 0-1)", "user_annotation", 50, 35),
        event("pyparallel:all_gather, group world", "user_annotation", 85, 5),
        event("pyparallel:send, group own", "user_annotation", 80, 15),
        event("gloo:send", "user_annotation", 95, 5),
        event("pyparallel::kernels::attention_forward", "cpu_op", 0, 10),
        event("mkldnn::_linear_pointwise", "cpu_op", 10, 10),
        event("my own region", "user_annotation", 0, 100),
    )
    content["distributedInfo"]["pg_config"] = [
        {"pg_name": "0", "pg_desc": "dp-tp"},
        {"pg_name": "3", "pg_desc": "tp"},
    ]
    (time,) = profile.read_traces([write(tmp_path / "t.json", content)])
    parts = (time.compute, time.exposed, time.hidden)
    assert parts == pytest.approx((60e-6, 40e-6, 10e-6))
    told = {"tp": 25e-6, "dp-tp": 5e-6, "own": 15e-6, "group not told": 5e-6}
    assert time.exposed_by_group == pytest.approx(told)
    assert time.peak_bytes is None


@pytest.mark.parametrize(
    ("group", "mend"),
    [
        ("tp", "tp_sequence_parallel"),
        ("pp", "more microbatches"),
        ("dp-sp", "more samples per step"),
        ("sp", "longer sequences"),
        ("dp-tp", "overlap it with compute"),
    ],
)
def test_each_dimension_has_its_mend(group, mend):
    time = profile.RankTime(0, 1.0, 0.7, 0.2, 0.1, 0.0, {group: 0.2}, None)
    (said,) = profile.advice([time])
    assert said.startswith(f"{group}: 20 % ")
    assert mend in said


def test_a_slow_rank_is_named(tmp_path):
    paths = [
        write(tmp_path / "0.json", on_device(0)),
        write(tmp_path / "1.json", on_device(1, slower=1.7)),
    ]
    assert any(
        text.startswith("uneven: rank 1 ") for text in profile.advice(profile.read_traces(paths))
    )


def test_a_simulated_step_has_the_simulators_bubble(tmp_path):
    simulation = simulate(with_transfers(generate("1f1b", 4, 8)), Costs())
    path = write(tmp_path / "step.json", chrome_trace(simulation))
    times = profile.read_traces([path])
    for time in times:  # (p - 1) / (m + p - 1) of the step, at equal times of all passes
        assert time.idle / time.span == pytest.approx(3 / 11)
    assert any(text.startswith("idle: 27 % ") for text in profile.advice(times))


def test_what_torch_writes_is_read(tmp_path, capsys):
    x = torch.randn(256, 256)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        for _ in range(3):
            x = (x @ x).tanh()
    run.export_chrome_trace(str(tmp_path / "rank0.json"))
    assert profile.main([str(tmp_path), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert 0 < rank["compute"] <= rank["span"]
    assert rank["exposed"] == 0
    assert rank["peak_bytes"] > 256 * 256 * 4
    assert profile.main([str(tmp_path)]) == 0
    assert "compute" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"traceEvents": []}',
        b'{"traceEvents": [{"ph": "X"}]}',
        b'{"traceEvents": [{"ph": "X", "ts": 0, "dur": 1}]}',
        b'{"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "pid": "main"}]}',
        b'{"traceEvents": [], "distributedInfo": [1]}',
        b"\x1f\x8b0",
    ],
)
def test_no_trace(tmp_path, capsys, content):
    path = tmp_path / "run.json"
    path.write_bytes(content)
    assert profile.main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_what_is_missing_or_there_twice(tmp_path, capsys):
    assert profile.main([str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert profile.main([str(tmp_path)]) == 2
    assert "no file ends in .json" in capsys.readouterr().err
    for name in ("a.json", "b.json"):
        write(tmp_path / name, on_device(0))
    assert profile.main([str(tmp_path)]) == 2
    assert "a.json" in (error := capsys.readouterr().err)
    assert "rank 0" in error


def test_a_trace_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="no trace in the Chrome format"):
        profile.read_traces([path])


@pytest.mark.parametrize(
    "content",
    [
        b'{"traceEvents":[{"ph":"X","ts":1,"dur":1e400,"pid":0}]}',
        b'{"traceEvents":[{"ph":"X","ts":1,"dur":1' + b"0" * 400 + b',"pid":0}]}',
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff\xff",
    ],
)
def test_times_and_bytes_that_no_trace_has(tmp_path, content):
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no trace in the Chrome format"):
        profile.read_traces([path])
    with pytest.raises(ValueError, match="File name too long"):
        profile.read_traces([Path("x" * 5000)])

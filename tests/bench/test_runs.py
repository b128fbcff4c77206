"""Whole runs with real ranks, small ones: verification catches what is wrong, faults end the run.

Stand-ins (wrong_providers.py) take the place of ours in all but the tests of the real thing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench import cli, providers, runner
from bench.options import Options

ROOT = Path(__file__).resolve().parents[2]
LACKS = "; ".join(filter(None, map(providers.missing, ("direct", "torch", "limit"))))
STANDINS = "tests.bench.wrong_providers"
SMALL = Options(
    quick=True, worlds=(2,), ops=("all_reduce",), sizes=(4096,), dtypes=("float32",), seconds=0.2,
    timeout=20.0,
)  # fmt: skip


def options(direct: str, **changes: object) -> Options:
    names = {"direct": f"{STANDINS}:{direct}", "torch": f"{STANDINS}:Right"}
    return replace(SMALL, replace=names, **changes)  # type: ignore[arg-type]


def children() -> set[str]:
    """Processes of this machine that carry the benchmark's worker in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"bench.worker" in words:
            parent = (path.parent / "status").read_text().split("PPid:")[1].split()[0]
            if int(parent) == os.getpid():
                found.add(path.parent.name)
    return found


def test_every_op_is_verified_and_timed_on_all_ranks() -> None:
    every = options("Right", ops=(), dtypes=("float32", "bfloat16"), worlds=(3,), seconds=2.0)
    events: list[dict[str, object]] = []
    rows, problems = runner.run("collectives", every, events.append)
    assert not problems
    assert len(rows) == 2 * (13 * 2 + 1)  # two doors; ops x dtypes, and the barrier
    for row in rows:
        assert row.verified
        assert row.peer_verified
        assert row.ours_us is not None
        assert row.peer_us is not None
        assert row.ours_us.p10 <= row.ours_us.median <= row.ours_us.p90
        assert min(row.ours_us.samples, row.peer_us.samples) >= 1
        assert row.error is not None
        assert row.error_bound is not None
        assert row.error <= row.error_bound
    assert [e["kind"] for e in events][:2] == ["world", "total"]
    assert events[-1]["kind"] == "done"


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("all_reduce", {"OneElementOff": "rank 1: error", "OwnRounding": "different bits"}),
        ("all_gather", {"DoesNothing": "rank 0: error inf", "SwapsBlocks": "at element 0"}),
        ("all_reduce", {"Raises": "RuntimeError: out of order today", "Lacks": "no such thing"}),
    ],
)
def test_wrong_contestants_are_marked_and_not_timed(op: str, wrong: dict[str, str]) -> None:
    names = [f"{STANDINS}:{standin}" for standin in wrong]
    asked = replace(SMALL, ops=(op,), replace=dict(zip(("direct", "torch"), names, strict=True)))
    rows, problems = runner.run("collectives", asked, lambda _: None)
    assert not problems
    assert len(rows) == 2
    for row, said in zip(rows, wrong.values(), strict=True):
        assert not row.verified
        assert row.ours_us is None
        assert row.speedup is None
        assert said in row.note
        assert row.peer_us is not None  # the others go on


def test_a_wrong_peer_is_a_problem_too() -> None:
    wrong = replace(options("Right"), replace={**options("Right").replace,
                                               "gloo": f"{STANDINS}:OneElementOff"})  # fmt: skip
    rows, problems = runner.run("collectives", wrong, lambda _: None)
    assert all(row.verified and row.speedup is None for row in rows)
    assert len(problems) == 1
    assert "off WRONG" in problems[0]


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_the_real_thing_and_the_limit_are_verified_and_timed() -> None:
    real = replace(SMALL, peers=("limit",), sizes=(4096, 1 << 20), ops=("all_reduce", "exchange"))
    rows, problems = runner.run("collectives", real, lambda _: None)
    assert not problems
    assert [(r.api, r.peer) for r in rows if r.op == "all_reduce" and r.bytes == 4096] == [
        ("direct", "gloo"),
        ("torch.distributed", "gloo"),
        ("direct", "limit"),
    ]
    for row in rows:
        assert row.verified, row.note
        assert row.peer_verified, row.note
        assert row.speedup is not None
        assert (row.bound_us is not None) == (row.op == "all_reduce")


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_a_busy_machine_is_run_and_marked() -> None:
    rows, problems = runner.run("collectives", replace(SMALL, busy=True), lambda _: None)
    assert not problems
    assert rows
    assert all(row.busy and row.verified for row in rows)
    assert children() == set()


def test_a_dead_rank_ends_the_run_with_its_name() -> None:
    begun = time.monotonic()
    rows, problems = runner.run("collectives", options("Dies"), lambda _: None)
    assert rows == []
    assert "rank 1 exited with 7" in problems[0]
    assert "all_reduce 4 KB fp32 x2" in problems[0]
    assert time.monotonic() - begun < 60
    assert children() == set()


def test_a_hanging_rank_ends_the_run_within_the_timeout() -> None:
    rows, problems = runner.run("collectives", options("Hangs", timeout=2.0), lambda _: None)
    assert rows == []
    assert "rank 1 has not come" in problems[0]
    assert children() == set()


def test_exit_status_and_files_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.providers, "missing", lambda name: "" if name != "limit" else "none")
    words = ["--world", "2", "--op", "all_reduce", "--size", "4K", "--dtype", "fp32", "--quick"]
    words += ["--seconds", "0.2", "--out", str(tmp_path)]
    for standin, status in (("Right", 0), ("OneElementOff", 1)):
        names = options(standin).replace
        monkeypatch.setattr(
            cli, "options_from", lambda a, n=names, f=_options_from: replace(f(a), replace=n)
        )
        assert cli.main(["collectives", *words]) == status
        data = json.loads((tmp_path / "bench.json").read_text())
        assert [r["verified"] for r in data["rows"]] == [status == 0, True]
        assert (tmp_path / "bench.html").exists()
    assert "verdict: FAILED" in capsys.readouterr().out


_options_from = cli.options_from


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nosuch"], "suite 'nosuch' is not one of collectives"),
        (["--world", "0"], "want at least one rank"),
        (["--device", "cuda", "--peer", "limit"], "moves CPU memory"),
        (["gemm", "--op", "mlp_forward", "--world", "2"], "gemm: no case for --op mlp_forward"),
        (
            ["collectives", "--op", "exchange", "--world", "1"],
            "no case for --op exchange --world 1",
        ),
        (["collectives", "--shape", "16x64x64"], "--shape has no effect: only suite gemm takes it"),
        (["gemm", "--rows", "64"], "--rows has no effect: only suite attention takes it"),
        (["gemm", "--heads", "8/2"], "--heads has no effect: only suite attention takes it"),
        (["model", "--size", "4K"], "--size has no effect: only suite collectives takes it"),
        (["model", "--op", "barrier"], "--op has no effect: only collectives, gemm, layers"),
        (["model", "--out", "elsewhere"], "--out has no effect: model writes no file"),
        (["static", "--quick"], "--quick has no effect: only collectives, gemm, layers"),
        (["model", "static", "--dtype", "bf16"], "--dtype has no effect: only collectives"),
        (["model", "--timeout", "3"], "--timeout has no effect: only collectives"),
    ],
)
def test_requests_that_make_no_sense(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--size", "4X"], ["--shape", "16x64"], ["--heads", "8/3"]])
def test_a_size_that_cannot_be_read_says_what_is_wanted(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    assert "want" in capsys.readouterr().err


def test_only_suites_with_something_to_run_are_started() -> None:
    options = cli.options_from(cli.parser().parse_args(["--op", "all_reduce", "--world", "2"]))
    assert cli._with_cases(list(cli.SUITES), options, named=False) == ["collectives"]


def test_a_peer_that_is_not_installed_is_named_with_its_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.providers, "_has_module", lambda name: name != "deepspeed")
    assert cli.main(["--peer", "deepspeed", "--world", "2"]) == 2
    assert "pip install deepspeed" in capsys.readouterr().err


def test_help_names_every_option() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], cwd=ROOT, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    wanted = {"--world", "--quick", "--out", "--peer", "--op", "--size", "--dtype", "--device"}
    assert wanted | {"--busy", "--seconds", "--timeout"} <= set(
        done.stdout.replace(",", " ").replace("[", " ").replace("]", " ").split()
    )

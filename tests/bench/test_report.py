"""What a run leaves behind: bench.json keeps its schema, the page stands alone."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from bench import report
from bench.case import Outcome, Row, Summary
from bench.report import plots
from bench.report.json import read_json, write_json
from bench.report.markdown import result
from bench.report.summary import show_summary, worst
from bench.report.table import show
from bench.targets import GROUP_GOALS, missed, target

SCHEMA = {  # the fields that other tools may rely on, with their types
    "suite": str,
    "op": str,
    "shape": list,
    "dtype": str,
    "world_size": int,
    "peer": str,
    "peer_us": (dict, type(None)),
    "ours_us": (dict, type(None)),
    "speedup": (float, type(None)),
    "error": (float, type(None)),
    "error_bound": (float, type(None)),
    "verified": bool,
}


def row(**changes: object) -> Row:
    fields: dict[str, object] = {
        "suite": "collectives",
        "op": "all_reduce",
        "api": "direct",
        "shape": [1024],
        "dtype": "float32",
        "world_size": 2,
        "peer": "gloo",
        "peer_us": Summary(300.0, 310.0, 330.0, 350.0, 400.0, 30, 4),
        "ours_us": Summary(4.0, 4.1, 5.0, 5.5, 6.0, 30, 300),
        "speedup": 66.0,
        "error": 5e-8,
        "error_bound": 6e-8,
        "verified": True,
        "peer_verified": True,
        "bytes": 4096,
        "flops": 1024,
        "bound_us": 0.7,
    }
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def outcome(*rows: Row) -> Outcome:
    return Outcome({"machine": {"cpu": "a <b>", "cores": 2}, "versions": {"torch": "2"}}, [*rows])


def test_json_has_the_schema_and_comes_back_the_same(tmp_path: Path) -> None:
    bad = row(error=math.inf, verified=False, ours_us=None, speedup=None, note="off")
    written = report.write(outcome(row(), bad), tmp_path)
    data = json.loads((tmp_path / "bench.json").read_text())
    assert set(data) == {"meta", "rows"}
    for found in data["rows"]:
        for name, kind in SCHEMA.items():
            assert isinstance(found[name], kind), name
    assert {"p10", "median", "p90"} <= set(data["rows"][0]["ours_us"])
    assert data["meta"]["ok"] is False
    again = read_json(tmp_path / "bench.json")
    assert again.rows[0] == row()
    assert again.rows[1].error == 1e308
    assert all(path.stat().st_size > 0 for path in written)
    assert sum(path.suffix == ".png" for path in written) == 2
    assert not list(tmp_path.glob("*.partial"))


def test_page_needs_nothing_beside_it_and_escapes(tmp_path: Path) -> None:
    bf16 = row(dtype="bfloat16", note="<script>alert(1)</script>", api="torch.distributed")
    report.write(outcome(row(), row(bytes=1 << 20, speedup=2.0), bf16), tmp_path)
    text = (tmp_path / "bench.html").read_text()
    assert "<script" not in text
    assert "a &lt;b&gt;" in text
    outside = r"""(?:src|href)\s*=\s*["'](?!#)|url\((?!#)|@import|<link"""
    assert not re.search(outside, text)
    assert text.count("<svg") == 4
    assert not re.search(r"<!DOCTYPE svg|<\?xml", text)


def printed(found: Outcome) -> str:
    console = Console(file=io.StringIO(), width=160)
    show(found, console)
    show_summary(found, [], console)
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_table_marks_what_is_wrong_and_what_misses_its_goal() -> None:
    wrong = row(op="reduce", verified=False, ours_us=None, speedup=None, note="ours WRONG: x")
    text = printed(outcome(row(speedup=30.0), wrong))
    assert "30.00x (goal 40)" in text
    assert "NOT VERIFIED" in text
    assert "ours WRONG: x" in text
    assert "verdict: FAILED" in text
    assert "verdict: all verified" in printed(outcome(row()))


@pytest.mark.parametrize(
    ("changes", "goal"),
    [
        ({}, 40.0),
        ({"api": "torch.distributed"}, 12.0),
        ({"bytes": 64 << 20}, 4.0),
        ({"bytes": 8 << 20}, 1.5),
        ({"dtype": "bfloat16"}, 2.0),
        ({"op": "gather"}, 2.0),
        ({"op": "gather", "api": "torch.distributed"}, 1.5),
        ({"world_size": 3, "crowded": True}, 1.0),
        ({"peer": "mpich"}, 1.0),
        ({"peer": "limit"}, None),
        ({"busy": True}, None),
    ],
)
def test_goals(changes: dict[str, object], goal: float | None) -> None:
    assert target(row(**changes)) == goal


def test_problems_fail_the_outcome_even_with_all_rows_verified() -> None:
    found = outcome(row())
    assert found.ok
    found.problems.append("world 3: rank 1 exited with -9")
    assert not found.ok
    assert "rank 1 exited with -9" in printed(found)


def test_markdown_has_every_row_and_the_least_of_each_goal(tmp_path: Path) -> None:
    gather = row(op="gather", bytes=1 << 20, speedup=1.2)
    crowd = row(op="gather", world_size=3, crowded=True, speedup=0.9, api="torch.distributed")
    found = outcome(row(), gather, row(op="gather", bytes=8 << 20, speedup=9.0), crowd)
    found.meta.update(command="python -m bench", commit="abc", date="2026-01-02T03:04:05")
    found.meta["machine"].update(virtual=True, load_at_start=0.1)
    path = write_json(found, tmp_path / "x.json")
    text = result(path)
    assert "| all_reduce 4 KB fp32 | 66.0x (goal 40x) | not measured |" in text
    assert "least 1.2x (goal 1.5x): gather 1 MB fp32" in text
    assert "| more ranks than cores, any op and size | not measured | 0.9x (goal 1x) |" in text
    assert "**0.90x** (goal 1)" in text
    assert text.count("300..400") == 4


def test_the_legend_has_the_colours_of_the_bars() -> None:
    figure = plots._overview([row(), row(api="torch.distributed", speedup=20.0)])
    axes = figure.axes[0]
    legend = axes.get_legend()
    assert legend is not None
    shown = {
        text.get_text(): handle.get_facecolor()
        for text, handle in zip(legend.get_texts(), legend.get_patches(), strict=True)
    }
    drawn = {bars.get_label(): bars.patches[0].get_facecolor() for bars in axes.containers}
    assert shown == drawn
    assert len(set(shown.values())) == 2


def test_a_run_beside_other_programs_says_so(tmp_path: Path) -> None:
    loaded = outcome(row())
    loaded.meta["machine"].update(load_at_start=3.25, usable_cores=2, simd=["avx2", "avx512f"])
    report.write(loaded, tmp_path)
    page = (tmp_path / "bench.html").read_text()
    for text in (printed(loaded), page):
        assert "load 3.2 on 2 cores at the start" in text
    assert "simd avx2 avx512f" in page
    loaded.meta["machine"]["load_at_start"] = 0.5
    assert "at the start" not in printed(loaded)


def gemm_row(**changes: object) -> Row:
    fields: dict[str, object] = {
        "suite": "gemm",
        "op": "matmul_all_reduce",
        "api": "ops",
        "shape": [16, 1024, 1024],
        "size": "16 x 1024 x 1024",
        "peer": "matmul+gloo",
        "speedup": 1.5,
        "parts": {"gemm": 20.0, "collective": 300.0, "sum": 320.0, "exposed %": 12.4},
    }
    return row(**{**fields, **changes})


def test_figures_beside_the_times_have_columns_in_every_form(tmp_path: Path) -> None:
    found = outcome(gemm_row(), gemm_row(shape=[1, 8, 8], size="1 x 8 x 8", parts={}))
    found.meta.update(command="python -m bench", commit="abc", date="2026-01-02T03:04:05")
    found.meta["machine"].update(virtual=True, load_at_start=0.1)
    names = [path.name for path in report.write(found, tmp_path)]
    assert "gemm_speedup_fp32_world2.png" in names
    assert not any("time" in name for name in names)
    markdown = result(write_json(found, tmp_path / "x.json"))
    for text in (printed(found), (tmp_path / "bench.html").read_text(), markdown):
        for part in ("gemm", "collective", "sum", "exposed %", "12 %", "320", "16 x 1024 x 1024"):
            assert part in text
    assert markdown.index("1 x 8 x 8") < markdown.index("16 x 1024 x 1024")
    assert read_json(tmp_path / "bench.json").rows[0].parts["sum"] == 320.0


def test_goals_of_the_gemm_suite() -> None:
    assert target(gemm_row()) == 1.0
    assert missed(gemm_row(speedup=0.99))
    assert not missed(gemm_row(speedup=None))
    (goal,) = (g for g in GROUP_GOALS if g.suite == "gemm")
    decode = [gemm_row(speedup=4.0), gemm_row(speedup=1.0)]
    others = [
        gemm_row(speedup=0.1, shape=[128, 1024, 1024]),
        gemm_row(speedup=0.1, op="matmul_reduce_scatter"),
        gemm_row(speedup=0.1, crowded=True),
        row(),
    ]
    assert goal.found([*decode, *others]) == pytest.approx(2.0)
    assert goal.found(others) is None


def test_the_summary_has_the_worst_rows_first_and_says_what_was_met() -> None:
    wrong = gemm_row(verified=False, speedup=None, note="rank 1: off")
    slow = gemm_row(speedup=0.7, size="4 x 4 x 4")
    rows = [row(), row(speedup=39.0), gemm_row(), slow, wrong]
    assert worst(rows)[:3] == [wrong, slow, rows[1]]
    text = printed(outcome(*rows))
    assert "NOT VERIFIED: rank 1: off" in text
    assert "4 x 4 x 4 fp32 x2, ops against matmul+gloo: 0.70x (goal 1)" in text
    assert "(decode): 1.02x together (goal 1.3)" in text
    lines = [line for line in text.splitlines() if line.startswith("\u2502")]
    (sums,) = (line.split("\u2502")[1:-1] for line in lines if line.startswith("\u2502gemm "))
    assert [cell.strip() for cell in sums] == [
        *("gemm", "matmul+gloo", "2", "3", "2", "1", "1", "1.02x", "0.70x"),
    ]
    assert "verdict: FAILED" in text
    assert "written" not in text

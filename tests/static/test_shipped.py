"""The Triton kernels that ship, compiled and read; `python -m bench static` reads all of them.

Layers: the table's own logic on rows made up here; then kernels for three architectures, a set that
has each kernel, each kind of main loop and configurations near the limits. No GPU is needed.

Each must be as bench/static/table.py wants it (no spills, shared memory, the chip's tensor
instruction, bulk copies, memory order) and no worse than the baseline, made by the same Triton.
"""

import json
from dataclasses import replace

import pytest
import triton

from bench.static import cli, order, table
from bench.static.compiling import compile_for
from bench.static.shipped import everything
from pyparallel.triton_kernels.configurations import CHIPS, Problem, candidates, turn_cycles

pytestmark = pytest.mark.timeout(600)  # many compilations on a busy machine

ENTRIES = {entry.key: entry for entry in everything()}
IN_TESTS = [
    "sm_80 push to owner bfloat16 128x128x64 w8 s3",
    "sm_80 push to owner float32 64x64x32 w8 s2",
    "sm_80 push to all bfloat16 16x64x128 w4 s3",
    "sm_80 sum to out 128x128",
    "sm_80 norm 4096 slots",
    "sm_90 gemm bfloat16 128x256x64 w8 s3 tma",
    "sm_90 push to owner bfloat16 128x256x64 w8 s3 tma",
    "sm_90 push to owner float8_e4m3fn 128x128x128 w8 s4 tma",
    "sm_90 push to owner bfloat16 128x128x64 w8 s4",
    "sm_90 push to self bfloat16 128x256x64 w8 s3 tma",
    "sm_90 push to all bfloat16 64x32x128 w4 s5 tma",
    "sm_90 grouped gemm bfloat16 128x256x64 w8 s3 tma",
    "sm_90 wait for group",
    "sm_90 sum to out 128x256",
    "sm_90 sum to all 128x256",
    "sm_90 sum by switch bf16 128x256",
    "sm_90 collect 128x256",
    "sm_90 norm 16384 results",
    "sm_100 push to owner bfloat16 128x256x64 w8 s3 tma",
    "sm_100 push to all bfloat16 128x32x128 w4 s3 tma",
]
BOUND_BY_TENSOR = "sm_90 {} bfloat16 128x256x64 w8 s3 tma"


@pytest.fixture(scope="module")
def baseline():
    return table.load_baseline()


@pytest.mark.parametrize("key", IN_TESTS)
def test_kernel(key, baseline):
    row, wrong = table.read_entry(ENTRIES[key])
    version, before = baseline
    if version == triton.__version__:
        wrong = wrong + table.compare([row], before)
    assert not wrong, "\n".join(wrong)


def test_the_baseline_has_what_is_tested_and_nothing_that_is_gone(baseline):
    _, rows = baseline
    assert set(IN_TESTS) <= set(ENTRIES) == set(rows)
    assert [key for key, row in rows.items() if row.spills] == []
    for arch, most in ((80, 163 * 1024), (90, 227 * 1024), (100, 227 * 1024)):
        assert max(row.shared_bytes for row in rows.values() if row.arch == arch) <= most


def test_the_main_loop_keeps_the_tensor_cores_busiest(baseline):
    """sm_90, bf16, 128x256x64: no unit needs more cycles than they, in every kernel on the loop."""
    _, rows = baseline
    for kernel in ("gemm", "push to owner", "push to self", "grouped gemm"):
        row = rows[BOUND_BY_TENSOR.format(kernel)]
        assert table.tensor_bound(row)
        assert row.cycles["tensor"] == 128 * 256 * 64 / 2048


def test_the_heuristics_count_as_the_compiled_loop_does(baseline):
    """The tensor cores' cycles exactly, shared memory's too where descriptors load."""
    _, rows = baseline
    compared = 0
    for arch, chip in ((90, CHIPS["H100 SXM"]), (100, CHIPS["B200"])):
        problem = Problem("gemm", (8192,), 8192, 8192, "bfloat16")
        for config in (c.config for c in candidates(problem, chip) if not c.excluded):
            tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
            name = f"bfloat16 {tile} w{config.num_warps} s{config.num_stages} tma"
            for kernel in ("gemm", "push to owner"):
                row = rows.get(f"sm_{arch} {kernel} {name}")
                if row:
                    predicted = turn_cycles(config, problem, chip)
                    assert row.cycles["tensor"] == predicted["tensor"]
                    assert row.cycles["shared"] == pytest.approx(predicted["shared"], rel=0.01)
                    compared += 1
    assert compared >= 3


def test_memory_order_of_a_push_would_be_missed():
    """Without a barrier, or at the scope of one GPU, the reader objects: the check bites."""
    entry = ENTRIES["sm_90 push to all bfloat16 64x32x128 w4 s5 tma"]
    ptx = compile_for(entry.description, entry.arch).ptx
    assert order.misfits(ptx) == []
    flags = [event for event in order.events(ptx) if event.kind in ("release", "acquire")]
    assert {event.scope for event in flags} == {"sys"}
    assert order.misfits("\n".join(line for line in ptx.splitlines() if "bar.sync" not in line))
    assert order.misfits(ptx.replace("global.sys.release", "global.cta.release"))


def test_a_table_that_got_worse_is_told(baseline, tmp_path):
    version, rows = baseline
    some = list(rows.values())[:5]
    path = tmp_path / "baseline.json"
    table.save_baseline(some, version, path)
    assert table.load_baseline(path) == (version, {row.key: row for row in some})
    assert table.compare(some, rows) == []
    worse = [replace(some[0], resident=0), *some[1:]]
    (told,) = table.compare(worse, rows)
    assert f"{some[0].key}: 0 programs at once" in told
    gone = replace(some[1], kernel="a kernel that was")
    table.save_baseline([some[0], gone], version, path)
    table.accept(some[2:], version, path)
    assert set(table.load_baseline(path)[1]) == {row.key for row in some} - {some[1].key}
    table.accept(some[:1], "another version", path)
    assert table.load_baseline(path) == ("another version", {some[0].key: some[0]})
    path.write_text(json.dumps({"triton": version, "rows": [{"kernel": "x"}]}))
    with pytest.raises(ValueError, match="a row has"):
        table.load_baseline(path)


def test_the_command(tmp_path, capsys):
    """One kernel of the table: printed, written, compared."""
    asked = ["--arch", "80", "--match", "norm 1024 slots", "--workers", "1"]
    assert cli.main([*asked, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "sm_80 norm 1024 slots" in said
    assert "not a measurement" in said
    written = json.loads((tmp_path / "static.json").read_text())
    assert [row["kernel"] for row in written["rows"]] == ["norm 1024 slots"]
    assert cli.main(["--match", "nothing has this name"]) == 2

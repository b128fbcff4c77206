"""Autotune without a GPU: its logic by a made-up timer, its file, its refusal."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from pyparallel.ops.device_path import DevicePath
from pyparallel.triton_kernels import autotune
from pyparallel.triton_kernels.configurations import (
    CHIPS,
    Problem,
    candidates,
    choose,
    key_of,
    with_programs,
)

HOPPER = CHIPS["H100 SXM"]
PROBLEM = Problem("gemm", (4096,), 4096, 4096, "bfloat16")
CONFIGS = [c.config for c in candidates(PROBLEM, HOPPER) if not c.excluded]


def timer(seconds, slow_first=()):
    """Seconds by configuration; those of slow_first are slow in their first two rounds."""
    seen = dict.fromkeys(CONFIGS, 0)

    def measure(config):
        seen[config] += 1
        if isinstance(seconds[config], Exception):
            raise seconds[config]
        return seconds[config] * (100 if config in slow_first and seen[config] <= 2 else 1)

    return measure


def test_the_least_median_wins_and_outliers_do_not_count():
    seconds = {config: 10.0 + place for place, config in enumerate(CONFIGS)}
    seconds[CONFIGS[3]] = 1.0
    result = autotune.tune(PROBLEM, HOPPER, timer(seconds, slow_first=CONFIGS[3:4]))
    assert result.best == CONFIGS[3]
    assert result.seconds == seconds
    assert result.failed == {}
    assert "1000000.0 us" in autotune.report([result])[1]


def test_a_candidate_that_fails_is_left_out_and_told():
    seconds = dict.fromkeys(CONFIGS, 2.0) | {CONFIGS[0]: ValueError("wrong by 3.0")}
    result = autotune.tune(PROBLEM, HOPPER, timer(seconds))
    assert result.best != CONFIGS[0]
    assert result.failed == {CONFIGS[0]: "ValueError: wrong by 3.0"}
    assert "wrong by 3.0" in autotune.report([result])[-1]
    with pytest.raises(RuntimeError, match="every configuration failed: .*out of memory"):
        autotune.tune(PROBLEM, HOPPER, timer(dict.fromkeys(CONFIGS, RuntimeError("out of memory"))))


def test_what_is_saved_is_loaded_and_chosen(tmp_path):
    path = tmp_path / "deep" / "configurations.json"
    assert "there is no" in autotune.load(path)[1]
    result = autotune.tune(PROBLEM, HOPPER, timer({c: float(c.block_n) for c in CONFIGS}))
    autotune.save({result.key: result.best}, path)
    autotune.save({"another problem": CONFIGS[0]}, path)
    measured, why_empty = autotune.load(path)
    assert why_empty == ""
    assert measured == {result.key: result.best, "another problem": CONFIGS[0]}
    assert path.stat().st_mode & 0o777 == 0o600
    found = choose(PROBLEM, HOPPER, measured)
    assert dataclasses.replace(found.config, programs=1) == result.best
    assert found.reason == "measured on H100 SXM"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "another format"),
        ('{"format": 0, "best": {}}', "another format"),
        ('{"format": 1}', "damaged"),
        ('{"format": 1, "best": {"x": {"block_m": 64}}}', "is no configuration"),
    ],
)
def test_a_foreign_or_damaged_file_is_told_and_not_used(tmp_path, text, said):
    path = tmp_path / "configurations.json"
    path.write_text(text)
    found, why = autotune.load(path)
    assert found == {}
    assert said in why


def test_a_row_of_wrong_types_is_damaged(tmp_path):
    path = tmp_path / "configurations.json"
    row = dataclasses.asdict(CONFIGS[0]) | {"block_m": "64"}
    path.write_text(json.dumps({"format": 1, "best": {"x": row}}))
    assert "is no configuration" in autotune.load(path)[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_the_command_says_so():
    command = [sys.executable, "-m", "pyparallel.triton_kernels.autotune"]
    done = subprocess.run(
        [*command, "--m", "16", "--n", "64", "--k", "64"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert "torch sees none here" in done.stderr


def test_problems_are_cut_as_the_ops_cut_them():
    cut = autotune.problem_of("gemm_reduce_scatter", 10, 64, 32, "bfloat16", 4)
    assert cut == Problem("gemm_reduce_scatter", (3, 3, 2, 2), 64, 32, "bfloat16")
    assert autotune.problem_of("gemm_all_reduce", 10, 64, 32, "bfloat16", 4).rows == (10,)
    with pytest.raises(ValueError, match="m = 0 rows of 4 ranks"):
        autotune.problem_of("gemm", 0, 64, 32, "bfloat16", 4)


def test_the_ops_take_what_was_measured():
    problem = Problem("gemm_all_reduce", (96,), 192, 64, "float32", True)
    chip = CHIPS["interpreter"]
    predicted = choose(problem, chip).config
    fit = [c.config for c in candidates(problem, chip) if not c.excluded]
    slower = next(c for c in fit if dataclasses.replace(predicted, programs=c.programs) != c)
    table = json.dumps(autotune.to_rows({key_of(problem, chip): slower}))
    asked = (problem.op, problem.rows, problem.n, problem.k, torch.float32, True)
    cpu = torch.device("cpu")
    assert DevicePath(None, cpu, "").config(*asked) == predicted
    assert DevicePath(None, cpu, table).config(*asked) == with_programs(slower, problem, chip)

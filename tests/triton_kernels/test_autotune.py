"""Autotune without a GPU: its logic by a made-up timer, its file, its refusal."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from pyparallel.triton_kernels import autotune
from pyparallel.triton_kernels.configurations import CHIPS, Problem, candidates, choose

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

"""The heuristics: pure functions, so all of it runs here, on any machine.

That each configuration compiles without spilling, fits its chip's shared memory and keeps the
tensor cores busy is shown on compiled code: tests/static/test_shipped.py.
"""

import dataclasses
import itertools

import pytest

from pyparallel.triton_kernels.configurations import (
    CHIPS,
    ONE_SHOT,
    Chip,
    Problem,
    candidates,
    choose,
    key_of,
    predict,
    turn_cycles,
)

GPUS = [chip for chip in CHIPS.values() if chip.arch]
SHAPES = [(m, n, k) for m in (0, 1, 16, 129, 4096) for n, k in ((1, 1), (4096, 14336), (53248, 8))]
HOPPER = CHIPS["H100 SXM"]


def problem(m=4096, n=4096, k=4096, dtype="bfloat16", op="gemm", **more):
    return Problem(op, (m,), n, k, dtype, **more)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_problem_gets_a_configuration(chip):
    """All shapes, dtypes and ops; programs enough for the tiles, and no more than run at once."""
    for (m, n, k), dtype, descriptors, op in itertools.product(
        SHAPES,
        ("float32", "bfloat16", "float16", "float8_e4m3fn"),
        (True, False),
        ("gemm", ONE_SHOT),
    ):
        if dtype == "float8_e4m3fn" and chip.arch in (80, 89):
            continue
        asked = problem(m, n, k, dtype, op, descriptors=descriptors)
        config = choose(asked, chip).config
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        assert 1 <= config.programs <= max(tiles, 1)
        assert config.programs <= 4 * chip.multiprocessors
        assert not config.descriptors or (descriptors and chip.arch >= 90)
        assert choose(asked, chip) == choose(asked, chip)


def test_every_candidate_has_cycles_or_a_reason():
    seen = set()
    for chip in GPUS:
        for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
            for candidate in candidates(problem(dtype=dtype), chip):
                assert bool(candidate.excluded) != (0 < candidate.cycles < float("inf"))
                seen.add(candidate.excluded.split(" ")[0])
    assert len(seen) > 4  # the reasons differ


def test_choices_that_are_known_to_be_right():
    """Large products take the largest tiles, a few rows take narrow ones that fill the chip."""
    large = choose(problem(8192, 8192, 8192), HOPPER).config
    assert (large.block_m, large.block_n, large.block_k) == (128, 256, 64)
    assert large.programs == 132
    few = choose(problem(m=4), HOPPER).config
    assert few.block_n <= 64
    assert few.programs >= 64
    # Parts that no tile may cross: 8 of 64 rows are worth no tile of 128 rows.
    shards = dataclasses.replace(problem(), rows=(64,) * 8)
    assert choose(shards, HOPPER).config.block_m == 64


def test_an_unknown_chip_falls_back_with_a_reason():
    found = choose(problem(), Chip("new", 130, 7, 64 * 1024))
    assert "sm_130 is unknown, so plain pointers" in found.reason
    assert not found.config.descriptors
    assert found.config.programs <= 4 * 7


def test_what_fits_nowhere_is_refused_with_every_reason():
    with pytest.raises(ValueError, match="sm_80 multiplies no float8_e4m3fn"):
        choose(problem(dtype="float8_e4m3fn"), CHIPS["A100"])
    with pytest.raises(ValueError, match=r"H0 \(sm_90\).*bytes of shared memory, 1000 are there"):
        choose(problem(), Chip("H0", 90, 100, 1000))
    with pytest.raises(ValueError, match="dtype int8; the kernels multiply float32"):
        choose(problem(dtype="int8"), HOPPER)
    with pytest.raises(ValueError, match="sizes are not negative"):
        choose(problem(n=-1), HOPPER)


def test_a_measured_configuration_is_taken_and_a_stale_one_is_not():
    asked = problem()
    other = [c.config for c in candidates(asked, HOPPER) if not c.excluded][2]
    found = choose(asked, HOPPER, {key_of(asked, HOPPER): other})
    assert dataclasses.replace(found.config, programs=other.programs) == other
    assert found.reason == "measured on H100 SXM"
    stale = dataclasses.replace(other, block_k=48)
    found = choose(asked, HOPPER, {key_of(asked, HOPPER): stale})
    assert "is no candidate any more" in found.reason
    assert found.config == choose(asked, HOPPER).config


def test_keys_tell_apart_what_was_measured_apart():
    keys = {
        key_of(one, chip)
        for one in (problem(), problem(k=8), problem(dtype="float16"), problem(op="other"))
        for chip in (HOPPER, CHIPS["H20"])
    }
    assert len(keys) == 8
    assert key_of(problem(m=65), HOPPER) == key_of(problem(m=128), HOPPER)


def test_the_prediction_counts_waves_and_units():
    config = candidates(problem(), HOPPER)[0].config
    one_wave, two_waves = (
        predict(config, problem(m=128 * tiles, n=256), HOPPER) for tiles in (132, 133)
    )
    assert two_waves == pytest.approx(2 * one_wave)
    cycles = turn_cycles(config, problem(), HOPPER)
    assert cycles["tensor"] == 128 * 256 * 64 / 2048
    assert cycles["shared"] == ((128 + 256) + (128 + 2 * 256)) * 64 * 2 / 128

"""Which blocks attention is cut into: pure functions, for all problems and chips."""

import re

import pytest

from bench.static import table
from bench.static.shipped import CHIP_OF
from pyparallel.triton_kernels.configurations import CHIPS
from pyparallel.triton_kernels.flash_attention_configurations import (
    OPS,
    AttentionProblem,
    attention_candidates,
    choose_for_chip,
    form_for_chip,
)
from pyparallel.triton_kernels.flash_attention_tiles import split_head


def test_every_problem_has_a_configuration():
    """On every chip; blocks with a mask divide those without; no descriptors on sm_80, or where an
    operand fits none."""
    for chip in CHIPS.values():
        for op in OPS:
            for dtype in ("float32", "float16", "bfloat16"):
                for size in range(1, 257, 7):
                    for scored in (False, True):
                        problem = AttentionProblem(op, size, 64, dtype, size % 2 == 0, scored)
                        config = choose_for_chip(problem, chip).config
                        met = config.block_q if op in OPS[1::2] else config.block_k
                        assert met % config.edge == 0
                        assert not config.descriptors or (chip.arch >= 90 and size % 2 == 0)


def test_what_does_not_fit_is_told():
    chip = CHIPS["H100 SXM"]
    with pytest.raises(ValueError, match="heads of 272, up to 256 fit"):
        choose_for_chip(AttentionProblem("forward", 264, 64, "bfloat16"), chip)
    with pytest.raises(ValueError, match="op is one of forward, dkdv, dq, fused backward"):
        attention_candidates(AttentionProblem("backward", 64, 64, "bfloat16"), chip)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        attention_candidates(AttentionProblem("dq", 64, 64, "float64"), chip)
    chosen = choose_for_chip(AttentionProblem("forward", 128, 128, "bfloat16"), chip)
    assert (chosen.config.block_q, chosen.config.block_k, chosen.config.num_warps) == (128, 128, 8)
    assert "sm_90" in chosen.reason


def test_the_form_of_the_backward_is_fused_where_the_table_says_it_is_clearly_faster():
    """Cycles of the busiest unit for one score: dkdv and dq against fused, in the baseline."""
    _, rows = table.load_baseline()
    cycles: dict[tuple, dict[str, float]] = {}
    for row in rows.values():
        pattern = r"attention (dkdv|dq|fused backward) (\w+) d(\d+) (\d+)x(\d+) .*causal"
        if found := re.fullmatch(pattern, row.kernel):
            op, dtype, size, block_q, block_k = found.groups()
            per_score = max(row.cycles.values()) / (int(block_q) * int(block_k))
            cycles.setdefault((row.arch, dtype, int(size)), {})[op] = per_score
    assert len(cycles) >= 30
    for (arch, dtype, size), one in cycles.items():
        problem = AttentionProblem("fused backward", size, size, dtype)
        split = one["dkdv"] + one["dq"]
        form = "fused" if one["fused backward"] < 0.95 * split else "split"
        assert form_for_chip(problem, CHIP_OF[arch]) == form, (arch, dtype, size, one)


def test_a_split_head_does_not_pay_for_the_next_power_of_two():
    """sm_90, heads of 80 and 96 against 128: a turn of each loop needs fewer cycles."""
    _, rows = table.load_baseline()
    compared = 0
    for key, row in rows.items():
        if row.arch == 90 and " d80 " in key and key.endswith("causal") and "fused" not in key:
            whole = rows[key.replace(" d80 ", " d128 ")]
            assert row.cycles["tensor"] <= 0.65 * whole.cycles["tensor"]
            assert max(row.cycles.values()) < 0.8 * max(whole.cycles.values())
            compared += 1
    assert compared == 3


def test_heads_are_split_where_that_pads_less():
    assert [split_head(size) for size in (8, 16, 40, 59, 64, 80, 96, 112, 136, 192, 256)] == [
        (16, 0), (16, 0), (32, 16), (64, 0), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64),
        (128, 64), (256, 0),
    ]  # fmt: skip
    for size in range(1, 257):
        main, tail = split_head(size)
        assert size <= main + tail <= max(16, 1 << (size - 1).bit_length())

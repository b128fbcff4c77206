"""The compiled attention kernels, read: what no run in the interpreter can show.

Layers: compiled for sm_80, 90 and 100 and disassembled (here; no GPU is needed). Registers, spills,
the instructions of the main loops, and how fast they could be at most; no GPU has run them.
"""

import pytest

from bench.static.attention_kernels import SCORED, describe, tile_of
from bench.static.compiling import compile_for
from bench.static.reading import faults, main_loop, read
from bench.static.shipped import CHIP_OF
from bench.static.units import TENSOR, shares
from pyparallel.triton_kernels.flash_attention_configurations import (
    AttentionProblem,
    choose_for_chip,
)

pytestmark = pytest.mark.timeout(600)  # a busy machine's first compilation

INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
CAUSAL = ("causal",)
# architecture, op, head, features
CASES = [
    (80, "forward", 128, CAUSAL),
    (80, "dkdv", 128, CAUSAL),
    (90, "forward", 128, CAUSAL),
    (90, "forward", 128, ("causal", "state")),
    (90, "forward", 80, CAUSAL),  # two parts of a head
    (90, "dq", 96, CAUSAL),
    (90, "forward", 256, CAUSAL),
    (90, "forward", 128, SCORED),
    (90, "dkdv", 128, CAUSAL),
    (90, "dq", 128, CAUSAL),
    (90, "fused backward", 128, CAUSAL),
    (100, "forward", 128, CAUSAL),
    (100, "dkdv", 128, CAUSAL),
]


def _compiled(arch, op, size, features):
    scored = bool({"softcap", "alibi", "dropout"} & set(features))
    problem = AttentionProblem(op, size, size, "bfloat16", scored=scored)
    config = choose_for_chip(problem, CHIP_OF[arch]).config
    description = describe(op, config, "bfloat16", size, features)
    return compile_for(description, arch), config, tile_of(op, config, "bfloat16", size)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"sm_{case[0]}-{case[1]}-{case[2]}")
def test_compiled(case):
    """No spill, fits, tensor cores in every loop that multiplies, exp2, 64-bit offsets."""
    compiled, config, tile = _compiled(*case)
    assert faults(read(compiled, tile)) == []
    loops = compiled.listing.innermost(TENSOR)
    assert len(loops) >= 2  # with a mask, and without
    for loop in loops:
        found = set(loop.names()) & set(TENSOR)
        assert INSTRUCTION[case[0]] in found
        if case[1] != "fused backward":  # whose tile of dq has fewer rows than a warpgroup
            assert len(found) == 1
        assert "MUFU" in loop.names()
    assert "ex2.approx" in compiled.ptx
    assert "mul.lo.s64" in compiled.ptx or "mad.lo.s64" in compiled.ptx
    loaded = [set(loop.names()) & {"UTMALDG", "LDGSTS"} for loop in loops]
    assert any(("UTMALDG" if config.descriptors else "LDGSTS") in names for names in loaded)


def test_how_fast_the_forward_could_be():
    """sm_90, bf16, d 128, 128x128 with 8 warps: half the tensor peak if units work in turn, nine
    tenths if they work at once."""
    compiled, config, tile = _compiled(90, "forward", 128, CAUSAL)
    assert (config.block_q, config.block_k, config.num_warps) == (128, 128, 8)
    loop = main_loop(compiled, tile)
    assert loop.multiply_adds == 2 * 128 * 128 * 128
    serial, overlapped = shares(loop.cycles)
    assert serial >= 0.5
    assert overlapped >= 0.9


def test_the_backward_has_64_queries_and_128_keys():
    _, config, _ = _compiled(90, "dkdv", 128, CAUSAL)
    assert (config.block_q, config.block_k, config.num_warps) == (64, 128, 8)


def test_shares_are_counted_by_hand():
    cycles = {"tensor": 60.0, "fma": 20.0, "mufu": 20.0, "shared": 80.0, "issue": 10.0}
    assert shares(cycles) == (0.6, 0.75)
    assert shares({}) == (0.0, 0.0)

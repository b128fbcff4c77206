"""The compiled kernels on the main loop, read: what no run in the interpreter can show.

Layers: compiled for sm_80, 90 and 100 and disassembled (here; CI runs it, no GPU is needed).
Registers, spills, instructions of the main loop, memory order. `python -m bench static` reads more
configurations.
"""

import re

import pytest

from bench.static import order
from bench.static.compiling import Description, compile_for
from bench.static.gemm_kernels import (
    DTYPES,
    describe_all_gather,
    describe_gemm,
    describe_open_call,
    describe_shelf,
)
from bench.static.reading import faults, main_loop, read
from bench.static.units import ASYNC_LOADS, BULK_LOADS, TENSOR, Tile
from pyparallel.triton_kernels.gemm import TileConfig

pytestmark = pytest.mark.timeout(300)  # a busy machine's first compilation

AMPERE = TileConfig(128, 128, 64, num_warps=8, num_stages=3)
LANES = TileConfig(64, 64, 32, num_warps=8, num_stages=3)
HOPPER = TileConfig(128, 256, 64, num_warps=8, num_stages=3, descriptors=True)
FP8 = TileConfig(128, 128, 128, num_warps=8, num_stages=4, descriptors=True)

INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}

# architecture, tiles, dtype, pulling programs, weights, scaled
GATHERS = [
    (80, AMPERE, "bfloat16", 0, 1, False),
    (80, AMPERE, "float16", 16, 2, False),
    (80, LANES, "float32", 0, 1, False),
    (90, HOPPER, "bfloat16", 0, 1, False),
    (90, HOPPER, "bfloat16", 16, 2, False),
    (90, FP8, "float8_e4m3fn", 16, 1, True),
    (100, HOPPER, "bfloat16", 0, 1, False),
    (100, HOPPER, "float16", 16, 2, False),
]
GEMMS = [
    (80, AMPERE, "float16", "gelu", False, True),
    (90, HOPPER, "bfloat16", "gelu", False, True),
    (90, FP8, "float8_e4m3fn", "silu", True, True),
    (100, HOPPER, "bfloat16", "silu", False, True),
]


def _tile(config, dtype):
    item = DTYPES[dtype][1]
    return Tile(config.block_m, config.block_n, config.block_k, item, config.num_warps)


def _check_main_loop(compiled, config, dtype):
    """No spills, fits, tensor cores and asynchronous loads in the loop that multiplies."""
    row = read(compiled, _tile(config, dtype))
    assert faults(row) == []
    if dtype == "float32":
        assert row.tensor_instructions == ()  # exact products, lane by lane
        return
    wanted = {"QGMMA"} if dtype.startswith("float8") else {INSTRUCTION[compiled.arch]}
    assert set(row.tensor_instructions) == wanted
    loads = BULK_LOADS if config.descriptors else ASYNC_LOADS
    loops = compiled.listing.innermost(TENSOR)
    assert any(set(loads) & set(loop.names()) for loop in loops)
    if (compiled.arch, config) == (90, HOPPER):
        assert main_loop(compiled, _tile(config, dtype)).binding == "tensor"


def _can_pass(ptx, start, end, between):
    """Whether some way through the code leads from a line with `start` to one with `end` and past
    none with `between`."""
    lines = [re.sub(r"\s*//.*", "", line).strip() for line in ptx.splitlines()]
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
    waiting = [number + 1 for number, line in enumerate(lines) if start in line]
    seen = set()
    while waiting:
        number = waiting.pop()
        if number in seen or number >= len(lines) or between in lines[number]:
            continue
        seen.add(number)
        line = lines[number]
        if end in line:
            return True
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)
        waiting += [labels[target[1]]] if target else []
        if not (target and not line.startswith("@")) and not line.startswith("ret"):
            waiting.append(number + 1)
    return False


def _order_faults(ptx):
    """Flags that no peer would see, or that order nothing."""
    flags = [event for event in order.events(ptx) if event.kind in ("release", "acquire")]
    return order.misfits(ptx) + [event.text for event in flags if event.scope != "sys"]


@pytest.mark.parametrize("case", GATHERS, ids=lambda case: f"sm_{case[0]}-{case[2]}-{case[3]}")
def test_all_gather_gemm(case):
    arch, config, dtype, pullers, weights, scaled = case
    compiled = compile_for(describe_all_gather(config, dtype, pullers, weights, scaled), arch)
    _check_main_loop(compiled, config, dtype)
    assert _order_faults(compiled.ptx) == []
    flags = order.flags(compiled.ptx)
    assert flags["acquire"] >= (2 if pullers else 1)
    assert flags["release"] >= (2 if pullers else 0)
    if pullers:  # wait for the source, fetch its rows, and only then tell
        assert order.empty_releases(compiled.ptx) == []
    # What other programs stored is ordered before reads by descriptor: acquire, fence, bulk load.
    assert ("fence.proxy.async.global" in compiled.ptx) == config.descriptors
    if config.descriptors:
        unfenced = compiled.ptx.replace("fence.proxy.async.global", "")
        assert not _can_pass(compiled.ptx, "acquire", "cp.async.bulk.tensor", "fence.proxy.async.g")
        assert _can_pass(unfenced, "acquire", "cp.async.bulk.tensor", "fence.proxy.async.g")


@pytest.mark.parametrize("case", GEMMS, ids=lambda case: f"sm_{case[0]}-{case[2]}-{case[3]}")
def test_gemm(case):
    arch, config, dtype, *epilogue = case
    _check_main_loop(compile_for(describe_gemm(config, dtype, *epilogue), arch), config, dtype)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_opening_of_a_call(arch):
    compiled = compile_for(describe_open_call(), arch)
    assert faults(read(compiled, None)) == []
    assert _order_faults(compiled.ptx) == []
    assert order.flags(compiled.ptx)["release"] >= 1
    assert order.flags(compiled.ptx)["acquire"] >= 1


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_flags_of_a_shelf(arch):
    """Rows copied by an earlier launch are told with release; a wait ends with acquire."""
    told, awaited = (compile_for(description, arch) for description in describe_shelf())
    for compiled in (told, awaited):
        assert faults(read(compiled, None)) == []
        assert _order_faults(compiled.ptx) == []
    assert order.flags(told.ptx) == {"release": 1, "acquire": 0}
    assert order.flags(awaited.ptx)["acquire"] >= 1


def test_signals():
    """Stores, barrier, release; acquire, barrier, loads: and that each of them would be missed."""
    from tests.triton_kernels import signal_kernels

    numbers = dict.fromkeys(("me", "world", "call", "signature"), "i32")
    put = Description(
        "put", signal_kernels.put, {"table": "*i64:16", "values": "*i64:16", **numbers}, {}
    )
    pages = dict.fromkeys(("table", "out", "status"), "*i64:16")
    take = Description("take", signal_kernels.take, {**pages, **numbers, "timeout_us": "i32"}, {})
    for description in (put, take):
        ptx = compile_for(description, 90).ptx
        assert _order_faults(ptx) == []
        assert _order_faults(re.sub(r"bar\.sync\s+0;", "", ptx))
        assert _order_faults(ptx.replace("global.sys.", "global.gpu."))
    assert order.flags(compile_for(put, 90).ptx) == {"release": 2, "acquire": 0}


def test_a_wait_decides_alike_in_all_threads():
    """Trap of `consume`: the clock and the abort word differ between threads, so no branch may hang
    on what was computed from them: only on what an atomic handed round."""
    from tests.triton_kernels import signal_kernels

    numbers = dict.fromkeys(("me", "world", "call", "signature", "timeout_us"), "i32")
    pages = dict.fromkeys(("table", "out", "status"), "*i64:16")
    ptx = compile_for(Description("take", signal_kernels.take, {**pages, **numbers}, {}), 90).ptx
    tainted = set()
    for line in map(str.strip, ptx.splitlines()):
        if found := re.match(r"mov\.u64 (%\w+), %globaltimer|ld\.volatile\S* \{ (%\w+)", line):
            tainted.add(found[1] or found[2])
        elif re.match(r"(@!?%p\d+\s+)?(st|atom|red|ld)\.", line):
            continue  # goes through memory: what comes back was handed round
        elif found := re.match(r"@!?(%p\d+)\s+bra", line):
            assert found[1] not in tainted, line
        elif found := re.match(r"[a-z][\w.:]*\s+(%\w+)(?:\|%\w+)?,\s*(.*);", line):
            sources = set(re.findall(r"%\w+", found[2]))
            (tainted.add if sources & tainted else tainted.discard)(found[1])
    assert len(tainted) > 2

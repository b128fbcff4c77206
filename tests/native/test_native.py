"""C++ tests of csrc: plain, and under the sanitizers.

Layers: (1) arithmetic in one thread, bit for bit against a scalar reference; (2) the same under
AddressSanitizer and UndefinedBehaviorSanitizer; (3) what the compiler made, read with nm; (4) the
communicator with threads as ranks, under ThreadSanitizer too: results alone prove nothing about
memory order.
"""

import platform
import re
import subprocess

import pytest

from tests.native import build

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler (g++ or CXX)"),
    pytest.mark.timeout(1500),  # the first run compiles, maybe on a busy machine
]

REDUCE = ["base/error.cpp", "base/env.cpp", "shm/reduce*.cpp"]
SHM = ["base/*.cpp", "shm/*.cpp", "symmetric/registry.cpp"]


@pytest.mark.parametrize("mode", ["plain", "address"])
def test_reduce(mode: str) -> None:
    text = build.run(build.build("test_reduce", REDUCE, mode))
    done = re.search(r"reduce: (\d+) checks, 0 failed", text)
    assert done, text
    assert int(done[1]) > 500_000, "a test that checks little passes easily"


def test_forced_instruction_set() -> None:
    """PYPARALLEL_SIMD takes what this CPU has and refuses, with a list, what it lacks."""
    program = build.build("test_reduce", REDUCE, "plain")
    text = build.run(program, PYPARALLEL_SIMD="portable")
    assert "variant avx" not in text
    with pytest.raises(AssertionError, match=r"PYPARALLEL_SIMD=mmx: this CPU runs .*portable"):
        build.run(program, PYPARALLEL_SIMD="mmx")


def test_fused_multiply_add_is_seen() -> None:
    """The control of the bit comparison: where contraction is allowed the last bits differ."""
    if "variant avx512" not in build.run(build.build("test_reduce", REDUCE, "plain")):
        pytest.skip("needs a CPU with AVX-512")
    program = build.build("test_reduce", REDUCE, "plain", ["-ffp-contract=fast"])
    with pytest.raises(AssertionError, match="FAILED: avx512 premul_sum float"):
        build.run(program)


def test_instruction_sets_stay_in_their_files() -> None:
    """An inline function compiled for AVX-512 could be the copy that the linker keeps for all."""
    for name in ("portable", "avx2", "avx512"):
        source = build.CSRC / "shm" / f"reduce_{name}.cpp"
        # -O0 inlines nothing, so that each function used shows as a symbol.
        made = build.object_of(source, ["-O0"])
        symbols = subprocess.run(["nm", "-C", made], capture_output=True, text=True, check=True)
        shared = [s for s in symbols.stdout.splitlines() if re.match(r"^\S* +[VWuTD] ", s)]
        expected = [f"pyparallel::shm::kernels_{name}"]
        if name != "portable" and platform.machine() != "x86_64":
            expected = []
        assert [s.split(" ", 2)[2] for s in shared] == expected


@pytest.mark.parametrize("spin_us", ["", "0"], ids=["spinning", "sleeping"])
@pytest.mark.parametrize("mode", ["plain", "address", "thread"])
def test_communicator(mode: str, spin_us: str) -> None:
    """With no time to spin every wait goes through the kernel."""
    program = build.build("test_communicator", SHM, mode)
    text = build.run(program, timeout=320, PYPARALLEL_SPIN_US=spin_us)
    done = re.search(r"communicator: (\d+) checks, 0 failed", text)
    assert done, text
    assert int(done[1]) > 1500, "a test that checks little passes easily"


def test_thread_sanitizer_sees_a_missing_release() -> None:
    """The control: one release store made relaxed is named, though every result is right."""
    program = build.build("test_communicator", SHM, "thread", ["-DPYPARALLEL_TEST_WEAK_FLAG"])
    with pytest.raises(AssertionError, match="data race") as failure:
        build.run(program, timeout=320)
    assert "pyparallel::shm::" in str(failure.value)
    assert "checks, " not in str(failure.value), "it is to stop at the first race"

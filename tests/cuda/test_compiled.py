"""The compiled kernels, read instead of run: resources, scopes, and the order around every flag.

Layers: the readers on small made-up listings (they must find what they are for); then the kernels
for three architectures, where nvcc is found. No GPU is needed.
"""

import re
import shutil
from pathlib import Path

import pytest

from bench.static import cuda_kernels as static
from tests.cuda import programs

# The first test of a run compiles: minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

ROUNDS = {
    "barrier": 1,
    "all_reduce_one_shot": 1,
    "all_reduce_two_shot": 2,
    "all_reduce_multimem": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
}
REDUCING = ("all_reduce_one_shot", "all_reduce_two_shot", "all_reduce_multimem", "reduce_scatter")
EXPECTED = {
    *("barrier", "put_signal", "wait_signal", "all_gather<f32>", "all_gather<f16>"),
    *(f"{name}<{element}>" for name in REDUCING for element in ("f32", "f16", "bf16")),
}
DATA_STORE = re.compile(r"st\.(global\.)?(v[24]\.)?[bfu]\d+|multimem\.st")
DATA_LOAD = re.compile(r"ld\.(global\.)?v4\.|multimem\.ld")
FLAG_STORE = "st.release.sys.u64"
FLAG_LOAD = "ld.acquire.sys.u64"


def op_of(line: str) -> str:
    """The instruction without its predicate: `st.release.sys.u64 [%rd1], %rd2;`"""
    return re.sub(r"^@\S+\s+", "", line)


def scope_misfits(code: list[str]) -> list[str]:
    """Ordered accesses that are not at system scope, but for the ticket of the own launch."""
    ordered = [op_of(line) for line in code if re.search(r"\.(release|acquire|acq_rel)\.", line)]
    return [
        line
        for line in ordered
        if ".sys." not in line and not line.startswith("atom.acq_rel.gpu.add.u32")
    ]


def order_misfits(code: list[str]) -> list[str]:
    """Flags that are not separated by a block barrier from the data they speak of.

    Before a flag is stored: data stores, barrier, flag. After one is loaded: barrier, data loads.
    The record of a failure (st.release.sys.u32 behind a claim) is outside: it ends the wait.
    """
    misfits = []
    unfenced_store = unfenced_flag = None
    recording = False  # between the claim of the status page and its release
    for line in map(op_of, code):
        if line.startswith("bar"):
            unfenced_store = unfenced_flag = None
        elif line.startswith("atom.relaxed.gpu.cas"):
            recording = True
        elif line.startswith("st.release.sys.u32"):
            recording = False
        elif line.startswith(FLAG_STORE) and unfenced_store:
            misfits.append(f"{line} after {unfenced_store} without a barrier")
        elif line.startswith(FLAG_LOAD):
            unfenced_flag = line
        elif DATA_LOAD.match(line) and unfenced_flag:
            misfits.append(f"{line} after {unfenced_flag} without a barrier")
        elif DATA_STORE.match(line) and not recording:
            unfenced_store = line
    return misfits


GOOD = [
    *("st.global.v4.u32 [%rd1], {};", "bar.sync 0;", "@%p1 st.release.sys.u64 [%rd2], %rd3;"),
    *("ld.acquire.sys.u64 %rd4, [%rd5];", "bar.red.or.pred %p2, 0, %p1;"),
    "ld.global.v4.u32 {}, [%rd6];",
]


def test_the_readers_find_what_they_are_for():
    assert order_misfits(GOOD) == []
    assert scope_misfits(GOOD) == []
    without = [line for line in GOOD if not line.startswith("bar.sync")]
    assert "st.release.sys.u64" in order_misfits(without)[0]
    without = [line for line in GOOD if not line.startswith("bar.red")]
    assert "after ld.acquire.sys.u64" in order_misfits(without)[0]
    narrow = [line.replace(".sys.", ".gpu.") for line in GOOD]
    assert len(scope_misfits(narrow)) == 2
    assert static.loads_at_once(["ld.v4.u32 a;", "ld.global.v4.f32 b;", "st.v4.u32 c;"]) == 2
    with pytest.raises(ValueError, match="no kernel"):
        static.readable("_Z4other")


@pytest.fixture(scope="module", params=static.ARCHITECTURES)
def compiled(request):
    nvcc = static.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed: compiled kernels cannot be read")
    cubin, ptx, report = programs.compiled_kernels(nvcc, request.param)
    return request.param, cubin, static.kernels_of(ptx.read_text()), static.read_report(report)


def test_every_kernel_is_there_and_none_spills(compiled):
    _, _, kernels, usages = compiled
    assert {usage.kernel for usage in usages} == set(kernels) == EXPECTED
    for usage in usages:
        assert (usage.stack_bytes, usage.spill_bytes) == (0, 0), usage
        assert usage.resident_blocks >= 1, usage


def _rounds(arch: str, kernel: str) -> int:
    if arch == "80" and kernel.startswith("all_reduce_multimem"):
        return 0  # needs sm_90: compiled to nothing, and refused by the launcher
    return ROUNDS.get(kernel.split("<")[0], 0)


def test_flags_are_at_system_scope(compiled):
    arch, _, kernels, _ = compiled
    for name, code in kernels.items():
        assert scope_misfits(code) == [], name
        text = "\n".join(map(op_of, code))
        assert text.count(FLAG_STORE) == _rounds(arch, name), name
        assert (FLAG_LOAD in text) == (_rounds(arch, name) > 0 or name == "wait_signal"), name
        assert ("atom.release.sys.add.u64" in text) == (name == "put_signal"), name
        # Plain volatile accesses and device-wide fences order nothing between ranks.
        assert not re.search(r"\.volatile|membar|fence\.acq_rel\.gpu", text), name


def test_barriers_stand_between_data_and_flags(compiled):
    _, _, kernels, _ = compiled
    for name, code in kernels.items():
        assert order_misfits(code) == [], name


def test_peers_data_is_never_read_through_the_read_only_cache(compiled):
    _, _, kernels, _ = compiled
    for name, code in kernels.items():
        assert not [line for line in code if re.search(r"ld\.\S*\.nc\b", line)], name


def test_data_moves_in_16_bytes_with_several_loads_under_way(compiled):
    arch, _, kernels, _ = compiled
    for name, code in kernels.items():
        if _rounds(arch, name) > 0 and name != "barrier":
            assert static.loads_at_once(code) >= 4, name
            assert any(DATA_STORE.match(op_of(line)) and "v4" in line for line in code), name


def test_multimem_where_the_hardware_has_it(compiled):
    arch, _, kernels, _ = compiled
    for name, code in kernels.items():
        text = "\n".join(code)
        if not name.startswith("all_reduce_multimem") or arch == "80":
            assert "multimem" not in text, name
            continue
        kind = {"f32": r"v4\.f32", "f16": r"acc::f32\.v4\.f16x2", "bf16": r"acc::f32\.v4\.bf16x2"}
        element = name.split("<")[1].rstrip(">")
        assert re.search(rf"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.{kind[element]}", text)
        assert "multimem.st.relaxed.sys.global.v4.f32" in text
        # Before each of the two meetings and after it: the same memory by its other address.
        assert text.count("fence.proxy.alias") == 4, name


def _disassembler() -> str | None:
    try:
        import triton
    except ImportError:
        return shutil.which("cuobjdump")
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump")


def test_the_machine_code_keeps_to_it(compiled):
    """No local memory, and a system fence in front of the flag, in what really runs."""
    arch, cubin, _, _ = compiled
    tool = _disassembler()
    if tool is None:
        pytest.skip("cuobjdump is not installed (the triton wheel carries one)")
    done = programs.run([tool, "-sass", str(cubin)], timeout=120)
    assert done.returncode == 0, done.stderr
    functions = re.split(r"Function : (\S+)", done.stdout)
    seen = {}
    for mangled, code in zip(functions[1::2], functions[2::2], strict=True):
        seen[static.readable(mangled)] = code
    assert set(seen) == EXPECTED
    for name, code in seen.items():
        assert not re.search(r"\b(STL|LDL)\b", code), name
        if _rounds(arch, name) > 0:
            flag = re.search(r"ST\.E\.64\.STRONG\.SYS", code)
            assert flag is not None, name
            since_barrier = code[code.rindex("BAR.SYNC", 0, flag.start()) : flag.start()]
            assert re.search(r"MEMBAR\.\w+\.SYS", since_barrier), name

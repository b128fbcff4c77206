"""The readers of compiled Triton kernels: listings, units, order, rows against a baseline.

Layers: listings and PTX made up here, which must be read right; then small kernels compiled for
three architectures, some of them wrong on purpose. No GPU is needed; CI skips none of this.
"""

import re
from dataclasses import replace

import pytest

from bench.static import order
from bench.static.compiling import ARCHITECTURES, Description, compile_for
from bench.static.listing import Listing
from bench.static.reading import Row, faults, main_loop, read, worse
from bench.static.units import TENSOR, Tile, turn
from tests.static.small_kernels import hand_over, small_gemm

pytestmark = pytest.mark.timeout(300)  # the first compilation of a busy machine


def lines(*code: str) -> str:
    out, address = [], 0
    for line in code:
        if line.endswith(":"):
            out.append(line)
        else:
            out.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(out)


# A loop of three instructions; its wait's slow side lies behind the end and branches back into it.
OUT_OF_LINE = lines(
    "MOV R1, RZ",
    ".L_x_1:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR13+0x2c000], R16",
    "@!P3 BRA `(.L_x_3)",
    ".L_x_2:",
    "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR20], R24, gsb0",
    "@P0 BRA `(.L_x_1)",
    "EXIT",
    ".L_x_3:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [UR13+0x2c000], R16",
    "@!P3 BRA `(.L_x_3)",
    "BRA `(.L_x_2)",
    ".L_x_4:",
    "BRA `(.L_x_4)",
)


def test_a_loop_is_what_branches_back_not_what_lies_between():
    (loop,) = Listing(OUT_OF_LINE).innermost(TENSOR)
    assert loop.header == 0x10
    assert loop.names() == ["SYNCS", "BRA", "HGMMA", "BRA", "SYNCS", "BRA", "BRA"]
    spin = [one for one in Listing(OUT_OF_LINE).loops() if "HGMMA" not in one.names()]
    assert [one.names() for one in spin] == [["SYNCS", "BRA"]]  # and the code past EXIT is none


def test_the_innermost_loop_is_taken():
    text = lines(
        ".L_x_1:", "HMMA.16816.F32 R4, R8, R2, R4", ".L_x_2:", "HMMA.16816.F32 R4, R8, R2, R4",
        "@P0 BRA `(.L_x_2)", "BRA.U UP0, `(.L_x_1)", "EXIT",
    )  # fmt: skip
    (loop,) = Listing(text).innermost(TENSOR)
    assert loop.names() == ["HMMA", "BRA"]
    assert len(Listing(text).loops()) == 2


def test_units_count_by_hand():
    """Two warpgroups of 64x256x16: 2 * 64 * 256 * 16 products, and each reads its operands."""
    (loop,) = Listing(OUT_OF_LINE.replace("gsb0", "gsb0")).innermost(TENSOR)
    found = turn(loop.code, Tile(128, 256, 16, 2, num_warps=8), 90)
    assert found.multiply_adds == 128 * 256 * 16
    assert found.cycles["tensor"] == 128 * 256 * 16 / 2048
    assert found.cycles["shared"] == 2 * (64 + 256) * 16 * 2 / 128
    assert found.cycles["issue"] == 7 * 8 / 4
    assert found.binding == "tensor"


@pytest.mark.parametrize(
    ("code", "unit", "cycles"),
    [
        ("MUFU.EX2 R1, R2", "mufu", 4 * 32 / 16),
        ("FFMA R1, R2, R3, R4", "fma", 4 * 32 / 128),
        ("IMAD R1, R2, R3, R4", "fma", 4 * 32 / 64),
        ("IMAD.MOV.U32 R1, RZ, RZ, R4", "fma", 0),
        ("LDSM.16.M88.4 R4, [R8]", "shared", 4 * 32 * 16 / 128),
        ("STS.U16 [R8], R4", "shared", 4 * 32 * 2 / 128),
        ("LDS.64 R4, [R8]", "shared", 4 * 32 * 8 / 128),
    ],
)
def test_units_of_single_instructions(code, unit, cycles):
    found = turn(Listing(lines(code, "EXIT")).code[:1], Tile(64, 64, 64, 2, num_warps=4), 90)
    assert found.cycles[unit] == cycles


def test_a_multiplication_of_unknown_shape_is_refused():
    code = Listing(lines("HMMA.WHATEVER R4, R8, R2, R4", "EXIT")).code
    with pytest.raises(ValueError, match="shape of HMMA.WHATEVER"):
        turn(code, Tile(64, 64, 64, 2, 4), 90)


GOOD = """
    st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {%r1, %r2}], [%r3];
    cp.async.bulk.wait_group 0;
    bar.sync 0;
    @%p1 atom.global.sys.release.exch.b64 %rd5, [ %rd4 + 0 ], %rd6;
    @%p1 ld.global.sys.acquire.b64 %rd7, [ %rd4 + 128 ];
    bar.sync 0;
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
"""


def test_order_that_is_right_passes_and_each_missing_part_is_named():
    assert order.misfits(GOOD) == []
    assert order.flags(GOOD) == {"release": 1, "acquire": 1}
    first, second = [i for i, line in enumerate(GOOD.splitlines()) if "bar.sync" in line]
    for remove, said in (
        (first, "release.* after .* without a barrier"),
        (second, "ld.global.v4.* after .*acquire.* without a barrier"),
    ):
        text = "\n".join(line for i, line in enumerate(GOOD.splitlines()) if i != remove)
        assert any(re.search(said, wrong) for wrong in order.misfits(text))
    only_read = GOOD.replace("wait_group 0", "wait_group.read 0")
    assert any("is complete" in wrong for wrong in order.misfits(only_read))
    narrow = GOOD.replace("sys.release", "cta.release")
    assert any("scope cta" in wrong for wrong in order.misfits(narrow))


def described(tile: int, dtype: str = "bf16", warps: int = 4) -> Description:
    types = dict.fromkeys("yxw", f"*{dtype}:16") | dict.fromkeys("MNK", "i32:16")
    constants = {"TILE": tile, "DEPTH": 32}
    return Description(f"small {tile} {dtype}", small_gemm, types, constants, warps)


@pytest.mark.parametrize(
    ("arch", "instruction"), list(zip(ARCHITECTURES, ("HMMA", "HGMMA", "UTCHMMA"), strict=True))
)
def test_a_small_gemm_is_read(arch, instruction):
    tile = Tile(128, 128, 32, 2, 4)
    compiled = compile_for(described(128), arch)
    row = read(compiled, tile)
    assert row.tensor_instructions == (instruction,)
    loop = main_loop(compiled, tile)
    assert loop is not None
    assert loop.multiply_adds == 128 * 128 * 32  # all of one turn's products, and no more
    assert 0 < row.registers <= 255
    assert row.shared_bytes > 0
    assert 1 <= row.resident <= 65536 // (128 * row.registers)
    assert faults(row) == []


def test_a_kernel_that_spills_is_caught():
    """256 x 256 sums for 128 threads: 512 each, of 255 registers."""
    row = read(compile_for(described(256), 80), Tile(256, 256, 32, 2, 4))
    assert row.registers == 255
    assert any("bytes spilled" in wrong for wrong in faults(row))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_order_in_compiled_kernels(arch):
    def ptx(fenced: bool, scope: str) -> str:
        arguments = {"x": "*fp32:16", "flag": "*i64:16", "word": "i64"}
        constants = {"FENCED": fenced, "SCOPE": scope}
        return compile_for(Description("hand over", hand_over, arguments, constants), arch).ptx

    right = ptx(True, "sys")
    assert order.misfits(right) == []
    assert order.flags(right) == {"release": 1, "acquire": 1}
    assert any("without a barrier" in wrong for wrong in order.misfits(ptx(False, "sys")))
    assert any("scope cta" in wrong for wrong in order.misfits(ptx(True, "cta")))


def test_a_flag_before_its_rows_is_seen():
    """Both ways each release is in order; only one of them says so when the rows are there."""
    wait = "atom.global.sys.acquire.add.u64 %rd1, [%rd2], 0;\nbar.sync 0;\n"
    copy = "ld.global.b32 %r1, [%rd3];\nst.global.b32 [%rd4], %r1;\n"
    tell = "bar.sync 0;\natom.global.sys.release.exch.b64 %rd5, [%rd6], %rd7;\n"
    assert order.empty_releases(wait + copy + tell) == []
    assert len(order.empty_releases(wait + tell + copy)) == 1
    assert order.misfits(wait + tell + copy) == []


def test_a_description_must_fit_the_kernel():
    wrong = replace(described(64), constants={"TILE": 64, "WIDTH": 3})
    with pytest.raises(ValueError, match=r"\['DEPTH'\] are not described, \['WIDTH'\] are not"):
        compile_for(wrong, 80)


ROW = Row("gemm", 90, 160, 0, 100_000, 2, ("HGMMA",), 2, "tensor", 1.0, {"tensor": 1024.0})


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (replace(ROW, resident=1, registers=184), "1 programs at once (184 registers"),
        (replace(ROW, tensor_instructions=("HMMA",)), "no HGMMA any more"),
        (replace(ROW, bulk_loads=0), "0 bulk loads, 2 before"),
        (replace(ROW, binding="shared", margin=0.9), "bound by shared"),
        (replace(ROW, margin=0.95), "tensor share 0.95"),
    ],
)
def test_what_got_worse_is_said(now, said):
    assert any(said in wrong for wrong in worse(now, ROW))
    assert worse(ROW, ROW) == []
    assert worse(replace(ROW, resident=3, margin=1.2), ROW) == []
    assert "bytes of shared memory" in faults(replace(ROW, shared_bytes=240_000))[0]

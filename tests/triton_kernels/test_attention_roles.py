"""The attention forward with warp roles: its protocol and arithmetic, and what it compiles to.

Layers: the kernel's own source in an emulator of Gluon's operations (gluon_emulator.py), against
the definition in float64, in several orders of events each; the launcher's choice; compiled for
sm_90 and read. No GPU has run it.

Bounds: out, the error of torch's own attention in that dtype, twice, in the largest element and in
RMS; lse 1e-5 of the largest, since its sums are fp32 (products of 16-bit operands are exact there).
"""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from bench.static.compiling import compile_for
from bench.static.reading import faults, main_loop, read, resident_programs
from bench.static.roles_kernels import describe_roles, tile_of_roles
from bench.static.units import TENSOR, shares
from pyparallel.attention import State
from pyparallel.triton_kernels import flash_attention as flash
from pyparallel.triton_kernels import flash_attention_roles as roles
from pyparallel.triton_kernels import flash_attention_roles_launch as launch
from pyparallel.triton_kernels.flash_attention_configurations import AttentionConfig
from tests.triton_kernels.attention_cases import EPS, Case, operands, reference, rms, stock
from tests.triton_kernels.gluon_emulator import Emulated, Stuck

pytestmark = pytest.mark.timeout(300)  # a busy machine

LAYOUTS = {
    "whole": ([(0, 300, 0, 1, 0)], [(0, 300, 0, 1, 0)]),
    "later keys first": ([(0, 140, 500, 1, 0)], [(0, 200, 600, 1, 0), (200, 450, 100, 1, 0)]),
    "zigzag": (
        [(0, 70, 0, 1, 0), (70, 130, 400, 1, 0)],
        [(0, 150, 100, 1, 0), (150, 140, 300, 1, 0)],
    ),
    "striped": ([(0, 130, 1, 2, 0)], [(0, 270, 0, 2, 0)]),
    "documents": (
        [(0, 50, 0, 1, 0), (50, 150, 7, 1, 1), (200, 9, 0, 1, 2)],
        [(0, 60, 0, 1, 0), (60, 290, 0, 1, 1), (350, 5, 0, 1, 3)],
    ),
}

pytestmark = pytest.mark.skipif(
    launch._roles() is None, reason="the Gluon of this Triton lacks what the kernel is written in"
)


@pytest.fixture
def emulated(monkeypatch):
    """The launcher runs the emulator, as if on sm_90."""
    monkeypatch.setattr(launch, "_arch", lambda q: 90)

    def put(seed=0):
        stand_in = Emulated(put.kernel, seed)
        monkeypatch.setattr(roles, "roles_kernel", stand_in)
        return stand_in

    put.kernel = roles.roles_kernel
    return put


def _operands(layout, size=64, size_v=64, heads=2, dtype=torch.bfloat16, seed=0):
    q_pieces, k_pieces = LAYOUTS[layout]
    rows = [max(begin + length for begin, length, *_ in x) for x in (q_pieces, k_pieces)]
    return *operands(1, *rows, heads, 1, size, size_v, dtype, seed), q_pieces, k_pieces


def _check(q, k, v, q_pieces, k_pieces, case, sinks=None):
    """In one launch, and in two steps of a state, against the definition."""
    ref, ref_lse = reference(q, k, v, q_pieces, k_pieces, case, sinks)
    theirs = (stock(q, k, v, q_pieces, k_pieces, case).double() - ref).abs()
    cut = k_pieces[-1][0] if len(k_pieces) > 1 else 130  # before a piece, or inside the only one
    early = [p for p in k_pieces if p[0] < cut]
    late = [(begin - cut, *rest) for begin, *rest in k_pieces if begin >= cut]
    if len(k_pieces) == 1:
        _, rows, position, stride, document = k_pieces[0]
        early = [(0, cut, position, stride, document)]
        late = [(0, rows - cut, position + cut * stride, stride, document)]
    state = State.empty(q, v.size(3))
    flash.forward_step(q, k[:, :cut], v[:, :cut], q_pieces, early, case, state, roles=True)
    rest = (k[:, cut:], v[:, cut:], q_pieces, late, case)
    for out, lse in (
        flash.forward(q, k, v, q_pieces, k_pieces, case, sinks=sinks, roles=True),
        flash.forward(q, *rest, state=state, sinks=sinks, roles=True),
    ):
        ours = (out.double() - ref).abs()
        if sinks is None:  # of which torch has none
            assert ours.max() <= 2 * theirs.max()
            assert rms(ours) <= 2 * rms(theirs)
        else:
            assert ours.max() <= 2 * EPS[q.dtype] * v.double().abs().max()
        some = ref_lse > -math.inf
        assert torch.equal(lse > -math.inf, some)
        error = (lse.double() - ref_lse)[some].abs().max()
        assert error <= 1e-5 * max(1.0, float(ref_lse[some].abs().max()))
        assert (out.transpose(1, 2)[~some] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_masks(emulated, layout):
    """Every layout of a ring, causal, whole and with windows, each in another order of events."""
    cases = (
        Case(0.125, causal=True),
        Case(0.125),
        Case(0.2, window_left=40, window_right=9),
        Case(0.125, causal=True, window_left=150),
    )
    for seed, case in enumerate(cases):
        stand_in = emulated(seed)
        _check(*_operands(layout, seed=seed), case)
        assert stand_in.launches >= 2


def test_heads_dtypes_and_sinks(emulated):
    """d_qk != d_v, grouped heads, fp16, sinks, two in a batch, rows that are not contiguous."""
    sinks = torch.tensor([0.3, -math.inf, 2.0])
    for size, size_v, dtype, sink in (
        (128, 64, torch.float16, None),
        (64, 128, torch.bfloat16, sinks),
        (128, 128, torch.bfloat16, None),
    ):
        emulated(size)
        q, k, v, *pieces = _operands("documents", size, size_v, 3, dtype)
        q, k = (torch.cat([x, x.flip(1)], 0) for x in (q, k))
        v = torch.cat([v, v], 0).transpose(1, 2).contiguous().transpose(1, 2)
        _check(q, k, v, *pieces, Case(size**-0.5, causal=True), sink)


def test_what_is_not_finite_stays_in_its_document(emulated):
    """NaN in one document of four, and in keys that are nobody's, before and behind the others."""
    q_pieces = [(0, 50, 0, 1, 0), (50, 100, 100, 1, 1), (150, 60, 0, 1, 3)]
    k_pieces = [(2, 48, 2, 1, 0), (50, 190, 10, 1, 1), (245, 100, 0, 1, 2), (345, 60, 0, 1, 3)]
    q, k, v = operands(1, 210, 410, 2, 1, 64, 128, torch.bfloat16, 3)
    case = Case(0.125, causal=True)
    ref, _ = reference(q, k, v, q_pieces, k_pieces, case)
    inside = torch.zeros(410, dtype=torch.bool)
    for begin, length, _, _, document in k_pieces:
        inside[begin : begin + length] = document != 2
    for x in (k, v):
        x[:, ~inside] = math.nan
    for seed in range(3):
        emulated(seed)
        out, _ = flash.forward(q, k, v, q_pieces, k_pieces, case, roles=True)
        assert (out.double() - ref).abs().max() <= 2 * EPS[q.dtype] * v.nan_to_num().abs().max()


@pytest.mark.parametrize("seed", range(6))
def test_orders_of_events(emulated, seed):
    """Many blocks, so that every buffer is used again, whatever is late."""
    emulated(seed)
    q, k, v = operands(1, 130, 1100, 1, 1, 64, 64, torch.float16, seed)
    _check(q, k, v, [(0, 130, 970, 1, 0)], [(0, 1100, 0, 1, 0)], Case(0.125, causal=True))


FREE = "mbarrier.arrive(values_free.index((turn - 1) % BUFFERS), count=1)"
WAIT = "sums = warpgroup_mma_wait(0, deps=[sums])"
FAULTS = {
    "let go before the product is done": (
        rf"{re.escape(WAIT)}(\s+){re.escape(FREE)}",
        rf"{FREE}\1{WAIT}",
    ),
    "never let go": (r"mbarrier\.arrive\(values_free.*", "pass"),
    "wait for the wrong phase": (r"phase \^ 1", "phase"),
    "read before its wait": (
        r"warpgroup_mma_wait\(0, deps=\[sums\]\)",
        "warpgroup_mma_wait(1, deps=[sums])",
    ),
    "not wait for the queries": (r"mbarrier\.wait\(queries_there, 0\).*", ""),
    "fewer arrivals than readers": (r"count=READERS\)", "count=READERS + 1)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_protocol_is_seen(emulated, monkeypatch, tmp_path, fault):
    """The emulator bites: each fault in the source is an error or a wrong result."""
    source, count = re.subn(*FAULTS[fault], Path(roles.__file__).read_text())
    assert count
    path = tmp_path / "flash_attention_broken.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{roles.__package__}.{path.stem}", path)
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    q, k, v = operands(1, 130, 700, 1, 1, 64, 64, torch.float16)
    pieces, case = ([(0, 130, 570, 1, 0)], [(0, 700, 0, 1, 0)]), Case(0.125)
    ref, _ = reference(q, k, v, *pieces, case)
    emulated()

    def goes_wrong(kernel, seed):
        monkeypatch.setattr(roles, "roles_kernel", Emulated(kernel, seed))
        try:
            out, _ = flash.forward(q, k, v, *pieces, case, roles=True)
        except (Stuck, AssertionError):
            return True
        return not bool(((out.double() - ref).abs() < 1e-2).all())

    assert any(goes_wrong(broken.roles_kernel, seed) for seed in range(12))
    assert not goes_wrong(emulated.kernel, 0)


def test_what_it_does_not_take_is_told(monkeypatch):
    """By name and number; asked for it is an error, wished for the plain kernel's."""
    q, k, v = operands(1, 40, 40, 2, 1, 64, 64, torch.bfloat16)
    whole, case = [(0, 40, 0, 1, 0)], Case(causal=True)
    fit = launch.unfit_for_roles(q, k, v, case, 90)
    assert fit == ""
    for change, text in (
        ({"arch": 80}, "sm_80; its products are those of sm_90"),
        ({"arch": 100}, "sm_100"),
        ({"q": q.float()}, "dtypes torch.float32"),
        ({"v": v[..., :40]}, "head sizes 64, 40; it takes 64 and 128"),
        ({"mask": Case(softcap=2.0)}, "softcap, ALiBi, dropout"),
        ({"mask": Case(-0.1)}, "a scale that is not positive"),
        ({"mask": Case(dropout_p=0.1)}, "softcap, ALiBi, dropout"),
        (
            {"k": k.transpose(1, 3).contiguous().transpose(1, 3)},
            "an operand that TMA does not take",
        ),
    ):
        given = {"q": q, "k": k, "v": v, "mask": case, "arch": 90, **change}
        assert text in launch.unfit_for_roles(**given)
    with pytest.raises(ValueError, match="warp roles does not take sm_0"):
        flash.forward(q, k, v, whole, whole, case, roles=True)
    monkeypatch.setattr(launch, "_arch", lambda q: 90)
    with pytest.raises(ValueError, match="AttentionConfig.* is of the plain one"):
        flash.forward(q, k, v, whole, whole, case, roles=True, config=AttentionConfig())
    monkeypatch.setattr(launch, "_roles", lambda: None)
    assert "no Gluon" in launch.unfit_for_roles(q, k, v, case, 90)


def test_the_wish(emulated, monkeypatch):
    """PYPARALLEL_ATTENTION_ROLES: 1 takes what fits."""
    q, k, v, *pieces = _operands("whole")
    stand_in = emulated()
    monkeypatch.setenv("PYPARALLEL_ATTENTION_ROLES", "1")
    flash.forward(q, k, v, *pieces, Case(0.125))
    assert stand_in.launches == 1
    monkeypatch.setenv("PYPARALLEL_ATTENTION_ROLES", "yes")
    with pytest.raises(ValueError, match="PYPARALLEL_ATTENTION_ROLES is 'yes'; 0 or 1"):
        flash.forward(q, k, v, *pieces, Case(0.125))
    monkeypatch.delenv("PYPARALLEL_ATTENTION_ROLES")
    assert not launch.wished()


@pytest.mark.parametrize("features", [("causal",), ("causal", "state")], ids="-".join)
def test_compiled(features):
    """sm_90: no spill, one program of twelve warps, registers dealt out by role, bulk copies,
    products in both readers' loops that do not wait for one another."""
    compiled = compile_for(describe_roles(128, features), 90)
    assert faults(read(compiled, tile_of_roles(128))) == []
    assert (compiled.warps, resident_programs(compiled)) == (12, 1)
    dealt = {one.operands.split()[-1] for one in compiled.listing.code if one.name == "USETMAXREG"}
    assert {"0xf0", "0x18"} <= dealt  # 240 for a reader, 24 for the loader
    assert compiled.listing.count("UTMALDG") >= 6
    loops = compiled.listing.innermost(TENSOR)
    assert len(loops) == 4  # two readers, without a mask and with one
    for loop in loops:
        names = loop.names()
        assert names.count("HGMMA") == 16
        # A product that waits for the one before has a WARPGROUP.DEPBAR of its own.
        assert names.count("WARPGROUP") <= 6
        assert not {"LDS", "STS", "LDG", "LDL", "STL"} & set(names)
    turn = main_loop(compiled, tile_of_roles(128))
    assert turn.multiply_adds == 2 * 64 * 128 * 128
    serial, overlapped = shares(turn.cycles)
    assert serial >= 0.5
    assert overlapped >= 0.9

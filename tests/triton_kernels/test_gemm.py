"""The main loop and its epilogues.

Layers of proof: one interpreted process against float64 (here); the compiled kernel, read
(test_compiled_gemm.py). No GPU has run it. Outputs are poisoned; each result is close within the
bound of bounds.py, whose controls are at the end.
"""

import mmap
import warnings

import torch

from pyparallel.triton_kernels import gemm as gemms
from pyparallel.triton_kernels.epilogue import ACTIVATIONS
from pyparallel.triton_kernels.gemm import TileConfig, gemm
from tests.launch import run_ranks
from tests.triton_kernels.bounds import EPS32, INTERPRETED, assert_within, limit_of, worst_share

SMALL = TileConfig(32, 16, 32, group_m=2, programs=3)
BY_DESCRIPTOR = TileConfig(32, 16, 32, group_m=2, programs=3, descriptors=True)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
SHAPES = [(1, 1, 1), (70, 50, 80), (33, 17, 31), (9, 40, 96), (64, 32, 64), (5, 7, 0)]


def _random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed * 1000003 + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def _out_dtype(dtype):
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def _stock(a, b, dtype):
    """torch's own product in the same dtype; fp8 is refused on a CPU: bf16 is exact for e4m3."""
    if a.dtype.itemsize == 1:
        a, b = a.bfloat16(), b.bfloat16()
    return (a @ b.T).to(dtype)


def _poisoned(rows, columns, dtype):
    return torch.full((rows, columns), float("nan"), dtype=dtype)


def _plain(rank):
    """Every shape and dtype, both ways of loading."""
    for dtype in DTYPES:
        for m, n, k in SHAPES:
            a, b = _random(m, k, dtype=dtype), _random(n, k, dtype=dtype, seed=1)
            stock = _stock(a, b, _out_dtype(dtype))
            ref = a.double() @ b.double().T
            for config in (SMALL, BY_DESCRIPTOR):
                if config.descriptors and not (
                    gemms.fits_descriptor(a) and gemms.fits_descriptor(b)
                ):
                    continue
                out = _poisoned(m, n, stock.dtype)
                gemm(out, a, b, config)
                assert_within(out, ref, limit_of(a, b, stock), f"{dtype} {m, n, k} {config}")


def _strided(rank):
    """Odd strides, offsets, transposes, slices of larger tensors, on every operand."""
    m, n, k = 37, 21, 45
    whole_a, whole_b = _random(m + 3, k + 8), _random(n + 3, k + 8, seed=1)
    ways = [
        (whole_a[:m, 1 : k + 1], whole_b[:n, 1 : k + 1]),  # offset 1, odd leading stride
        (whole_a.T.contiguous().T[:m, :k], whole_b.T.contiguous().T[2 : n + 2, :k]),
        (whole_a[:1, :k].expand(m, k), whole_b[:n, :k]),
        (whole_a[:m].flatten()[: m * k].view(k, m).T, whole_b[:n, 8 : k + 8]),
    ]
    for a, b in ways:
        for out in (
            _poisoned(m, n, torch.float32),
            _poisoned(n, m, torch.float32).T,
            _poisoned(m + 2, 2 * n, torch.float32)[1:-1, ::2],
        ):
            gemm(out, a, b, SMALL)
            assert_within(out, a.double() @ b.double().T, limit_of(a, b, a @ b.T))
    border = _poisoned(m + 2, 2 * n, torch.float32)
    gemm(border[1:-1, ::2], *ways[0], SMALL)
    assert border[:, 1::2].isnan().all()
    assert border[[0, -1]].isnan().all()


def _epilogues(rank):
    """Scale, bias, activation, residual, in this order; each derivative is at most 1.2."""
    m, n, k = 40, 24, 64
    reference = {
        "none": lambda x: x,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    assert set(reference) == set(ACTIVATIONS)
    a, b = _random(m, k), _random(n, k, seed=1)
    bias, residual = _random(n, seed=2), _random(n, m, seed=3).T
    for activation, function in reference.items():
        for rows, columns in ((m, n), (1, 1), (m, 1), (0, 0)):
            row_scale = _random(rows, seed=4).abs() if rows else None
            column_scale = _random(columns, seed=5).abs() if columns else None
            out = _poisoned(m, n, torch.float32)
            gemm(
                out,
                a,
                b,
                SMALL,
                row_scale=row_scale,
                column_scale=column_scale,
                bias=bias,
                residual=residual,
                activation=activation,
            )
            scale = torch.ones(m, n, dtype=torch.float64)
            if rows:
                scale = scale * row_scale.double()[:, None] * column_scale.double()
            x = a.double() @ b.double().T * scale + bias
            ref = function(x) + residual
            limit = 1.2 * k**0.5 * EPS32 * (a.double().abs() @ b.double().abs().T * scale)
            limit += 8 * EPS32 * (x.abs() + ref.abs() + 1)  # one rounding per step
            assert_within(out, ref, limit, f"{activation} {rows, columns}")
            if activation == "relu":
                assert worst_share(out, ref + bias.double(), limit)[0] > 1  # bias added twice


def _far_apart(rank):
    """Offsets past 2^31 elements: rows that lie 2^30 + 16 elements apart, in memory never touched
    but for these rows."""
    rows, k, stride = 4, 40, 2**30 + 16  # the stride itself fits in 32 bits
    size = (rows * stride + k) * 2
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # NORESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = torch.frombuffer(memory, dtype=torch.float16)
    a = flat.as_strided((rows, k), (stride, 1))
    a.copy_(_random(rows, k, dtype=torch.float16))
    b = _random(20, k, dtype=torch.float16, seed=1)
    out = _poisoned(rows, 20, torch.float16)
    gemm(out, a, b, SMALL)
    assert_within(out, a.double() @ b.double().T, limit_of(a, b, _stock(a, b, torch.float16)))
    far_out = flat.as_strided((rows, 20), (stride, 1), 64)
    gemm(far_out, a, b, SMALL)
    assert torch.equal(far_out, out)


def _column_tail(rank):
    """576 columns in tiles of 128: the last tile is half outside, and nothing lies behind it."""
    m, n, k = 5, 576, 33
    a, b = _random(m, k), _random(n, k, seed=1)
    whole = _poisoned(m + 1, n, torch.float32)
    gemm(whole[:m], a, b, TileConfig(16, 128, 64, group_m=4, programs=2))
    assert_within(whole[:m], a.double() @ b.double().T, limit_of(a, b, a @ b.T))
    assert whole[m].isnan().all()


def test_every_shape_and_dtype():
    run_ranks(_plain, 1, env=INTERPRETED)


def test_strides_and_offsets():
    run_ranks(_strided, 1, env=INTERPRETED)


def test_epilogues():
    run_ranks(_epilogues, 1, env=INTERPRETED)


def test_a_tail_of_columns():
    run_ranks(_column_tail, 1, env=INTERPRETED)


def test_offsets_past_32_bits():
    run_ranks(_far_apart, 1, env=INTERPRETED)


def test_the_bound_bites():
    a, b = _random(40, 64), _random(24, 64, seed=1)
    ref = a.double() @ b.double().T
    limit = limit_of(a, b, a @ b.T)
    assert worst_share((a[:, :63] @ b[:, :63].T), ref, limit)[0] > 1  # the last k left out
    assert worst_share((a.bfloat16() @ b.bfloat16().T), ref, limit)[0] > 1
    assert worst_share(torch.full_like(ref, float("nan")), ref, limit)[0] > 1


def test_what_fits_a_descriptor():
    x = torch.zeros(8, 64, dtype=torch.float16)
    assert gemms.fits_descriptor(x)
    assert gemms.fits_descriptor(x[:, 8:40])
    for other in (x[:, 1:], x[:, :0], x[:0], x.T, torch.zeros(8, 63, dtype=torch.float16)):
        assert not gemms.fits_descriptor(other)

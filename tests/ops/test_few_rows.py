"""x @ weight^T for few rows and many (csrc/torch/few_rows.h, many_rows.h): against float64, and
what it must not change.

Bound: |ours - ref| <= |stock - ref| + sqrt(K) eps32 (|x| |w|), stock being torch's linear.
"""

import pytest
import torch
from torch.nn.functional import linear

from pyparallel import _torch
from tests.launch import run_ranks
from tests.ops.reference import assert_within, draw, limit_of


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _checked(x, w):
    ours, stock = _torch.product(x, w), linear(x, w)
    ref = linear(x.double(), w.double())
    assert (ours.shape, ours.dtype) == (stock.shape, stock.dtype)
    assert ours.is_contiguous()
    assert_within(ours, ref, limit_of(stock, ref, x, w), f"{list(x.shape)} {list(w.shape)}")
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("n", "k"), [(64, 1024), (1030, 517), (7, 16384), (3001, 33), (1, 70000)])
def test_every_number_of_rows(dtype, n, k):
    for m in (1, 2, 3, 4, 5, 7, 8, 13, 16, 17):
        x, w = draw(m * n + k, [(m, k), (n, k)], dtype)
        ours = _checked(x, w)
        wrong = ours.clone()
        wrong[-1, -1] += 1 + abs(float(wrong[-1, -1]))
        ref = linear(x.double(), w.double())
        with pytest.raises(AssertionError):
            assert_within(wrong, ref, limit_of(linear(x, w), ref, x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_and_shape(dtype):
    x, w = draw(1, [(6, 700), (300, 700)], dtype)
    wide, tall = draw(2, [(6, 1400), (700, 300)], dtype)
    _checked(wide[:, ::2], w)
    _checked(x, tall.t())
    _checked(x[2:5], w[:, :])
    _checked(x.view(2, 3, 700), w)
    _checked(x[0], w)
    assert _torch.product(x[:0], w).shape == (0, 300)
    assert _torch.product(x, w[:0]).shape == (6, 0)
    assert torch.equal(_torch.product(x[:, :0], w[:, :0]), torch.zeros(6, 300, dtype=dtype))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _torch.product(x, tall)


@pytest.mark.parametrize(("m", "n", "k"), [(24, 1024, 700), (130, 257, 300), (2000, 64, 33)])
def test_many_rows_of_any_layout(m, n, k):
    x, w = draw(m, [(m, k), (n, k)], torch.float32)
    ours = _checked(x, w)
    turned, wide = x.t().contiguous().t(), torch.cat([w, w], 1)[:, :k]
    assert torch.equal(_checked(x.view(2, -1, k), w).view(m, n), ours)
    _checked(turned, wide)
    _checked(x, w.t().contiguous().t())
    out = torch.full((m, n), float("nan"))
    _torch.product_into(out, x, w)
    assert torch.equal(out, ours)
    x.requires_grad_()
    assert not _torch.product(x.detach(), w).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others_nor_a_call_on_the_last(dtype):
    x, w = draw(3, [(16, 1000), (260, 1000)], dtype)
    whole = _torch.product(x, w)
    assert torch.equal(whole, _torch.product(x, w))
    for m in (1, 3, 6, 11):
        assert torch.equal(_torch.product(x[:m].clone(), w), whole[:m])
    assert torch.equal(_torch.product(x, w[:129].clone()), whole[:, :129])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_so(dtype):
    x, w = draw(4, [(5, 600), (200, 600)], dtype)
    x[1, 599] = float("nan")
    x[3, 7] = float("inf")
    ours, stock = _torch.product(x, w), linear(x, w)
    assert torch.equal(torch.isnan(ours), torch.isnan(stock))
    assert torch.equal(torch.isinf(ours), torch.isinf(stock))
    assert torch.isfinite(ours[[0, 2, 4]]).all()


def test_with_several_threads_it_is_linear():
    x, w = draw(5, [(4, 1024), (512, 1024)], torch.float32)
    torch.set_num_threads(2)
    assert torch.equal(_torch.product(x, w), linear(x, w))


def _plain_simd(rank):
    torch.set_num_threads(1)
    x, w = draw(6, [(4, 1024), (512, 1024)], torch.float32)
    return torch.equal(_torch.product(x, w), linear(x, w))


def test_without_avx512_it_is_linear():
    assert run_ranks(_plain_simd, 1, env={"PYPARALLEL_SIMD": "portable"}) == [True]

"""Kernels that the tests of bench/static compile: small, and some wrong on purpose."""

import triton
import triton.language as tl


@triton.jit
def small_gemm(y, x, w, M, N, K, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """y = x @ w^T of tiles that divide all sizes."""
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, DEPTH)
    acc = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, K, DEPTH):
        a = tl.load(x + rows[:, None] * K + inner[None, :] + k)
        b = tl.load(w + columns[None, :] * K + inner[:, None] + k)
        acc = tl.dot(a, b, acc)
    tl.store(y + rows[:, None] * N + columns[None, :], acc.to(y.dtype.element_ty))


@triton.jit
def hand_over(x, flag, word, FENCED: tl.constexpr, SCOPE: tl.constexpr):
    """Stores, sets a flag, waits for another and loads; without the barriers if not FENCED."""
    lanes = tl.arange(0, 512)
    tl.store(x + lanes, lanes.to(tl.float32))
    if FENCED:
        tl.debug_barrier()
    tl.atomic_xchg(flag, word, sem="release", scope=SCOPE)
    while tl.atomic_add(flag + 16, 0, sem="acquire", scope=SCOPE) < word:
        pass
    tl.store(x + 512 + lanes, tl.load(x + lanes) + 1.0)

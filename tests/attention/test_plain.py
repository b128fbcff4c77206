"""The plain engine against attention by the book: every feature, steps in any order, bad rows."""

import math

import pytest
import torch

from pyparallel.attention import Mask, Pieces, State, finish
from pyparallel.attention.dropout import philox
from pyparallel.attention.plain import backward_step, forward_step
from tests.attention.reference import Rows, attention

HEADS, KV_HEADS, D, D_V = 6, 2, 8, 12
# Two documents of 13 and 7 rows with padding between and behind; keys: 11 and 9.
Q_PIECES = Pieces([(1, 6, 0, 2, 0), (7, 7, 1, 2, 0), (16, 7, 0, 1, 1)])
K_PIECES = [Pieces([(0, 6, 0, 2, 0), (9, 5, 0, 1, 1)]), Pieces([(2, 5, 1, 2, 0), (8, 4, 5, 1, 1)])]
Q_ROWS, K_ROWS = 25, (15, 12)
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 3},
    "both sides": {"window_left": 2, "window_right": 1},
    "softcap": {"causal": True, "softcap": 0.7},
    "alibi": {"causal": True, "alibi_slopes": torch.rand(HEADS, generator=torch.Generator())},
    "alibi of each": {"alibi_slopes": torch.rand(2, HEADS, generator=torch.Generator())},
    "dropout": {"dropout_p": 0.3, "seed": 2**63 + 12345, "first_head": 3, "all_heads": 20},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_steps_equal_the_book(name: str, with_sinks: bool) -> None:
    torch.manual_seed(1)
    mask = Mask(0.4, **MASKS[name])
    q, dout = torch.randn(2, Q_ROWS, HEADS, D).double(), torch.randn(2, Q_ROWS, HEADS, D_V).double()
    ks = [torch.randn(2, n, KV_HEADS, D).double() for n in K_ROWS]
    vs = [torch.randn(2, n, KV_HEADS, D_V).double() for n in K_ROWS]
    sinks = torch.randn(HEADS).double().requires_grad_() if with_sinks else None
    rows = Rows.of(Q_PIECES, Q_ROWS)
    key_rows = [Rows.of(p, n) for p, n in zip(K_PIECES, K_ROWS, strict=True)]
    both = Rows(*(torch.cat(x) for x in zip(*(vars(r).values() for r in key_rows), strict=True)))
    inputs = [q, torch.cat(ks, 1), torch.cat(vs, 1)]
    for x in inputs:
        x.requires_grad_()
    want, want_lse = attention(*inputs, rows, both, mask, sinks)
    grads = torch.autograd.grad(want, [*inputs, *([] if sinks is None else [sinks])], dout)

    poison = torch.full((), math.nan, dtype=torch.float64)  # padding must not be read
    bad = torch.ones(Q_ROWS, dtype=torch.bool)
    bad[Q_PIECES.covered()] = False
    q = torch.where(bad.view(-1, 1, 1), poison, q.detach())
    dout = torch.where(bad.view(-1, 1, 1), poison, dout)
    for i, (pieces, n) in enumerate(zip(K_PIECES, K_ROWS, strict=True)):
        hole = torch.ones(n, dtype=torch.bool)
        hole[pieces.covered()] = False
        ks[i], vs[i] = (torch.where(hole.view(-1, 1, 1), poison, x) for x in (ks[i], vs[i]))

    state = State.empty(q, D_V)
    for i in (1, 0):
        forward_step(q, ks[i], vs[i], Q_PIECES, K_PIECES[i], mask, state)
    out, lse = finish(state, sinks, torch.float64)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    real = ~bad
    torch.testing.assert_close(lse[:, :, real], want_lse[:, :, real], rtol=1e-12, atol=1e-12)

    delta = torch.where(real.view(-1, 1), (dout * out).sum(-1), 0.0).transpose(1, 2)
    dq = torch.zeros_like(q)
    dks, dvs = [torch.zeros_like(k) for k in ks], [torch.zeros_like(v) for v in vs]
    for i in (0, 1):
        backward_step(dout, q, ks[i], vs[i], lse, delta, Q_PIECES, K_PIECES[i], mask, dq, dks[i],
                      dvs[i])  # fmt: skip
    for got, grad in zip((dq, torch.cat(dks, 1), torch.cat(dvs, 1)), grads, strict=False):
        torch.testing.assert_close(got, grad, rtol=1e-11, atol=1e-12)
    if sinks is not None:
        dsinks = -(torch.exp(sinks.view(1, -1, 1) - lse) * delta).sum((0, 2))
        torch.testing.assert_close(dsinks, grads[3], rtol=1e-11, atol=1e-12)


def test_rows_without_a_key_are_zero() -> None:
    q, k = torch.randn(1, 5, 2, 4), torch.randn(1, 2, 2, 4)
    state = State.empty(q, 4)
    forward_step(q, k, k, Pieces.whole(5, position=-3), Pieces.whole(2), Mask(1.0, True), state)
    out, lse = finish(state, None, q.dtype)
    assert (lse[:, :, :3] == -math.inf).all()
    assert (lse[:, :, 3:] > -math.inf).all()
    assert (out[:, :3] == 0).all()
    assert out.isfinite().all()


def test_scores_far_apart_do_not_overflow() -> None:
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 2, 1, 4)
    v = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 1, 4)
    k[0, 0] = -25.0  # scores -100 and 100
    k[0, 1] = 25.0
    for order in ((0, 1), (1, 0)):
        state = State.empty(q, 4)
        for i in order:
            one = slice(i, i + 1)
            forward_step(q, k[:, one], v[:, one], Pieces.whole(1), Pieces.whole(1), Mask(1.0),
                         state)  # fmt: skip
        out, lse = finish(state, None, q.dtype)
        assert out.flatten().tolist() == [2.0] * 4
        assert lse.item() == 100.0


def test_merge_of_states_equals_steps_after_each_other() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 5, 2, 4), torch.randn(1, 9, 2, 4), torch.randn(1, 9, 2, 3)
    rows, mask = Pieces.whole(5), Mask(0.5, causal=True)
    parts = [Pieces([(i, 1, i, 1, 0)]) for i in range(9)]
    states = []
    for part in parts:
        states.append(State.empty(q, 3))
        forward_step(q, k, v, rows, part, mask, states[-1])
    for other in states[1:]:
        states[0].merge(other)
    whole = State.empty(q, 3)
    forward_step(q, k, v, rows, Pieces.whole(9), mask, whole)
    for got, want in zip(finish(states[0], None, q.dtype), finish(whole, None, q.dtype),
                         strict=True):  # fmt: skip
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_philox_gives_the_words_of_its_paper() -> None:
    """Random123's known answers for philox4x32-10."""
    known = [
        ((0, 0, 0, 0), 0, 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, 0xD16CFE09),
    ]
    for counter, seed, word in known:
        assert int(philox(tuple(torch.tensor(c) for c in counter), seed)) == word

"""Speed of the native attention steps against torch's scaled_dot_product_attention, one process.

    python -m bench.native.attention_speed --rows 2048 --threads 1 2

Method: of each shape both results are compared, then both sides run in turn, so that a change of
clock or a neighbour meets both alike; a ratio is the median of the rounds' stock / ours, with the
least and the greatest. Heads are Llama-3-8B's, scaled: 8 of queries, 2 of keys, head_dim 128.
`--decode`: one row of q against that many keys. Our side takes rows as [batch, seq, heads, d] and
makes its state and log-sum-exp; torch's takes its own layout, already contiguous.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pyparallel.attention import Mask, Pieces, State, finish
from pyparallel.attention.native import backward_step, forward_step

HEADS, KV_HEADS, D = 8, 2, 128


class Shape:
    """Operands of one attention, and its two sides."""

    def __init__(self, queries: int, keys: int, dtype: torch.dtype, causal: bool) -> None:
        self.dtype, self.causal = dtype, causal
        self.q, self.k, self.v, self.dout = (
            torch.randn(1, rows, heads, D, dtype=dtype)
            for rows, heads in ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS),
                                (queries, HEADS))
        )  # fmt: skip
        self.pieces = Pieces.whole(queries, keys - queries), Pieces.whole(keys)
        self.mask = Mask(D**-0.5, causal=causal)
        self.theirs = [
            x.transpose(1, 2).contiguous().requires_grad_() for x in (self.q, self.k, self.v)
        ]
        self.flops = 4 * queries * keys * HEADS * D / (2 if causal else 1)

    def ours(self) -> tuple[Tensor, Tensor]:
        state = State.empty(self.q, D)
        forward_step(self.q, self.k, self.v, *self.pieces, self.mask, state)
        return finish(state, None, self.dtype)

    def stock(self) -> Tensor:
        q, k, v = self.theirs
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)

    def ours_backward(self, out: Tensor, lse: Tensor) -> list[Tensor]:
        delta = (self.dout.float() * out.float()).sum(-1).transpose(1, 2)
        dq, dk, dv = (torch.zeros(x.shape) for x in (self.q, self.k, self.v))
        backward_step(self.dout, self.q, self.k, self.v, lse, delta, *self.pieces, self.mask,
                      dq, dk, dv)  # fmt: skip
        return [grad.to(self.dtype) for grad in (dq, dk, dv)]

    def stock_backward(self, out: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.theirs, dout, retain_graph=True)


def compare(name: str, ours: Callable[[], Any], stock: Callable[[], Any], flops: float,
            rounds: int) -> None:  # fmt: skip
    def seconds(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    pairs = [(seconds(stock), seconds(ours)) for _ in range(rounds + 1)][1:]
    ratios = sorted(theirs / mine for theirs, mine in pairs)
    theirs, mine = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"{name}: {theirs * 1e3:.1f} ms / {mine * 1e3:.1f} ms = {statistics.median(ratios):.2f}x "
        f"({ratios[0]:.2f}..{ratios[-1]:.2f}), {flops / mine / 1e9:.0f} GFLOP/s",
        flush=True,
    )


def agree(ours: Tensor, stock: Tensor) -> None:
    limit = 1e-5 if ours.dtype is torch.float32 else 2e-2
    error = (ours.float() - stock.float()).norm() / stock.float().norm()
    if not error < limit:
        raise SystemExit(f"results differ by {float(error):.1e}, limit {limit:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="native attention against torch's")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", action="store_true")
    args = parser.parse_args()
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in args.dtype:
            for rows in args.rows:
                for causal in (False,) if args.decode else (False, True):
                    shape = Shape(1 if args.decode else rows, rows, getattr(torch, dtype), causal)
                    (out, lse), theirs = shape.ours(), shape.stock()
                    agree(out.transpose(1, 2), theirs.detach())
                    kind = "decode" if args.decode else "causal" if causal else "full"
                    name = f"{rows} {dtype} {kind}, {threads} threads"
                    compare(f"{name}, forward", shape.ours, shape.stock, shape.flops, args.rounds)
                    if args.decode:
                        continue
                    dout = shape.dout.transpose(1, 2).contiguous()
                    grads = shape.ours_backward(out, lse)
                    for mine, grad in zip(grads, shape.stock_backward(theirs, dout), strict=True):
                        agree(mine.transpose(1, 2), grad)
                    compare(
                        f"{name}, backward",
                        lambda: shape.ours_backward(out, lse),  # noqa: B023
                        lambda: shape.stock_backward(theirs, dout),  # noqa: B023
                        2.5 * shape.flops,
                        args.rounds,
                    )


if __name__ == "__main__":
    main()

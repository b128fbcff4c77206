"""One attention over P simulated ranks, and what attention by the book makes of the same."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyparallel.attention import Mask, Sharding, sequence_parallel_attention, simulate
from tests.attention.reference import Rows, attention


@dataclass
class Case:
    """Whole operands (float32 unless cast), and the options of the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    sinks: Tensor | None = None
    dout: Tensor = field(init=False)
    dlse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        batch, rows, heads, _ = self.q.shape
        self.dout = torch.randn(batch, rows, heads, self.v.shape[3]).to(self.q.dtype)
        sums = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        self.dlse = torch.randn(batch, heads, rows, dtype=sums)

    @classmethod
    def random(cls, batch=1, rows=32, heads=4, kv_heads=2, d=8, d_v=None, keys=None,
               dtype=torch.float32, sinks=False, **options):  # fmt: skip
        q = torch.randn(batch, rows, heads, d)
        k, v = (torch.randn(batch, rows if keys is None else keys, kv_heads, n)
                for n in (d, d_v or d))  # fmt: skip
        sink = torch.randn(heads).to(dtype) if sinks else None
        return cls(q.to(dtype), k.to(dtype), v.to(dtype), options, sink)

    @property
    def mask(self) -> Mask:
        o = self.options
        return Mask(
            o.get("softmax_scale") or self.q.shape[-1] ** -0.5,
            o.get("causal", False),
            *o.get("window_size", (-1, -1)),
            o.get("softcap", 0.0),
            o.get("alibi_slopes"),
            o.get("dropout_p", 0.0),
            o.get("dropout_seed", 0),
        )

    def shardings(self, world: int) -> tuple[Sharding, Sharding]:
        o, found = self.options, []
        for x, cu in ((self.q, o.get("cu_seqlens")),
                      (self.k, o.get("cu_seqlens_k", o.get("cu_seqlens")))):  # fmt: skip
            found.append(Sharding.of(o.get("sharding", "zigzag"), x.shape[1], world, cu_seqlens=cu,
                                     per_document=o.get("per_document", False)))  # fmt: skip
        return found[0], found[1]

    def reference(self) -> dict[str, Tensor]:
        """By the book, in float64."""
        queries, keys = self.shardings(1)
        inputs = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        sinks = None if self.sinks is None else self.sinks.double().requires_grad_()
        rows = Rows.of(queries.pieces(0, keys), self.q.shape[1])
        out, lse = attention(*inputs, rows, Rows.of(keys.pieces(0), self.k.shape[1]), self.mask,
                             sinks)  # fmt: skip
        leaves = inputs if sinks is None else [*inputs, sinks]
        dout = torch.where((rows.document >= 0).view(-1, 1, 1), self.dout.double(), 0.0)
        seen = torch.where(lse > -torch.inf, lse, 0.0)
        total = (out * dout).sum() + (seen * self.dlse.double()).sum()
        grads = torch.autograd.grad(total, leaves)
        names = ("out", "lse", "dq", "dk", "dv", "dsinks")
        return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=False))

    def simulated(self, world: int, **more: Any) -> dict[str, Any]:
        """The same over `world` ranks, put together again; `traffic` and `dsinks` of each rank."""
        options = {"return_lse": True, **self.options, **more}
        decode = options.get("strategy") == "decode"
        self_sharding = dict(self.options)
        self.options = {**self.options, **{k: v for k, v in more.items() if k == "sharding"}}
        queries, keys = self.shardings(world)
        self.options = self_sharding

        def run(group: Any) -> tuple[list[Tensor], Any]:
            mine = slice(None) if decode else queries.rows(group.rank)
            q = self.q[:, mine].clone().requires_grad_()
            k, v = (x[:, keys.rows(group.rank)].clone().requires_grad_() for x in (self.k, self.v))
            sinks = None if self.sinks is None else self.sinks.clone().requires_grad_()
            out, lse = sequence_parallel_attention(q, k, v, group=group, sinks=sinks, **options)
            loss = [out, lse], [self.dout[:, mine], self.dlse[:, :, mine]]
            torch.autograd.backward(*loss)
            grads = [q.grad, k.grad, v.grad, *([] if sinks is None else [sinks.grad])]
            return [out.detach(), lse.detach(), *grads], group.traffic

        every = simulate(world, run)
        found: dict[str, Any] = {"traffic": [traffic for _, traffic in every]}
        for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
            parts = [tensors[i] for tensors, _ in every]
            if decode and name in ("out", "lse", "dq"):
                assert all(torch.equal(part, parts[0]) for part in parts), name
                found[name] = parts[0]
            else:
                order = (keys if name in ("dk", "dv") else queries).order()
                dim = 2 if name == "lse" else 1
                found[name] = torch.cat(parts, dim).index_select(dim, order)
        if self.sinks is not None:
            sinks = [tensors[5] for tensors, _ in every]
            assert all(torch.equal(x, sinks[0]) for x in sinks)
            found["dsinks"] = sinks[0]
        return found


TENSORS = ("out", "lse", "dq", "dk", "dv", "dsinks")


def rms_error(got: Tensor, want: Tensor) -> float:
    """Root of the mean squared error, relative to that of what is wanted."""
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    got, want = got.double()[finite], want.double()[finite]
    if not want.numel():
        return 0.0
    scale = want.square().mean().sqrt()
    return float((got - want).square().mean().sqrt() / scale.clamp(min=1e-30))


def largest_error(got: Tensor, want: Tensor) -> float:
    """Of any element."""
    return float((got.double() - want.double()).abs().max())


def check(found: dict[str, Any], want: dict[str, Tensor], bound: float, what: object) -> None:
    for name in TENSORS:
        if name in want and want[name].numel():
            error = rms_error(found[name], want[name])
            assert error <= bound, (what, name, error)

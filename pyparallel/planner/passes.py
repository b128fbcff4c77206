"""Seconds of one microbatch through one layer, its embedding or its head, on one device, by part.

Each operation of a forward and of both halves of a backward is listed with its sizes; times come
from kernels.py and collectives.py. What runs beside something else is part hidden, part exposed.
"""

from dataclasses import dataclass, field

from pyparallel.planner.activations import local_tokens
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.collectives import Group, group_of
from pyparallel.planner.kernels import Kernels
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.models import Linear, kept_by_op, linears
from pyparallel.planner.stages import local_linear

__all__ = ["Pass", "Passes"]

_EXPOSED = ("tp", "cp", "ep")
# Their input or output goes over tp together with another matrix's.
_SHARES_A_COLLECTIVE = ("query up", "shared up", "shared down")
# Heads of 192 and 128 beside heads of 128, forward and backward, on a B200 (SimuMax, as in
# hardware.py): 0.83 to 0.89 against 0.87 to 1.0, and 0.60 to 0.65 against 0.73 to 0.83.
LATENT_SHARE = (0.92, 0.80)
# Rows scattered by a permutation move at this part of a plain pass's rate: 0.50 against 0.67 there.
SCATTERED_SHARE = 0.75


@dataclass
class Pass:
    """Seconds by part, and bytes sent by dimension."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_EXPOSED, 0.0))
    hidden: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_EXPOSED, 0.0))
    volume: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_EXPOSED, 0.0))

    @property
    def seconds(self) -> float:
        return self.gemm + self.attention + self.elementwise + sum(self.exposed.values())

    def add(self, other: "Pass", times: float = 1.0) -> None:
        self.gemm += times * other.gemm
        self.attention += times * other.attention
        self.elementwise += times * other.elementwise
        for mine, theirs in (
            (self.exposed, other.exposed),
            (self.hidden, other.hidden),
            (self.volume, other.volume),
        ):
            for name, value in theirs.items():
                mine[name] += times * value

    def beside(self, axis: str, seconds: float, compute: float, slowdown: float) -> None:
        """A collective that may run while `compute` seconds of work do. Both share the device:
        what is hidden slows the work by `slowdown` of its time."""
        hidden = min(seconds, compute)
        self.hidden[axis] += hidden
        self.exposed[axis] += seconds - hidden + slowdown * hidden


@dataclass
class Three:
    """A layer's forward, input half and weight half."""

    forward: Pass = field(default_factory=Pass)
    inputs: Pass = field(default_factory=Pass)
    weights: Pass = field(default_factory=Pass)


class Passes:
    """Times of a layout's passes."""

    def __init__(self, job: Job, cluster: ClusterSpec, layout: Layout, kernels: Kernels) -> None:
        self.job, self.layout, self.kernels = job, layout, kernels
        self.tokens = local_tokens(job, layout)
        self.whole = self.tokens / (layout.tp if layout.sequence_parallel else 1)
        self.tp = group_of(layout, cluster, "tp")
        self.cp = group_of(layout, cluster, "cp")
        self.ep = group_of(layout, cluster, "ep")

    def layer(self, number: int) -> Three:
        """Layer `number`; equal ones take the same time."""
        three = Three()
        for linear in linears(self.job.model, number):
            self._linear(three, linear)
        self._attention(three)
        self._elementwise(three, number)
        if self.job.model.is_moe(number):
            self._experts(three)
        if self.layout.recompute == "full":
            three.inputs.add(three.forward)
        elif self.layout.recompute == "op":
            self._elementwise(again := Three(), number)
            three.inputs.add(again.forward)
            for linear in linears(self.job.model, number):
                self._linear(again := Three(), linear)
                three.inputs.add(again.forward, 1 - kept_by_op(self.job.model, linear))
        elif self.layout.recompute == "selective" and self.job.attention == "unfused":
            again = Three()
            self._attention(again)
            three.inputs.add(again.forward)
        return three

    def _linear(self, three: Three, linear: Linear) -> None:
        local = local_linear(linear, self.job.model, self.layout)
        copies = local.copies
        rows = self.tokens * linear.rows * (self.layout.ep if linear.copies > 1 else 1)
        if linear.copies > 1:
            rows /= linear.copies
        sharded = linear.shard != "whole" or not self.layout.sequence_parallel
        if not sharded:
            rows /= self.layout.tp
        n, k, gemm = local.outputs, local.inputs, self.kernels.gemm
        wide = linear.name == "router"
        forward, inputs = gemm(rows, n, k, copies, wide=wide), gemm(rows, k, n, copies, wide=wide)
        weights = gemm(n, k, rows, copies, accumulate=True, wide=wide)
        three.forward.gemm += forward
        three.inputs.gemm += inputs
        three.weights.gemm += weights
        if self.kernels.dtype == "fp8" and not wide:
            # Read in 16 bits, written in 8, once as it is and once transposed. A norm or an
            # activation function casts what it writes; attention, the exchange of experts' tokens
            # and the sum of gradients do not; a norm before experts writes 16 bits for the router.
            if linear.name in ("projection", "expert up", "shared up"):
                three.forward.elementwise += self.kernels.move(4 * rows * copies * k)
            if not linear.name.endswith(" up") and linear.name != "up":
                three.inputs.elementwise += self.kernels.move(4 * rows * copies * n)
        if linear.shard == "whole" or self.tp.size == 1 or linear.name in _SHARES_A_COLLECTIVE:
            return
        size = self.job.bytes.activation * self.job.model.hidden * self.tokens
        if linear.copies > 1 and self.layout.ep > 1:
            size *= linear.rows  # tokens come from other ranks, a copy per expert
        column = linear.shard == "column"
        self._tensor_parallel(three, column, size, forward, inputs, weights)

    def _tensor_parallel(
        self,
        three: Three,
        column: bool,
        size: float,
        forward: float,
        inputs: float,
        weights: float,
    ) -> None:
        """A column-parallel matrix needs its input on all ranks and sums its input's gradient; a
        row-parallel one sums its output. Megatron's autograd functions hide the column's backward:
        the gradient's sum beside the weight half, the input's second gather beside the input half.
        """
        t, slow = self.tp, self.tp.sm_share
        ring = (t.size - 1) / t.size * size
        if not self.layout.overlap_backward:
            inputs = weights = 0.0
        if self.layout.sequence_parallel:
            once = t.gather(size)
            if column:
                self._pieces(three.forward, once, forward)
                three.inputs.beside("tp", once, inputs, slow)
                three.weights.beside("tp", once, weights, slow)
                three.inputs.volume["tp"] += ring
                three.weights.volume["tp"] += ring
            else:
                self._pieces(three.forward, once, forward)
                self._pieces(three.inputs, once, inputs)
                three.inputs.volume["tp"] += ring
            three.forward.volume["tp"] += ring
        elif column:
            three.weights.beside("tp", t.reduce(size), weights, slow)
            three.weights.volume["tp"] += 2 * ring
        else:
            self._pieces(three.forward, t.reduce(size), forward)
            three.forward.volume["tp"] += 2 * ring

    def _pieces(self, into: Pass, seconds: float, gemm: float) -> None:
        """A collective before or after its own GEMM: hidden only in pieces, as many as ranks."""
        if not self.layout.overlap_tp:
            into.exposed["tp"] += seconds
            return
        together = max(seconds, gemm) + min(seconds, gemm) / self.tp.size
        left = min(seconds, together - gemm)
        into.hidden["tp"] += seconds - left
        into.exposed["tp"] += left + self.tp.sm_share * (seconds - left)

    def _attention(self, three: Three) -> None:
        model, t = self.job.model, self.layout.tp
        heads = model.heads / t
        if model.latent is not None:
            latent = model.latent
            width = (latent.plain + latent.rotary + latent.value) / 2
        else:
            width = float(model.head_dim)
        flops = 4.0 * self.tokens * self.job.seq * heads * width
        if self.job.attention == "flash":
            share = LATENT_SHARE if model.latent is not None else (1.0, 1.0)
            keys = float(self.job.seq)
            forward = self.kernels.flash(flops / 2, keys, width, share=share[0])
            backward = self.kernels.flash(
                2.5 * flops / 2, keys, width, backward=True, share=share[1]
            )
            three.forward.attention += forward
            three.inputs.attention += backward
            self._context(three, forward, backward)
            return
        # Scores in 16 bits through memory, whole: two batched GEMMs forward, four backward; scale,
        # mask and softmax in one kernel; dropout in another.
        scores = heads * self.tokens * self.job.seq
        two = 2 * self.kernels.batched(flops / 2, 2 * scores)
        mask = 5.0 if self.job.dropout else 0.0
        three.forward.attention += two + self.kernels.move((4 + mask) * scores, 2)
        three.inputs.attention += 2 * two + self.kernels.move((6 + mask) * scores, 2)
        self._context(three, two, 2 * two)

    def _context(self, three: Three, forward: float, backward: float) -> None:
        """Context parallelism: keys and values go round beside the attention (ring), sequence and
        heads change places (Ulysses), or keys and values are gathered first."""
        c, model, e = self.cp.size, self.job.model, self.job.bytes.activation
        if c == 1:
            return
        t = self.layout.tp
        keys = max(model.kv_heads / t, 1.0) * model.head_dim
        queries = model.heads / t * model.head_dim
        if model.latent is not None:
            keys = queries
        both = 2 * e * keys * self.tokens
        kind = self.layout.cp_kind
        if kind == "ring":
            hop = self.cp.hop(both)
            three.forward.beside("cp", (c - 1) * hop, forward * (c - 1) / c, self.cp.sm_share)
            three.inputs.beside("cp", 2 * (c - 1) * hop, backward * (c - 1) / c, self.cp.sm_share)
            sent = (c - 1) * both
        elif kind == "ulysses":
            around = 2 * e * (queries + max(keys, model.head_dim)) * self.tokens
            three.forward.exposed["cp"] += self._exchanges(self.cp, around, 4)
            three.inputs.exposed["cp"] += self._exchanges(self.cp, around, 4)
            sent = (c - 1) / c * around
        else:
            gathered = self.cp.gather(c * both)
            three.forward.exposed["cp"] += gathered
            three.inputs.exposed["cp"] += 2 * gathered
            sent = (c - 1) * both
        three.forward.volume["cp"] += sent
        three.inputs.volume["cp"] += sent * (1 if kind == "ulysses" else 2)

    def _exchanges(self, group: Group, held: float, calls: int) -> float:
        """All-to-alls of `held` bytes in all, with a pass over memory that packs and one that
        unpacks them."""
        return calls * group.exchange(held / calls) + self.kernels.move(4 * held, 2 * calls)

    def _elementwise(self, three: Three, number: int) -> None:
        """Norms, residual sums, dropout, positions and the activation function: bytes that each
        reads and writes."""
        model, e, t = self.job.model, self.job.bytes.activation, self.layout.tp
        h, move = model.hidden, self.kernels.move
        mask = 1.0 if self.job.dropout else 0.0
        # Forward: 2 norms (read, write), 2 sums with the residual (2 reads, write).
        forward = self.whole * h * 2 * (2 * e + 3 * e + mask)
        # Backward: 2 norms (2 reads, write), 2 sums of gradients, the masks once more.
        backward = self.whole * h * 2 * (3 * e + 3 * e + mask * (2 * e + 1))
        kernels_forward, kernels_backward = 4.0, 6.0
        turned = model.heads + model.kv_heads
        if model.positions == "rotary":
            rotary = self.tokens * 2 * e * turned * model.head_dim / t
            forward, backward = forward + rotary, backward + rotary
            kernels_forward, kernels_backward = kernels_forward + 2, kernels_backward + 2
        # Norms of the heads of q and k, or of the low ranks (which tp does not shard): as above.
        normed = 0.0
        if model.head_norms:
            normed = self.tokens * turned * model.head_dim / t
        elif model.latent is not None:
            normed = self.whole * (model.latent.query_rank + model.latent.key_value_rank)
        if normed:
            forward, backward = forward + 2 * e * normed, backward + 3 * e * normed
            kernels_forward, kernels_backward = kernels_forward + 2, kernels_backward + 2
        width = float(model.ffn)
        if model.is_moe(number) and model.experts is not None:
            width = model.experts.active * model.experts.ffn + model.experts.shared_ffn
        gated = model.gated
        forward += self.tokens * width / t * e * (3 if gated else 2)
        backward += self.tokens * width / t * e * (5 if gated else 3)
        three.forward.elementwise += move(forward, kernels_forward + 1)
        three.inputs.elementwise += move(backward, kernels_backward + 1)

    def _experts(self, three: Three) -> None:
        """Routing: scores choose each token's experts; its copies are sorted by expert, exchanged,
        and brought back."""
        model, experts = self.job.model, self.job.model.experts
        assert experts is not None
        e, move = self.job.bytes.activation, self.kernels.move
        copies = self.whole * experts.active * model.hidden * e
        exchanged = self.ep.exchange(copies)
        # Tokens become copies in the order of experts; those that came are sorted by expert where a
        # rank has several, and back; then they are summed into tokens. A token's row is read or
        # written once for all its copies.
        several = experts.count > self.layout.ep
        rows = 2 + 2 / experts.active + (4 if several else 0)
        sorting = move(rows * copies / SCATTERED_SHARE, 6 if several else 4)
        for half in (three.forward, three.inputs):
            half.exposed["ep"] += 2 * exchanged
            half.elementwise += sorting
            half.volume["ep"] += 2 * (self.ep.size - 1) / self.ep.size * copies
        # How many copies go to each expert is exchanged first.
        three.forward.exposed["ep"] += self.ep.exchange(4 * experts.count)
        # Float32 scores: the function, its top, the loss that balances; their gradients.
        scores = 4 * self.whole * experts.count
        three.forward.elementwise += move(4 * scores, 3)
        three.inputs.elementwise += move(3 * scores, 2)
        # A sum (2 reads, write) of the routed and the shared experts' outputs; backward of the
        # gradients of the input that the router, the routed and the shared experts have in common.
        shared = 1 if experts.shared_ffn else 0
        summed = 3 * e * self.whole * model.hidden
        three.forward.elementwise += move(shared * summed, shared)
        three.inputs.elementwise += move((1 + shared) * summed, 1 + shared)

    def embedding(self) -> Three:
        """The table is read, its gradient added up."""
        three = Three()
        model, e = self.job.model, self.job.bytes.activation
        moved = self.tokens * model.hidden * e
        three.forward.elementwise += self.kernels.move(2 * moved)
        three.weights.elementwise += self.kernels.move(6 * moved)
        if self.tp.size > 1:
            once = self.tp.gather(moved) if self.layout.sequence_parallel else self.tp.reduce(moved)
            three.forward.exposed["tp"] += once
        return three

    def head(self) -> Three:
        """The last norm, the output layer in 16 bits, and the loss: logits as 32-bit numbers."""
        three = Three()
        model, e = self.job.model, self.job.bytes.activation
        n = model.padded_vocab(self.layout.tp) / self.layout.tp
        k, rows, gemm = model.hidden, self.tokens, self.kernels.gemm
        three.forward.gemm += gemm(rows, n, k, wide=True)
        three.inputs.gemm += gemm(rows, k, n, wide=True)
        three.weights.gemm += gemm(n, k, rows, accumulate=True, wide=True)
        # Read in 16 bits; written, read for maximum and sum in 32; the gradient over them.
        three.forward.elementwise += self.kernels.move(rows * n * (e + 4 + 4 + 4), 4)
        three.inputs.elementwise += self.kernels.move(rows * n * (4 + e), 2)
        if self.job.loss == "plain":  # a copy in 32 bits; its gradient filled, and read once more
            three.forward.elementwise += self.kernels.move(rows * n * 4, 1)
            three.inputs.elementwise += self.kernels.move(rows * n * (4 + 8), 2)
        three.forward.elementwise += self.kernels.move(self.whole * k * 2 * e)
        three.inputs.elementwise += self.kernels.move(self.whole * k * 3 * e)
        if self.tp.size > 1:
            size = e * k * rows
            once = self.tp.gather(size) if self.layout.sequence_parallel else 0.0
            three.forward.exposed["tp"] += once
            three.weights.beside(
                "tp",
                once if self.layout.sequence_parallel else self.tp.reduce(size),
                three.weights.gemm if self.layout.overlap_backward else 0.0,
                self.tp.sm_share,
            )
        return three

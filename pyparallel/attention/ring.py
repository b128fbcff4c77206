"""The exchange of keys and values between the R ranks of a column, and the steps that use them.

    ring         hop t: this rank computes with the keys of the rank t places before it, while those
                 of the next hop arrive: two receive buffers, made once per call. Keys come straight
                 from their owner, and only those that some query here sees: a window's ring is a
                 halo exchange, and packed documents send what crosses a border.
    all_gather   all hops' keys first, then one step over all of them

Where the group has a shelf (shelf.py) nobody sends keys: a rank lays its own there, and copies what
it needs from the others' on a stream beside the kernels. Hops, buffers and what moves are the same.

The softmax's state goes on from hop to hop in float32 (float64), so the result does not depend on R
but for the order of its sums. In backward, dk and dv of a hop go back to the owner of the keys in
float32 (float64), who adds them in hop order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyparallel.attention.heads import Heads
from pyparallel.attention.needs import Part, add_rows, select_rows
from pyparallel.attention.pieces import Pieces
from pyparallel.attention.plan import Plan
from pyparallel.attention.shelf import Laid
from pyparallel.attention.state import State, accumulator_dtype
from pyparallel.attention.transport import Message, Transport

__all__ = ["Column"]

_KEYS, _GRADIENTS = 0x5A01, 0x5A02  # tags


def _nothing() -> None:
    pass


@dataclass
class _Arrived:
    k: Tensor
    v: Tensor
    pieces: Pieces


class Column:
    """One rank's part of one attention among the ranks of its column."""

    def __init__(self, plan: Plan, transport: Transport, heads: Heads) -> None:
        self._plan = plan
        self._transport = transport
        self._heads = heads
        self._peers = plan.column(transport.rank)
        self._size = plan.outer
        self._me = self._peers.index(transport.rank)
        self.queries = plan.queries(self._me)
        self._own = plan.keys(self._me)

    def _takes(self, hop: int) -> Part:
        return self._plan.needs(self._me, (self._me - hop) % self._size)

    def _gives(self, hop: int) -> Part:
        return self._plan.needs((self._me + hop) % self._size, self._me)

    def _source(self, hop: int) -> int:
        return self._peers[(self._me - hop) % self._size]

    def _target(self, hop: int) -> int:
        return self._peers[(self._me + hop) % self._size]

    # --- forward

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> State:
        """The state after all keys that these queries see."""
        state = State.empty(q, v.shape[3])
        if self._plan.strategy == "all_gather":
            every = self._gather(k, v)
            self._heads.forward(q, every.k, every.v, self.queries, every.pieces, state)
            return state
        arrivals = _Arrivals(self, k, v)
        for hop in range(self._size):
            now = arrivals.take(hop)
            self._heads.forward(q, now.k, now.v, self.queries, now.pieces, state)
        return state

    def lay(self, k: Tensor, v: Tensor) -> Laid | None:
        """The keys where the other ranks fetch them; None: they are sent. Collective."""
        shelf = self._transport.shelf
        if shelf is None or self._size == 1:
            return None
        plan, batch = self._plan, k.shape[0]
        widths = k.shape[3], v.shape[3]
        of_ranks = [plan.key_shape(rank) for rank in range(plan.world)]
        shapes = [tuple((batch, *of_rank, d) for d in widths) for of_rank in of_ranks]
        return shelf.lay((k, v), shapes, (plan.strategy, plan.ulysses))

    def _fetch(self, laid: Laid, hop: int, k: Tensor, v: Tensor) -> Callable[[], None]:
        source, part, gives = self._source(hop), self._takes(hop), self._gives(hop)
        width = k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
        traffic = self._transport.traffic
        traffic.messages += 2 * (gives.count > 0)
        traffic.bytes_sent += gives.count * width
        traffic.bytes_received += part.count * width
        return laid.fetch(source, part, (k, v))

    def start_hop(
        self, hop: int, k: Tensor, v: Tensor, buffer: Tensor, laid: Laid | None
    ) -> "_Hop":
        """Sends what the rank `hop` places on needs; receives into the flat `buffer`."""
        gives, takes = self._gives(hop), self._takes(hop)
        k_in, v_in = _cut(buffer, takes.count, k, v)
        if laid is not None:
            return _Hop(_Arrived(k_in, v_in, takes.pieces), self._fetch(laid, hop, k_in, v_in))
        target, source = self._target(hop), self._source(hop)
        wait = self._transport.exchange(
            [Message(target, select_rows(k, gives)), Message(target, select_rows(v, gives))],
            [Message(source, k_in), Message(source, v_in)],
            _KEYS,
        )
        return _Hop(_Arrived(k_in, v_in, takes.pieces), wait)

    def most_taken(self) -> int:
        """The most rows that arrive in one hop."""
        return max((self._takes(hop).count for hop in range(1, self._size)), default=0)

    def _gather(self, k: Tensor, v: Tensor) -> _Arrived:
        """All keys that these queries see, in the order of hops, the own first."""
        counts = [k.shape[1], *(self._takes(hop).count for hop in range(1, self._size))]
        batch, _, heads, d = k.shape
        every_k = k.new_empty((batch, sum(counts), heads, d))
        every_v = v.new_empty((batch, sum(counts), heads, v.shape[3]))
        sends, receives = [], []
        parts = list(zip(every_k.split(counts, 1), every_v.split(counts, 1), strict=True))
        laid = self.lay(k, v)
        if laid is not None:
            waits = [self._fetch(laid, hop, *parts[hop]) for hop in range(1, self._size)]
        else:
            for hop in range(1, self._size):
                gives, target, source = self._gives(hop), self._target(hop), self._source(hop)
                sends += [Message(target, select_rows(x, gives)) for x in (k, v)]
                receives += [Message(source, part) for part in parts[hop]]
            waits = [self._transport.exchange(sends, receives, _KEYS)]
        parts[0][0].copy_(k)
        parts[0][1].copy_(v)
        for wait in waits:
            wait()
        tables = [self._own, *(self._takes(hop).pieces for hop in range(1, self._size))]
        return _Arrived(every_k, every_v, Pieces.joined(zip(tables, counts, strict=True)))

    # --- backward

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv in float32 (float64); delta as for `backward_step`."""
        dtype = accumulator_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        fixed = dout, q, lse, delta, dq, deterministic
        if self._plan.strategy == "all_gather":
            self._backward_of_all(fixed, k, v, dk, dv)
        else:
            self._backward_by_hops(fixed, k, v, dk, dv)
        return dq, dk, dv

    def _step(
        self,
        fixed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool],
        keys: _Arrived,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        dout, q, lse, delta, dq, deterministic = fixed
        self._heads.backward(
            dout, q, keys.k, keys.v, lse, delta, self.queries, keys.pieces, dq, dk, dv,
            deterministic,
        )  # fmt: skip

    def _backward_by_hops(
        self,
        fixed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool],
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        arrivals = _Arrivals(self, k, v)
        gradients = _Gradients(self, dk, dv)
        for hop in range(self._size):
            now = arrivals.take(hop)
            if hop == 0:
                self._step(fixed, now, dk, dv)
            else:
                gone = gradients.outgoing(hop)
                self._step(fixed, now, *gone)
                gradients.send(hop, *gone)
        gradients.finish()

    def _backward_of_all(
        self,
        fixed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool],
        k: Tensor,
        v: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        every = self._gather(k, v)
        every_dk = torch.zeros(every.k.shape, dtype=dk.dtype, device=dk.device)
        every_dv = torch.zeros(every.v.shape, dtype=dv.dtype, device=dv.device)
        self._step(fixed, every, every_dk, every_dv)
        counts = [k.shape[1], *(self._takes(hop).count for hop in range(1, self._size))]
        parts = list(zip(every_dk.split(counts, 1), every_dv.split(counts, 1), strict=True))
        dk.copy_(parts[0][0])
        dv.copy_(parts[0][1])
        sends, receives, arrived = [], [], []
        for hop in range(1, self._size):
            sends += [Message(self._source(hop), part) for part in parts[hop]]
            arrived.append(self._room(self._gives(hop), dk, dv))
            receives += [Message(self._target(hop), x) for x in arrived[-1]]
        self._transport.exchange(sends, receives, _GRADIENTS)()
        for hop, (more_dk, more_dv) in enumerate(arrived, 1):
            add_rows(dk, self._gives(hop), more_dk)
            add_rows(dv, self._gives(hop), more_dv)

    def _room(self, part: Part, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        """Uninitialised, for the gradients of a part's keys."""
        return (
            dk.new_empty((dk.shape[0], part.count, *dk.shape[2:])),
            dv.new_empty((dv.shape[0], part.count, *dv.shape[2:])),
        )

    def start_gradients(
        self, hop: int, gone: tuple[Tensor, Tensor], buffer: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Callable[[], None]]:
        """Sends a hop's dk and dv to the owner of its keys; receives those of the own keys."""
        gives = self._gives(hop)
        come = _cut(buffer, gives.count, *gone)
        wait = self._transport.exchange(
            [Message(self._source(hop), x) for x in gone],
            [Message(self._target(hop), x) for x in come],
            _GRADIENTS,
        )
        return come, wait


@dataclass
class _Hop:
    keys: _Arrived
    wait: Callable[[], None]


class _Arrivals:
    """The keys of one hop after another, the next hop's arriving meanwhile in the other buffer."""

    def __init__(self, column: Column, k: Tensor, v: Tensor) -> None:
        self._column, self._k, self._v = column, k, v
        elements = column.most_taken() * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
        count = min(2, column._size - 1)
        self._buffers = [k.new_empty(elements) for _ in range(count)]
        self._laid = column.lay(k, v)
        self._next: _Hop | None = None
        self._start(1)

    def _start(self, hop: int) -> None:
        self._next = None
        if hop < self._column._size:
            buffer = self._buffers[hop % len(self._buffers)]
            self._next = self._column.start_hop(hop, self._k, self._v, buffer, self._laid)

    def take(self, hop: int) -> _Arrived:
        """The keys of `hop`; asked for in order. Those of the hop before are gone."""
        if hop == 0:
            return _Arrived(self._k, self._v, self._column._own)
        now = self._next
        assert now is not None
        now.wait()
        self._start(hop + 1)
        return now.keys


class _Gradients:
    """dk and dv on their way home: what this rank sends, and what comes for its own keys."""

    def __init__(self, column: Column, dk: Tensor, dv: Tensor) -> None:
        self._column, self._dk, self._dv = column, dk, dv
        sizes = range(1, column._size)
        width = dk.shape[0] * dk.shape[2] * (dk.shape[3] + dv.shape[3])
        most_out = max((column._takes(h).count for h in sizes), default=0) * width
        most_in = max((column._gives(h).count for h in sizes), default=0) * width
        self._out = [dk.new_empty(most_out) for _ in sizes[:2]]
        self._in = dk.new_empty(most_in)
        self._finish: Callable[[], None] = _nothing

    def outgoing(self, hop: int) -> tuple[Tensor, Tensor]:
        """Zeros for the gradients of the hop's keys, in a buffer that is free."""
        flat = self._out[hop % len(self._out)]
        k, v = _cut(flat, self._column._takes(hop).count, self._dk, self._dv)
        return k.zero_(), v.zero_()

    def send(self, hop: int, dk: Tensor, dv: Tensor) -> None:
        """Adds what came for the hop before, then starts this one's."""
        self._finish()
        come, wait = self._column.start_gradients(hop, (dk, dv), self._in)

        def finish() -> None:
            wait()
            gives = self._column._gives(hop)
            add_rows(self._dk, gives, come[0])
            add_rows(self._dv, gives, come[1])

        self._finish = finish

    def finish(self) -> None:
        self._finish()
        self._finish = _nothing


def _cut(flat: Tensor, rows: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The front of a flat buffer as [batch, rows, heads, d] and [batch, rows, heads, d_v]."""
    k_shape = (k.shape[0], rows, *k.shape[2:])
    v_shape = (v.shape[0], rows, *v.shape[2:])
    k_count, v_count = k_shape[0] * rows * k_shape[2] * k_shape[3], 0
    v_count = v_shape[0] * rows * v_shape[2] * v_shape[3]
    return flat[:k_count].view(k_shape), flat[k_count : k_count + v_count].view(v_shape)

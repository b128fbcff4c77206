"""How packets travel: over a process group, or between rows of one process.

A meeting over a group is up to three batches of messages, with the same members on both sides: the
sizes of descriptions, the descriptions, the tensors. The first two go only where the packet may
have a shape that this channel has not had for microbatches of this kind; both sides know when. All
that travels is bytes, in the order of the plan; no tags are needed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyparallel.pipeline.packets import (
    Packet,
    Shape,
    TensorShape,
    as_bytes,
    empty,
    from_wire,
    to_wire,
)
from pyparallel.pipeline.row import Key, Row
from pyparallel.schedule import Action, Channel, Kind, Unit

__all__ = ["GroupTransport", "LocalTransport"]

_REMEMBERED = 256  # shapes per channel
_SENDING = 8  # messages that may be under way; the plan allows each to be waited for at once
_FAILED = -1
_LONGEST = 1 << 24  # bytes of a description: more comes from no peer of ours


class LocalTransport:
    """All rows in one process. A receive lets the other rows go on until its message is there."""

    def __init__(self) -> None:
        self._under_way: dict[Key, Any] = {}

    def meet(self, row: Row, unit: Unit) -> Iterator[None]:
        for action in unit.actions:
            if action.kind.is_send:
                key = Key.of(action)
                self._under_way[key] = row.outbox.pop(key, None)
        for action in unit.actions:
            if action.kind.is_recv:
                key = Key.of(action)
                while key not in self._under_way:
                    yield
                value = self._under_way.pop(key)
                if value is None:
                    row.fail(None)
                row.inbox[key] = lambda value=value: value  # type: ignore[misc]

    def finish(self) -> None:
        self._under_way.clear()


class GroupTransport:
    """One row per process.

    Args:
        group: rank r of the group runs row r.
        device: where received tensors are to be.
        fixed_shapes: descriptions travel only where microbatches are of a new kind; else with each
            packet.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, fixed_shapes: bool) -> None:
        self.group, self.device, self.fixed_shapes = group, device, fixed_shapes
        # On CPU each message has a progress of its own: a batch would give nothing but its
        # overhead. On CUDA a meeting is one kernel on the backend's own stream, which waits for the
        # passes before it by an event; the passes go on meanwhile, and the one that needs the
        # message makes their stream wait for it, not the host.
        self.batched = device.type != "cpu"
        self._known: dict[Channel, dict[tuple[int, bool], Shape]] = {}
        self._sending: list[tuple[_Pending, Tensor]] = []

    def meet(self, row: Row, unit: Unit) -> Iterator[None]:
        assert unit.partner is not None
        self._drop_sent()
        shapes = self._agree_on_shapes(row, unit, unit.partner)
        ops: list[tuple[bool, Tensor]] = []
        arriving: list[tuple[Key, Shape | None, list[Tensor] | None, slice]] = []
        for action in unit.actions:
            key, shape = Key.of(action), shapes[action]
            wanted = () if shape is None else shape.gradients if key.gradient else shape.tensors
            if action.kind.is_send:
                tensors = self._to_send(row, key, wanted)
            else:
                tensors = [empty(one, self.device) for one in wanted]
                if shape is None:
                    row.fail(None)
            first = len(ops)
            data = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
            ops += [(action.kind.is_send, one) for one in data]
            if not action.kind.is_send:
                its = slice(first, len(ops))
                arriving.append((key, shape, None if shape is None else tensors, its))
        under_way = self._start(ops, unit.partner)
        self._sending += [
            (pending, data)
            for pending, (is_send, data) in zip(under_way, ops, strict=True)
            if is_send
        ]
        for key, shape, received, its in arriving:
            row.inbox[key] = _arrival(under_way[its], key, shape, received)
        return iter(())

    def finish(self) -> None:
        """Waits for what is still on its way."""
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()

    def _to_send(self, row: Row, key: Key, wanted: tuple[TensorShape, ...]) -> list[Tensor]:
        """A packet's tensors, or where there is none after a failure, zeros: the other side waits
        for so many bytes."""
        value = row.outbox.pop(key, None)
        if value is None:
            return [empty(one, self.device).zero_() for one in wanted]
        tensors = value if key.gradient else value.tensors
        misfits = [
            f"{tuple(tensor.shape)} {tensor.dtype} for {one}"
            for tensor, one in zip(tensors, wanted, strict=True)
            if tuple(tensor.shape) != one.shape or tensor.dtype != one.dtype
        ]
        if misfits:
            row.fail(ValueError(f"gradients of stage {key.stage + 1}: {'; '.join(misfits)}"))
            return [empty(one, self.device).zero_() for one in wanted]
        return list(tensors)

    def _agree_on_shapes(self, row: Row, unit: Unit, partner: int) -> dict[Action, Shape | None]:
        """The shape of each transfer's packet; None where its sender has failed."""
        shapes: dict[Action, Shape | None] = {}
        unknown: list[Action] = []
        for action in unit.actions:
            if action.kind.direction < 0:  # gradients are like what went forward
                stage = action.stage - 1 if action.kind.is_send else action.stage
                shapes[action] = row.shapes.get((stage, action.microbatch))
                continue
            known = self._shapes_of(row, action).get(self._kind(row, action))
            shapes[action] = known
            if known is None:
                unknown.append(action)
            elif action.kind is Kind.SEND_ACTIVATION:
                self._check(row, action, known)
        if unknown:
            shapes.update(self._describe(row, unknown, partner))
        for action, shape in shapes.items():
            if action.kind.direction > 0 and shape is not None:
                sender = action.stage if action.kind.is_send else action.stage - 1
                row.shapes[sender, action.microbatch] = shape
        return shapes

    def _describe(
        self, row: Row, unknown: list[Action], partner: int
    ) -> dict[Action, Shape | None]:
        packets: dict[Action, Packet | None] = {
            a: row.outbox.get(Key.of(a)) for a in unknown if a.kind.is_send
        }
        texts = {a: b"" if p is None else to_wire(p.shape) for a, p in packets.items()}
        sizes = {}
        for action in unknown:
            size = len(texts[action]) or _FAILED if action in texts else 0
            sizes[action] = torch.tensor([size], dtype=torch.int64, device=self.device)
        self._exchange([(a.kind.is_send, as_bytes(sizes[a])) for a in unknown], partner)
        lengths = {action: int(size.item()) for action, size in sizes.items()}
        bodies: dict[Action, Tensor] = {}
        for action in unknown:
            if not _FAILED <= lengths[action] <= _LONGEST:
                raise ValueError(
                    f"{action}: rank {partner} announces a description of {lengths[action]} bytes"
                )
            if lengths[action] != _FAILED:
                body = torch.frombuffer(
                    bytearray(texts.get(action) or lengths[action]), dtype=torch.uint8
                )
                bodies[action] = body.to(self.device)
        self._exchange([(a.kind.is_send, body) for a, body in bodies.items()], partner)
        found: dict[Action, Shape | None] = {}
        for action in unknown:
            packet = packets.get(action)
            shape: Shape | None = None
            if packet is not None:
                shape = packet.shape
            elif action in bodies:
                shape = from_wire(bytes(bodies[action].tolist()))
            found[action] = shape
            if shape is not None and not shape.plain and self.fixed_shapes:
                remembered = self._shapes_of(row, action)
                if len(remembered) == _REMEMBERED:
                    remembered.clear()  # on both sides at the same message
                remembered[self._kind(row, action)] = shape
        return found

    def _shapes_of(self, row: Row, action: Action) -> dict[tuple[int, bool], Shape]:
        return self._known.setdefault(row.job.plan.channel(action), {})

    def _kind(self, row: Row, action: Action) -> tuple[int, bool]:
        return (row.job.kinds[action.microbatch], row.job.training)

    def _check(self, row: Row, action: Action, known: Shape) -> None:
        packet = row.outbox.get(Key.of(action))
        if packet is not None and packet.shape != known:
            row.fail(
                ValueError(
                    f"{action} on rank {row.rank}: stage {action.stage} gave {packet.shape}, and "
                    f"{known} for an earlier microbatch of the same input shapes; where shapes or "
                    "structures depend on data, pass fixed_shapes=False"
                )
            )
            del row.outbox[Key.of(action)]

    def _start(self, ops: list[tuple[bool, Tensor]], partner: int) -> "list[_Pending]":
        """What to wait for, message by message."""
        if not ops or not self.batched:
            return [
                _Pending([(self.group.send if is_send else self.group.recv)([data], partner, 0)])
                for is_send, data in ops
            ]
        batch = [
            dist.P2POp(
                dist.isend if is_send else dist.irecv, data, group=self.group, group_peer=partner
            )
            for is_send, data in ops
        ]
        works = dist.batch_isend_irecv(batch)
        if len(works) != len(ops):  # a backend that makes one of all
            return [_Pending(works)] * len(ops)
        return [_Pending([work]) for work in works]

    def _exchange(self, ops: list[tuple[bool, Tensor]], partner: int) -> None:
        for pending in self._start(ops, partner):
            pending.wait()

    def _drop_sent(self) -> None:
        """Lets go of what has been sent, so that its memory is free."""
        self._sending = [entry for entry in self._sending if not entry[0].is_completed()]
        while len(self._sending) > _SENDING:  # gloo does not tell before one waits
            self._sending.pop(0)[0].wait()


class _Pending:
    """Messages under way. Each is waited for once: on gloo a second wait never ends (torch
    2.13)."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _arrival(
    messages: list[_Pending], key: Key, shape: Shape | None, tensors: list[Tensor] | None
) -> Callable[[], Any]:
    def wait() -> Any:
        for message in messages:
            message.wait()
        if shape is None or tensors is None:
            return None
        return tensors if key.gradient else Packet(shape, tensors)

    return wait

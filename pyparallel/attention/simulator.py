"""P virtual ranks in one process, each a thread: to check a sharding without launching anything.

    def step(group):                       # runs once per rank, as a process of a real group would
        out = sequence_parallel_attention(q[group.rank], k[...], v[...], group=group, causal=True)
        return out.sum().backward()
    results = simulate(4, step)

The strategies run unchanged: only the transport is another, which hands tensors over in memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyparallel.attention.transport import Message, Traffic
from pyparallel.errors import Aborted, InvalidArgument, Mismatch, Timeout

__all__ = ["SimulatedGroup", "simulate"]

T = TypeVar("T")

_DEVICES = ("cpu", "cuda")


class _World:
    """What the ranks of one simulation share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int, int], deque[Tensor]] = {}
        self.meetings: dict[int, dict[int, tuple[str, Any]]] = {}
        self.failure: str = ""

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """With `changed` held."""
        deadline = time.monotonic() + self.timeout
        while not self.failure and not ready():
            if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                self.fail(f"{what} did not come within {self.timeout:g} s")
                raise Timeout(f"simulated ranks: {self.failure}")
        if not ready():
            raise Aborted(f"simulated ranks: {self.failure}")

    def fail(self, why: str) -> None:
        with self.changed:
            self.failure = self.failure or why
            self.changed.notify_all()


class SimulatedGroup:
    """One virtual rank's seat; pass it as `group`. It is its own transport."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.world_size = world.size
        self.traffic = Traffic()
        self.shelf = None
        self._meetings = 0

    @property
    def attention_transport(self) -> "SimulatedGroup":
        return self

    def agree(self, note: str, facts: Sequence[int]) -> list[list[int]]:
        seen = self._meet(note, list(facts))
        return [seen[rank][1] for rank in range(self.world_size)]

    def refused(self, op: str, error: Exception) -> Exception:
        text = f"{op}, rank {self.rank} of {self.world_size} simulated ranks: {error}"
        self._world.fail(f"rank {self.rank} refused: {text}")
        kind = type(error) if isinstance(error, (TypeError, ValueError)) else InvalidArgument
        return kind(text)

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> Callable[[], None]:
        world = self._world
        with world.changed:
            for message in sends:
                if message.tensor.numel():
                    box = world.boxes.setdefault((self.rank, message.peer, tag), deque())
                    box.append(message.tensor.detach().clone())
                    self.traffic.messages += 1
                    self.traffic.bytes_sent += message.tensor.nbytes
            world.changed.notify_all()
        expected = [message for message in receives if message.tensor.numel()]

        def wait() -> None:
            for message in expected:
                key = (message.peer, self.rank, tag)
                with world.changed:
                    what = f"rank {self.rank}'s message {tag} from rank {message.peer}"
                    world.wait_for(lambda key=key: bool(world.boxes.get(key)), what)  # type: ignore[misc]
                    x = world.boxes[key].popleft()
                message.tensor.copy_(x.view(message.tensor.shape))
                self.traffic.bytes_received += x.nbytes
            expected.clear()

        return wait

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        seen = self._meet(f"gather dim {dim} sizes {list(sizes)}", x.detach().clone())
        self.traffic.bytes_sent += x.nbytes * (self.world_size - 1)
        return torch.cat([seen[rank][1] for rank in range(self.world_size)], dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        seen = self._meet(f"all_reduce {list(x.shape)} {x.dtype}", x.detach().clone())
        total = seen[0][1].clone()
        for rank in range(1, self.world_size):
            total += seen[rank][1]
        return x.copy_(total)

    def _meet(self, note: str, value: Any) -> dict[int, tuple[str, Any]]:
        """What every rank brought to its n-th meeting."""
        world = self._world
        number = self._meetings
        self._meetings += 1
        with world.changed:
            seen = world.meetings.setdefault(number, {})
            seen[self.rank] = note, value
            world.changed.notify_all()
            world.wait_for(lambda: len(seen) == world.size, f"the others of meeting {number}")
            world.meetings.pop(number - 2, None)
        notes = [seen[rank][0] for rank in range(world.size)]
        for rank, other in enumerate(notes):
            if other != notes[0]:
                raise Mismatch(
                    f"simulated ranks called different things: rank 0 {notes[0]}; "
                    f"rank {rank} {other}"
                )
        return seen


def simulate(
    world_size: int, fn: Callable[[SimulatedGroup], T], *, timeout: float = 60.0
) -> list[T]:
    """Calls `fn(group)` once for each of `world_size` virtual ranks; the results in rank order.

    Args:
        world_size: how many ranks, at least 1.
        fn: does what a process of a real group would do; it may call backward. Each rank starts
            with the caller's grad mode and autocast.
        timeout: seconds that a rank waits for another.

    Raises:
        What the first rank that failed raised.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise InvalidArgument(f"world_size is {world_size}; expected an int of at least 1")
    world = _World(world_size, timeout)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []
    # What torch keeps for each thread, all ranks have as the caller has it.
    grad = torch.is_grad_enabled()
    casts = [(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)]

    def run(rank: int) -> None:
        try:
            with ExitStack() as inside:
                inside.enter_context(torch.set_grad_enabled(grad))
                for device, dtype in casts:
                    inside.enter_context(torch.autocast(device, dtype))
                results[rank] = fn(SimulatedGroup(world, rank))
        except BaseException as error:
            errors.append((rank, error))
            world.fail(f"rank {rank} raised {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(1, world_size)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join(timeout)
    told = [error for _, error in errors if not isinstance(error, Aborted)] or [
        error for _, error in errors
    ]
    if told:
        raise told[0]
    if any(thread.is_alive() for thread in threads):
        raise Timeout(f"simulated ranks still ran {timeout:g} s after rank 0 had ended")
    return results

"""The group an op runs on: whatever names it, this process's `Seat` in it.

A group is given as a torch ProcessGroup of any backend, a DeviceMesh of one dimension, a
`pyparallel.comm.Communicator`, or the name that `group_name` gives for one of these, which is what
custom ops and compiled graphs carry. There is no default: no op ever runs on the world because
nothing else was said.
"""

import itertools
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from pyparallel.comm import Communicator
from pyparallel.comm.torch_backend import communicator_of
from pyparallel.errors import InvalidArgument
from pyparallel.ops.choosing import Chooser
from pyparallel.ops.device_path import KERNELS, DevicePath, unfit
from pyparallel.ops.engines import SYMMETRIC, Alone, Engine, Native, Torch, Unserved
from pyparallel.ops.grouped_path import GroupedPath

__all__ = ["MOST_PLANS", "Group", "Seat", "group_name", "key_of", "place_of", "seat_of"]

Group = "dist.ProcessGroup | DeviceMesh | Communicator | str"


class Seat:
    """This process's place in one group, and the engine that moves its data.

    Made once per group object, which owns it: nothing here keeps a group alive.
    """

    def __init__(self, name: str, engine: Engine, device_engine: Engine) -> None:
        """`engine` moves CPU tensors, `device_engine` those of an accelerator."""
        self.name = name
        self.engine = engine
        self._device_engine = device_engine
        self._device_paths: dict[torch.device, DevicePath] = {}
        self._grouped_paths: dict[torch.device, GroupedPath] = {}
        self.rank = engine.rank
        self.world_size = engine.world_size
        self.chooser = Chooser(engine.meeting)
        # Algorithm and note of calls that have been checked, by what they depend on (`key_of`).
        self.plans: dict[tuple[Any, ...], tuple[str, str]] = {}
        self.checked: set[tuple[Any, ...]] = set()  # of calls through torch's dispatcher, likewise
        self._barred: Mapping[str, str] | None = None  # not asked yet: that is collective

    def engine_of(self, x: torch.Tensor) -> Engine:
        """What moves tensors like `x`."""
        return self.engine if x.device.type == "cpu" else self._device_engine

    def device_path(self, device: torch.device) -> DevicePath:
        """The fused kernels of this group on `device`, for the algorithms that `choose` gives."""
        found = self._device_paths.get(device)
        if found is None:
            meeting = self.engine.meeting
            assert meeting is not None, "a group of one rank has no fused kernels"
            found = self._device_paths[device] = DevicePath(
                meeting, device, self.chooser.policy.tiles
            )
        return found

    def grouped_path(self, x: torch.Tensor) -> GroupedPath:
        """The kernels with an ordinary collective behind each group of tiles."""
        found = self._grouped_paths.get(x.device)
        if found is None:
            found = GroupedPath(self.device_path(x.device), self.engine_of(x))
            self._grouped_paths[x.device] = found
        return found

    def barred(self, note: str = "") -> Mapping[str, str]:
        """Algorithms that CPU tensors cannot take here, and why. Collective at first."""
        if self._barred is None:
            self.engine.note(note)
            barred = self.engine.barred()
            self.engine.note(note)
            _ = self.chooser.policy
            self._barred = barred
        return self._barred

    def choose(
        self,
        op: str,
        m: int,
        shared: int,
        x: torch.Tensor,
        algorithm: str | None,
        note: str,
        not_first: str = "",
        not_fused: str = "",
    ) -> str:
        """The algorithm of one call, alike on all ranks. Collective at the first of a group.

        `note` is that of the call; `not_first` says of which dim a call shares parts, where that
        is not the first; `not_fused` why no kernel can do all of this call.
        """
        device = x.device.type
        if device == "cpu" and self.is_interpreted(op, algorithm):
            device = "cuda"
        if self.world_size == 1:
            if algorithm is not None:  # of a group that may be larger elsewhere: a known one
                self.chooser.choose(op, m, shared, x.dtype, device, algorithm)
            return "plain"
        bars = self.barred(note)
        if device != "cpu":
            reason = not_first or not_fused
            bars = self.barred_kernels(op, shared, x.dtype, algorithm, reason)
        elif not_first:
            bars = {**dict.fromkeys(SYMMETRIC, not_first), **bars}
        try:
            choice = self.chooser.choose(op, m, shared, x.dtype, device, algorithm, bars)
        except ValueError as error:
            raise self.refused(op, error) from None
        return choice.algorithm

    def meet(self, note: str) -> None:
        """Waits for all ranks to come here with this note; raises on all where one does not."""
        if self.engine.meeting is not None:
            self.engine.note(note)
            self.engine.meeting.barrier()

    def refused(self, op: str, error: Exception) -> Exception:
        """Tells the other ranks, so that they raise and do not wait; gives what to raise here."""
        return self.engine.refused(op, error)

    def plan(
        self,
        key: tuple[Any, ...],
        op: str,
        m: int,
        shared: int,
        x: torch.Tensor,
        algorithm: str | None,
        note: str,
    ) -> tuple[str, str]:
        """`choose`, and the note, kept for the next call of this key."""
        plan = self.choose(op, m, shared, x, algorithm, note), note
        if len(self.plans) >= MOST_PLANS:  # of shapes that may never come back
            self.plans.clear()
        self.plans[key] = plan
        return plan

    def is_interpreted(self, op: str, algorithm: str | None) -> bool:
        """Whether a CPU call names a kernel, and Triton's interpreter can run it."""
        if not _INTERPRETED:
            return False
        return (algorithm or self.chooser.asked(op)) in KERNELS[op]

    def barred_kernels(
        self, op: str, shared: int, dtype: torch.dtype, algorithm: str | None, reason: str = ""
    ) -> dict[str, str]:
        """Which of an accelerator's algorithms cannot take this call, and why."""
        asked = algorithm or self.chooser.asked(op)
        bars = unfit(op, shared, dtype, asked, reason)
        if isinstance(self.engine, Native) and SYMMETRIC[0] in self.barred():
            why = self.barred()[SYMMETRIC[0]]
            bars = {**{name: why for name in KERNELS[op] if name != "signal"}, **bars}
        return bars


def key_of(*facts: Any) -> tuple[Any, ...]:
    """What the plan of a call depends on: of tensors all but values, strides and gradients."""
    return tuple(
        (type(x), x.shape, x.dtype, x.device, x.layout) if isinstance(x, torch.Tensor) else x
        for x in facts
    )


MOST_PLANS = 1024
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_seats: "weakref.WeakKeyDictionary[Any, Seat]" = weakref.WeakKeyDictionary()
_by_name: "weakref.WeakValueDictionary[str, Seat]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def seat_of(group: Any) -> Seat:
    """The seat in `group`. The first call for a group may be collective over its ranks."""
    if type(group) is Seat:
        return group
    if type(group) is str:
        return _seat_of_name(group)
    try:
        seat = _seats.get(group)
    except TypeError:  # neither hashable nor weakly referable: no group
        seat = None
    return seat if seat is not None else _make(_unwrapped(group))


def group_name(group: Any) -> str:
    """The name by which custom ops know `group` in this process."""
    if isinstance(group, str):
        return group
    if isinstance(group, DeviceMesh):
        group = _group_of_mesh(group)
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    # Kept on it too: torch.compile of torch 2.9 cannot look a Communicator up in a dictionary.
    named = getattr(group, "_ops_name", None)
    return seat_of(group).name if named is None else str(named)


def place_of(name: str) -> tuple[int, int]:
    """(rank, world size) in the group of that name: constants, where a call is compiled."""
    seat = seat_of(name)
    return seat.rank, seat.world_size


# What torch.compiler.assume_constant_result sets (torch 2.9 to 2.14); calling it would import the
# compiler, which takes seconds, into every process that never compiles.
place_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _seat_of_name(name: str) -> Seat:
    try:
        group = _resolve_process_group(name)  # type: ignore[arg-type]  # a str in torch 2.9
    except (RuntimeError, KeyError, ValueError):
        seat = _by_name.get(name)
        if seat is None:
            raise InvalidArgument(
                f"group {name!r} names no group of this process that is still there; pass the "
                "ProcessGroup, DeviceMesh or Communicator itself"
            ) from None
        return seat
    return seat_of(group)


def _unwrapped(group: Any) -> "dist.ProcessGroup | Communicator":
    if isinstance(group, DeviceMesh):
        return _group_of_mesh(group)
    if isinstance(group, (dist.ProcessGroup, Communicator)):
        return group
    hint = ""
    if group is None:
        hint = (
            "; None could mean the world or no group: pass torch.distributed.group.WORLD if meant"
        )
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        hint = "; this is what new_group gives to a rank that is no member: only members may call"
    raise InvalidArgument(
        f"group is {group!r}; expected a torch.distributed ProcessGroup, a DeviceMesh of one "
        f"dimension or a pyparallel.comm.Communicator{hint}"
    )


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        hint = f'mesh["{names[-1]}"]' if names else "mesh.get_group(dim)"
        raise InvalidArgument(
            f"group is a DeviceMesh of {mesh.ndim} dimensions (shape {list(mesh.shape)}); pass one "
            f"of them, such as {hint}"
        )
    return mesh.get_group()


def _make(group: "dist.ProcessGroup | Communicator") -> Seat:
    seat = _seats.get(group)  # a mesh's group may have one already
    if seat is not None:
        return seat
    if isinstance(group, Communicator):
        name = f"communicator/{group.name}/{next(_numbers)}"
        group._ops_name = name  # type: ignore[attr-defined]
        native = Native(weakref.proxy(group))
        seat = Seat(name, native, Unserved(native.communicator))
    else:
        if dist.get_rank(group) < 0:
            raise InvalidArgument(
                f"group {group.group_name!r} does not contain this process; only its ranks may call"
            )
        seat = Seat(str(group.group_name), *_engines_of(group))
    _seats[group] = seat
    _by_name[seat.name] = seat
    return seat


def _engines_of(group: dist.ProcessGroup) -> tuple[Engine, Engine]:
    if group.size() == 1:
        return Alone(), Alone()
    communicator = communicator_of(group)
    if communicator is not None:
        return Native(communicator), Torch(group, communicator)
    # A group of another library: its own collectives move the data, a communicator of ours over
    # the same store carries agreements and refusals.
    store = c10d._get_process_group_store(group)
    agreement = Communicator.from_store(
        store, group.rank(), group.size(), name=f"ops of group {group.group_name}"
    )
    both = Torch(group, agreement)
    return both, both

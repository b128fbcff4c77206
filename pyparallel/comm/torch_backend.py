"""The torch.distributed backend "pyparallel", seen from Python.

    import pyparallel.comm
    dist.init_process_group("pyparallel")              # or "cpu:pyparallel,cuda:pyparallel"

Everything else is torch's own interface: docs/torch_backend.md.
"""

import os
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pyparallel import _core, _torch
from pyparallel.comm.communicator import Communicator
from pyparallel.comm.torch_mends import install
from pyparallel.errors import InvalidArgument

__all__ = ["communicator_of", "create", "make_gloo"]

# torch asks once per device type of a group, for one backend that serves them all.
_made: "weakref.WeakKeyDictionary[Store, Any]" = weakref.WeakKeyDictionary()


def create(options: Any, backend_options: Any = None) -> Any:
    """The backend of one group, as torch asks for it. Collective over the group's ranks."""
    if backend_options is not None:
        raise InvalidArgument(
            f"init_process_group/new_group got backend options of type "
            f"{type(backend_options).__name__}; the backend 'pyparallel' takes none. "
            "Pass `timeout=` to the call itself."
        )
    install()
    group_store = getattr(options.store, "underlying_store", options.store)
    backend = _made.get(group_store)
    if backend is None:
        backend = _torch.create_backend(
            _of_this_attempt(options.store),
            options.group_rank,
            options.group_size,
            _name(options.group_id, list(options.global_ranks_in_group)),
            options.timeout,
            make_gloo,
        )
        _made[group_store] = backend
    return backend


def _of_this_attempt(store: Store) -> Store:
    """torchrun keeps one store over its restarts, with all that dead ranks wrote: a rank that died
    before it came to a meeting would be out of step with the others for good. Where one agent has
    all ranks, they agree on the number of the restart; agents of several hosts count their own."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return PrefixStore(f"attempt/{attempt}", store) if attempt != "0" and alone else store


def communicator_of(group: dist.ProcessGroup) -> Communicator | None:
    """What the group's CPU tensors go through, or None where that is another backend.

    It is the group's own, not a copy: calls of both share one order, and closing it breaks the
    group.
    """
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group serves no CPU tensors
        return None
    if not isinstance(backend, _torch.Backend):
        return None
    return Communicator(_core.Communicator.from_capsule(backend.to_capsule()))


def make_gloo(store: Store, rank: int, size: int, timeout: float) -> Any:
    """What carries messages between hosts: torch's gloo, over the interface that it chooses."""
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


def _name(group_id: str, global_ranks: list[int]) -> str:
    """The group's name in messages, where ranks count within the group."""
    if not global_ranks:
        return "world"
    shown = ", ".join(map(str, global_ranks[:8])) + (", ..." if len(global_ranks) > 8 else "")
    return f"{group_id} (global ranks {shown})"

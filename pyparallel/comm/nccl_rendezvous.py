"""How ranks that share a torch Store come to share a unique id, and who has not come."""

from datetime import timedelta
from typing import Any, Final

from pyparallel.errors import InvalidArgument, Timeout

_PREFIX: Final = "pyparallel/nccl"


def exchange_id(
    store: Any, rank: int, world_size: int, name: str, timeout: float, library: Any
) -> bytes:
    """Rank 0 makes the id, the others take it. `name` must be used once per store."""
    if not 0 <= rank < world_size:
        raise InvalidArgument(f"communicator {name}: rank {rank} is not in 0..{world_size - 1}")
    store.set(f"{_PREFIX}/{name}/here/{rank}", b"1")
    key = f"{_PREFIX}/{name}/id"
    if rank == 0:
        made: bytes = library.unique_id()
        store.set(key, made)
        return made
    try:
        store.wait([key], timedelta(seconds=timeout))
    except Exception as error:  # each kind of store raises its own
        absent = absent_ranks(store, world_size, name)
        raise Timeout(
            f"communicator {name} (rank {rank} of {world_size}): no unique id from rank 0 after "
            f"{timeout} s; never came to the store: ranks {absent or 'none'} ({error})"
        ) from error
    id: bytes = store.get(key)
    return id


def absent_ranks(store: Any, world_size: int, name: str) -> list[int]:
    """The ranks that have not called `exchange_id`."""
    return [r for r in range(world_size) if not store.check([f"{_PREFIX}/{name}/here/{r}"])]

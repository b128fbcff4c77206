"""Positions of a rank's rows, and whether those that a model used are the same.

A model that counts the rows of its shard from 0 is wrong without an error. So whoever has the
positions at hand can have them compared: each rank tells a digest of its own, and every rank knows
what it should be.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyparallel.attention.sharding import Sharding
from pyparallel.errors import InvalidArgument

__all__ = ["check_positions", "digest_of", "positions_of"]

_NONE = 0  # digest of a rank that told no positions
_known = WeakTensorKeyDictionary()  # tensor -> (its version, digest)


def positions_of(sharding: Sharding, rank: int) -> Tensor:
    """int64 [rows]: the position in its document of each row; padding counts from 0."""
    rows = sharding.rows(rank)
    borders = torch.tensor(sharding.borders, dtype=torch.int64)
    return rows - borders[torch.searchsorted(borders, rows, right=True) - 1]


def _digest(positions: Tensor) -> int:
    data = positions.to(torch.int64).contiguous().numpy().tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True) or 1


@lru_cache(maxsize=1024)
def _expected(sharding: Sharding, rank: int) -> int:
    return _digest(positions_of(sharding, rank))


def digest_of(position_ids: Any, strategy: str) -> int:
    """Of this rank's positions; computed once for as long as the tensor lives unchanged."""
    if position_ids is None:
        return _NONE
    if strategy == "decode":
        raise InvalidArgument("position_ids are compared for sharded queries, not for decode")
    if not isinstance(position_ids, Tensor) or position_ids.dim() not in (1, 2):
        raise InvalidArgument(
            f"position_ids is {position_ids!r}; expected an integer tensor [rows] or [batch, rows]"
        )
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise InvalidArgument(f"position_ids has dtype {position_ids.dtype}; expected integers")
    version = None if position_ids.is_inference() else position_ids._version
    known = _known.get(position_ids)
    if known is None or version is None or known[0] != version:
        host = position_ids.detach().cpu()
        if host.dim() == 2:
            if not bool((host == host[:1]).all()):
                raise InvalidArgument(
                    "position_ids differ within the batch; all its sequences are cut alike"
                )
            host = host[0] if host.shape[0] else host.reshape(-1)
        known = _known[position_ids] = version, _digest(host)
    digest: int = known[1]
    return digest


def check_positions(op: str, sharding: Sharding, digests: Sequence[int]) -> None:
    """Raises alike on all ranks where some rank's positions are not those of its rows."""
    wrong = [
        rank
        for rank, digest in enumerate(digests)
        if digest != _NONE and digest != _expected(sharding, rank)
    ]
    if wrong:
        shown = positions_of(sharding, wrong[0])[:8].tolist()
        raise InvalidArgument(
            f"{op}: position_ids of ranks {wrong} are not those of their rows; of rank {wrong[0]} "
            f"they begin {shown} ({sharding.name} shards of {sharding.total} rows): "
            "pyparallel.attention.position_ids gives them"
        )

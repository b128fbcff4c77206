"""What all ranks of a call must have in common: compared in one small collective."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyparallel.attention.transport import Transport
from pyparallel.errors import Mismatch

__all__ = ["agree_on"]


def agree_on(
    transport: Transport, op: str, common: Mapping[str, Any], own: Sequence[int]
) -> list[list[int]]:
    """Every rank's `own` integers. Collective.

    Raises:
        ValueError: ranks differ in `common`, plain values; on every rank, with all values of what
            differs (`Mismatch`).
    """
    text = json.dumps({name: str(value) for name, value in common.items()}).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
    told = transport.agree(op, [digest, len(text), *own])
    if all(row[0] == digest for row in told):
        return [row[2:] for row in told]
    most = max(row[1] for row in told)
    texts = transport.agree(f"{op}: arguments", list(text.ljust(most)))
    every = [json.loads(bytes(row)) for row in texts]
    misfits = []
    for name in every[0]:
        values = [values.get(name, "none") for values in every]
        if len(set(values)) > 1:
            shown = ", ".join(f"rank {rank} {value}" for rank, value in enumerate(values[:8]))
            misfits.append(f"{name}: {shown}{', ...' if len(values) > 8 else ''}")
    raise Mismatch(f"{op}: arguments differ between ranks: {'; '.join(misfits)}")

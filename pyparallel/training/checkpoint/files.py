"""Files of tensors in the safetensors format: a length, a JSON header, the tensors' bytes.

Written here because it is small: 8 bytes (little endian) with the header's length, the header
{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}, then the data,
which the offsets count from. Nothing in such a file can be executed; what is read is checked: sizes
against the file's, dtypes against the table, every tensor's bytes against its shape.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.plain import bytes_of

__all__ = [
    "DTYPES",
    "Stored",
    "dtype_name",
    "header_of",
    "read_header",
    "read_rows",
    "write_tensors",
]

LONGEST_HEADER = 100_000_000  # bytes, as other readers of the format have it
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Raises TypeError for a dtype that the format does not have."""
    if dtype not in NAMES:
        raise TypeError(f"{dtype} cannot be stored; known are {', '.join(DTYPES)}")
    return NAMES[dtype]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `begin` counts from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    values: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[dict[str, Stored], int, str]:
    """Writes a new file and puts it on the disk for good (fsync).

    tensors: name, dtype and shape of each, those of wide dtypes first where alignment matters;
    values: the tensors, in that order, made one at a time. Gives where each lies, the file's bytes
    and its sha256. Raises OSError (nothing is left of the file then), FileExistsError.
    """
    beginning, size = header_of(tensors, metadata)
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            _write(file.fileno(), memoryview(beginning))
            digest.update(beginning)
            for (name, dtype, shape), value in zip(tensors, values, strict=True):
                assert value.dtype is dtype, name
                assert tuple(value.shape) == tuple(shape), name
                data = bytes_of(value.detach().to("cpu").contiguous())
                _write(file.fileno(), data)
                digest.update(data)
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    placed, at = {}, len(beginning)
    for name, dtype, shape in tensors:
        placed[name] = Stored(dtype, tuple(shape), at)
        at += placed[name].nbytes
    return placed, len(beginning) + size, digest.hexdigest()


def header_of(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, int]:
    """All that stands before the data, and the data's bytes: tensors one after another."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """What a file holds: its tensors, by name, and its metadata.

    Raises:
        CheckpointError: it is no such file, or says of itself what cannot be.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise CheckpointError(
                    f"{path}: {size} bytes, with a header of {length}: truncated, or no safetensors"
                )
            header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is a {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ is a {type(metadata).__name__}")
    found = {}
    for name, entry in header.items():
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: {name!r} is described by {entry!r:.200}") from None
        if not whole or end - begin != prod(shape) * dtype.itemsize or 8 + length + end > size:
            raise CheckpointError(
                f"{path}: {name!r} of shape {list(shape)} and {entry['dtype']} lies at {begin} to "
                f"{end} of {size - 8 - length} bytes"
            )
        found[name] = Stored(dtype, shape, 8 + length + begin)
    return found, {str(k): str(v) for k, v in metadata.items()}


def read_rows(descriptor: int, stored: Stored, first: int, count: int) -> Tensor:
    """Rows (of dimension 0) of a stored tensor; of one without dimensions, the tensor itself.

    Raises:
        CheckpointError: the file ends before.
    """
    shape = (count, *stored.shape[1:]) if stored.shape else ()
    row = prod(stored.shape[1:]) * stored.dtype.itemsize
    data = torch.empty(prod(shape) * stored.dtype.itemsize, dtype=torch.uint8)
    left = bytes_of(data)
    at = stored.begin + first * row
    while left:
        read = os.preadv(descriptor, [left], at)
        if read == 0:
            raise CheckpointError(f"the file ends at byte {at}, {len(left)} bytes too early")
        left, at = left[read:], at + read
    return data.view(stored.dtype).view(shape)

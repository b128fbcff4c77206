"""What a checkpoint says of itself: a manifest in JSON, and the checksums of all its files.

    DIRECTORY/000012-step-3400/          complete, or not there: it was renamed to this name
        manifest.json                    step, layout, where each tensor's boxes lie, plain state
        rank-00000.safetensors ...       one per rank that had something to write
        SHA256SUMS                       of the files above, as `sha256sum -c SHA256SUMS` takes it
    DIRECTORY/.writing-...               one that is being written, or was when its job died

The first number counts checkpoints in the order in which they came to be: the highest is the
newest, also where a run went back to an earlier step.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Size
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.files import DTYPES, Stored

__all__ = [
    "FORMAT",
    "MANIFEST",
    "SUMS",
    "Name",
    "checkpoints_in",
    "damage",
    "metadata_of",
    "publish",
    "read_manifest",
    "read_sums",
    "remove",
]

FORMAT = "pyparallel checkpoint 1"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
WRITING = ".writing-"
_NAME = re.compile(r"(\d{6,12})-step-(\d{1,18})")
_FILE = re.compile(r"rank-\d{5,8}\.safetensors")
_SUM = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")


@dataclass(frozen=True, order=True)
class Name:
    """Of a published checkpoint's folder."""

    sequence: int
    step: int

    def __str__(self) -> str:
        return f"{self.sequence:06}-step-{self.step}"


def checkpoints_in(directory: Path) -> list[Name]:
    """The published checkpoints, the newest first; whole or not."""
    if not directory.is_dir():
        return []
    found = [_NAME.fullmatch(entry.name) for entry in directory.iterdir()]
    return sorted((Name(int(m[1]), int(m[2])) for m in found if m), reverse=True)


def publish(folder: Path, final: Path, manifest: Mapping[str, Any], sums: dict[str, str]) -> None:
    """Completes a folder of written files, and gives it its name: there at once, or not at all."""
    text = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode()
    sums = {**sums, MANIFEST: hashlib.sha256(text).hexdigest()}
    _write(folder / MANIFEST, text)
    _write(folder / SUMS, "".join(f"{sums[name]}  {name}\n" for name in sorted(sums)).encode())
    _sync_folder(folder)
    folder.rename(final)
    _sync_folder(final.parent)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(directory: Path, names: Iterable[str]) -> None:
    """Deletes checkpoints; they lose their names first, so that none is seen half-deleted."""
    for name in names:
        doomed = directory / f"{WRITING}deleted-{name}"
        (directory / name).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def read_sums(folder: Path) -> dict[str, str]:
    """sha256 by file name.

    Raises:
        CheckpointError: they are missing, or no such list.
    """
    try:
        text = (folder / SUMS).read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder.name}: {SUMS}: {error}") from None
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _SUM.fullmatch(line)
        if match is None or not (match[2] == MANIFEST or _FILE.fullmatch(match[2])):
            raise CheckpointError(f"{folder.name}: {SUMS} has the line {line[:100]!r}")
        found[match[2]] = match[1]
    if MANIFEST not in found or not text.endswith("\n"):
        raise CheckpointError(f"{folder.name}: {SUMS} is cut short")
    return found


def damage(folder: Path, name: str, expected: str) -> str:
    """What is wrong with a file of a checkpoint; empty if it is as it was written."""
    digest = hashlib.sha256()
    try:
        with (folder / name).open("rb", buffering=0) as file:
            while block := file.read(1 << 22):
                digest.update(block)
    except OSError as error:
        return f"{folder.name}/{name}: {error.strerror}"
    if digest.hexdigest() == expected:
        return ""
    return (
        f"{folder.name}/{name}: its sha256 is {digest.hexdigest()[:12]}..., not {expected[:12]}..."
    )


def read_manifest(folder: Path, expected: str) -> dict[str, Any]:
    """
    Raises:
        CheckpointError: it is not the manifest of that checksum, or none of this format.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder.name}/{MANIFEST}: {error.strerror}") from None
    if hashlib.sha256(text).hexdigest() != expected:
        raise CheckpointError(f"{folder.name}/{MANIFEST}: its sha256 is not that of {SUMS}")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder.name}/{MANIFEST} is no JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        said = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(f"{folder.name}/{MANIFEST} is of format {said!r}, not {FORMAT!r}")
    kinds = {"step": int, "layout": dict, "tensors": dict, "aliases": dict, "state": dict}
    for key, kind in {**kinds, "optimizer": list}.items():
        if type(manifest.get(key)) is not kind:
            raise CheckpointError(f"{folder.name}/{MANIFEST}: {key!r} is no {kind.__name__}")
    return manifest


def metadata_of(manifest: Mapping[str, Any], sizes: Mapping[str, int], where: str) -> Metadata:
    """torch's description of the tensors; where each box lies is in its `storage_data`, as
    (file, Stored).

    sizes: of the files there are, in bytes.

    Raises:
        CheckpointError: a box lies outside of its tensor or file, or boxes do not make a whole.
    """
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, tuple[str, Stored]] = {}
    for key, entry in manifest["tensors"].items():
        try:
            tensors[key] = _tensor(key, entry, sizes, places)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where}: tensor {key!r} is described by what cannot be: {error}"
            ) from None
    return Metadata(tensors, storage_data=places)


def _tensor(
    key: str,
    entry: Any,
    sizes: Mapping[str, int],
    places: dict[MetadataIndex, tuple[str, Stored]],
) -> TensorStorageMetadata:
    dtype, shape = DTYPES[entry["dtype"]], _whole(entry["shape"])
    chunks = []
    for file, begin, at, lengths in entry["boxes"]:
        offsets, lengths = _whole(at), _whole(lengths)
        stored = Stored(dtype, lengths, *_whole([begin]))
        fits = len(offsets) == len(lengths) == len(shape) and all(
            o + n <= s for o, n, s in zip(offsets, lengths, shape, strict=True)
        )
        if not fits or begin + stored.nbytes > sizes[file]:
            raise ValueError(f"a box of {lengths} at {offsets}, byte {begin} of {file}")
        chunks.append(ChunkStorageMetadata(Size(offsets), Size(lengths)))
        places[MetadataIndex(key, offsets)] = (file, stored)
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        raise ValueError(f"boxes of {[list(c.sizes) for c in chunks]} in a whole of {shape}")
    return TensorStorageMetadata(TensorProperties(dtype), Size(shape), chunks)


def _whole(numbers: Any) -> tuple[int, ...]:
    found = tuple(numbers)
    if not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"{found} where whole numbers were expected")
    return found

"""Weights in and out of the files that Hugging Face's `from_pretrained` and `save_pretrained` use.

    FOLDER/model.safetensors                            or, where there is much,
    FOLDER/model-00001-of-00003.safetensors ...         with
    FOLDER/model.safetensors.index.json                 which tensor is in which file

Each rank reads the rows it needs, and writes its boxes into files whose bytes were reserved: no
rank ever holds the whole model.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.files import (
    DTYPES,
    Stored,
    dtype_name,
    header_of,
    read_header,
    read_rows,
)
from pyparallel.training.checkpoint.pieces import Piece, held_by, modules_of
from pyparallel.training.checkpoint.ranks import Ranks, reasons
from pyparallel.training.checkpoint.saving import Description, assign, described

__all__ = ["export_hugging_face", "import_hugging_face"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE = re.compile(r"[\w.-]+\.safetensors")


@torch.no_grad()
def import_hugging_face(
    model: Any,
    folder: "str | os.PathLike[str]",
    *,
    aliases: "Mapping[str, str] | None" = None,
) -> None:
    """Fills a model's weights from a folder of safetensors. Collective over all ranks.

    Values are converted to the parameters' dtypes. Of tied parameters one name is enough.

    Args:
        model: as in `Checkpointer.save`; not on the meta device.
        folder: with model.safetensors, or its index and the files that names.
        aliases: names that the model has -> names in the files: a head that is tied to the
            embedding, say, on a last stage that has only the head.

    Raises:
        CheckpointError: on all ranks, and nothing was changed: a file is missing or none of the
            format; names or shapes are not the model's.
    """
    ranks = Ranks(None, 600.0, own_group=False)
    where = f"import from {folder}"
    wanted: list[tuple[Piece, Path, Stored]] = []
    known: list[str] = []
    names: list[str] = []
    problem: Exception | None = None
    try:
        stored = _stored_in(Path(folder))
        names = sorted(stored)
        wanted, known = _wanted(model, stored, aliases or {})
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        problem = error
    ranks.agree(where, problem)
    used = {name for every in ranks.gather(known) for name in every}
    unexpected = [name for name in names if name not in used]
    ranks.agree(
        where,
        CheckpointError(f"{len(unexpected)} tensors that the model has not: {unexpected[:6]}")
        if unexpected
        else None,
    )
    try:
        _read(wanted)
    except (CheckpointError, OSError) as error:
        problem = error
    ranks.agree(f"{where}, half-way: the model holds parts of it", problem)


def _stored_in(folder: Path) -> dict[str, tuple[Path, Stored]]:
    """Where each tensor is, of all files of a folder."""
    files = [SINGLE]
    index: dict[str, str] | None = None
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        try:
            index = dict(json.loads((folder / INDEX).read_bytes())["weight_map"])
            files = sorted(set(index.values()))
            strange = [name for name in files if not _FILE.fullmatch(name)]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index: {error!r}") from None
        if strange:
            raise CheckpointError(f"{folder / INDEX} names {strange[:3]}")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} has no {', '.join(missing[:4])}")
    found: dict[str, tuple[Path, Stored]] = {}
    for name in files:
        for key, stored in read_header(folder / name)[0].items():
            if index is None or index.get(key) == name:
                found[key] = folder / name, stored
    absent = [key for key in index or () if key not in found]
    if absent:
        raise CheckpointError(f"{absent[:4]} are not in the files that {INDEX} names")
    return found


def _wanted(
    model: Any, stored: Mapping[str, tuple[Path, Stored]], aliases: Mapping[str, str]
) -> tuple[list[tuple[Piece, Path, Stored]], list[str]]:
    """What this rank reads, and the names in the files that its part of the model has."""
    wanted, known, misfits = [], [], []
    for held in held_by(modules_of(model)):
        keys = []
        for names in zip(*held.names, strict=True):
            there = [*names, *(aliases[name] for name in names if name in aliases)]
            known += there
            keys.append(next((name for name in there if name in stored), names[0]))
        for piece in held.renamed(keys).pieces(held.tensor, counted=False):
            if piece.key not in stored:
                misfits.append(f"{piece.key} is missing")
                continue
            path, one = stored[piece.key]
            if one.shape != piece.shape:
                misfits.append(
                    f"{piece.key} has shape {list(one.shape)}, expected {list(piece.shape)}"
                )
            wanted.append((piece, path, one))
    if misfits:
        raise CheckpointError("; ".join(sorted(set(misfits))[:6]))
    return wanted, known


def _read(wanted: list[tuple[Piece, Path, Stored]]) -> None:
    for path in sorted({path for _, path, _ in wanted}):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for piece, _, stored in (one for one in wanted if one[1] == path):
                box = piece.box
                if not box.numel:
                    continue
                first, count = (box.offsets[0], box.sizes[0]) if box.sizes else (0, 1)
                tensor = read_rows(descriptor, stored, first, count)
                inner = zip(box.offsets[1:], box.sizes[1:], strict=True)
                for dim, (offset, length) in enumerate(inner, 1):
                    tensor = tensor.narrow(dim, offset, length)
                piece.view.copy_(tensor)
        finally:
            os.close(descriptor)


@torch.no_grad()
def export_hugging_face(
    model: Any,
    folder: "str | os.PathLike[str]",
    *,
    dtype: "torch.dtype | None" = None,
    largest_file: int = 5_000_000_000,
) -> None:
    """Writes a model's weights as whole tensors under the unsharded model's names. Collective.

    The folder is there with all files, or not at all; the model's configuration is the caller's.

    Args:
        model: as in `Checkpointer.save`.
        folder: new; on a file system that all hosts share.
        dtype: of floating point tensors in the files; None: as they are.
        largest_file: bytes of data; a larger tensor has a file of its own.

    Raises:
        CheckpointError: on all ranks: the folder exists, cannot be written, or the model's parts do
            not make a whole. Nothing is left of it.
    """
    ranks, final = Ranks(None, 600.0, own_group=False), Path(folder)
    where = f"export to {final}"
    problem: Exception | None = None
    pieces: list[Piece] = []
    mine: Description = []
    try:
        pieces = [
            piece
            for held in held_by(modules_of(model))
            for piece in held.pieces(held.tensor, counted=True)
        ]
        mine = described(pieces)
        for row in mine:
            if dtype is not None and DTYPES[row[4]].is_floating_point:
                row[4] = dtype_name(dtype)
        if final.exists():
            problem = CheckpointError("it exists already: name a new folder")
    except (TypeError, ValueError) as error:
        problem = error
    ranks.agree(where, problem)
    every = ranks.gather(mine)
    try:
        role = assign(every)[ranks.rank]
    except ValueError as error:  # the same on all ranks
        ranks.refuse(where, [str(error)] * ranks.size, error)
        raise
    files = _cut(every, largest_file)
    half = final.with_name(f".writing-{final.name}")
    try:
        if ranks.is_first:
            _reserve(half, files)
    except OSError as error:
        problem = error
    told = ranks.gather("" if problem is None else str(problem))
    if not any(told):
        try:
            _write(half, files, [pieces[number] for number in role])
        except OSError as error:
            problem = error
        told = ranks.gather("" if problem is None else str(problem))
    if not any(told) and ranks.is_first:
        try:
            half.rename(final)
        except OSError as error:
            problem = error
    told = [a or b for a, b in zip(told, ranks.gather(str(problem or "")), strict=True)]
    if any(told) and ranks.is_first:
        shutil.rmtree(half, ignore_errors=True)
    if any(told):
        raise CheckpointError(f"{where}: {reasons(told)}") from problem


def _cut(every: list[Description], largest: int) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """Which tensors are in which file: name -> (dtype, shape), in the order of their names."""
    tensors = {key: (dtype, shape) for rows in every for key, shape, _, _, dtype in rows}
    cut: list[dict[str, tuple[str, list[int]]]] = [{}]
    size = 0
    for key, (dtype, shape) in sorted(tensors.items()):
        nbytes = prod(shape) * DTYPES[dtype].itemsize
        if cut[-1] and size + nbytes > largest:
            cut.append({})
            size = 0
        cut[-1][key] = (dtype, shape)
        size += nbytes
    if len(cut) == 1:
        return {SINGLE: cut[0]}
    return {f"model-{n + 1:05}-of-{len(cut):05}.safetensors": one for n, one in enumerate(cut)}


def _reserve(folder: Path, files: Mapping[str, Mapping[str, tuple[str, list[int]]]]) -> None:
    """Files with their headers, and all of their bytes: what is written later fits."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    total = 0
    for name, tensors in files.items():
        described = [(key, DTYPES[dtype], shape) for key, (dtype, shape) in tensors.items()]
        header, size = header_of(described, {"format": "pt"})
        with (folder / name).open("xb") as file:
            file.write(header)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, len(header) + size)
            os.fsync(file.fileno())
        total += size
    if len(files) > 1:
        where = {key: name for name, tensors in files.items() for key in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write(
    folder: Path, files: Mapping[str, Mapping[str, tuple[str, list[int]]]], pieces: list[Piece]
) -> None:
    for name, tensors in files.items():
        of_file = [piece for piece in pieces if piece.key in tensors and piece.view.numel()]
        if not of_file:
            continue
        placed, _ = read_header(folder / name)
        size = (folder / name).stat().st_size
        mapped = torch.from_file(str(folder / name), shared=True, size=size, dtype=torch.uint8)
        for piece in of_file:
            _box(mapped, placed[piece.key], piece).copy_(piece.view)
        with (folder / name).open("rb+") as file:
            os.fsync(file.fileno())


def _box(mapped: Tensor, stored: Stored, piece: Piece) -> Tensor:
    tensor = mapped[stored.begin : stored.begin + stored.nbytes].view(stored.dtype)
    tensor = tensor.view(stored.shape)
    for dim, (offset, length) in enumerate(zip(piece.offsets, piece.view.shape, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor

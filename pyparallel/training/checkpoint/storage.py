"""Checkpoints as torch.distributed.checkpoint's storage: its planners cut boxes, this reads bytes.

torch's own storage keeps its metadata in a pickle, which runs what it is told to when it is read:
here it is JSON (manifest.py), made into torch's description by way of checks. `Reader` also serves
torch's own `load(state_dict, storage_reader=Reader(folder))`.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.files import Stored, read_rows
from pyparallel.training.checkpoint.manifest import (
    MANIFEST,
    damage,
    metadata_of,
    read_manifest,
    read_sums,
)
from pyparallel.training.checkpoint.pieces import Piece

__all__ = ["Reader", "fill"]


class Reader(StorageReader):
    """Reads a published checkpoint. Nothing in it is executed, everything it says is checked.

    Args:
        folder: of the checkpoint, `DIRECTORY/000012-step-3400`.
        verify: whether the checksums of all files are compared now.

    Raises:
        CheckpointError: it is not whole.
    """

    def __init__(self, folder: "str | os.PathLike[str]", *, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.sums = read_sums(self.folder)
        if verify:
            wrong = [damage(self.folder, name, sha) for name, sha in self.sums.items()]
            if any(wrong):
                raise CheckpointError("; ".join(filter(None, wrong)))
        self.manifest: Mapping[str, Any] = read_manifest(self.folder, self.sums[MANIFEST])
        try:
            sizes = {n: (self.folder / n).stat().st_size for n in self.sums if n != MANIFEST}
        except OSError as error:
            raise CheckpointError(f"{self.folder.name}: {error}") from None
        self.metadata = metadata_of(self.manifest, sizes, self.folder.name)

    # --- torch's protocol

    def reset(self, checkpoint_id: "str | os.PathLike[str] | None" = None) -> None:
        if checkpoint_id is not None and Path(checkpoint_id) != self.folder:
            self.__init__(checkpoint_id)  # type: ignore[misc]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Stored, ReadItem]]] = {}
        for item in plan.items:
            file, stored = self._place(item.storage_index)
            by_file.setdefault(file, []).append((stored, item))
        for file, items in by_file.items():
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self.folder / file, flags)
            try:
                for stored, item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(descriptor, stored, item))
                    planner.commit_tensor(item, target)
            finally:
                os.close(descriptor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> tuple[str, Stored]:
        places: dict[MetadataIndex, tuple[str, Stored]] = self.metadata.storage_data
        return places[MetadataIndex(index.fqn, index.offset)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: "str | os.PathLike[str]") -> bool:
        return (Path(checkpoint_id) / MANIFEST).is_file()


def _read(descriptor: int, stored: Stored, item: ReadItem) -> Tensor:
    """The part of a stored box that is asked for; only its rows are read."""
    if not stored.shape:
        return read_rows(descriptor, stored, 0, 1)
    tensor = read_rows(descriptor, stored, item.storage_offsets[0], item.lengths[0])
    inner = zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
    for dim, (offset, length) in enumerate(inner, 1):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _Planner(DefaultLoadPlanner):
    """torch's planner for pieces: which stored boxes, and which parts of them, fill them."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__()
        self._pieces: dict[str, list[Piece]] = {}
        for piece in pieces:
            if piece.view.numel():
                self._pieces.setdefault(piece.key, []).append(piece)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, pieces in self._pieces.items():
            described = self.metadata.state_dict_metadata[key]
            assert isinstance(described, TensorStorageMetadata)
            chunks = [ChunkStorageMetadata(Size(p.offsets), p.view.shape) for p in pieces]
            items += create_read_items_for_chunk_list(key, described, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        view = self._pieces[index.fqn][index.index or 0].view
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (offset, length) in enumerate(spans):
            view = view.narrow(dim, offset, length)
        return view


def fill(pieces: Sequence[Piece], reader: Reader) -> None:
    """Reads what a checkpoint has for these pieces into their views."""
    planner = _Planner(pieces)
    planner.set_up_planner({}, reader.read_metadata(), is_coordinator=False)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()

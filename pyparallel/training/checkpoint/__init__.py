"""Checkpoints of a training: docs/checkpoints.md."""

from pyparallel.training.checkpoint.checkpointer import Checkpointer, PendingSave
from pyparallel.training.checkpoint.errors import CheckpointError
from pyparallel.training.checkpoint.hugging_face import export_hugging_face, import_hugging_face
from pyparallel.training.checkpoint.storage import Reader
from pyparallel.training.checkpoint.writing import SaveResult

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "PendingSave",
    "Reader",
    "SaveResult",
    "export_hugging_face",
    "import_hugging_face",
]

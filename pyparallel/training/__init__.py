"""Composed training: data, tensor, sequence and pipeline parallelism of one model.

Names are loaded when they are first used: a layout alone (`ParallelConfig`) needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyparallel.training.checkpoint import (
        Checkpointer,
        CheckpointError,
        PendingSave,
        SaveResult,
        export_hugging_face,
        import_hugging_face,
    )
    from pyparallel.training.clipping import clip_grad_norm_, global_grad_norm, tied_copies
    from pyparallel.training.compressed_sums import Traffic
    from pyparallel.training.compression import Compression
    from pyparallel.training.data import ElasticSampler
    from pyparallel.training.data_parallelism import DataParallel, data_parallel
    from pyparallel.training.layout import (
        AXES,
        ORDERS,
        Coordinates,
        Neighbours,
        ParallelConfig,
        check_batch,
    )
    from pyparallel.training.memory import StepMemory, expected_step, measure_step
    from pyparallel.training.mesh import ParallelMesh, build_mesh
    from pyparallel.training.metrics import (
        MetricsLog,
        Utilization,
        measured_peak,
        peak_bytes,
    )
    from pyparallel.training.model import ParallelModel
    from pyparallel.training.precision import LossScaler, Precision
    from pyparallel.training.random import PlacedDropout, RandomStreams, place_dropouts
    from pyparallel.training.recompute import HostOffload, apply_recompute
    from pyparallel.training.topology import Crossing, Topology

__all__ = [
    "AXES",
    "ORDERS",
    "CheckpointError",
    "Checkpointer",
    "Compression",
    "Coordinates",
    "Crossing",
    "DataParallel",
    "ElasticSampler",
    "HostOffload",
    "LossScaler",
    "MetricsLog",
    "Neighbours",
    "ParallelConfig",
    "ParallelMesh",
    "ParallelModel",
    "PendingSave",
    "PlacedDropout",
    "Precision",
    "RandomStreams",
    "SaveResult",
    "StepMemory",
    "Topology",
    "Traffic",
    "Utilization",
    "apply_recompute",
    "build_mesh",
    "check_batch",
    "clip_grad_norm_",
    "data_parallel",
    "expected_step",
    "export_hugging_face",
    "global_grad_norm",
    "import_hugging_face",
    "measure_step",
    "measured_peak",
    "peak_bytes",
    "place_dropouts",
    "tied_copies",
]

_HOMES = {
    "checkpoint": (
        "CheckpointError",
        "Checkpointer",
        "PendingSave",
        "SaveResult",
        "export_hugging_face",
        "import_hugging_face",
    ),
    "data": ("ElasticSampler",),
    "compressed_sums": ("Traffic",),
    "compression": ("Compression",),
    "data_parallelism": ("DataParallel", "data_parallel"),
    "layout": ("AXES", "ORDERS", "Coordinates", "Neighbours", "ParallelConfig", "check_batch"),
    "mesh": ("ParallelMesh", "build_mesh"),
    "metrics": ("MetricsLog", "Utilization", "measured_peak", "peak_bytes"),
    "model": ("ParallelModel",),
    "topology": ("Crossing", "Topology"),
    "clipping": ("clip_grad_norm_", "global_grad_norm", "tied_copies"),
    "memory": ("StepMemory", "expected_step", "measure_step"),
    "precision": ("LossScaler", "Precision"),
    "random": ("PlacedDropout", "RandomStreams", "place_dropouts"),
    "recompute": ("HostOffload", "apply_recompute"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)

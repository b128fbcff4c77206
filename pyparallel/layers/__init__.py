"""Modules of tensor and sequence parallelism, on `pyparallel.ops`.

`group` is a torch ProcessGroup of any backend, a DeviceMesh of one dimension, or a
`pyparallel.comm.Communicator`.
"""

from pyparallel.layers.cross_entropy import (
    VocabParallelCrossEntropy,
    vocab_parallel_cross_entropy,
)
from pyparallel.layers.dropout import Dropout, RandomStreams
from pyparallel.layers.embedding import VocabParallelEmbedding, tie
from pyparallel.layers.fused import FusedColumnParallelLinear, GatedMLP, QKVParallelLinear
from pyparallel.layers.gradients import clip_gradient_norm_, gradient_norm
from pyparallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from pyparallel.layers.module import ShardedModule
from pyparallel.layers.norm import LayerNorm, RMSNorm
from pyparallel.layers.parallelize import parallelize
from pyparallel.layers.parallelize_report import ParallelizeReport, ShardedEntry
from pyparallel.layers.parameters import ParameterLayout
from pyparallel.layers.partition import HeadSplit, Partition, split_heads
from pyparallel.layers.sequence import SequenceSharding
from pyparallel.layers.state import full_state_dict, load_full_state_dict, materialize

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "FusedColumnParallelLinear",
    "GatedMLP",
    "HeadSplit",
    "LayerNorm",
    "ParallelizeReport",
    "ParameterLayout",
    "Partition",
    "QKVParallelLinear",
    "RMSNorm",
    "RandomStreams",
    "RowParallelLinear",
    "SequenceSharding",
    "ShardedEntry",
    "ShardedModule",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "clip_gradient_norm_",
    "full_state_dict",
    "gradient_norm",
    "load_full_state_dict",
    "materialize",
    "parallelize",
    "split_heads",
    "tie",
    "vocab_parallel_cross_entropy",
]

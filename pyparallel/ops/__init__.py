"""Functional ops of tensor and sequence parallelism: GEMM with its communication, on every device.

`group` is a torch ProcessGroup of any backend, a DeviceMesh of one dimension, or a
`pyparallel.comm.Communicator`; every rank of it makes the same calls in the same order. Weights
are in torch.nn.Linear's layout, [N, K].
"""

from pyparallel.ops.all_gather_matmul import all_gather_matmul
from pyparallel.ops.all_reduce_rms_norm import all_reduce_rms_norm, all_reduce_rms_norm_
from pyparallel.ops.collectives import (
    all_gather,
    all_reduce,
    all_reduce_,
    gather,
    reduce_scatter,
    replicate,
    split,
)
from pyparallel.ops.explaining import Explanation, explain
from pyparallel.ops.groups import group_name
from pyparallel.ops.matmul_all_reduce import matmul_all_reduce
from pyparallel.ops.matmul_all_reduce_rms_norm import matmul_all_reduce_rms_norm
from pyparallel.ops.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = [
    "Explanation",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_",
    "explain",
    "gather",
    "group_name",
    "matmul_all_reduce",
    "matmul_all_reduce_rms_norm",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "replicate",
    "split",
]

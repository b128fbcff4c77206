"""Pipeline parallelism for torch modules: a model is cut into stages, and schedules run on them.

Schedules, as data without torch, are in `pyparallel.schedule`.
"""

from pyparallel.pipeline.agreement import PipelineError
from pyparallel.pipeline.balance import balance
from pyparallel.pipeline.executor import PipelineExecutor, StepResult
from pyparallel.pipeline.meta import materialise, parameters_on_meta
from pyparallel.pipeline.norm import clip_gradient_norm_, gradient_norm
from pyparallel.pipeline.partition import Partition, TiedParameter, partition_model
from pyparallel.pipeline.parts import Part
from pyparallel.pipeline.profiling import StepProfile, profile
from pyparallel.pipeline.recompute import recompute
from pyparallel.pipeline.tied import sum_tied_gradients

__all__ = [
    "Part",
    "Partition",
    "PipelineError",
    "PipelineExecutor",
    "StepProfile",
    "StepResult",
    "TiedParameter",
    "balance",
    "clip_gradient_norm_",
    "gradient_norm",
    "materialise",
    "parameters_on_meta",
    "partition_model",
    "profile",
    "recompute",
    "sum_tied_gradients",
]

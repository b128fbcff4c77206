"""Contestants by name, without importing them: what each needs and where its code is.

A provider is one way to run the ops. The same setup function runs them all (contest.py); adding one
is a class in a file here plus a line in PROVIDERS.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    where: str  # module:class
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    mend: str = ""
    launcher: tuple[str, ...] = ()  # what starts the ranks, before `-n world python ..`


PROVIDERS: dict[str, Entry] = {
    "direct": Entry(
        "bench.providers.direct:Direct", ("pyparallel._core",), mend="build it: pip install -e ."
    ),
    "direct_nccl": Entry(
        "bench.providers.direct_nccl:DirectNccl",
        ("pyparallel._core",),
        mend="build it: pip install -e .",
    ),
    "torch": Entry(
        "bench.providers.torch_distributed:Ours",
        ("pyparallel._torch",),
        mend="build it: pip install -e . in an environment that has torch",
    ),
    "gloo": Entry("bench.providers.torch_distributed:Gloo", ("torch",)),
    "nccl": Entry("bench.providers.torch_distributed:Nccl", ("torch",)),
    "mpich": Entry(
        "bench.providers.mpi:Mpi",
        ("mpi4py",),
        ("mpiexec",),
        mend="apt-get install mpich libmpich-dev; pip install --no-binary mpi4py mpi4py",
        launcher=("mpiexec",),
    ),
    "deepspeed": Entry(
        "bench.providers.deepspeed:DeepSpeed", ("deepspeed",), mend="pip install deepspeed"
    ),
    "ops": Entry(
        "bench.providers.gemm:Ops",
        ("pyparallel._torch",),
        mend="build it: pip install -e . in an environment that has torch",
    ),
    "stock_gemm": Entry("bench.providers.gemm:Stock", ("torch",)),
    "gemm": Entry("bench.providers.gemm:GemmAlone", ("torch",)),
    "collective": Entry("bench.providers.gemm:CollectiveAlone", ("torch",)),
    "symm_mem": Entry("bench.providers.gemm:SymmMem", ("torch",)),
    "layers": Entry(
        "bench.providers.blocks:Layers",
        ("pyparallel._torch",),
        mend="build it: pip install -e . in an environment that has torch",
    ),
    "dtensor": Entry("bench.providers.blocks:DTensor", ("torch",)),
    "pipeline": Entry(
        "bench.providers.pipelines:Pipeline",
        ("pyparallel._torch",),
        mend="build it: pip install -e . in an environment that has torch",
    ),
    "stock_pipeline": Entry("bench.providers.pipelines:StockPipeline", ("torch",)),
    "stock_pipeline_ours": Entry(
        "bench.providers.pipelines:StockPipelineOurs",
        ("pyparallel._torch",),
        mend="build it: pip install -e . in an environment that has torch",
    ),
    "attention": Entry(
        "bench.providers.attention:SequenceParallel",
        ("pyparallel._torch",),
        mend="build it: pip install -e . in an environment that has torch",
    ),
    "stock_attention": Entry("bench.providers.attention:StockAttention", ("torch",)),
    "flash_attn": Entry(
        "bench.providers.attention_peers:FlashAttn", ("flash_attn",), mend="pip install flash-attn"
    ),
    "ring_flash_attn": Entry(
        "bench.providers.attention_peers:RingFlashAttn",
        ("ring_flash_attn", "flash_attn"),
        mend="pip install flash-attn ring-flash-attn",
    ),
    "context_parallel": Entry("bench.providers.attention_peers:ContextParallel", ("torch",)),
    "train": Entry(
        "bench.providers.trains:Train",
        ("pyparallel._torch",),
        mend="build it: pip install -e . in an environment that has torch",
    ),
    "stock_train": Entry("bench.providers.stock_trains:StockTrain", ("torch",)),
    "one_process": Entry("bench.providers.attention:OneProcess", ("pyparallel._torch",)),
    "limit": Entry(
        "bench.providers.limit:Limit", programs=("c++",), mend="install a C++17 compiler"
    ),
}
CUDA_PEERS = ("flash_attn", "ring_flash_attn", "context_parallel")  # of suite attention
OPTIONAL_PEERS = ("mpich", "deepspeed", "limit", *CUDA_PEERS)


def missing(name: str) -> str:
    """Empty if the provider can run here, else what it lacks and what would help."""
    entry = PROVIDERS[name]
    lacks = [f"Python module {m}" for m in entry.modules if not _has_module(m)]
    lacks += [f"program {p}" for p in entry.programs if not _program(p)]
    return f"{name} needs {' and '.join(lacks)} ({entry.mend})" if lacks else ""


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _program(name: str) -> str | None:
    return shutil.which(os.environ.get("CXX", name) if name == "c++" else name)


def load(where: str) -> type:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)

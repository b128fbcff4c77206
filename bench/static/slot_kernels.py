"""Descriptions of the kernels on slots.py and of gemm_then_collective.py, as launchers call them.

Sizes and strides are multiples of 16 and operands contiguous along K, as a model's are; 8 ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from bench.static.compiling import Description
from bench.static.gemm_kernels import name_of, operand_type
from pyparallel.triton_kernels import all_reduce_finish, gemm_then_collective, partial_sums
from pyparallel.triton_kernels.gemm import TileConfig
from pyparallel.triton_kernels.partial_sums import LANES, MOST_REGISTERS, SUM_OFFSETS, WARPS
from pyparallel.triton_kernels.slots import SlotLayout

LAYOUT = SlotLayout(8, 1024, 8192, 4096, torch.float32, 8192, torch.bfloat16)
TARGETS = {
    "owner": partial_sums.TO_OWNER.value,
    "all": partial_sums.TO_ALL.value,
    "self": partial_sums.TO_SELF.value,
}
OUT = "*bf16:16"
# Arguments by name, where every kernel has them alike.
COMMON = {
    "table": "*i64:16",
    "status": "*i64:16",
    "row_starts": "*i32:16",
    "words": "*i64:16",
    "multicast": "i64:16",
    "eps": "fp32",
    **dict.fromkeys(("bias", "residual", "weight", "out", "hidden"), OUT),
    **dict.fromkeys(("N", "K"), "i32:16"),
    **dict.fromkeys(("stride_am", "stride_bn", "stride_om", "stride_rm", "stride_hm"), "i32:16"),
    **dict.fromkeys(("rank", "world", "parts", "rows", "first_row"), "i32"),
    **dict.fromkeys(("owners", "groups", "group", "chunk"), "i32"),
    **dict.fromkeys(("signature", "timeout_us"), "i32"),
}
UNIT_STRIDES = dict.fromkeys(("stride_ak", "stride_bk", "stride_on", "stride_rn", "stride_hn"), 1)


def push(config: TileConfig, dtype: str, target: str) -> Description:
    """The push to "owner", "all" or "self"; fp8 with the scales of its rows and columns."""
    scaled = dtype == "float8_e4m3fn"
    scales = ("row_scale", "column_scale")
    strides = dict.fromkeys(("row_scale_stride", "column_scale_stride"), 1 if scaled else 0)
    return _describe(
        name_of(f"push to {target}", config, dtype),
        partial_sums.push_kernel,
        {
            "a": operand_type(config.block_m, config, dtype),
            "b": operand_type(config.block_n, config, dtype),
            **(dict.fromkeys(scales, "*fp32:16") if scaled else {}),
        },
        {
            **({} if scaled else dict.fromkeys(scales)),
            **strides,
            **LAYOUT.constants("started", "pushed", "slots", "slot_bytes", "tiles"),
            **config.constants(),
            "UPCAST": False,
            "SLOT": tl.float32,
            "TARGET": TARGETS[target],
            "HALVES": config.halves,
        },
        config.num_warps,
        config.num_stages,
    )


def grouped(config: TileConfig, dtype: str) -> Description:
    """Products in groups, for an ordinary collective behind each."""
    unused = ("row_scale", "column_scale")
    return _describe(
        name_of("grouped gemm", config, dtype),
        gemm_then_collective.grouped_kernel,
        {
            "a": operand_type(config.block_m, config, dtype),
            "b": operand_type(config.block_n, config, dtype),
        },
        {
            **dict.fromkeys(unused),
            **dict.fromkeys((f"{name}_stride" for name in unused), 0),
            **config.constants(),
            "UPCAST": False,
        },
        config.num_warps,
        config.num_stages,
    )


def wait() -> Description:
    """The one program that lets a group's collective begin."""
    return _describe("wait for group", gemm_then_collective.wait_kernel, {}, {}, 1, 3)


def sums(config: TileConfig) -> list[Description]:
    """The kernels that sum and collect tiles of these blocks, but for the switch."""
    blocks = _blocks(config)
    tile = f"{config.block_m}x{config.block_n}"
    result = {"RESULT": tl.bfloat16}
    summed = {**blocks, **result, "SLOT": tl.float32, "ACTIVATION": "silu", "THREADS": LANES}
    offsets = LAYOUT.constants(*SUM_OFFSETS)
    nowhere = {"out": None, "residual": None, "stride_om": 0, "stride_rm": 0}
    collected = LAYOUT.constants("ready", "results", "result_bytes", "tiles")
    return [
        _small(f"sum to out {tile}", partial_sums.sum_kernel, {**summed, **offsets, "SEND": False}),
        _small(
            f"sum to all {tile}",
            partial_sums.sum_kernel,
            {**summed, **offsets, **nowhere, "SEND": True},
        ),
        _small(
            f"collect {tile}",
            all_reduce_finish.collect_kernel,
            {**blocks, **result, **collected},
        ),
    ]


def switch(config: TileConfig, result: Any = tl.bfloat16) -> Description:
    """The sum that the switch makes (sm_90 and later)."""
    return _small(
        f"sum by switch {result} {config.block_m}x{config.block_n}",
        all_reduce_finish.switch_kernel,
        {
            **_blocks(config),
            "THREADS": LANES,
            "RESULT": result,
            **LAYOUT.constants(*SUM_OFFSETS),
        },
    )


def norm(columns: int, from_slots: bool) -> Description:
    """RMSNorm of rows of up to `columns`, summed here or by their owners."""
    warps = all_reduce_finish.norm_warps(columns)
    source = "slots" if from_slots else "results"
    constants = {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "COLUMNS": columns,
        "THREADS": 32 * warps,
        "FROM": tl.float32 if from_slots else tl.bfloat16,
        "FROM_SLOTS": from_slots,
        **LAYOUT.constants(*SUM_OFFSETS),
    }
    return _small(f"norm {columns} {source}", all_reduce_finish.norm_kernel, constants, warps)


def norm_columns() -> list[int]:
    """Every COLUMNS there can be."""
    most = triton.next_power_of_2(all_reduce_finish.LARGEST_NORM)
    return [1 << power for power in range(7, most.bit_length())]


def _blocks(config: TileConfig) -> dict[str, int]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STEP_M": partial_sums.step_of(config),
    }


def _small(name: str, kernel: Any, constants: Mapping[str, Any], warps: int = WARPS) -> Description:
    return _describe(name, kernel, {}, constants, warps, 3, {"maxnreg": MOST_REGISTERS})


def _describe(
    name: str,
    kernel: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
    stages: int,
    options: "Mapping[str, Any] | None" = None,
) -> Description:
    names = kernel.arg_names
    all_constants = {**UNIT_STRIDES, **constants}
    kept = {key: all_constants[key] for key in names if key in all_constants}
    types = {**COMMON, **arguments}
    told = {key: types[key] for key in names if key not in kept and key in types}
    return Description(name, kernel, told, kept, warps, stages, options or {})

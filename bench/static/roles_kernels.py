"""Descriptions of the attention forward with warp roles, as its launcher calls it."""

from bench.static.attention_kernels import OPERAND, STATE
from bench.static.compiling import Description
from bench.static.units import Tile
from pyparallel.triton_kernels.flash_attention_roles import (
    BUFFERS,
    READER_ROWS,
    READERS,
    roles_kernel,
)
from pyparallel.triton_kernels.flash_attention_roles_launch import BLOCK_K

READER_WARPS = 4
ITEM = 2  # bytes of an element


def tile_of_roles(size: int) -> Tile:
    """What one turn of a reader's loop multiplies. The two readers share what the loader fills, and
    all units: what holds for one reader and its half of the copies holds for the program."""
    return Tile(
        READER_ROWS,
        BLOCK_K,
        size,
        ITEM,
        READER_WARPS,
        filled=2 * BLOCK_K * size * ITEM // READERS,
        work=2 * READER_ROWS * BLOCK_K * size,
    )


def describe_roles(size: int, features: "tuple[str, ...]") -> Description:
    """bfloat16, heads of `size` in q, k and v; features: causal, full, window, sinks, state."""
    state, sinks = "state" in features, "sinks" in features
    arguments: dict[str, object] = {
        "q_blocks": _descriptor(READER_ROWS, size),
        **dict.fromkeys(("k_blocks", "v_blocks"), _descriptor(BLOCK_K, size)),
        **dict.fromkeys(("tiles", "segments"), "*i32:16"),
        **dict.fromkeys(("before", "after", "tile_count", "heads", "group"), "i32"),
        "scale": "fp32",
    }
    constants: dict[str, object] = {}
    states = ("row_max", "row_sum", "acc")
    if state:
        arguments |= dict.fromkeys(states, "*fp32:16")
        arguments |= {"row_max_strides": STATE, "row_sum_strides": STATE, "acc_strides": OPERAND}
        constants |= {"out": None, "lse": None}
        constants |= {"out_strides": (0, 0, 0, 0), "lse_strides": (0, 0, 0)}
    else:
        arguments |= {"out": "*bf16:16", "lse": "*fp32:16"}
        arguments |= {"out_strides": OPERAND, "lse_strides": STATE}
        constants |= dict.fromkeys(states)
        constants |= {f"{x}_strides": (0, 0, 0) for x in ("row_max", "row_sum")}
        constants |= {"acc_strides": (0, 0, 0, 0)}
    if sinks:
        arguments["sinks"] = "*fp32:16"
    else:
        constants["sinks"] = None
    shape = f"{READERS}x{READER_ROWS}x{BLOCK_K}"
    return Description(
        f"attention forward by roles bfloat16 d{size} {shape} b{BUFFERS} {' '.join(features)}",
        roles_kernel,
        arguments,
        {
            **constants,
            "SIZE": size,
            "SIZE_V": size,
            "BLOCK_K": BLOCK_K,
            "BUFFERS": BUFFERS,
            "READERS": READERS,
            "READER_ROWS": READER_ROWS,
            "BEFORE": "window" in features,
            "AFTER": bool({"causal", "window"} & set(features)),
            "SINKS": sinks,
            "LOAD": state,
            "FINISH": not state,
        },
        4,
        options={"enable_fp_fusion": True},
    )


def _descriptor(rows: int, size: int) -> str:
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = NVMMASharedLayout(128, 8 * ITEM, rank=4)
    return f"tensordesc<bf16[1,1,{rows},{size}],{layout!r}>"

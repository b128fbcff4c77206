"""Descriptions of the attention kernels, as their launchers call them for dense operands."""

from collections.abc import Iterator

from bench.static.compiling import Description
from bench.static.gemm_kernels import DTYPES
from bench.static.units import Tile
from pyparallel.triton_kernels.configurations import Chip
from pyparallel.triton_kernels.flash_attention_arguments import head_constants
from pyparallel.triton_kernels.flash_attention_configurations import (
    OPS,
    AttentionConfig,
    AttentionProblem,
    choose_for_chip,
)
from pyparallel.triton_kernels.flash_attention_dkdv import dkdv_kernel
from pyparallel.triton_kernels.flash_attention_dq import dq_kernel
from pyparallel.triton_kernels.flash_attention_forward import forward_kernel
from pyparallel.triton_kernels.flash_attention_tiles import split_head

SCORED = ("softcap", "alibi", "dropout", "window")
OPERAND = ("i64:16", "i64:16", "i64:16", 1)  # strides of [batch, seq, heads, size]
STATE = ("i64:16", "i64:16", 1)  # of [batch, heads, seq]


def choices(
    dtype: str, size: int, features: "tuple[str, ...]", chip: Chip
) -> Iterator[tuple[str, AttentionConfig]]:
    """(op, the configuration that is picked for heads of this size)."""
    scored = bool({"softcap", "alibi", "dropout"} & set(features))
    for op in OPS:
        problem = AttentionProblem(op, size, size, dtype, scored=scored)
        yield op, choose_for_chip(problem, chip).config


def describe(
    op: str, config: AttentionConfig, dtype: str, size: int, features: "tuple[str, ...]"
) -> Description:
    """The kernel of this op."""
    if op == "forward":
        return describe_forward(config, dtype, size, features=features)
    if op == "dq":
        return describe_queries(config, dtype, size, features=features)
    return describe_keys(config, dtype, size, features=features, fused=op == "fused backward")


def tile_of(op: str, config: AttentionConfig, dtype: str, size: int) -> Tile:
    """What one turn of the main loop multiplies and loads."""
    met = config.block_q if op in ("dkdv", "fused backward") else config.block_k
    item = DTYPES[dtype][1]
    products = {"forward": 2, "dq": 3, "dkdv": 4, "fused backward": 5}[op]
    return Tile(
        config.block_q,
        config.block_k,
        size,
        item,
        config.num_warps,
        filled=2 * met * size * item if config.num_stages > 1 else 0,
        work=products * config.block_q * config.block_k * size,
    )


def name_of(op: str, size: int, size_v: int, dtype: str, config: AttentionConfig, note: str) -> str:
    """attention forward bfloat16 d128 128x128 w8 s2 tma causal."""
    heads = f"d{size}" if size == size_v else f"d{size}/{size_v}"
    loads = " tma" if config.descriptors else ""
    blocks = f"{config.block_q}x{config.block_k} w{config.num_warps} s{config.num_stages}{loads}"
    return f"attention {op} {dtype} {heads} {blocks} {note}".rstrip()


def _blocks(size: int, rows: int, dtype: str, config: AttentionConfig) -> object:
    if not config.descriptors:
        return None
    return tuple(
        f"tensordesc<{DTYPES[dtype][0]}[1,1,{rows},{width}]>" for width in split_head(size) if width
    )


def mask_description(features: "tuple[str, ...]") -> "tuple[dict[str, object], dict[str, object]]":
    """Arguments and constants of the mask."""
    numbers = dict.fromkeys(
        ("seed_low", "seed_high", "first_head", "all_heads", "before", "after"), "i32"
    )
    arguments = {
        **numbers,
        "threshold": "i64",
        **dict.fromkeys(("scale", "softcap", "undrop"), "fp32"),
    }
    constants: dict[str, object] = {
        "FOLD": not {"softcap", "alibi"} & set(features),
        "SOFTCAP": "softcap" in features,
        "ALIBI": "alibi" in features,
        "BEFORE": "window" in features,
        "AFTER": bool({"causal", "window"} & set(features)),
        "DROPOUT": "dropout" in features,
    }
    if "alibi" in features:
        arguments |= {"slopes": "*fp32:16", "slope_strides": ("i32", 1)}
    else:
        constants |= {"slopes": None, "slope_strides": (0, 0)}
    return arguments, constants


def describe_forward(
    config: AttentionConfig,
    dtype: str,
    size: int,
    size_v: "int | None" = None,
    features: "tuple[str, ...]" = ("causal",),
) -> Description:
    """The forward; `state`: one that reads and writes the state, else one that finishes."""
    size_v = size if size_v is None else size_v
    name = DTYPES[dtype][0]
    state, finish = "state" in features, "state" not in features
    arguments, constants = mask_description(features)
    states = ("row_max", "row_sum", "acc")
    absent = dict.fromkeys(() if state else states)
    if finish:
        arguments |= {"out": f"*{name}:16", "lse": "*fp32:16"}
        arguments |= {"out_strides": OPERAND, "lse_strides": STATE}
        constants |= {f"{x}_strides": (0, 0, 0) for x in ("row_max", "row_sum")}
        constants |= {"acc_strides": (0, 0, 0, 0)}
    else:
        arguments |= dict.fromkeys(states, "*fp32:16")
        arguments |= {"row_max_strides": STATE, "row_sum_strides": STATE, "acc_strides": OPERAND}
        absent |= {"out": None, "lse": None}
        constants |= {"out_strides": (0, 0, 0, 0), "lse_strides": (0, 0, 0)}
    if "sinks" in features:
        arguments["sinks"] = "*fp32:16"
    else:
        absent["sinks"] = None
    blocks = {
        "k_blocks": _blocks(size, config.block_k, dtype, config),
        "v_blocks": _blocks(size_v, config.block_k, dtype, config),
    }
    (arguments if config.descriptors else constants).update(blocks)
    return Description(
        name_of("forward", size, size_v, dtype, config, " ".join(features)),
        forward_kernel,
        {
            **dict.fromkeys(("q", "k", "v"), f"*{name}:16"),
            "tiles": "*i32:16",
            "segments": "*i32:16",
            **dict.fromkeys(("q_strides", "k_strides", "v_strides"), OPERAND),
            **dict.fromkeys(("tile_count", "heads", "group"), "i32"),
            **arguments,
        },
        {
            **constants,
            **absent,
            **head_constants(size, size_v),
            **config.constants(),
            "SINKS": "sinks" in features,
            "LOAD": state,
            "FINISH": finish,
            "FAR": False,
            "UPCAST": False,
        },
        config.num_warps,
        config.num_stages,
        {"enable_fp_fusion": True},
    )


def describe_keys(
    config: AttentionConfig,
    dtype: str,
    size: int,
    size_v: "int | None" = None,
    features: "tuple[str, ...]" = ("causal",),
    fused: bool = False,
) -> Description:
    """dk and dv, and dq if fused."""
    size_v = size if size_v is None else size_v
    name = DTYPES[dtype][0]
    arguments, constants = mask_description(features)
    if fused:
        arguments |= {"dq": "*fp32:16", "dq_strides": OPERAND}
    else:
        constants |= {"dq": None, "dq_strides": (0, 0, 0, 0)}
    blocks = {
        "q_blocks": _blocks(size, config.block_q, dtype, config),
        "dout_blocks": _blocks(size_v, config.block_q, dtype, config),
    }
    (arguments if config.descriptors else constants).update(blocks)
    op = "fused backward" if fused else "dkdv"
    return Description(
        name_of(op, size, size_v, dtype, config, " ".join(features)),
        dkdv_kernel,
        {
            **dict.fromkeys(("dk", "dv"), "*fp32:16"),
            **dict.fromkeys(("dk_strides", "dv_strides"), OPERAND),
            **_backward_arguments(name),
            **dict.fromkeys(("tile_count", "kv_heads", "group"), "i32"),
            **arguments,
        },
        {
            **constants,
            **head_constants(size, size_v),
            **config.constants(),
            "FUSED": fused,
            "FAR": False,
            "UPCAST": False,
        },
        config.num_warps,
        config.num_stages,
        {"enable_fp_fusion": True},
    )


def describe_queries(
    config: AttentionConfig,
    dtype: str,
    size: int,
    size_v: "int | None" = None,
    features: "tuple[str, ...]" = ("causal",),
) -> Description:
    """dq by itself."""
    size_v = size if size_v is None else size_v
    name = DTYPES[dtype][0]
    arguments, constants = mask_description(features)
    blocks = {
        "k_blocks": _blocks(size, config.block_k, dtype, config),
        "v_blocks": _blocks(size_v, config.block_k, dtype, config),
    }
    (arguments if config.descriptors else constants).update(blocks)
    return Description(
        name_of("dq", size, size_v, dtype, config, " ".join(features)),
        dq_kernel,
        {
            "dq": "*fp32:16",
            "dq_strides": OPERAND,
            **_backward_arguments(name),
            **dict.fromkeys(("tile_count", "heads", "group"), "i32"),
            **arguments,
        },
        {
            **constants,
            **head_constants(size, size_v),
            **config.constants(),
            "FAR": False,
            "UPCAST": False,
        },
        config.num_warps,
        config.num_stages,
        {"enable_fp_fusion": True},
    )


def _backward_arguments(name: str) -> "dict[str, object]":
    operands = ("dout", "q", "k", "v")
    return {
        **dict.fromkeys(operands, f"*{name}:16"),
        **dict.fromkeys(("lse", "delta"), "*fp32:16"),
        **dict.fromkeys(("tiles", "segments"), "*i32:16"),
        **{f"{x}_strides": OPERAND for x in operands},
        **dict.fromkeys(("lse_strides", "delta_strides"), STATE),
    }

"""Descriptions of the kernels on the GEMM main loop, as their launchers call them.

Sizes and strides are multiples of 16 and operands contiguous along K, as a model's are.
"""

from bench.static.compiling import Description
from pyparallel.triton_kernels import key_shelf
from pyparallel.triton_kernels.all_gather_gemm import all_gather_gemm_kernel
from pyparallel.triton_kernels.all_gather_plan import AllGatherLayout
from pyparallel.triton_kernels.all_gather_rows import COPY_BYTES, OPENING_WARPS, open_call
from pyparallel.triton_kernels.gemm import TileConfig, gemm_kernel

# dtype of the operands -> Triton's name, bytes, dtype of the output
DTYPES = {
    "float32": ("fp32", 4, "fp32"),
    "float16": ("fp16", 2, "fp16"),
    "bfloat16": ("bf16", 2, "bf16"),
    "float8_e4m3fn": ("fp8e4nv", 1, "bf16"),
}
LAYOUT = AllGatherLayout(8, 1 << 28, 1 << 15)


def name_of(kernel: str, config: TileConfig, dtype: str) -> str:
    """all_gather_gemm bfloat16 128x256x64 w8 s3 tma."""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    loads = " tma" if config.descriptors else ""
    return f"{kernel} {dtype} {tile} w{config.num_warps} s{config.num_stages}{loads}"


def operand_type(rows: int, config: TileConfig, dtype: str) -> str:
    """A pointer, or a descriptor of blocks of `rows`."""
    name = DTYPES[dtype][0]
    if config.descriptors:
        return f"tensordesc<{name}[{rows},{config.block_k}]>"
    return f"*{name}:16"


def describe_gemm(
    config: TileConfig,
    dtype: str,
    activation: str = "none",
    scaled: bool = False,
    residual: bool = False,
) -> Description:
    """The plain GEMM with a bias; scaled: by row and column, as fp8 is."""
    out = DTYPES[dtype][2]
    sizes = ("N", "K", "stride_om", "stride_am", "stride_bn")
    scales = ("row_scale", "column_scale")
    return Description(
        name_of("gemm", config, dtype),
        gemm_kernel,
        {
            "out": f"*{out}:16",
            "a": operand_type(config.block_m, config, dtype),
            "b": operand_type(config.block_n, config, dtype),
            "bias": f"*{out}:16",
            "M": "i32",
            **dict.fromkeys(sizes, "i32:16"),
            "row_scale_stride": "i32:16",  # 0
            "column_scale_stride": "i32:16",
            "stride_rm": "i32:16",
            **(dict.fromkeys(scales, "*fp32:16") if scaled else {}),
            **({"residual": f"*{out}:16"} if residual else {}),
        },
        {
            **dict.fromkeys(("stride_on", "stride_ak", "stride_bk", "stride_rn"), 1),
            **({} if scaled else dict.fromkeys(scales)),
            **({} if residual else {"residual": None}),
            **config.constants(),
            "UPCAST": False,
            "ACTIVATION": activation,
        },
        config.num_warps,
        config.num_stages,
    )


def describe_all_gather(
    config: TileConfig, dtype: str, pullers: int, weights: int = 1, scaled: bool = False
) -> Description:
    """all_gather_gemm for several weights, the first with a bias; scaled: with scales of fp8."""
    out, item = DTYPES[dtype][2], DTYPES[dtype][1]
    mode = "pull" if pullers else "push"
    return Description(
        f"{name_of('all_gather_gemm', config, dtype)} {mode} x{weights}",
        all_gather_gemm_kernel,
        {
            "outs": (f"*{out}:16",) * weights,
            "gathered": operand_type(config.block_m, config, dtype),
            "weights": (operand_type(config.block_n, config, dtype),) * weights,
            "biases": (f"*{out}:16",) + (None,) * (weights - 1),
            "column_scales": ("*fp32:16" if scaled else None,) * weights,
            "columns": ("i32:16",) * weights,
            "K": "i32:16",
            "strides_om": ("i32:16",) * weights,
            "strides_on": (1,) * weights,
            "strides_wn": ("i32:16",) * weights,
            "strides_wk": (1,) * weights,
            "column_scale_strides": (1 if scaled else "i32:16",) * weights,
            "table": "*i64:16",
            "starts": "*i32:16",
            "status": "*i64:16",
            "rows_offset": "i64:16",
            "scales_offset": "i32:16",
            **dict.fromkeys(("rank", "world", "chunk_rows", "timeout_us"), "i32"),
            **({"row_scale": "*fp32:16"} if scaled else {}),
        },
        {
            **({} if scaled else {"row_scale": None}),
            "PULLERS": pullers,
            "ITEM": _integer(item),
            "COPY": COPY_BYTES // item,
            "ACTIVATION": "none",
            **LAYOUT.constants(mode),
            **config.constants(),
            "UPCAST": False,
        },
        config.num_warps,
        config.num_stages,
    )


def describe_open_call() -> Description:
    """The one program that begins a call of all_gather_gemm."""
    return Description(
        "open_call",
        open_call,
        {
            "table": "*i64:16",
            "status": "*i64:16",
            **dict.fromkeys(("rank", "world", "signature", "buffer", "timeout_us"), "i32"),
        },
        {"FAILED": LAYOUT.failed, "DONE": LAYOUT.done},
        OPENING_WARPS,
    )


def describe_shelf() -> tuple[Description, Description]:
    """What tells peers of rows on a shelf, and what waits for theirs: one program each."""
    layout = key_shelf.ShelfLayout(8, 1 << 28)
    constants = {"FAILED": layout.failed, "READY": layout.ready}
    told = {"table": "*i64:16", **dict.fromkeys(("rank", "world"), "i32")}
    awaited = dict.fromkeys(("rank", "source", "timeout_us"), "i32")
    return (
        Description("publish_rows", key_shelf.publish_rows, told, constants, OPENING_WARPS),
        Description(
            "await_rows",
            key_shelf.await_rows,
            {**dict.fromkeys(("table", "status"), "*i64:16"), **awaited},
            constants,
            OPENING_WARPS,
        ),
    )


def _integer(nbytes: int) -> object:
    import triton.language as tl

    return {1: tl.int8, 2: tl.int16, 4: tl.int32}[nbytes]

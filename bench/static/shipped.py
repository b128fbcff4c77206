"""Every Triton kernel with every configuration that the heuristics can pick: what the table has."""

from collections.abc import Iterator
from dataclasses import dataclass

import triton.language as tl

from bench.static import attention_kernels, roles_kernels, slot_kernels
from bench.static.compiling import ARCHITECTURES, Description
from bench.static.gemm_kernels import (
    DTYPES,
    describe_all_gather,
    describe_gemm,
    describe_open_call,
    describe_shelf,
)
from bench.static.units import Tile
from pyparallel.triton_kernels.configurations import CHIPS, ONE_SHOT, Problem, candidates
from pyparallel.triton_kernels.gemm import TileConfig

CHIP_OF = {80: CHIPS["A100"], 90: CHIPS["H100 SXM"], 100: CHIPS["B200"]}
PULLERS = 16
SIZES = (16, 64, 80, 96, 128, 192, 256)
FLOAT32_SIZES = (96, 128, 256)
SCORED_SIZES = (80, 256)
ROLES = (
    (128, ("causal",)),
    (128, ("full",)),
    (128, ("causal", "state")),
    (128, ("causal", "window", "sinks")),
    (64, ("causal",)),
)


@dataclass(frozen=True)
class Entry:
    """A kernel to compile for sm_`arch`; tile: what it multiplies. dtype: of its operands."""

    arch: int
    description: Description
    tile: "Tile | None" = None
    dtype: str = ""
    config: "TileConfig | None" = None
    bulk: bool = False  # whether it must load by bulk copies, if no config says so
    wants: tuple[str, ...] = ()  # instructions that it must have
    rows: int = 64  # of its products: a warpgroup has 64, fewer are multiplied warp by warp

    @property
    def key(self) -> str:
        return f"sm_{self.arch} {self.description.name}"


def configs(arch: int, dtype: str, op: str = "gemm", descriptors: bool = True) -> list[TileConfig]:
    """What choose() can pick for some shape of this dtype, in the order of candidates()."""
    problem = Problem(op, (8192,), 8192, 8192, dtype, descriptors)
    found = candidates(problem, CHIP_OF[arch])
    return [candidate.config for candidate in found if not candidate.excluded]


def shipped(arch: int) -> Iterator[Entry]:
    """All entries for an architecture; names do not repeat."""
    for dtype in DTYPES:
        if dtype != "float16":  # compiled as bfloat16 is, but for the name of the instruction
            yield from _multiplying(arch, dtype)
    yield Entry(arch, describe_open_call())
    for description in describe_shelf():
        yield Entry(arch, description)
    yield Entry(arch, slot_kernels.wait())
    blocks = set()
    for config in configs(arch, "bfloat16") + configs(arch, "float32"):
        if (config.block_m, config.block_n) not in blocks:
            blocks.add((config.block_m, config.block_n))
            for description in slot_kernels.sums(config):
                yield Entry(arch, description)
            if arch >= 90:
                yield Entry(arch, slot_kernels.switch(config))
    if arch >= 90:
        for result in (tl.float16, tl.float32):
            yield Entry(arch, slot_kernels.switch(configs(arch, "bfloat16")[0], result))
    for columns in slot_kernels.norm_columns():
        for from_slots in (True, False):
            yield Entry(arch, slot_kernels.norm(columns, from_slots))


def attention(arch: int) -> Iterator[Entry]:
    """The attention kernels, every row of their tables with heads of one part and of two: causal,
    in fp32, with all that takes registers for each score; the forward with a state, and with warp
    roles where there are any."""
    for size in SIZES:
        yield from _attention(arch, "bfloat16", size, ("causal",))
    for size in FLOAT32_SIZES:
        yield from _attention(arch, "float32", size, ("causal",))
    for size in SCORED_SIZES:
        yield from _attention(arch, "bfloat16", size, attention_kernels.SCORED)
    yield from _attention(arch, "bfloat16", 128, ("causal", "state"), ("forward",))
    if arch == 90:
        for size, features in ROLES:
            yield Entry(
                arch,
                roles_kernels.describe_roles(size, features),
                roles_kernels.tile_of_roles(size),
                "bfloat16",
                bulk=True,
                wants=("HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"),
            )


def _attention(
    arch: int,
    dtype: str,
    size: int,
    features: tuple[str, ...],
    ops: tuple[str, ...] = attention_kernels.OPS,
) -> Iterator[Entry]:
    for op, config in attention_kernels.choices(dtype, size, features, CHIP_OF[arch]):
        if op in ops:
            yield Entry(
                arch,
                attention_kernels.describe(op, config, dtype, size, features),
                attention_kernels.tile_of(op, config, dtype, size),
                dtype,
                bulk=config.descriptors,
                rows=config.block_k if op in ("dkdv", "fused backward") else config.block_q,
            )


def everything() -> list[Entry]:
    """All there is, but for variants that compile to the same code with another type in it."""
    return [entry for arch in ARCHITECTURES for entry in (*shipped(arch), *attention(arch))]


def _multiplying(arch: int, dtype: str) -> Iterator[Entry]:
    scaled, bf16 = dtype.startswith("float8"), dtype == "bfloat16"
    for config in configs(arch, dtype):
        yield _entry(arch, describe_gemm(config, dtype, scaled=scaled), config, dtype)
        pulled = bf16 and config == configs(arch, dtype)[0]
        for pullers in (0, PULLERS) if pulled else (0,):
            description = describe_all_gather(config, dtype, pullers, scaled=scaled)
            yield _entry(arch, description, config, dtype)
        yield _entry(arch, slot_kernels.push(config, dtype, "owner"), config, dtype)
        if bf16:
            yield _entry(arch, slot_kernels.grouped(config, dtype), config, dtype)
        if arch >= 90 and bf16:
            yield _entry(arch, slot_kernels.push(config, dtype, "self"), config, dtype)
    for config in configs(arch, dtype, ONE_SHOT):
        yield _entry(arch, slot_kernels.push(config, dtype, "all"), config, dtype)
    if arch >= 90 and bf16:  # operands that no descriptor fits
        for config in configs(arch, dtype, descriptors=False):
            yield _entry(arch, describe_gemm(config, dtype), config, dtype)
            yield _entry(arch, slot_kernels.push(config, dtype, "owner"), config, dtype)


def _entry(arch: int, description: Description, config: TileConfig, dtype: str) -> Entry:
    item = DTYPES[dtype][1]
    tile = Tile(config.block_m, config.block_n, config.block_k, item, config.num_warps)
    return Entry(arch, description, tile, dtype, config)

"""What the model knows of chips and of the links between them. Data, each figure with its source.

A figure is a published specification, a measurement that somebody published, or fitted: "fitted"
says on what. Where no source is at hand the figure is "assumed", and so it is called.
Only the standard library is used here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CHIPS", "LINKS", "Chip", "Link", "Machine", "chip_named", "machine_named"]

_TRANSPORTS = ("collective", "copies", "stores", "multimem")


@dataclass(frozen=True)
class Chip:
    """One accelerator: what a GEMM on it can reach."""

    name: str
    matches: str  # the part of a device's own name that tells it
    sms: int
    dense_tflops: Mapping[str, float]  # by dtype, without sparsity
    memory_gbps: float
    gemm_share: float  # of the dense peak, reached by the vendor's GEMM with no wave half empty
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Link:
    """What connects the chips of one machine; every chip reaches every other at the same rate."""

    name: str
    gbps: float  # one direction of one chip
    # Part of `gbps` that each way of moving data reaches; no entry: the link has no such way.
    share: Mapping[str, float]
    collective_us: float  # of a collective of the vendor's library, however small
    signal_us: float  # store a flag at a peer, and see it there
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        unknown = set(self.share) - set(_TRANSPORTS)
        if unknown:
            raise ValueError(f"link {self.name}: transport {sorted(unknown)}; want {_TRANSPORTS}")

    def bytes_per_us(self, transport: str) -> float:
        if transport not in self.share:
            raise ValueError(f"link {self.name} has no {transport}; it has {sorted(self.share)}")
        return self.gbps * self.share[transport] * 1e3


@dataclass(frozen=True)
class Machine:
    """Chips of one kind and their link."""

    chip: Chip
    link: Link

    @property
    def name(self) -> str:
        return f"{self.chip.name} {self.link.name}"


_HOPPER_PEAK = {"fp8": 1979.0, "bf16": 989.5, "fp16": 989.5, "fp32": 66.9}
_HOPPER_SHARE = (
    "fitted: cuBLAS takes 0.846 ms for 4096x6144x12288 on an H800 (bytedance/flux "
    "docs/performance_report.md), 6 waves of 128x256 tiles"
)
_H100_SOURCE = "NVIDIA H100 datasheet (SXM5), figures with sparsity halved"

_CHIPS = (
    Chip(
        "A100", "A100", 108, {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}, 2039.0, 0.87,
        {
            "sms, dense_tflops, memory_gbps": "NVIDIA A100 datasheet (SXM4 80 GB)",
            "gemm_share": "fitted: cuBLAS takes 2.438 ms for 4096x6144x12288 on an A800 "
            "(bytedance/flux docs/performance_report.md)",
        },
    ),
    Chip(
        "A800", "A800", 108, {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}, 2039.0, 0.87,
        {
            "sms, dense_tflops, memory_gbps": "as the A100; only NVLink is narrower",
            "gemm_share": "as the A100",
        },
    ),
    Chip(
        "L20", "L20", 92, {"fp8": 239.0, "bf16": 119.5, "fp16": 119.5, "fp32": 59.8}, 864.0, 0.93,
        {
            "sms, dense_tflops, memory_gbps": "NVIDIA L20 datasheet",
            "gemm_share": "fitted: cuBLAS takes 5.4 to 5.7 ms for 4096x6144x12288 "
            "(bytedance/flux docs/performance.md)",
        },
    ),
    Chip(
        "H100", "H100", 132, _HOPPER_PEAK, 3352.0, 0.78,
        {"sms, dense_tflops, memory_gbps": _H100_SOURCE, "gemm_share": _HOPPER_SHARE},
    ),
    Chip(
        "H800", "H800", 132, _HOPPER_PEAK, 3352.0, 0.78,
        {
            "sms, dense_tflops, memory_gbps": "as the H100; only NVLink and fp64 are narrower",
            "gemm_share": _HOPPER_SHARE,
        },
    ),
    Chip(
        "H200", "H200", 132, _HOPPER_PEAK, 4800.0, 0.78,
        {
            "sms, dense_tflops, memory_gbps": "NVIDIA H200 datasheet, figures with sparsity halved",
            "gemm_share": "assumed: as the H100",
        },
    ),
    Chip(
        "B200", "B200", 148,
        {"fp8": 4500.0, "bf16": 2250.0, "fp16": 2250.0, "fp32": 80.0}, 8000.0, 0.75,
        {
            "sms, dense_tflops, memory_gbps": "NVIDIA DGX B200 datasheet, figures with sparsity "
            "halved, by chip; SMs as the CUDA device reports them",
            "gemm_share": "assumed",
        },
    ),
)  # fmt: skip
CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _CHIPS}

_NVLINK_SHARE = (
    "collective: fitted, NCCL gathers 88 MB in 0.583 ms on 8 H800 (bytedance/flux "
    "docs/performance_report.md), 0.76 of 200 GB/s; copies: fitted on the rows of "
    "triton-distributed in fused_gemm_published.csv; stores: fitted on the reduce_scatter rows of "
    "flux there; multimem: assumed as copies"
)
_NVLINK_TIMES = {
    "share": _NVLINK_SHARE,
    "collective_us": "all-reduce of 8 KB on 8 H100: 22 us (yifuwang/symm-mem-recipes PR #3)",
    "signal_us": "one-shot all-reduce of 8 KB on 8 H100: 11 us with its launch and two flags "
    "(yifuwang/symm-mem-recipes PR #3)",
}
_HOPPER_LINK = {"collective": 0.76, "copies": 0.775, "stores": 0.70, "multimem": 0.775}
_AMPERE_LINK = {"collective": 0.67, "copies": 0.775, "stores": 0.70}
_LINKS = (
    Link(
        "NVLink 300", 300.0, _AMPERE_LINK, 22.0, 3.0,
        {
            **_NVLINK_TIMES,
            "gbps": "NVIDIA A100 datasheet: 12 NVLinks, 600 GB/s both ways",
            "share": "collective: as the A800's; the rest as NVLink 450, without multicast",
        },
    ),
    Link(
        "NVLink 200 (A800)", 200.0, _AMPERE_LINK, 22.0, 3.0,
        {
            **_NVLINK_TIMES,
            "gbps": "A800: 8 NVLinks, 400 GB/s both ways",
            "share": "collective: fitted, NCCL gathers 88 MB in 0.662 ms on 8 A800 (bytedance/flux "
            "docs/performance_report.md); the rest as NVLink 450, without multicast",
        },
    ),
    Link(
        "NVLink 200", 200.0, _HOPPER_LINK, 22.0, 3.0,
        {**_NVLINK_TIMES, "gbps": "H800: 8 NVLinks, 400 GB/s both ways"},
    ),
    Link(
        "NVLink 450", 450.0, _HOPPER_LINK, 22.0, 3.0,
        {**_NVLINK_TIMES, "gbps": "NVIDIA H100 datasheet: 18 NVLinks, 900 GB/s both ways"},
    ),
    Link(
        "NVLink 900", 900.0, _HOPPER_LINK, 22.0, 3.0,
        {**_NVLINK_TIMES, "gbps": "NVIDIA B200 datasheet: 18 NVLinks, 1800 GB/s both ways"},
    ),
    Link(
        "PCIe 4", 31.5, {"collective": 0.24, "copies": 0.60, "stores": 0.60}, 30.0, 5.0,
        {
            "gbps": "PCI Express 4.0, 16 lanes",
            "share": "collective: fitted, NCCL takes 11.2 ms to gather and 12.3 ms to scatter "
            "88 MB on 8 L20 (bytedance/flux docs/performance.md); copies, stores: at least 0.5, as "
            "flux hides the same bytes in 5.9 ms there; 0.60 assumed",
            "collective_us": "assumed",
            "signal_us": "assumed",
        },
    ),
    Link(
        "PCIe 5", 63.0, {"collective": 0.24, "copies": 0.60, "stores": 0.60}, 30.0, 5.0,
        {"gbps": "PCI Express 5.0, 16 lanes", "share": "assumed: as PCIe 4",
         "collective_us": "assumed", "signal_us": "assumed"},
    ),
)  # fmt: skip
LINKS: Mapping[str, Link] = {link.name: link for link in _LINKS}

_NVLINK_OF = {
    "A100": "NVLink 300", "A800": "NVLink 200 (A800)", "H100": "NVLink 450",
    "H800": "NVLink 200", "H200": "NVLink 450", "B200": "NVLink 900", "L20": "PCIe 4",
}  # fmt: skip


def chip_named(name: str) -> Chip | None:
    """The chip that a device's own name ("NVIDIA H100 80GB HBM3") speaks of; None if unknown."""
    words = name.upper().replace("-", " ").split()
    return next((chip for chip in _CHIPS if chip.matches in words), None)


def machine_named(text: str) -> Machine:
    """ "H800 NVLink", "L20 PCIe" (PCIe 4), or a link by its full name: "H100 PCIe 5".

    Raises ValueError naming the chips and links that are known.
    """
    chip_name, _, link_name = text.strip().partition(" ")
    chip = CHIPS.get(chip_name)
    if link_name in ("NVLink", ""):
        link_name = _NVLINK_OF.get(chip_name, "")
    elif link_name == "PCIe":
        link_name = "PCIe 4"
    link = LINKS.get(link_name)
    if chip is None or link is None:
        raise ValueError(
            f"machine {text!r} is not known; want a chip of {', '.join(CHIPS)} and NVLink, PCIe "
            f"or one of {', '.join(LINKS)}"
        )
    return Machine(chip, link)

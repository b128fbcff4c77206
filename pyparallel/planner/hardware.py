"""Devices and nodes by name, each figure with its source.

A figure is a published specification, a measurement that somebody published, or says "assumed". One
that was fitted to a row of the validation tables says "FITTED" (docs/validation.md lists them).
"""

import re
from collections.abc import Mapping

from pyparallel.planner.clusters import ClusterSpec, Gpu, Link
from pyparallel.planner.errors import PlanError, nearest_names, shown

__all__ = ["CLUSTERS", "cluster_named", "driver_preset"]

_SIMUMAX_B200 = "kernels measured on a B200: MooreThreads/SimuMax configs/system/b200_bf16_ceperm"
_SIMUMAX_A100 = "kernels measured on an A100 PCIe: MooreThreads/SimuMax configs/system/a100_pcie"

_AMPERE = {
    "peak_tflops, memory_gbps, sms": "NVIDIA A100 datasheet (SXM4)",
    "gemm_share": "cuBLAS takes 2.438 ms for 4096x6144x12288 on an A800 (bytedance/flux "
    "docs/performance_report.md): 0.81 with its waves; 0.76 on the 300 W PCIe card: "
    + _SIMUMAX_A100,
    "attention_share": "FlashAttention-2, arXiv:2307.08691, figures 5 and 6: 190 to 225 TFLOP/s "
    "forward, 150 to 190 backward, causal",
    "memory_share": "0.91 measured: " + _SIMUMAX_A100 + "; less for short passes",
}
_DRIVER = "nvidia-smi: {} MiB"
_HOPPER = {
    "memory_gib": _DRIVER.format(81559),
    "peak_tflops, memory_gbps, sms": "NVIDIA H100 datasheet (SXM5), sparsity halved",
    "gemm_share": "bf16: cuBLAS takes 0.846 ms for 4096x6144x12288 on an H800 (bytedance/flux "
    "docs/performance_report.md), 6 waves; fp8: assumed",
    "attention_share": "FlashAttention-3, arXiv:2407.08608, figures 5 and 6: 500 to 640 TFLOP/s "
    "forward, 400 to 550 backward, causal",
    "memory_share": "assumed: as the A100",
}
_A100_PEAK = {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5, "tf32": 156.0}
_A100_SHARE = {"bf16": 0.85, "fp32": 0.90, "tf32": 0.75}
_H100_PEAK = {"fp8": 1979.0, "bf16": 989.5, "fp16": 989.5, "tf32": 494.7, "fp32": 66.9}
_H100_SHARE = {"bf16": 0.74, "fp8": 0.65, "tf32": 0.70, "fp32": 0.90}

_GPUS = (
    Gpu("a100-40", 40.0, _A100_PEAK, _A100_SHARE, (0.65, 0.52), 1555.0, 0.85, 108,
        sources=_AMPERE),
    Gpu("a100-80", 80.0, _A100_PEAK, _A100_SHARE, (0.65, 0.52), 2039.0, 0.85, 108,
        sources=_AMPERE),
    Gpu("h100", 79.6, _H100_PEAK, _H100_SHARE, (0.60, 0.50), 3352.0, 0.85, 132,
        sources=_HOPPER),
    Gpu("h200", 140.4, _H100_PEAK, _H100_SHARE, (0.60, 0.50), 4800.0, 0.85, 132,
        sources={**_HOPPER, "peak_tflops, memory_gbps, sms": "NVIDIA H200 datasheet",
                 "memory_gib": _DRIVER.format(143771)}),
    Gpu(
        "b200", 179.1,
        {"fp8": 4500.0, "bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 80.0},
        {"bf16": 0.505, "fp8": 0.58, "tf32": 0.5, "fp32": 0.8},
        (0.50, 0.415), 8000.0, 0.67, 148,
        sources={
            "memory_gib": _DRIVER.format(183359),
            "peak_tflops, memory_gbps, sms": "NVIDIA DGX B200 datasheet, sparsity halved, by "
            "chip; SMs as the CUDA device reports them",
            "gemm_share": "bf16: the long GEMMs (N, K of 8192 and more) reach 0.50 of 2250, short "
            "ones up to 0.65; "
            + _SIMUMAX_B200 + "; fp8: FITTED on one row, LLAMA3_8B on 8 B200 of "
            "Megatron-Bridge 25.11",
            "attention_share": "0.96 to 0.99 and 0.82 to 0.83 where all products are counted, of "
            "which causality leaves half; " + _SIMUMAX_B200,
            "memory_share": "0.666; " + _SIMUMAX_B200,
        },
    ),
    Gpu(
        "gb200", 185.0,
        {"fp8": 5000.0, "bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0},
        {"bf16": 0.505, "fp8": 0.58, "tf32": 0.5, "fp32": 0.8},
        (0.50, 0.415), 8000.0, 0.67, 148,
        sources={
            "memory_gib": _DRIVER.format(189471),
            "peak_tflops, memory_gbps": "NVIDIA GB200 NVL72 datasheet, sparsity halved, by chip",
            "gemm_share, attention_share, memory_share": "as the B200",
        },
    ),
    Gpu("a100-pcie", 80.0, _A100_PEAK, {**_A100_SHARE, "bf16": 0.78}, (0.60, 0.48), 1935.0, 0.75,
        108,
        sources={
            "peak_tflops, memory_gbps, sms": "NVIDIA A100 datasheet (PCIe, 80 GB)",
            "gemm_share, memory_share": "long GEMMs 0.75 with their waves, 0.91 of 1600 GB/s; "
            + _SIMUMAX_A100,
            "attention_share": "assumed: a little below the 400 W card",
        }),
    Gpu("h100-pcie", 79.6,
        {"fp8": 1513.0, "bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.2}, _H100_SHARE,
        (0.60, 0.50), 2039.0, 0.85, 114,
        sources={"memory_gib": _DRIVER.format(81559),
                 "peak_tflops, memory_gbps, sms": "NVIDIA H100 datasheet (PCIe), sparsity halved",
                 "gemm_share, attention_share, memory_share": "assumed: as the H100 of 700 W; its "
                 "350 W may hold long GEMMs below"}),
    Gpu("mi300x", 192.0,
        {"fp8": 2614.9, "bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4},
        {"bf16": 0.52, "fp8": 0.45, "fp32": 0.6}, (0.35, 0.25), 5300.0, 0.75, 304,
        sources={
            "peak_tflops, memory_gbps, sms": "AMD Instinct MI300X datasheet",
            "gemm_share": "best bf16 GEMM of 708 TFLOP/s (stas00/ml-engineering, maximum "
            "achievable matmul FLOPS), a little less in long runs; fp8: assumed",
            "attention_share, memory_share": "assumed",
        }),
    Gpu("l40s", 45.0, {"fp8": 733.0, "bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
        {"bf16": 0.65, "fp8": 0.55, "fp32": 0.6}, (0.45, 0.35), 864.0, 0.85, 142,
        sources={"memory_gib": _DRIVER.format(46068) + ", with ECC",
                 "peak_tflops, memory_gbps, sms": "NVIDIA L40S datasheet, sparsity halved",
                 "gemm_share, attention_share, memory_share": "assumed"}),
    Gpu("v100-32", 32.0, {"fp16": 125.0, "bf16": 15.7, "fp32": 15.7}, {"fp16": 0.75, "bf16": 0.9},
        (0.3, 0.25), 900.0, 0.85, 80,
        sources={"peak_tflops, memory_gbps, sms": "NVIDIA V100 datasheet (SXM2, 32 GB)",
                 "gemm_share, attention_share, memory_share": "assumed"}),
    Gpu("cpu", 64.0, {"bf16": 1.0, "fp16": 1.0, "fp32": 1.0}, {"bf16": 0.7}, (0.3, 0.3), 50.0, 0.7,
        0, 1.0,
        sources={"all": "assumed: a part of a server CPU of 16 cores with AVX-512; calibrate with "
                 "python -m bench and --calibrate bench.json"}),
)  # fmt: skip
_BY_NAME = {gpu.name: gpu for gpu in _GPUS}

_NVLINK = "NVIDIA datasheets: {} NVLinks of 25 GB/s a direction; "
_IB = (
    "{} InfiniBand adapter per GPU; share and time of a step: calculon-ai/calculon systems/; "
    "slowdown beside compute: 1.1 to 1.3 in Galvatron, arXiv:2211.13878"
)
_SM = "; share of the SMs: calculon-ai/calculon systems/"

_NVLINK3 = Link("NVLink 3", 300.0, 0.75, 3.0, 15.0, 0.15,
                _NVLINK.format(12) + "share: NCCL's bus bandwidth on 8 A100, 225 to 235 GB/s from "
                "256 MB (NVIDIA nccl-tests); 0.67 at 88 MB (bytedance/flux)" + _SM)  # fmt: skip
_NVLINK4 = Link("NVLink 4", 450.0, 0.76, 3.0, 15.0, 0.15,
                _NVLINK.format(18) + "share: NCCL gathers 88 MB in 0.583 ms over 200 GB/s of 8 "
                "H800 (bytedance/flux docs/performance_report.md)" + _SM)  # fmt: skip
_NVLINK5 = Link("NVLink 5", 900.0, 0.68, 8.0, 23.0, 0.1,
                "18 NVLinks of 50 GB/s a direction; share, step and call of all-gather and "
                "reduce-scatter: " + _SIMUMAX_B200)  # fmt: skip
_HDR = Link("InfiniBand HDR", 25.0, 0.85, 10.0, 20.0, 0.15, _IB.format("one HDR"))
_NDR = Link("InfiniBand NDR", 50.0, 0.80, 10.0, 20.0, 0.15, _IB.format("one NDR"))
_FABRIC = Link("Infinity Fabric", 448.0, 0.65, 5.0, 20.0, 0.15,
               "AMD MI300X datasheet: 7 links of 64 GB/s a direction; share: assumed")  # fmt: skip
_PCIE4 = Link("PCIe 4", 31.5, 0.45, 9.0, 25.0, 0.1,
              "16 lanes of PCI Express 4.0; share of 8 devices: " + _SIMUMAX_A100)  # fmt: skip
_PCIE5 = Link("PCIe 5", 63.0, 0.45, 9.0, 25.0, 0.1,
              "16 lanes of PCI Express 5.0; share: assumed, as PCIe 4")  # fmt: skip
_V100 = Link("NVLink 2", 150.0, 0.80, 5.0, 20.0, 0.15, _NVLINK.format(6) + "share: assumed")
_EDR = Link("InfiniBand EDR", 6.25, 0.85, 10.0, 20.0, 0.15, "DGX-2: 8 EDR for 16 GPUs")
_SHARED = Link("shared memory", 4.0, 0.9, 5.0, 20.0, 0.0,
               "assumed; docs/performance.md has measured figures of one machine")  # fmt: skip
_ETHERNET = Link("Ethernet 25 Gb/s", 3.1, 0.7, 30.0, 60.0, 0.0, "assumed")

_CLUSTERS = (
    ClusterSpec("a100-40", _BY_NAME["a100-40"], 8, _NVLINK3, _HDR, 128.0, 25.0),
    ClusterSpec("a100-80", _BY_NAME["a100-80"], 8, _NVLINK3, _HDR, 256.0, 25.0),
    ClusterSpec("h100", _BY_NAME["h100"], 8, _NVLINK4, _NDR, 256.0, 50.0),
    ClusterSpec("h200", _BY_NAME["h200"], 8, _NVLINK4, _NDR, 256.0, 50.0),
    ClusterSpec("b200", _BY_NAME["b200"], 8, _NVLINK5, _NDR, 512.0, 50.0),
    ClusterSpec("gb200", _BY_NAME["gb200"], 72, _NVLINK5, _NDR, 240.0, 200.0),
    ClusterSpec("a100-pcie", _BY_NAME["a100-pcie"], 8, _PCIE4, _HDR, 256.0, 25.0),
    ClusterSpec("h100-pcie", _BY_NAME["h100-pcie"], 8, _PCIE5, _NDR, 256.0, 50.0),
    ClusterSpec("mi300x", _BY_NAME["mi300x"], 8, _FABRIC, _NDR, 256.0, 50.0),
    ClusterSpec("l40s", _BY_NAME["l40s"], 8, _PCIE4, _HDR, 128.0, 25.0),
    ClusterSpec("v100-32", _BY_NAME["v100-32"], 16, _V100, _EDR, 96.0, 12.0),
    ClusterSpec("cpu", _BY_NAME["cpu"], 2, _SHARED, _ETHERNET, 0.0, 10.0),
)
CLUSTERS: Mapping[str, ClusterSpec] = {cluster.name: cluster for cluster in _CLUSTERS}
# Words of a driver's name, and the preset of the card in its largest form.
_CHIPS = {"A100": "a100-80", "A800": "a100-80", "H100": "h100", "H800": "h100", "H200": "h200",
          "B200": "b200", "GB200": "gb200", "MI300X": "mi300x", "MI300": "mi300x", "L40S": "l40s",
          "V100": "v100-32", "HOST": "cpu"}  # fmt: skip
_OTHER_RATES = {"NVL", "GH200"}  # cards of these chips whose rates no preset has
_FEWER_LINKS = {"A800", "H800"}


def driver_preset(name: str, memory_gib: float | None = None) -> str | None:
    """The preset of a device as its driver calls it ("NVIDIA A100-SXM4-40GB"), by chip, slot and
    memory; None where there is none."""
    words = re.split(r"[^A-Z0-9]+", name.upper())
    found = next((_CHIPS[word] for word in words if word in _CHIPS), None)
    if found is None or _OTHER_RATES & set(words):
        return None
    if any(word.startswith("PCI") for word in words):
        return {"a100-80": "a100-pcie", "h100": "h100-pcie"}.get(found, found)
    if found == "a100-80" and memory_gib is not None and memory_gib < 60:
        return "a100-40"
    return found


def _by_driver(name: str) -> str | None:
    """The preset that a driver's name on a command line means, where its memory is the same."""
    if _FEWER_LINKS & set(re.split(r"[^A-Z0-9]+", name.upper())):
        return None
    size = re.search(r"(?<![\da-z])(\d{2,3}) ?(?:gi?b?)?(?![\da-z])", name.lower())
    memory = None if size is None else float(size[1])
    found = driver_preset(name, memory)
    if found is None or memory is None:
        return found
    return found if abs(_BY_NAME[found].memory_gib / memory - 1) < 0.1 else None


def cluster_named(name: str) -> ClusterSpec:
    """Nodes of the device called `name`, as they are usually built. What a driver calls it will do
    as well ("NVIDIA H100 80GB HBM3").

    Raises:
        PlanError: it is not known; near names are listed.
    """
    plain = re.sub(r"[-_ ]", "", name.lower())
    by_plain = {re.sub("-", "", known): known for known in CLUSTERS}
    found = by_plain.get(plain) or _by_driver(name)
    if found is None:
        near = nearest_names(name, CLUSTERS)
        raise PlanError(
            f"no GPU {shown(name)}{'; ' + near if near else ''}. There are {', '.join(CLUSTERS)}; "
            "or what `python -m pyparallel doctor --json` wrote on a machine (--cluster FILE)"
        )
    return CLUSTERS[found]

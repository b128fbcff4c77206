"""Clusters of real machines: from `doctor --json`, with efficiencies from our own bench.json.

`doctor` says which devices and links there are; the preset of the same device gives the
efficiencies. `calibrated` replaces those that the benchmark measured there.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from pyparallel.planner.clusters import GIB, ClusterSpec
from pyparallel.planner.errors import PlanError, shown
from pyparallel.planner.hardware import CLUSTERS, driver_preset

__all__ = ["calibrated", "cluster_from_doctor", "in_file", "read_json"]

_NVLINK_GBPS = {"a100": 25.0, "h100": 25.0, "h200": 25.0, "b200": 50.0, "gb200": 50.0,
                "v100": 25.0}  # fmt: skip


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object of a file.

    Raises:
        PlanError: it cannot be read; a broken file names its line.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: byte {error.start}: no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise PlanError(f"{path}: nested too deeply") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise PlanError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise PlanError(f"{path}: line 1: an object is expected")
    return document


def in_file(path: Path, text: str) -> str:
    """An error of a JSON file's contents ("gpu: key sms: ...") with the file, and with the line of
    the key that it names where that stands in it."""
    named = re.match(r"(?:(\w+): )?(?:unknown )?keys? (\w+)", text)
    body = path.read_text()
    above = named and named[1] and re.search(rf'"{named[1]}"\s*:', body)
    stands = named and re.compile(rf'"{named[2]}"\s*:').search(body, above.end() if above else 0)
    if not stands:
        return f"{path}: {text}"
    return f"{path}, line {body.count(chr(10), 0, stands.start()) + 1}: {text}"


def cluster_from_doctor(report: Mapping[str, Any], name: str = "this machine") -> ClusterSpec:
    """Nodes like the machine that wrote the report: its GPUs with their memory and links, or its
    CPU where it has none. What crosses nodes is the preset's, for no report of one machine knows.

    Raises:
        PlanError: the report lacks what is needed, has a GPU that is not known, or unequal ones.
    """
    try:
        devices = [
            (str(device["name"]), _bytes(device.get("memory_bytes")))
            for device in report["gpus"]["devices"]
        ]
        links = [str(link.get("link", "")) for link in report["gpus"].get("links") or ()]
        host = float(report["memory"]["total_bytes"])
        cores = int(report["cpu"]["usable"])
        if not (0 < host < inf and cores > 0):
            raise ValueError(f"memory.total_bytes {host:g}, cpu.usable {cores}: more than 0 each")
        if any(size is not None and not 0 < size < inf for _, size in devices):
            raise ValueError("a GPU's memory_bytes: more than 0 is expected")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"key {error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(
            f"{name}: no report of `doctor --json`, nor a cluster with its key intra: {what}"
        ) from None
    if not devices:
        return _cpu(name, host, cores, report)
    first = devices[0][0]
    kinds = sorted({device for device, _ in devices})
    if len(kinds) > 1:
        raise PlanError(
            f"{name}: {len(kinds)} kinds of GPU, {', '.join(kinds)}: nodes of equal devices are "
            "planned; give the one to plan for by --gpu and --node-size"
        )
    memory = min((size for _, size in devices if size is not None), default=None)
    preset = driver_preset(first, None if memory is None else memory / GIB)
    if preset is None:
        raise PlanError(
            f"{name}: GPU {shown(first)} is not known; known are {', '.join(CLUSTERS)}: give one "
            "by --gpu, or a cluster file with its figures"
        )
    base = CLUSTERS[preset]
    gpu = base.gpu if memory is None else replace(base.gpu, memory_gib=memory / GIB)
    intra = _link(base, preset, links, name)
    return replace(
        base,
        name=name,
        gpu=gpu,
        node_size=len(devices),
        intra=intra,
        host_gib=host / GIB / len(devices),
    )


def _bytes(value: Any) -> float | None:
    return None if value is None else float(value)


def _link(base: ClusterSpec, preset: str, links: Sequence[str], name: str) -> Any:
    """The slowest common link of the node: so many NVLinks, or PCIe."""
    kinds = Counter(links)
    if not kinds:
        return base.intra
    if not all(kind.startswith("NV") for kind in kinds):
        pcie = CLUSTERS["l40s"].intra
        return replace(pcie, source=pcie.source + f"; found {dict(kinds)}")
    wrong = [kind for kind in kinds if not re.fullmatch(r"NV[1-9]\d{0,2}", kind)]
    if wrong:
        raise PlanError(f"{name}: link {shown(wrong[0])}: NV and a number of NVLinks is expected")
    lanes = min(int(kind[2:]) for kind in kinds)
    each = next((g for part, g in _NVLINK_GBPS.items() if preset.startswith(part)), 25.0)
    return replace(base.intra, gbps=lanes * each, name=f"{lanes} NVLinks")


def _cpu(name: str, host: float, cores: int, report: Mapping[str, Any]) -> ClusterSpec:
    """Two ranks share the host; peak by cores, vector width and an assumed 2.5 GHz."""
    base = CLUSTERS["cpu"]
    simd = report.get("cpu", {}).get("simd", [])
    per_cycle = 64.0 if "avx512f" in simd else 32.0
    node = max(1, min(cores, base.node_size))
    peak = cores / node * per_cycle * 2.5e9 / 1e12
    gpu = replace(
        base.gpu,
        memory_gib=host / GIB / node,
        peak_tflops=dict.fromkeys(base.gpu.peak_tflops, peak),
        sources={"all": f"{cores} cores, {per_cycle:g} fp32 operations a cycle, 2.5 GHz assumed"},
    )
    return replace(base, name=name, gpu=gpu, node_size=node, host_gib=0.0)


def calibrated(cluster: ClusterSpec, bench: Mapping[str, Any]) -> tuple[ClusterSpec, list[str]]:
    """A cluster whose GEMM rate and link rate are those that `python -m bench` measured.

    GEMM: the best rate of stock matmuls (`parts.gemm` of suite gemm), per dtype. Link: the largest
    all-reduces of suite collectives, as bus bandwidth 2 (n-1)/n bytes / time.

    Returns:
        The cluster, and a line for each figure that was replaced.

    Raises:
        PlanError: no bench.json, or one without a row to calibrate by.
    """
    rows = bench.get("rows")
    if not isinstance(rows, list):
        raise PlanError("calibration: no bench.json: key rows is missing")
    _check_device(cluster, bench)
    rows = [row for row in rows if isinstance(row, dict) and row.get("verified")]
    said: list[str] = []
    gpu = cluster.gpu
    for dtype, long in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        rates = [r for r in map(_gemm_rate, rows) if r and r[0] == long]
        if not rates or dtype not in gpu.peak_tflops:
            continue
        best = max(rate for _, rate in rates)
        peak = max(gpu.peak_tflops[dtype], best / 1e12)
        share = best / (peak * 1e12)
        gpu = replace(
            gpu,
            peak_tflops={**gpu.peak_tflops, dtype: peak},
            gemm_share={**gpu.gemm_share, dtype: share},
        )
        said.append(f"{dtype} GEMM {best / 1e12:.3g} TFLOP/s, {100 * share:.0f} % of the peak")
    intra = cluster.intra
    bus = [(size, rate) for size, rate in map(_bus_rate, rows) if rate]
    if bus:
        largest = max(size for size, _ in bus)
        rate = median(rate for size, rate in bus if size == largest)
        share = rate / (intra.gbps * 1e9)
        if share > 1:
            intra = replace(intra, gbps=rate / 1e9, share=1.0)
        else:
            intra = replace(intra, share=share)
        said.append(
            f"all-reduce of {largest / 2**20:.4g} MiB at {rate / 1e9:.3g} GB/s bus bandwidth"
        )
    if not said:
        raise PlanError(
            "calibration: bench.json has no verified row of suite gemm or all_reduce of suite "
            "collectives: run python -m bench gemm collectives"
        )
    gpu = replace(gpu, sources={**gpu.sources, "calibrated": "; ".join(said)})
    return replace(cluster, name=f"{cluster.name} (calibrated)", gpu=gpu, intra=intra), said


def _check_device(cluster: ClusterSpec, bench: Mapping[str, Any]) -> None:
    """A benchmark of CPUs says nothing of GPUs, nor theirs of CPUs."""
    try:
        device, machine = bench["meta"]["options"]["device"], bench["meta"]["machine"]["cpu"]
    except (KeyError, TypeError):
        return  # rows alone, without what they were measured on
    if (device == "cpu") != (cluster.gpu.name == "cpu"):
        raise PlanError(
            f"calibration: bench.json was measured on {device} ({machine}), the plan is for "
            f"{cluster.gpu.name}: calibrate by a benchmark that ran on the device planned for, "
            "or take --gpu cpu or --cluster of that machine"
        )


def _gemm_rate(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """(dtype, FLOP/s of one rank) of a row's matmul alone."""
    if row.get("suite") != "gemm":
        return None
    try:
        seconds = float(row["parts"]["gemm"]) * 1e-6
        flops = float(row["flops"])
        return str(row["dtype"]), flops / seconds
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _bus_rate(row: Mapping[str, Any]) -> tuple[float, float]:
    """(bytes, bytes/s) of an all-reduce; (0, 0) of another row."""
    if row.get("suite") != "collectives" or row.get("op") != "all_reduce":
        return 0.0, 0.0
    try:
        n, size = int(row["world_size"]), float(row["bytes"])
        seconds = float(row["ours_us"]["median"]) * 1e-6
        return size, 2 * (n - 1) / n * size / seconds
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0.0, 0.0

"""Step times against published ones, and whether what is faster there is faster here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.planner.afterwards import nemo
from bench.planner.quantities import KORTHIKANTI, bridge_model, ptdp_model, simumax_case
from bench.planner.tables import Compared, Group, Row, rows
from pyparallel.planner import Job, Layout, cluster_named, preset
from pyparallel.planner.clusters import ClusterSpec
from pyparallel.planner.cost import time_report
from pyparallel.planner.flops import flops_per_token
from pyparallel.planner.kernels import Kernels
from pyparallel.planner.memory import memory_report
from pyparallel.planner.models import ModelSpec
from pyparallel.planner.passes import Passes

A100, H100, B200, GB200 = (cluster_named(name) for name in ("a100-80", "h100", "b200", "gb200"))
MEAN, WORST = 10.0, 20.0


def _gpt(model: ModelSpec, batch: int) -> Job:
    return Job(model, 2048, batch, "fp16", "unfused", dropout=True)


def simumax() -> Group:
    found = []
    for row in rows("simumax_b200"):
        job, layout = simumax_case(row)
        step = 1e3 * time_report(job, B200, layout).step
        found.append(Compared(row["case"], float(row["measured_ms"]), step, "ms"))
    return Group(
        "Step time, 8 x B200", "simumax_b200", tuple(found), WORST, MEAN,
        said="GEMM, attention and collective rates are those of kernels timed alone, published "
        "beside these rows; one factor, 1.05 for kernels of a running job, is fitted.",
    )  # fmt: skip


Run = tuple[str, Job, ClusterSpec, Layout]


def korthikanti_jobs() -> list[Run]:
    """Full recompute, and selective recompute with sequence parallelism, of each model."""
    configs = {row["model"]: row for row in rows("korthikanti_configs")}
    found: list[Run] = []
    for model, config in configs.items():
        chunks = int(config["interleave"])
        base = Layout(
            tp=int(config["tp"]), pp=int(config["pp"]), chunks=chunks,
            micro_batch=int(config["microbatch"]), zero=0,
            schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        )  # fmt: skip
        job = _gpt(preset(KORTHIKANTI[model]), int(config["global_batch"]))
        full = base.with_(recompute="full", sequence_parallel=False)
        found.append((f"{model} full_recompute_s", job, A100, full))
        found.append((f"{model} sel_sp_s", job, A100, base.with_(recompute="selective")))
    return found


def korthikanti() -> Group:
    published = {row["model"]: row for row in rows("korthikanti_end_to_end")}
    found = []
    for label, job, cluster, layout in korthikanti_jobs():
        model, column = label.split()
        step = time_report(job, cluster, layout).step
        text = f"{model} {column.removesuffix('_s').replace('_', ' ')}"
        found.append(Compared(text, float(published[model][column]), step, "s"))
    return Group("Step time, up to 512 x A100", "korthikanti_end_to_end", tuple(found), WORST,
                 MEAN)  # fmt: skip


_METHODS: dict[str, dict[str, Any]] = {
    "baseline": {"sequence_parallel": False},
    "sequence_parallel": {},
    "full_recompute": {"sequence_parallel": False, "recompute": "full"},
    "selective_recompute": {"sequence_parallel": False, "recompute": "selective"},
    "selective_plus_sp": {"recompute": "selective"},
}


def layer_times() -> Group:
    """One layer of the 22B model, tp 8, microbatches of four sequences."""
    job = _gpt(preset("megatron-22b"), 4)
    kernels = Kernels(A100.gpu, job.bytes, devices=8)
    found = []
    for row in rows("korthikanti_layer_time_22B"):
        layout = Layout(tp=8, micro_batch=4, **_METHODS[row["method"]])
        three = Passes(job, A100, layout, kernels).layer(0)
        forward = 1e3 * three.forward.seconds
        backward = 1e3 * (three.inputs.seconds + three.weights.seconds)
        for column, ours in (
            ("forward_ms", forward),
            ("backward_ms", backward),
            ("combined_ms", forward + backward),
        ):
            label = f"{row['method'].replace('_', ' ')}, {column.removesuffix('_ms')}"
            found.append(Compared(label, float(row[column]), ours, "ms"))
    return Group(
        "Time of one layer, 8 x A100", "korthikanti_layer_time_22B", tuple(found), WORST, MEAN,
        said="That an unfused attention's products do not hide the traffic of their scores was "
        "chosen after the rows were seen.",
    )  # fmt: skip


def _tuned(job: Job, layout: Layout) -> Layout:
    """The fastest micro batch and number of chunks that fit: what a published run has chosen and
    its table does not print."""
    found = []
    for micro in (1, 2, 4, 8, 16):
        for chunks in (1, 2, 3, 4, 5):
            if job.global_batch % (micro * layout.dp):
                continue
            if chunks > 1 and (layout.pp == 1 or job.model.layers % (layout.pp * chunks)):
                continue
            name = "interleaved-1f1b" if chunks > 1 else "1f1b"
            one = layout.with_(micro_batch=micro, chunks=chunks, schedule=name)
            if memory_report(job, A100, one, exact=False).fits:
                found.append((time_report(job, A100, one, exact=False).step, one))
    return min(found, key=lambda item: item[0])[1]


def _hardware_seconds(job: Job, devices: int, tflops: float) -> float:
    """Step time from TFLOP/s per device that count a whole recomputed forward."""
    each = flops_per_token(job.model, job.seq, "hardware", "full")
    return job.tokens * each / devices / (tflops * 1e12)


def ptdp() -> Group:
    found = []
    for row in rows("ptdp_table1"):
        job = _gpt(ptdp_model(row), int(row["batch"]))
        layout = _tuned(
            job,
            Layout(
                dp=int(row["dp"]), tp=int(row["tp"]), pp=int(row["pp"]), zero=0,
                recompute="full", sequence_parallel=False, overlap_dp=False,
            ),
        )  # fmt: skip
        published = _hardware_seconds(job, int(row["gpus"]), float(row["tflops_per_gpu"]))
        note = f"micro batch {layout.micro_batch}, {layout.chunks} chunks: not printed, our choice"
        step = time_report(job, A100, layout).step
        found.append(Compared(f"{row['params_B']}B on {row['gpus']}", published, step, "s", note))
    return Group("Step time, up to 3072 x A100", "ptdp_table1", tuple(found), WORST, MEAN)


def _table2(row: Row) -> tuple[Job, Layout]:
    model = preset("megatron-175b" if row["params_B"] == "174.6" else "megatron-530b")
    job = replace(_gpt(model, int(row["batch"])), precision="fp16-zero")
    gpus, cut = int(row["gpus"]), int(row["model_parallel"])
    layout = Layout(
        dp=gpus // cut, tp=8 if cut > 1 else 1, pp=max(cut // 8, 1), recompute="full",
        zero=0 if cut > 1 else 3, micro_batch=int(row["microbatch"]),
        sequence_parallel=False, overlap_dp=False, one_adapter=cut == 1,
    )  # fmt: skip
    return job, layout


def ptdp_zero() -> Group:
    found = []
    for row in rows("ptdp_table2_zero3"):
        job, layout = _table2(row)
        published = _hardware_seconds(job, int(row["gpus"]), float(row["tflops_per_gpu"]))
        step = time_report(job, A100, layout).step
        zero = row["scheme"] == "ZeRO-3"
        note = "DeepSpeed of 2021: held to the order only" if zero else ""
        label = f"{row['scheme']} {row['params_B']}B on {row['gpus']}"
        found.append(Compared(label, published, step, "s", note, counted=not zero))
    return Group(
        "Step time, PTD-P and ZeRO-3", "ptdp_table2_zero3", tuple(found), WORST, MEAN,
        said="The ZeRO-3 rows show the same step time for twice the devices: gathers that do not "
        "use a node's eight adapters. They are computed with one adapter per ring and nothing "
        "overlapped, chosen after the rows were seen.",
    )  # fmt: skip


def llama_405b() -> Group:
    model = preset("llama-3.1-405b")
    found = []
    for row in rows("llama3_405b_4d"):
        job = Job(model, int(row["seq"]), int(row["batch_per_dp"]) * int(row["dp"]))
        layout = Layout(
            dp=int(row["dp"]), tp=int(row["tp"]), pp=int(row["pp"]), cp=int(row["cp"]),
            chunks=4, schedule="interleaved-1f1b", cp_kind="all-gather",
        )  # fmt: skip
        each = flops_per_token(model, job.seq, "full")
        rate = float(row["tflops_per_gpu"]) * 1e12 * int(row["gpus"])
        label = f"{row['gpus']} devices, cp {row['cp']}"
        step = time_report(job, H100, layout).step
        found.append(Compared(label, job.tokens * each / rate, step, "s"))
    return Group(
        "Step time, Llama 3.1 405B on H100", "llama3_405b_4d", tuple(found), WORST, None,
        said="Not printed there: the convention of the FLOPs (taken: attention whole) and the "
        "stages per rank (taken: 4). Compared by these.",
    )  # fmt: skip


_SYSTEMS: dict[str, ClusterSpec] = {"H100": H100, "B200": B200, "GB200": GB200}


def _megatron_rows() -> list[tuple[Row, Run]]:
    found: list[tuple[Row, Run]] = []
    for table in ("megatron_llama3_fp8_h100", "megatron_bridge_25_11"):
        for row in rows(table):
            name, system = bridge_model(row["model"]), row.get("system", "H100")
            if row["model"] == "DeepSeekV3":
                name = "deepseek-v3"
            if name is None or system not in _SYSTEMS:
                continue
            tp, pp, cp = (int(row[k]) for k in ("tp", "pp", "cp"))
            chunks = int(row["vp"] or 1)
            precision = "bf16" if row.get("precision") == "BF16" else "fp8"
            job = Job(preset(name), int(row["seq"]), int(row["global_batch"]), precision)
            layout = Layout(
                dp=int(row["gpus"]) // (tp * pp * cp), tp=tp, pp=pp, cp=cp, chunks=chunks,
                ep=int(row.get("ep") or 1),
                zero=3 if row.get("fsdp") == "1" else 1, micro_batch=int(row["microbatch"]),
                schedule="interleaved-1f1b" if chunks > 1 else "1f1b", overlap_tp=tp > 1,
            )  # fmt: skip
            label = f"{system} {row['model']} on {row['gpus']}, {table.split('_')[1]}"
            found.append((row, (label, job, _SYSTEMS[system], layout)))
    return found


def megatron_jobs() -> list[Run]:
    """Dense Llamas in 8 bits, on H100 and B200. Those on GB200 keep activations on its host, which
    their table does not print."""
    return [run for row, run in _megatron_rows() if row.get("system") != "GB200"]


def megatron() -> Group:
    found = []
    for row, (label, job, cluster, layout) in _megatron_rows():
        published = job.tokens / int(row["gpus"]) / float(row["tokens_per_s_per_gpu"])
        step = time_report(job, cluster, layout).step
        fitted = row.get("system") == "B200" and row["model"] == "LLAMA3_8B"
        note = "the fp8 share of B200 was fitted here" if fitted else ""
        found.append(Compared(label, published, step, "s", note, counted=not fitted))
    return Group(
        "Step time, Megatron of 2025", "megatron_bridge_25_11", tuple(found), WORST, MEAN,
        said="Llamas in fp8 and DeepSeek-V3 in bf16, on devices that hardware.py has; tensor "
        "parallelism's collectives overlapped, as these recipes do. Also from "
        "megatron_llama3_fp8_h100.",
    )  # fmt: skip


def groups() -> list[Group]:
    return [simumax(), korthikanti(), layer_times(), ptdp(), ptdp_zero(), llama_405b(), megatron(),
            nemo()]  # fmt: skip

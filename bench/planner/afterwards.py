"""Published step times that were looked at after everything was set: nothing was fitted to them.

NeMo's are held to the bounds of all others. Those of FSDP in eager PyTorch are not: they show how
much slower than planned a framework is whose passes are not fused; nor those of mixtures of
experts, which show how far a host that launches their kernels is behind the device.
"""

from __future__ import annotations

from bench.planner.tables import Compared, Group, rows
from pyparallel.planner import Job, Layout, ModelSpec, cluster_named, preset
from pyparallel.planner.cost import time_report
from pyparallel.planner.flops import flops_per_token

H100, A100 = cluster_named("h100"), cluster_named("a100-80")
MIXTURES = {"DeepSeekV3": preset("deepseek-v3"), "Qwen3_30B_a3B": preset("qwen3-30b-a3b"),
            "Qwen3_235B_a22B": preset("qwen3-235b-a22b")}  # fmt: skip


def _gpt(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    return ModelSpec(
        name, layers, hidden, heads, 51200, gated=False, tied=True, biases="all", norm="layer",
        positions="learned",
    )  # fmt: skip


def _nemotron(name: str, layers: int, hidden: int, heads: int, ffn: int, kv: int = 0) -> ModelSpec:
    return ModelSpec(name, layers, hidden, heads, 256000, ffn, kv, gated=False, norm="layer")


NEMO = {
    "GPT3-5B": _gpt("GPT3-5B", 24, 4096, 32),
    "GPT3-20B": _gpt("GPT3-20B", 44, 6144, 48),
    "GPT3-175B": preset("gpt3-175b"),
    "LLAMA2-7B": preset("llama-2-7b"),
    "LLAMA2-13B": preset("llama-2-13b"),
    "LLAMA2-70B": preset("llama-2-70b"),
    "LLAMA3-8B": preset("llama-3-8b"),
    "LLAMA3-70B": preset("llama-3-70b"),
    "Nemotron-8B": _nemotron("Nemotron-8B", 32, 4096, 32, 16384),
    "Nemotron-22B": _nemotron("Nemotron-22B", 40, 6144, 48, 24576),
    "Nemotron-340B": _nemotron("Nemotron-340B", 96, 18432, 96, 73728, 8),
}
MPT = {"70b": (80, 8192, 64), "30b": (48, 7168, 56), "13b": (40, 5120, 40), "7b": (32, 4096, 32),
       "3b": (32, 2560, 20), "1b": (24, 2048, 16)}  # fmt: skip


def nemo() -> Group:
    """Megatron in 8 bits, with its overlapped tensor parallelism."""
    found = []
    for row in rows("nemo_24_12_h100"):
        gpus, tp, pp, cp, chunks = (int(row[k]) for k in ("gpus", "tp", "pp", "cp", "vp"))
        job = Job(NEMO[row["model"]], int(row["seq"]), int(row["global_batch"]), "fp8")
        layout = Layout(
            dp=gpus // (tp * pp * cp), tp=tp, pp=pp, cp=cp, chunks=chunks,
            micro_batch=int(row["microbatch"]), overlap_tp=tp > 1,
            schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        )  # fmt: skip
        published = job.tokens / gpus / float(row["tokens_per_s_per_gpu"])
        step = time_report(job, H100, layout).step
        found.append(Compared(f"{row['model']} on {gpus}", published, step, "s"))
    return Group(
        "Step time, NeMo of 2024", "nemo_24_12_h100", tuple(found), 20.0, 10.0,
        said="Looked at after everything was set; nothing was changed for these rows. Sizes of "
        "GPT3-5B, GPT3-20B and Nemotron are not printed: with those of NeMo's recipes the printed "
        "tokens give the printed TFLOP/s (above).",
    )  # fmt: skip


def nemo_rates() -> list[Compared]:
    """The MFU that the printed tokens give with these sizes, against that of printed TFLOP/s."""
    found = []
    for row in rows("nemo_24_12_h100"):
        each = flops_per_token(NEMO[row["model"]], int(row["seq"]), "full")
        rate = each * float(row["tokens_per_s_per_gpu"]) / H100.gpu.peak("fp8")
        published = float(row["tflops_per_gpu"]) * 1e12 / H100.gpu.peak("fp8")
        label = f"H100 {row['model']} of {row['gpus']}, NeMo (full)"
        found.append(Compared(label, 100 * published, 100 * rate, "%", points=True))
    return found


def unfused() -> Group:
    """FSDP in eager PyTorch."""
    found = []
    for row in rows("mpt_fsdp_a100"):
        seq, gpus, micro = (int(row[k]) for k in ("seq", "gpus", "microbatch"))
        model = ModelSpec(
            row["model"], *MPT[row["model"]], 50368, gated=False, tied=True, norm="layer",
            positions="learned", max_seq=seq,
        )  # fmt: skip
        job = Job(model, seq, gpus * micro * int(row["accumulation"]), "bf16-grads")
        layout = Layout(dp=gpus, zero=3, micro_batch=micro, recompute=row["recompute"])
        published = job.tokens / gpus / float(row["tokens_per_s_per_gpu"])
        step = time_report(job, A100, layout).step
        label = f"MPT {row['model']} of {seq} tokens on {gpus}, recompute {row['recompute']}"
        found.append(Compared(label, published, step, "s"))
    found += _torchtitan()
    return Group(
        "Not held to a bound: FSDP in eager PyTorch", "mpt_fsdp_a100", tuple(found), None,
        said="Looked at after everything was set. The planner counts kernels as Megatron-LM and "
        "SimuMax have them: fused passes, and today's attention. The runs of 2023 (MPT) had "
        "neither: the longer the sequence, the further they are behind; torchtitan's of 2024 had "
        "the latter.",
    )  # fmt: skip


def _torchtitan() -> list[Compared]:
    """Table torchtitan_a100: FSDP2 of 2024."""
    found = []
    for row in rows("torchtitan_a100"):
        seq, gpus, micro = (int(row[k]) for k in ("seq", "gpus", "local_batch"))
        model = preset(row["model"])
        job = Job(model, seq, gpus * micro, "bf16-grads", loss="plain")
        kind, _, every = row["recompute"].partition(" ")
        layout = Layout(dp=gpus, zero=3, micro_batch=micro, recompute="full" if every else kind)
        if every:
            layout = layout.with_(recompute_layers=model.layers // int(every))
        published = job.tokens / gpus / float(row["tokens_per_s_per_gpu"])
        step = time_report(job, A100, layout).step
        label = f"torchtitan {row['model']} of {seq} tokens on {gpus}, recompute {row['recompute']}"
        found.append(Compared(label, published, step, "s"))
    return found


def mixtures() -> Group:
    """Mixtures of experts in Megatron, release by release."""
    found = []
    for row in rows("moe_megatron_bridge"):
        gpus, tp, pp, chunks, ep = (int(row[k]) for k in ("gpus", "tp", "pp", "vp", "ep"))
        model, seq, micro = MIXTURES[row["model"]], int(row["seq"]), int(row["microbatch"])
        job = Job(model, seq, int(row["global_batch"]), row["precision"].lower())
        layout = Layout(
            dp=gpus // (tp * pp), tp=tp, pp=pp, ep=ep, chunks=chunks, micro_batch=micro,
            schedule="interleaved-1f1b" if chunks > 1 else "1f1b", overlap_tp=tp > 1,
        )  # fmt: skip
        each = flops_per_token(model, seq, "causal")
        rate = float(row["tokens_per_s_per_gpu"] or float(row["tflops_per_gpu"]) * 1e12 / each)
        step = time_report(job, cluster_named(row["system"].lower()), layout).step
        label = (
            f"{row['release']}, {row['tokens']} tokens: {row['system']} {row['model']} "
            f"{row['precision']} on {gpus}, ep {ep}, micro batch {micro}"
        )
        found.append(Compared(label, job.tokens / gpus / rate, step, "s"))
    return Group(
        "Not held to a bound: mixtures of experts", "moe_megatron_bridge", tuple(found), None,
        said="Nothing is fitted. The plan is the device's time. A host that launches a "
        "microbatch's kernels later than the device could end them is not counted: the 30B model "
        "on 8 B200 took 28 s with micro batches of 1 and all tokens, 15 s where dropped ones make "
        "all sizes known beforehand, and 11 s in 26.04, with micro batches of 4 and CUDA graphs; "
        "the 235B model's 20 s became 17 by leaving out what cost the host time.",
    )  # fmt: skip

"""Parameters, bytes and FLOPs against published closed forms and measured memory."""

from __future__ import annotations

from dataclasses import replace

from bench.planner.afterwards import nemo_rates
from bench.planner.tables import Compared, Group, Row, rows
from pyparallel.planner import PRECISIONS, Job, Layout, ModelSpec, cluster_named, evaluate, preset
from pyparallel.planner.activations import layer_activations
from pyparallel.planner.clusters import GIB
from pyparallel.planner.flight import closed_form
from pyparallel.planner.flops import flops_per_token
from pyparallel.planner.memory import CONTEXT_BYTES, state_bytes
from pyparallel.planner.models import linears

KORTHIKANTI = {"22B": "megatron-22b", "175B": "megatron-175b", "530B": "megatron-530b",
               "1T": "megatron-1t"}  # fmt: skip
MODELS = {
    "gpt3-175B": "gpt3-175b", "megatron-1T": "megatron-1t", "megatron-22B": "megatron-22b",
    "turing-530B": "megatron-530b", "llama3-8B": "llama-3-8b", "llama3-70B": "llama-3-70b",
    "llama3.1-405B": "llama-3.1-405b", "bloom-176B": "bloom-176b",
}  # fmt: skip
SIMUMAX = {"llama3_70b": "llama-3-70b", "llama3_405b": "llama-3.1-405b",
           "deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3"}  # fmt: skip


def ptdp_model(row: Row) -> ModelSpec:
    """The model of a row of PTD-P's table 1, by its sizes."""
    return ModelSpec(
        f"{row['params_B']}B", int(row["layers"]), int(row["hidden"]), int(row["heads"]), 51200,
        gated=False, tied=True, biases="all", norm="layer", positions="learned", pad_vocab_to=128,
    )  # fmt: skip


def parameters() -> Group:
    found = [
        Compared(
            f"{row['params_B']}B: {row['layers']} layers of {row['hidden']}",
            float(row["params_B"]),
            ptdp_model(row).parameters() / 1e9,
            "billion",
            "" if float(row["params_B"]) >= 7.5 else "printed with two digits",
            counted=float(row["params_B"]) >= 7.5,
        )
        for row in rows("ptdp_table1")
    ]
    return Group("Parameters", "ptdp_table1", tuple(found), worst=0.5)


def sizes() -> Group:
    """Layers, widths and heads of presets that the table of models has too."""
    found = []
    for row in rows("models"):
        if row["name"] not in MODELS:
            continue
        model = preset(MODELS[row["name"]])
        named = (("layers", "layers"), ("hidden", "hidden"), ("ffn", "ffn"), ("heads", "heads"),
                 ("kv_heads", "kv_heads"), ("vocab", "vocab"))  # fmt: skip
        found += [
            Compared(f"{row['name']} {column}", float(row[column]), float(getattr(model, ours)), "")
            for column, ours in named
        ]
    return Group("Sizes of presets", "models", tuple(found), worst=0.0)


def zero_bytes() -> Group:
    paper = PRECISIONS["fp16-zero"]
    found = []
    for row in rows("zero_memory"):
        numbers, ranks = float(row["params_B"]) * 1e9, int(row["dp"])
        for stage in (1, 2, 3):
            found.append(
                Compared(
                    f"{row['model']} over {ranks}, ZeRO-{stage}",
                    float(row[f"stage{stage}_gb"]),
                    numbers * sum(state_bytes(paper, stage, ranks)) / 1e9,
                    "GB",
                )
            )
    return Group("ZeRO: bytes of states per device", "zero_memory", tuple(found), worst=2.5)


def zero_sizes() -> Group:
    """Largest models in 32 GB of states, by stage, over 64 replicas."""
    paper = PRECISIONS["fp16-zero"]
    found = []
    for row in rows("zero_max_model_size"):
        for stage, column in enumerate(("baseline", "stage1", "stage2", "stage3")):
            each = sum(state_bytes(paper, stage, 64))
            found.append(
                Compared(
                    f"mp {row['mp']}, {column}",
                    float(row[f"theory_{column}"]),
                    int(row["mp"]) * 32e9 / each / 1e9,
                    "billion",
                )
            )
    return Group("ZeRO: largest model, theory", "zero_max_model_size", tuple(found), worst=2.5)


def _gpt_job(model: ModelSpec, batch: int) -> Job:
    return Job(model, 2048, batch, "fp16", "unfused", dropout=True)


def korthikanti_memory() -> Group:
    """First stage: 18 bytes x 12 L h^2 / (t p), and activations of L (1 + (p-1)/(p v)) layers."""
    configs = {row["model"]: row for row in rows("korthikanti_configs")}
    found = []
    for row in rows("korthikanti_memory_gib"):
        config = configs[row["model"]]
        model = preset(KORTHIKANTI[row["model"]])
        job = _gpt_job(model, int(config["global_batch"]))
        chunks = int(config["interleave"])
        layout = Layout(
            tp=int(config["tp"]), pp=int(config["pp"]), chunks=chunks,
            schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
            micro_batch=int(config["microbatch"]), sequence_parallel=False,
        )  # fmt: skip
        weights = sum(w.weights for w in linears(model, 0)) * model.layers
        states = sum(state_bytes(job.bytes, 0, 1)) * weights / (layout.tp * layout.pp)
        flight = closed_form(layout, layout.microbatches(job))
        assert flight is not None
        passes = flight[0] * model.layers / layout.pp
        none = layer_activations(job, layout, 0) * passes
        both = layout.with_(recompute="selective", sequence_parallel=True)
        for column, ours in (
            ("params_and_optimizer_gib", states),
            ("activations_none_gib", none),
            ("activations_sel_sp_gib", layer_activations(job, both, 0) * passes),
        ):
            found.append(
                Compared(
                    f"{row['model']} {column.removesuffix('_gib').replace('_', ' ')}",
                    float(row[column]),
                    ours / GIB,
                    "GiB",
                )
            )
    return Group("Activations and states, closed forms", "korthikanti_memory_gib",
                 tuple(found), worst=0.1)  # fmt: skip


def korthikanti_shares() -> Group:
    """Activations as a share of what tensor parallelism alone keeps."""
    configs = {row["model"]: row for row in rows("korthikanti_configs")}
    found = []
    for row in rows("korthikanti_activation_relative"):
        job = _gpt_job(preset(KORTHIKANTI[row["model"]]), 64)
        base = Layout(tp=int(configs[row["model"]]["tp"]), sequence_parallel=False)
        whole = layer_activations(job, base, 0)
        for column, change in (
            ("sp_only", {"sequence_parallel": True}),
            ("selective_only", {"recompute": "selective"}),
            ("selective_plus_sp", {"recompute": "selective", "sequence_parallel": True}),
            ("full_recompute", {"recompute": "full"}),
        ):
            ours = 100 * layer_activations(job, base.with_(**change), 0) / whole
            found.append(
                Compared(
                    f"{row['model']} {column.replace('_', ' ')}",
                    float(row[column]),
                    ours,
                    "%",
                    points=True,
                )
            )
    return Group(
        "Activations, shares", "korthikanti_activation_relative", tuple(found), worst=0.16,
        said="The table was read off a figure; the formulas give its values within 0.15 points.",
    )  # fmt: skip


def simumax_case(row: Row) -> tuple[Job, Layout]:
    """A job on 8 B200: layers cut off, microbatches of one sequence, nothing overlapped."""
    model = replace(preset(SIMUMAX[row["model"]]), layers=int(row["layers"]))
    if model.experts is not None:
        model = replace(model, experts=replace(model.experts, dense_layers=1))
    dp = int(row["dp"])
    job = Job(model, int(row["seq"]), int(row["microbatches"]) * dp)
    layout = Layout(
        dp=dp, tp=int(row["tp"]), pp=int(row["pp"]), cp=int(row["cp"]), ep=int(row["ep"]),
        cp_kind="ulysses", overlap_dp=False, overlap_pp=False, overlap_backward=False,
    )  # fmt: skip
    return job, layout


def simumax_memory() -> Group:
    cluster = cluster_named("b200")
    found = []
    for row in rows("simumax_b200"):
        job, layout = simumax_case(row)
        plan = evaluate(job, cluster, layout)
        most = max(stage.allocated for stage in plan.memory.stages)
        found.append(Compared(row["case"], float(row["measured_gib"]), most / GIB, "GiB"))
    return Group(
        "Measured memory, 8 x B200", "simumax_b200", tuple(found), worst=8.0, mean=3.0,
        said="No constant is fitted. That one bf16 gradient of every shape of a layer stays, and "
        "that logits and a layer's temporaries do not add up, was chosen after the rows were "
        "seen. Compared is what the allocator's own peak counter shows: without our margin.",
    )  # fmt: skip


def torchtitan_memory() -> Group:
    """FSDP2: parameters, gradients and moments in 32 bits, 16 bytes, as the plan's 2 + 2 + 12."""
    found = []
    for row in rows("torchtitan_memory"):
        gpus, cp, batch = (int(row[key]) for key in ("gpus", "cp", "local_batch"))
        precision = {"bf16": "bf16-grads", "fp8": "fp8-grads"}[row["precision"]]
        job = Job(preset("llama-3.1-8b"), int(row["seq"]), gpus // cp * batch, precision,
                  loss=row["loss"])  # fmt: skip
        layout = Layout(dp=gpus // cp, cp=cp, zero=3, micro_batch=batch, recompute=row["recompute"])
        peak = evaluate(job, cluster_named(row["device"]), layout).memory.peak - CONTEXT_BYTES
        label = (
            f"{gpus} x {row['device']}, {row['precision']}, cp {cp}, recompute {row['recompute']}"
        )
        found.append(Compared(label, float(row["memory_gib"]), peak / GIB, "GiB"))
    return Group(
        "Measured memory, torchtitan", "torchtitan_memory", tuple(found), worst=8.0, mean=5.0,
        said="No constant is fitted. That a plain loss holds 14 bytes a logit, and which products "
        "recompute by operation keeps, was counted after these rows were seen to be 40 % off. "
        "Compared is what the allocator has reserved: with our margin for fragments.",
    )  # fmt: skip


def mfu() -> Group:
    """The MFU that a published time gives, against the published one."""
    found = []
    configs = {row["model"]: row for row in rows("korthikanti_configs")}
    for row in rows("korthikanti_end_to_end"):
        config = configs[row["model"]]
        model = preset(KORTHIKANTI[row["model"]])
        tokens = 2048 * int(config["global_batch"])
        for column, convention in (("mfu_pct", "full"), ("hfu_pct", "hardware")):
            flops = tokens * flops_per_token(model, 2048, convention, "selective")
            rate = flops / float(row["sel_sp_s"]) / int(config["gpus"])
            found.append(
                Compared(
                    f"{row['model']} {column.removesuffix('_pct').upper()} ({convention})",
                    float(row[column]), 100 * rate / 312e12, "%", points=True,
                )
            )  # fmt: skip
    found += [
        Compared(
            f"PTD-P {row['params_B']}B (hardware)", float(row["pct_peak"]),
            100 * float(row["tflops_per_gpu"]) / 312, "%", points=True,
        )
        for row in rows("ptdp_table1")
    ]  # fmt: skip
    peaks = {"H100": 1979e12, "B200": 4500e12}
    for table, convention in (
        ("megatron_llama3_fp8_h100", "full"),
        ("megatron_bridge_25_11", "causal"),
    ):
        for row in rows(table):
            name = bridge_model(row["model"])
            peak = peaks.get(row.get("system", "H100"), 4500e12)
            if name is None or row.get("precision", "FP8").startswith("BF16"):
                continue
            each = flops_per_token(preset(name), int(row["seq"]), convention)
            rate = each * float(row["tokens_per_s_per_gpu"])
            found.append(
                Compared(
                    f"{row.get('system', 'H100')} {row['model']} of {row['gpus']} ({convention})",
                    100 * float(row["tflops_per_gpu"]) * 1e12 / peak, 100 * rate / peak, "%",
                    points=True,
                )
            )  # fmt: skip
    found += nemo_rates()
    return Group("MFU from a published time", "korthikanti_end_to_end", tuple(found), worst=0.6,
                 said="Each with the convention in which it was published; also from "
                 "ptdp_table1, megatron_llama3_fp8_h100, megatron_bridge_25_11 and "
                 "nemo_24_12_h100.")  # fmt: skip


def bridge_model(name: str) -> str | None:
    """The preset of a dense Llama by the tables' names; None for others."""
    plain = name.lower().replace("_", "-")
    return {"llama3-8b": "llama-3-8b", "llama3-70b": "llama-3-70b",
            "llama3.1-405b": "llama-3.1-405b"}.get(plain)  # fmt: skip


def groups() -> list[Group]:
    return [parameters(), sizes(), zero_bytes(), zero_sizes(), korthikanti_memory(),
            korthikanti_shares(), simumax_memory(), torchtitan_memory(), mfu()]  # fmt: skip

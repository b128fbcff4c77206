"""DeepSpeed's JSON, as DeepSpeed 0.19 reads it."""

import json
from typing import Any

from pyparallel.planner.emitters.form import Emission

__all__ = ["deepspeed_json"]


def deepspeed_json(e: Emission) -> str:
    job, layout = e.job, e.layout
    _refuse(e)
    # DeepSpeed counts tensor parallel ranks in train_batch_size, so it is left to derive its own.
    whole = {"train_batch_size": job.global_batch} if layout.tp == 1 else {}
    document: dict[str, Any] = {
        **whole,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": e.microbatches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": layout.zero},
    }
    if layout.zero:
        document["zero_optimization"]["overlap_comm"] = layout.overlap_dp
    kind = job.bytes.compute
    if kind in ("bf16", "fp16"):
        document[kind] = {"enabled": True}
        if job.bytes.gradient == 4:
            document["data_types"] = {"grad_accum_dtype": "fp32"}
    if layout.replicas > 1:
        document["zero_optimization"]["mics_shard_size"] = layout.shards
        e.notes.append("hybrid sharding: build the model under deepspeed.zero.MiCS_Init")
    if layout.secondary:
        document["zero_optimization"]["zero_hpz_partition_size"] = layout.secondary
    if layout.offload != "none":
        document["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "all":
        document["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if layout.tp > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.cp > 1:
        document["sequence_parallel_size"] = layout.cp
    if layout.pp > 1:
        e.notes.append(
            f"the file holds no pipeline: build PipelineModule(num_stages={layout.pp}) in the "
            f"script; read it back with --pp {layout.pp}"
        )
    if layout.recompute != "none":
        e.notes.append(
            f"the file does not switch recompute on: call gradient_checkpointing_enable() or "
            f"deepspeed.checkpointing in the script; read it back with "
            f"--recompute {layout.recompute}"
        )
    if job.loss == "fused":
        e.notes.append(
            "the loss is the script's: the plan has a fused one, PyTorch's own takes 14 bytes a "
            "logit and not 6; read it back with --loss fused"
        )
    if layout.ep > 1:
        e.notes.append(
            f"the file holds no experts: give MoE(ep_size={layout.ep}) in the script; read it "
            f"back with --ep {layout.ep}"
        )
    return json.dumps(document, indent=2) + "\n"


def _refuse(e: Emission) -> None:
    job, layout = e.job, e.layout
    e.cannot(
        layout.tp > 1 and layout.sequence_parallel,
        "sequence parallelism beside tensor parallelism",
        "take sequence_parallel=False, or cp with ulysses",
    )
    e.cannot(layout.cp > 1 and layout.cp_kind != "ulysses", f"cp by {layout.cp_kind}", "ulysses")
    e.cannot(
        layout.pp > 1 and layout.zero > 1,
        f"ZeRO-{layout.zero} with a pipeline",
        "take zero 1 or 0, or pp 1",
    )
    e.cannot(layout.pp > 1 and layout.schedule != "1f1b", f"schedule {layout.schedule}", "1f1b")
    e.cannot(
        layout.replicas > 1 and layout.zero != 3,
        f"{layout.replicas} replicas with ZeRO-{layout.zero}",
        "take zero 3 (MiCS)",
    )
    e.cannot(layout.chunks > 1, f"{layout.chunks} chunks a rank", "1")
    e.cannot(layout.layers_per_stage is not None, "stages in the file", "even ones in the script")
    e.cannot(layout.offload != "none" and not layout.zero, "offload without ZeRO", "take zero 1")
    e.cannot(layout.offload == "all" and layout.zero != 3, "weights on the host", "take zero 3")
    e.cannot(job.bytes.compute == "fp8", "fp8", "take bf16")
    e.cannot(
        job.bytes.compute != "fp32" and job.bytes.gradient == 4 and not layout.zero,
        "fp32 gradients of 16-bit parameters without ZeRO",
        "take zero 1, or precision bf16-grads",
    )

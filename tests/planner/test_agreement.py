"""The planner may not import ops (docs/architecture.md), so what both know is held equal here."""

import pytest

from pyparallel.ops.chips import CHIPS
from pyparallel.ops.model import Problem
from pyparallel.planner import CLUSTERS, Job, Layout, preset
from pyparallel.planner.flops import matrix_flops
from pyparallel.planner.kernels import Kernels
from pyparallel.planner.layout import PRECISIONS
from pyparallel.planner.passes import Passes

CHIP_OF = {"a100-80": "A100", "h100": "H100", "h200": "H200", "b200": "B200"}


@pytest.mark.parametrize("name", sorted(CHIP_OF))
def test_specifications_are_the_same(name):
    gpu, chip = CLUSTERS[name].gpu, CHIPS[CHIP_OF[name]]
    for dtype, tflops in chip.dense_tflops.items():
        assert gpu.peak_tflops[dtype] == pytest.approx(tflops)
    assert gpu.memory_gbps == chip.memory_gbps
    assert gpu.sms == chip.sms


@pytest.mark.parametrize("tp", [2, 8])
def test_flops_of_a_layer_are_those_of_its_ops(tp):
    """A layer's four products as all_gather_matmul and matmul_reduce_scatter count them."""
    model = preset("llama-3-8b")
    rows = 4096
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    problems = [
        Problem.of_whole("all_gather_matmul", rows, qkv, model.hidden, "bf16", tp),
        Problem.of_whole("matmul_reduce_scatter", rows, model.hidden, model.hidden, "bf16", tp),
        Problem.of_whole("all_gather_matmul", rows, 2 * model.ffn, model.hidden, "bf16", tp),
        Problem.of_whole("matmul_reduce_scatter", rows, model.hidden, model.ffn, "bf16", tp),
    ]
    head = 2 * model.hidden * model.padded_vocab()
    ours = rows * (matrix_flops(model) - head) / model.layers / tp
    assert ours == sum(p.flops for p in problems)


def test_bytes_of_tensor_parallelism_are_those_of_its_ops():
    """Forward: what each of the four ops shares, times (t-1)/t."""
    model, tp, rows = preset("llama-3-8b"), 8, 4096
    h, item = model.hidden, PRECISIONS["bf16"].activation
    shared = [
        Problem.of_whole(op, rows, n, k, "bf16", tp).moved_bytes
        for op, n, k in (
            ("all_gather_matmul", 6144, h), ("matmul_reduce_scatter", h, h),
            ("all_gather_matmul", 2 * model.ffn, h), ("matmul_reduce_scatter", h, model.ffn),
        )
    ]  # fmt: skip
    job, cluster = Job(model, rows, 1), CLUSTERS["h100"]
    passes = Passes(job, cluster, Layout(tp=tp), Kernels(cluster.gpu, job.bytes))
    assert passes.layer(0).forward.volume["tp"] == pytest.approx(sum(shared) * (tp - 1) / tp)
    assert shared == [rows * h * item] * 4

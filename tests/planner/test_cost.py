"""Time: closed forms, limits, and orders that physics demands. Layers of proof: pure numbers, all
in CI; published step times are compared by `python -m bench planner`."""

from dataclasses import replace

import pytest

from pyparallel.planner import CLUSTERS, CONVENTIONS, Job, Layout, cost, evaluate, preset
from pyparallel.planner.collectives import group_of
from pyparallel.planner.cost import message_seconds, time_report
from pyparallel.planner.flops import flops_per_token
from pyparallel.planner.kernels import Kernels, running
from pyparallel.planner.layout import PRECISIONS
from pyparallel.planner.models import Experts
from pyparallel.planner.passes import SCATTERED_SHARE, Passes

A100, H100 = CLUSTERS["a100-80"], CLUSTERS["h100"]
GPT = preset("megatron-22b")
LLAMA = preset("llama-3-70b")


def test_flops_are_those_of_the_papers():
    """72 B L s h^2 (1 + s/(6h) + V/(12 L h)), and 96 .. with full recompute (arXiv:2104.04473)."""
    s, h, n, v = 2048, GPT.hidden, GPT.layers, GPT.vocab
    model = 72 * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    hardware = 96 * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    selective = 72 * n * h**2 * (1 + s / (3 * h) + v / (12 * n * h))
    assert flops_per_token(GPT, s, "full") == pytest.approx(model)
    assert flops_per_token(GPT, s, "hardware", "full") == pytest.approx(hardware)
    assert flops_per_token(GPT, s, "hardware", "selective") == pytest.approx(selective)


@pytest.mark.parametrize(
    ("name", "gflops"), [("llama-3-8b", 51.5), ("llama-3-70b", 449.2), ("llama-3.1-405b", 2524)]
)
def test_causal_flops_are_those_that_megatron_bridge_prints(name, gflops):
    """docs/performance-summary.md of 25.11: TFLOP/s over tokens/s, attention halved."""
    ours = flops_per_token(preset(name), 8192, "causal") / 1e9
    assert ours == pytest.approx(gflops, rel=0.002)


def test_llama_8b_with_whole_attention_is_what_megatron_lm_prints():
    """800 TFLOP/s over 13812 tokens/s: 57.9 GFLOP per token (examples/llama/README.md)."""
    assert flops_per_token(preset("llama-3-8b"), 8192, "full") / 1e9 == pytest.approx(57.9, abs=0.1)


def test_an_unknown_convention_is_refused():
    with pytest.raises(ValueError, match="'MFU' is not one of full, causal, hardware, 6N"):
        flops_per_token(GPT, 2048, "MFU")


def test_every_convention_is_reported_with_its_mfu():
    plan = evaluate(Job(LLAMA, 8192, 64), H100, Layout(dp=2, tp=8, pp=4))
    assert set(plan.flops.mfu) == set(CONVENTIONS)
    for name, count in plan.flops.counts.items():
        seconds = plan.time.step * plan.layout.devices
        assert plan.flops.mfu[name] == pytest.approx(count / seconds / 989.5e12)


def test_a_large_gemm_reaches_its_share_and_a_small_one_does_not():
    kernels = Kernels(A100.gpu, PRECISIONS["bf16"])
    rate = 2 * 8192 * 16384 * 13824 / kernels.gemm(8192, 16384, 13824) / 312e12
    assert rate == pytest.approx(0.85, rel=0.06)
    assert kernels.gemm(16, 4096, 4096) > 1.2 * 4096 * 4096 * 2 / 2039e9  # memory's rate
    assert kernels.waves(128 * 108, 256, 4096) == pytest.approx(1.0)
    assert kernels.waves(128 * 109, 256, 512) < 0.8  # one tile more: a second wave for it


def test_a_job_waits_for_its_slowest_rank():
    """1 + width sqrt(2 ln N): nobody to wait for alone, and ever slower growth."""
    factors = [running(n) for n in (1, 2, 8, 64, 1024, 16384)]
    assert factors[0] == 1
    assert factors == sorted(factors)
    assert factors[2] == pytest.approx(1.05, abs=1e-3)
    assert factors[-1] < 1.12
    alone, many = (Kernels(A100.gpu, PRECISIONS["bf16"], n) for n in (1, 1024))
    ratio = many.gemm(8192, 8192, 8192) / alone.gemm(8192, 8192, 8192)
    assert ratio == pytest.approx(factors[4], rel=0.01)


def test_a_sum_into_float32_costs_more():
    kernels = Kernels(A100.gpu, PRECISIONS["bf16"])
    plain, summed = (kernels.gemm(8192, 8192, 4096, accumulate=a) for a in (False, True))
    assert 1.03 < summed / plain < 1.2


@pytest.mark.parametrize("size", [2, 8])
def test_collectives_are_alpha_beta(size):
    group = group_of(Layout(tp=size), A100, "tp")
    alpha = 1e-6 * (A100.intra.call_us + 2 * (size - 1) * A100.intra.latency_us)
    whole = 64e6
    expected = alpha + 2 * (size - 1) / size * whole / A100.intra.rate
    assert group.reduce(whole) == pytest.approx(expected)
    assert group.reduce(whole) < 2 * group.gather(whole)
    assert group.reduce(0) == 0 == group_of(Layout(), A100, "tp").reduce(whole)


def test_groups_know_where_nodes_end():
    layout = Layout(tp=4, cp=2, dp=4, pp=2)
    sizes = {a: group_of(layout, A100, a) for a in ("tp", "cp", "dp", "pp", "data")}
    assert {a: g.local for a, g in sizes.items()} == {
        "tp": 4, "cp": 2, "dp": 1, "pp": 1, "data": 2,
    }  # fmt: skip
    assert [a for a, g in sizes.items() if g.crosses] == ["dp", "pp", "data"]


def test_a_group_across_nodes_is_slower_than_inside_one():
    inside, across = (group_of(Layout(tp=t), A100, "tp") for t in (8, 16))
    assert across.reduce(64e6) > 1.25 * inside.reduce(64e6)


def test_parts_add_up_to_the_step():
    for layout in (
        Layout(dp=2, tp=8, pp=4),
        Layout(dp=2, tp=8, pp=4, chunks=5, schedule="interleaved-1f1b", overlap_pp=False),
        Layout(dp=4, tp=4, pp=4, recompute="full", overlap_tp=True),
        Layout(dp=8, tp=8, zero=3, cp_kind="ulysses"),
        Layout(dp=4, tp=4, cp=4),
    ):
        time = time_report(Job(LLAMA, 8192, 64), H100, layout)
        assert sum(time.parts.values()) == pytest.approx(time.step)
        assert min(time.parts.values()) >= 0


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_messages_that_are_not_overlapped_cost_their_own_time_and_no_more(chunks):
    """Two messages a microbatch and stage of each rank: not the passes of other ranks as well."""
    layout = Layout(
        dp=2, tp=8, pp=4, chunks=chunks, schedule="interleaved-1f1b" if chunks > 1 else "1f1b"
    )
    job = Job(LLAMA, 8192, 128)
    beside = time_report(job, H100, layout).step
    alone = time_report(job, H100, layout.with_(overlap_pp=False)).step
    messages = 2 * layout.microbatches(job) * chunks * message_seconds(job, H100, layout)
    assert 0.2 * messages < alone - beside < 1.3 * messages


def test_recomputation_is_a_third_more_and_selective_little():
    job = Job(GPT, 2048, 32, "fp16", "unfused", dropout=True)
    none, selective, full = (
        time_report(job, A100, Layout(tp=8, micro_batch=4, recompute=r)).step
        for r in ("none", "selective", "full")
    )
    assert 1.02 < selective / none < 1.12
    assert 1.28 < full / none < 1.42


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 5)]
)
@pytest.mark.parametrize("m", [8, 16, 64])
def test_the_closed_form_of_the_pipeline_is_near_the_simulator(schedule, chunks, m):
    job = Job(LLAMA, 4096, m)
    layout = Layout(tp=8, pp=8, schedule=schedule, chunks=chunks)
    exact = time_report(job, H100, layout, exact=True)
    closed = time_report(job, H100, layout, exact=False)
    assert closed.step == pytest.approx(exact.step, rel=0.06)


@pytest.mark.parametrize("m", [201, 208])
@pytest.mark.parametrize(
    ("schedule", "chunks", "near"),
    [("1f1b", 1, 1e-9), ("zb-v", 2, 1e-9), ("zb-h1", 1, 1e-9), ("interleaved-1f1b", 5, 2e-3)],
)
def test_more_microbatches_than_are_simulated_follow_by_rounds(
    schedule, chunks, near, m, monkeypatch
):
    job = Job(LLAMA, 4096, m)
    layout = Layout(tp=8, pp=8, schedule=schedule, chunks=chunks)
    monkeypatch.setattr(cost, "LARGEST", 10**6)
    whole = time_report(job, H100, layout).step
    monkeypatch.setattr(cost, "LARGEST", 100)
    assert time_report(job, H100, layout).step == pytest.approx(whole, rel=near)


def test_interleaving_divides_the_bubble():
    job = Job(LLAMA, 4096, 32)
    plain = time_report(job, H100, Layout(tp=8, pp=8)).bubble
    chunks = time_report(
        job, H100, Layout(tp=8, pp=8, chunks=5, schedule="interleaved-1f1b")
    ).bubble
    assert plain / chunks == pytest.approx(5, rel=0.35)


def test_faster_links_and_overlap_never_hurt():
    job = Job(LLAMA, 8192, 64)
    layout = Layout(dp=2, tp=8, pp=4)
    step = time_report(job, H100, layout).step
    assert time_report(job, H100.slower_links(0.5, 0.5), layout).step > step
    assert time_report(job, H100.slower_links(2, 2), layout).step < step
    assert time_report(job, H100, layout.with_(overlap_tp=True)).step < step
    assert time_report(job, H100, layout.with_(overlap_dp=False)).step > step
    assert time_report(job, H100, layout.with_(overlap_backward=False)).step > step


def test_tensor_parallel_volume_is_the_formula():
    """16 s b h (t-1)/t bytes per layer and microbatch; the same with sequence parallelism and the
    regather (10 instead of 8 halves), and two more sums with full recompute."""
    job = Job(replace(GPT, layers=1, tied=True), 2048, 1, "fp16", "unfused", True)
    unit = 2 * 2048 * GPT.hidden * 7 / 8  # bytes of one half of an all-reduce

    def layer(**choices):
        layout = Layout(tp=8, **choices)
        three = Passes(job, A100, layout, Kernels(A100.gpu, job.bytes)).layer(0)
        return sum(p.volume["tp"] for p in (three.forward, three.inputs, three.weights)) / unit

    assert layer(sequence_parallel=False) == pytest.approx(8)
    assert layer(sequence_parallel=True) == pytest.approx(10)
    assert layer(sequence_parallel=False, recompute="full") == pytest.approx(12)


def test_experts_over_tensor_parallel_ranks_pay_for_their_tokens():
    """A token's input and output cross tp once where its experts are here (ep 1), and once per
    copy where copies come from other ranks."""
    job = Job(preset("mixtral-8x7b"), 4096, 64)
    h = job.model.hidden

    def halves(**sizes):
        layout = Layout(tp=2, **sizes)
        three = Passes(job, H100, layout, Kernels(H100.gpu, job.bytes)).layer(0)
        return three.forward.volume["tp"] / (2 * 4096 * h * 1 / 2)

    assert halves(dp=4) == pytest.approx(4)  # qkv, projection, experts' up, experts' down
    assert halves(dp=4, ep=4) == pytest.approx(2 + 2 * 2)  # of two copies each


@pytest.mark.parametrize(("count", "shared"), [(64, 0), (64, 512), (8, 0)])
def test_routing_reads_and_writes_what_it_sorts(count, shared):
    """Beside a dense layer of the same width, in bytes of a token's row of h, k of them copied: one
    and k, then k and k where a rank has several experts, the same on the way back, both ways;
    scores in float32; sums of two rows of outputs, and of two or three gradients."""
    k, seq, several = 4, 4096, count > 8
    dense = replace(preset("llama-3-8b"), ffn=k * 1024 + shared)
    model = replace(dense, experts=Experts(count, k, 1024, shared))
    job = Job(model, seq, 8)
    kernels = Kernels(H100.gpu, job.bytes)
    layout = Layout(dp=8, ep=8)
    moe = Passes(job, H100, layout, kernels).layer(0)
    plain = Passes(replace(job, model=dense), H100, layout, kernels).layer(0)
    row, sums = 2 * seq * dense.hidden, 1 if shared else 0
    for half, scores, summed in (("forward", 4, sums), ("inputs", 3, sums + 1)):
        more = getattr(moe, half).elementwise - getattr(plain, half).elementwise
        rows = 2 * (1 + k + (2 * k if several else 0))
        sorting = kernels.move(rows * row / SCATTERED_SHARE, 6 if several else 4)
        scored = kernels.move(scores * 4 * count * seq, scores - 1)
        assert more == pytest.approx(sorting + scored + kernels.move(3 * summed * row, summed))
    sizes = moe.forward.exposed["ep"] - moe.inputs.exposed["ep"]
    assert sizes == pytest.approx(group_of(layout, H100, "ep").exchange(4 * count))


def test_norms_of_heads_are_passes_over_queries_and_keys():
    model = preset("qwen3-8b")
    with_norms, without = (
        Passes(job, H100, Layout(tp=2), Kernels(H100.gpu, job.bytes)).layer(0)
        for job in (Job(replace(model, head_norms=norms), 4096, 8) for norms in (True, False))
    )
    moved = 2 * 4096 * (32 + 8) * 128 / 2
    move = Kernels(H100.gpu, PRECISIONS["bf16"]).move
    for half, times in (("forward", 2), ("inputs", 3)):
        more = getattr(with_norms, half).elementwise - getattr(without, half).elementwise
        assert more == pytest.approx(move(times * moved, 2))


def test_in_fp8_the_inputs_of_experts_are_cast_and_the_router_stays_in_16_bits():
    job = Job(preset("qwen3-30b-a3b"), 4096, 8, "fp8")
    layout, h = Layout(dp=8, ep=8), job.model.hidden
    kernels = Kernels(H100.gpu, job.bytes)
    wide = replace(job, precision="bf16")
    eight = Passes(job, H100, layout, kernels).layer(0)
    sixteen = Passes(wide, H100, layout, Kernels(H100.gpu, wide.bytes)).layer(0)
    cast = eight.forward.elementwise - sixteen.forward.elementwise
    attention, copied = 4 * 4096 * 32 * 128, 4 * 4096 * 8 * h
    assert cast == pytest.approx(kernels.move(attention) + kernels.move(copied))
    gemm = kernels.gemm
    forward = gemm(4096, 40 * 128, h) + gemm(4096, h, 32 * 128) + gemm(4096, 128, h, wide=True)
    forward += gemm(2048, 2 * 768, h, 16) + gemm(2048, h, 768, 16)
    assert eight.forward.gemm == pytest.approx(forward)


@pytest.mark.parametrize(("zero", "times"), [(0, 2 * 4), (1, 4 + 2), (2, 8 * 4 + 2)])
def test_gradient_volume(zero, times):
    """Bytes per number over (d-1)/d: all-reduce twice 4, sharded 4 + 2; zero 2 for each of 8
    microbatches."""
    job = Job(preset("llama-3-8b"), 2048, 8 * 8)
    time = time_report(job, A100, Layout(dp=8, zero=zero))
    expected = times * job.model.parameters() * 7 / 8
    assert time.volume["dp"] == pytest.approx(expected)


def test_crossing_the_node_costs_tensor_parallelism_more_than_pipelines():
    """Ultra-Scale playbook, H100: from 8 to 16 devices TP loses 43 % a device, PP 14 %."""
    job = Job(preset("llama-3-8b"), 4096, 128)

    def per_device(layout):
        return 1 / (time_report(job, H100, layout).step * layout.devices)

    tensor, pipeline = (
        1 - per_device(long) / per_device(short)
        for long, short in ((Layout(tp=16), Layout(tp=8)), (Layout(pp=16), Layout(pp=8)))
    )
    assert 0.25 < tensor < 0.6
    assert pipeline < tensor


def test_parts_add_up_where_rounds_are_added():
    """1024 microbatches over three ranks: too many actions to simulate, and a last round that is
    not full. No step is shorter than the passes of its slowest rank."""
    job = Job(preset("qwen2.5-32b"), 32768, 1024)
    layout = Layout(tp=2, pp=3, cp=4, recompute="selective", schedule="interleaved-1f1b", chunks=2)
    time = evaluate(job, CLUSTERS["v100-32"], layout).time
    assert time.bubble >= 0
    assert sum(time.parts.values()) == pytest.approx(time.step, rel=1e-9)

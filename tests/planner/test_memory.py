"""Memory against closed forms of the papers. Layers of proof: pure numbers, all in CI; measured
memory is compared by `python -m bench planner` (tests/bench/test_planner.py)."""

from dataclasses import replace

import pytest

from pyparallel.planner import CLUSTERS, PRECISIONS, Job, Layout, PlanError, evaluate, preset
from pyparallel.planner.activations import layer_activations, logits_bytes
from pyparallel.planner.flight import closed_form, in_flight
from pyparallel.planner.memory import memory_report, state_bytes
from pyparallel.planner.models import ModelSpec
from pyparallel.planner.stages import even_layers, local_parameters, stages_of
from pyparallel.schedule import FAMILIES, Kind, generate

A100, H200 = CLUSTERS["a100-80"], CLUSTERS["h200"]


def _gpt(recompute="none", seq=2048, batch=4):
    return Job(preset("megatron-22b"), seq, batch, "fp16", "unfused", dropout=True), recompute


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize(
    ("recompute", "sharded", "form"),
    [
        ("none", False, lambda t, x: 10 + 24 / t + 5 * x / t),
        ("none", True, lambda t, x: (34 + 5 * x) / t),
        ("selective", False, lambda t, x: 10 + 24 / t),
        ("selective", True, lambda t, x: 34 / t),
        ("full", False, lambda t, x: 2),
        ("full", True, lambda t, x: 2 / t),
    ],
)
def test_activations_are_those_of_korthikanti(tp, recompute, sharded, form):
    """arXiv:2205.05198, equations 1 to 6, exactly: s b h times a number, x = a s / h."""
    job, _ = _gpt()
    layout = Layout(tp=tp, recompute=recompute, sequence_parallel=sharded, micro_batch=4)
    model = job.model
    sbh = job.seq * 4 * model.hidden
    expected = sbh * form(tp, model.heads * job.seq / model.hidden)
    assert layer_activations(job, layout, 0) == pytest.approx(expected, rel=1e-12)


def test_context_parallelism_divides_the_sequence():
    job = Job(preset("llama-3-8b"), 32768, 8)
    whole = layer_activations(job, Layout(), 0)
    assert layer_activations(job, Layout(cp=4), 0) == pytest.approx(whole / 4)


def test_norms_of_heads_keep_what_they_read():
    model = preset("qwen3-8b")
    with_norms, without = (
        layer_activations(Job(replace(model, head_norms=norms), 4096, 8), Layout(tp=2), 0)
        for norms in (True, False)
    )
    assert with_norms - without == 4096 * 2 * (32 + 8) * 128 / 2


@pytest.mark.parametrize("ranks", [1, 4, 64, 1024])
def test_zero_bytes(ranks):
    """arXiv:1910.02054: 16, 4 + 12/d, 2 + 14/d, 16/d; Megatron: 18, 6 + 12/d; 20, 4 + 16/d."""
    paper = PRECISIONS["fp16-zero"]
    forms = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
    assert [sum(state_bytes(paper, z, ranks)) for z in range(4)] == pytest.approx(forms)
    assert sum(state_bytes(PRECISIONS["bf16"], 0, ranks)) == 18
    assert sum(state_bytes(PRECISIONS["bf16"], 1, ranks)) == pytest.approx(6 + 12 / ranks)
    assert sum(state_bytes(PRECISIONS["fp16-megatron"], 0, ranks)) == 20
    assert sum(state_bytes(PRECISIONS["fp16-megatron"], 1, ranks)) == pytest.approx(4 + 16 / ranks)
    assert sum(state_bytes(PRECISIONS["fp32"], 1, ranks)) == pytest.approx(8 + 8 / ranks)


def test_the_divisor_is_the_ranks_that_reduce_gradients_never_all_devices():
    job = Job(preset("llama-3-8b"), 8192, 64)
    plain = memory_report(job, A100, Layout(dp=2, tp=4)).stages[0]
    wider = memory_report(job, A100, Layout(dp=2, tp=4, cp=2)).stages[0]
    assert plain.optimizer == pytest.approx(2 * wider.optimizer)
    assert plain.weights == wider.weights


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"dualpipe"}))
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("m", [4, 5, 9, 16, 33])
def test_flight_counts_the_schedule_object(name, pp, m):
    """Against a count of the schedule's own rows, with chunks of different weight."""
    chunks = FAMILIES[name].default_chunks()
    layout = Layout(pp=pp, schedule=name, chunks=chunks)
    weights = [1.0, 1.7, 0.4][:chunks]
    schedule = generate(name, pp, m, chunks=chunks)
    for rank, row in enumerate(schedule.rows):
        now, peak = 0.0, 0.0
        for action in row:
            kept = weights[schedule.held[rank].index(action.stage)]
            now += {
                Kind.FORWARD: kept,
                Kind.BACKWARD: -kept,
                Kind.BACKWARD_INPUT: (32 / 34 - 1) * kept,
                Kind.BACKWARD_WEIGHT: -32 / 34 * kept,
            }.get(action.kind, 0.0)
            peak = max(peak, now)
        ours = max(
            sum(n * w for n, w in zip(counts, weights, strict=True))
            for counts in in_flight(layout, m)[rank]
        )
        assert ours == pytest.approx(peak, abs=1e-6)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 3)])
@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [8, 16, 24, 37])
def test_closed_forms_are_the_schedules_own(name, chunks, pp, m):
    layout = Layout(pp=pp, schedule=name, chunks=chunks if pp > 1 else 1)
    exact = [max(map(sum, counts)) / layout.chunks for counts in in_flight(layout, m)]
    assert list(closed_form(layout, m)) == pytest.approx(exact)


def test_the_first_stage_keeps_what_korthikanti_prints_for_interleaving():
    """Factor 1 + (p-1)/(p v): p 8, v 3 gives 31 chunks of a 24th of the layers."""
    layout = Layout(pp=8, chunks=3, schedule="interleaved-1f1b")
    assert closed_form(layout, 64)[0] == pytest.approx(31 / 3)


def test_the_first_stage_is_the_fullest():
    plan = evaluate(
        Job(preset("megatron-22b"), 2048, 32, "fp16", "flash", True), A100,
        Layout(dp=1, tp=4, pp=4, recompute="selective"),
    )  # fmt: skip
    kept = [stage.activations for stage in plan.memory.stages]
    assert kept == sorted(kept, reverse=True)
    assert plan.memory.fullest.rank == 0
    assert plan.memory.stages[-1].logits > 0
    assert all(stage.total == sum(stage.parts.values()) for stage in plan.memory.stages)


@pytest.mark.parametrize("name", ["gpt3-175b", "llama-3.2-1b", "smollm-1.7b"])
def test_what_recomputes_more_needs_no_more(name):
    """Scores that selective recomputation makes again are there once too, while their layer's
    backward runs."""
    for attention in ("flash", "unfused"):
        job = Job(preset(name), 32768, 64, "bf16", attention, True)
        peaks = [
            evaluate(job, A100, Layout(dp=1, recompute=kind)).memory.peak
            for kind in ("none", "selective", "full")
        ]
        assert peaks == sorted(peaks, reverse=True), attention


@pytest.mark.parametrize("layers", [1, 5, 12, 30, 61, 126])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 16])
def test_every_layer_is_on_one_stage(layers, stages):
    counts = even_layers(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    model = ModelSpec("m", layers, 64, 4, 100)
    held = [n for s in stages_of(model, Layout(pp=stages)) for n in s.layers]
    assert held == list(range(layers))


def test_first_and_last_stage_of_llama_405b_have_a_layer_less():
    """arXiv:2407.21783, section 3.3.2."""
    counts = even_layers(126, 16)
    assert (counts[0], counts[-1], set(counts[1:-1])) == (7, 7, {8})


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_local_parameters_add_up(schedule):
    """Over tp and pp they are the model's, but for norms on every tp rank."""
    model = replace(preset("llama-3-8b"), layers=8)
    chunks = 1 if schedule == "1f1b" else 2
    layout = Layout(tp=1, pp=4, chunks=chunks, schedule=schedule)
    local = local_parameters(model, layout, stages_of(model, layout))
    assert sum(n.total for n in local) == model.parameters()


def test_kv_heads_fewer_than_tp_are_held_more_than_once():
    model = ModelSpec("m", 2, 64, 8, 100, kv_heads=2, head_dim=8)
    by_tp = [
        local_parameters(model, layout, stages_of(model, layout))[0].total
        for layout in (Layout(tp=2), Layout(tp=4))
    ]
    # Of a layer's qkv, (a/t + 2 max(k/t, 1)) d_h outputs: the two of kv do not halve.
    qkv = [2 * 64 * (8 / t + 2) * 8 for t in (2, 4)]
    rest = [2 * (64 * 64 / t + 3 * 64 * 256 / t + 128) + 2 * 100 * 64 / t + 64 for t in (2, 4)]
    assert by_tp == pytest.approx([q + r for q, r in zip(qkv, rest, strict=True)])


def test_offload_moves_states_to_the_host():
    job = Job(preset("llama-3-8b"), 4096, 64)
    on_device = memory_report(job, A100, Layout(dp=8, zero=1))
    off = memory_report(job, A100, Layout(dp=8, zero=1, offload="optimizer"))
    assert off.stages[0].optimizer == 0
    assert off.host_bytes == pytest.approx(on_device.stages[0].optimizer)
    assert off.peak < on_device.peak


def test_recompute_by_operation_keeps_every_second_product():
    """Llama 3 8B, per token: the layer's input, query, value, gate and down's outputs, attention's
    output with its log-sum-exp; torchtitan's list of 2024, by hand."""
    job = Job(preset("llama-3-8b"), 8192, 8)
    by_hand = 2 * (4096 + 4096 + 1024 + 14336 + 4096 + 4096) + 4 * 32
    assert layer_activations(job, Layout(recompute="op"), 0) == 8192 * by_hand
    none, op, full = (
        evaluate(job, H200, Layout(dp=8, zero=3, recompute=r)) for r in ("none", "op", "full")
    )
    assert none.memory.peak > op.memory.peak > full.memory.peak
    assert none.time.step < op.time.step < full.time.step
    # Key, projection and up are computed again: of seven products' FLOPs, 1 + 4 + 14 of 53.
    h, f = 4096, 14336
    again = 2.0 * 32 * (h * 1024 + h * h + h * f)
    more = op.flops.counts["hardware"] - none.flops.counts["hardware"]
    assert more == pytest.approx(again * job.tokens)


def test_a_plain_loss_holds_fourteen_bytes_a_logit():
    """PyTorch's operations one by one: logits, a float32 copy, its log-softmax, that one's
    gradient; Megatron's, and a compiled loss, hold 2 + 4."""
    fused = Job(preset("llama-3-8b"), 8192, 8)
    plain = Job(preset("llama-3-8b"), 8192, 8, loss="plain")
    for job, each in ((fused, 6), (plain, 14)):
        assert logits_bytes(job, Layout()) == each * 8192 * 128256
    assert (
        evaluate(plain, H200, Layout(dp=8)).time.step
        > evaluate(fused, H200, Layout(dp=8)).time.step
    )
    with pytest.raises(PlanError, match="loss='none' is not one of fused, plain"):
        Job(preset("llama-3-8b"), 8192, 8, loss="none")

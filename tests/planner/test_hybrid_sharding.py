"""Hybrid sharding: shards over dp cp / replicas neighbours, copied; weights held twice.
Layers of proof: pure numbers, and the frameworks' own words for it read and written; all of it
runs in CI."""

import pytest

from pyparallel.plan import main
from pyparallel.planner import CLUSTERS, Job, Layout, PlanError, evaluate, preset
from pyparallel.planner.collectives import group_of
from pyparallel.planner.cost import Traffic, data_parallel, optimizer_seconds
from pyparallel.planner.emitters import emit
from pyparallel.planner.importers import import_configuration
from pyparallel.planner.kernels import Kernels
from pyparallel.planner.quick import Estimator
from pyparallel.planner.search import Space, search
from pyparallel.planner.stages import Local, local_parameters, stages_of

H100 = CLUSTERS["h100"]
JOB = Job(preset("llama-3-8b"), seq=8192, global_batch=64)
DENSE = Layout(dp=64, zero=3, recompute="full")
MOE = Job(preset("mixtral-8x7b"), seq=4096, global_batch=64)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 8, 32])
def test_states_are_shared_by_a_shard_group_alone(zero, replicas):
    """MiCS (arXiv:2205.00119, section 3.2): 18 bytes as 2 + 4 + 12, each over 64 / replicas."""
    stage = evaluate(JOB, H100, DENSE.with_(zero=zero, replicas=replicas)).memory.fullest
    shards, n = 64 // replicas, JOB.model.parameters()
    assert stage.weights == pytest.approx(2 * n / (shards if zero == 3 else 1))
    assert stage.gradients == pytest.approx(4 * n / (shards if zero >= 2 else 1))
    assert stage.optimizer == pytest.approx(12 * n / shards)


def test_experts_are_shared_by_the_shards_that_hold_the_same_ones():
    layout = Layout(dp=64, ep=4, zero=1, recompute="full")
    one, four = (evaluate(MOE, H100, layout.with_(replicas=r)).memory.fullest for r in (1, 4))
    assert four.optimizer == pytest.approx(4 * one.optimizer)
    with pytest.raises(PlanError, match=r"ep 4 does not divide dp 64 x cp 1 / replicas 32 = 2"):
        evaluate(MOE, H100, layout.with_(replicas=32))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gradients_take_two_hops_over_their_own_links(zero):
    """Per device: scattered (and weights gathered) in a node of 8, then an eighth of the gradient
    reduced over 8 nodes, once: 2 (r-1)/r of it. Without overlap all of it is exposed."""
    layout = DENSE.with_(zero=zero, replicas=8, overlap_dp=False)
    count, m = 1e9, 4
    traffic = data_parallel(JOB, H100, layout, 1.0, 2.0, Local(count, 0.0), m)
    times = {1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[zero]
    inside = 7 / 8 * count * (4 * times[0] + 2 * times[1])
    assert traffic.volume == pytest.approx(inside + 2 * 7 / 8 * 4 * count / 8)
    near, far = (group_of(layout, H100, axis) for axis in ("shards", "replicas"))
    assert (near.size, near.crosses, near.stride) == (8, False, 1)
    assert (far.size, far.local, far.stride) == (8, 1, 8)
    seconds = times[0] * near.gather(4 * count) + times[1] * near.gather(2 * count)
    assert traffic.exposed == pytest.approx(seconds + far.reduce(4 * count / 8))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_experts_travel_between_those_that_hold_the_same_ones(zero):
    """64 ranks, ep 4, two replicas: 8 ranks, four apart, share an expert's shards, as often as
    dense ones are; its gradients' shards then go between the two replicas."""
    replicas = 2 if zero else 1
    layout = Layout(dp=64, ep=4, zero=zero, replicas=replicas, overlap_dp=False)
    count, m = 1e9, 4
    traffic = data_parallel(MOE, H100, layout, 1.0, 2.0, Local(0.0, count), m)
    same, far = (group_of(layout, H100, axis) for axis in ("expert shards", "replicas"))
    assert (same.size, same.stride, far.stride) == (16 // replicas, 4, 64 // replicas)
    times = {0: (2, 0), 1: (1, 1), 2: (m, 1), 3: (m, 2 * m)}[zero]
    seconds = times[0] * same.gather(4 * count) + times[1] * same.gather(2 * count)
    if zero:
        seconds += far.reduce(4 * count / 8)
    assert traffic.exposed == pytest.approx(seconds, rel=1e-3)
    sent = (1 - 1 / same.size) * count * (4 * times[0] + 2 * times[1])
    assert traffic.volume == pytest.approx(sent + (4 * count / 8 if zero else 0.0))
    one = Traffic(0.0, 0.0, 0.0)
    alone = layout.with_(ep=64 // replicas)
    assert (data_parallel(MOE, H100, alone, 1.0, 2.0, Local(0.0, count), m) == one) == (not zero)


def test_the_optimizer_updates_a_shard_of_a_replica():
    kernels = Kernels(H100.gpu, JOB.bytes, 64)
    local = Local(1e9, 1e9)
    seconds = [
        optimizer_seconds(MOE, H100, Layout(dp=dp, ep=4, replicas=r), kernels, local)
        for dp, r in ((64, 8), (8, 1), (64, 1))
    ]
    assert seconds[0] == pytest.approx(seconds[1])
    assert seconds[0] > seconds[2]


def test_a_second_copy_of_the_weights_is_held_and_gathered_in_its_group():
    """ZeRO++ (arXiv:2306.10209, section 3.2): 2 bytes more over 8; the backward gathers in a node,
    once a microbatch; what crosses nodes is one gather and the gradients."""
    layout = DENSE.with_(secondary=8, overlap_dp=False)
    stage = evaluate(JOB, H100, layout).memory.fullest
    n = JOB.model.parameters()
    assert stage.weights == pytest.approx(2 * n / 64 + 2 * n / 8)
    assert stage.gradients == pytest.approx(4 * n / 64)
    count, m = 1e9, 4
    traffic = data_parallel(JOB, H100, layout, 1.0, 2.0, Local(count, 0.0), m)
    far, near = (group_of(layout, H100, axis) for axis in ("shards", "secondary"))
    assert (near.size, near.crosses, near.stride) == (8, False, 1)
    seconds = far.gather(2 * count) + near.gather(2 * count) + far.gather(4 * count)
    assert traffic.exposed == pytest.approx(m * seconds)
    assert traffic.volume == pytest.approx(m * count * (63 / 64 * (2 + 4) + 7 / 8 * 2))
    experts = Layout(dp=64, ep=4, zero=3, secondary=8, recompute="full")
    one, held = (evaluate(MOE, H100, experts.with_(secondary=s)).memory.fullest for s in (0, 8))
    group = group_of(experts, H100, "expert secondary")
    assert (group.size, group.stride) == (2, 4)
    (local,) = local_parameters(MOE.model, experts, stages_of(MOE.model, experts))
    assert held.weights - one.weights == pytest.approx(2 * local.dense / 8 + 2 * local.experts / 2)


def test_estimates_agree_and_a_search_keeps_what_is_given():
    hybrid = (JOB, DENSE.with_(replicas=8)), (MOE, Layout(dp=16, ep=2, replicas=2))
    twice = (JOB, DENSE.with_(secondary=8)), (MOE, Layout(dp=16, ep=2, zero=3, secondary=4))
    for job, layout in (*hybrid, *twice):
        plan, estimate = evaluate(job, H100, layout), Estimator(job, H100).estimate(layout)
        assert estimate.peak == pytest.approx(plan.memory.peak)
        assert estimate.step == pytest.approx(plan.time.step)
    found = search(JOB, H100, 16, space=Space(fixed={"replicas": 2, "dp": 16}), exact=2)
    assert {e.layout.replicas for e in found.estimates} == {2}
    assert "in 2 replicas" in found.best.layout.label


@pytest.mark.parametrize(
    ("change", "message"),
    [({"replicas": 2, "zero": 0}, "2 with zero 0, which shards nothing"),
     ({"replicas": 3}, "3 does not divide dp 64 x cp 1 = 64; nearest 2 and 4"),
     ({"replicas": 64}, "leave one shard, so none; nearest 16 and 32, or zero 0"),
     ({"replicas": 0}, "replicas=0; allowed are 1, 2, 3"),
     ({"secondary": 8, "zero": 2}, "8 with zero 2, which keeps weights whole; nearest zero 3"),
     ({"secondary": 24, "replicas": 2}, "24 does not divide .* replicas 2 = 32; nearest 16 and 32"),
     ({"secondary": -1}, "-1 does not divide dp 64")],
)  # fmt: skip
def test_what_cannot_be(change, message, capsys):
    with pytest.raises(PlanError, match=message):
        evaluate(JOB, H100, DENSE.with_(**change))
    if "secondary" not in change and change["replicas"] > 1:
        arguments = ["--model", "llama-3-8b", "--dp", "64", "--tp", "1", "--pp", "1", "--cp", "1"]
        options = [w for k, v in change.items() for w in (f"--{k}", str(v))]
        assert main([*arguments, *options]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("framework", "layout"),
    [("torchtitan", DENSE.with_(replicas=8, micro_batch=1)),
     ("deepspeed", DENSE.with_(replicas=8, sequence_parallel=False)),
     ("deepspeed", DENSE.with_(secondary=8, sequence_parallel=False)),
     ("pyparallel", DENSE.with_(secondary=8)),
     ("megatron", Layout(dp=64, zero=1, replicas=4)),
     ("pyparallel", DENSE.with_(replicas=4))],
)  # fmt: skip
def test_what_is_written_is_read_back(framework, layout, tmp_path):
    emitted = emit(framework, JOB, layout, 8)
    path = tmp_path / emitted.filename
    path.write_text(emitted.text)
    found = import_configuration(str(path), 64, JOB.model, JOB.seq)
    assert not found.violations
    for name in ("replicas", "zero", "secondary"):
        assert getattr(found.layout, name) == getattr(layout, name)


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
def test_a_second_copy_is_refused_where_there_is_no_word_for_it(framework):
    with pytest.raises(PlanError, match="a second copy of the weights"):
        emit(framework, JOB, DENSE.with_(secondary=8), 8)


def test_other_files(read):
    """MiCS counts the ranks that share; one that shares alone shards nothing; a node of 6."""
    ds = {"train_micro_batch_size_per_gpu": 1,
          "zero_optimization": {"stage": 3, "mics_shard_size": 4}}  # fmt: skip
    assert read(ds, ".json", gpus=32).layout.replicas == 8
    found = read(ds, ".json", gpus=30)
    assert "4 ranks that share shards, of dp 30 x cp 1 = 30" in found.text()
    ds["zero_optimization"]["stage"] = 2
    found = read(ds, ".json", gpus=32)
    assert found.layout.replicas == 1
    assert "mics_shard_size 4 has no effect with stage 2" in found.assumptions
    ds["zero_optimization"] = {"stage": 3, "zero_hpz_partition_size": 12}
    found = read(ds, ".json", gpus=32)
    assert found.layout.secondary == 4
    assert "12, of 32 ranks; take 8 or 16" in found.text()
    ds["zero_optimization"] = {"stage": 2, "zero_hpz_partition_size": 8}
    assert "zero_hpz_partition_size 8 has no effect with stage 2" in read(ds, ".json").assumptions
    titan = "--parallelism.data_parallel_replicate_degree {} --training.seq_len 4096"
    assert import_configuration(titan.format(8), gpus=8).layout.zero == 0
    assert import_configuration(titan.format(3), gpus=8).violations
    fsdp = {"num_processes": 12, "nproc_per_node": 6,
            "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}  # fmt: skip
    assert read(fsdp, ".json").layout.replicas == 2

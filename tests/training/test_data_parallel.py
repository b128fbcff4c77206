"""Data parallelism and ZeRO on four ranks: against one process that has all samples.

Layers: N processes, gradients and weights in float64; communication counted by the groups' own
sequence numbers; what cannot be is refused.
"""

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyparallel.pipeline import PipelineExecutor
from pyparallel.schedule import generate, with_transfers
from pyparallel.training import (
    Checkpointer,
    ParallelConfig,
    ParallelModel,
    Topology,
    build_mesh,
    data_parallel,
)
from tests.launch import run_ranks
from tests.training.models import batch, llama
from tests.training.ranks import several

WIDTH, ROWS, MICROBATCHES, STEPS = 6, 8, 3, 3
UNITS = 4  # of Model: its blocks, and the rest


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(y, target):
    return nn.functional.mse_loss(y, target)


def make(seed):
    torch.manual_seed(seed)
    return Model().double()


def batches():
    """Of every step and microbatch: all ranks' samples."""
    torch.manual_seed(11)
    for _ in range(STEPS):
        yield [
            (
                torch.randn(ROWS, WIDTH, dtype=torch.float64),
                torch.randn(ROWS, 5, dtype=torch.float64),
            )
            for _ in range(MICROBATCHES)
        ]


def adam(params):
    return torch.optim.AdamW(params, lr=0.05)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_process():
    """Gradients of each step, and the weights at the end."""
    model = make(0)
    optimizer, gradients = adam(model.parameters()), []
    for step in batches():
        optimizer.zero_grad()
        for x, target in step:
            (loss_fn(model(x), target) / MICROBATCHES).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
    return gradients, model.state_dict()


def calls(group):
    return group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def trained(rank, config, dtype=torch.float64):
    """Averages (not sums: a wrong factor would show in the gradients) of all microbatches (none
    zeroed between), and nothing said to the replicas before the last."""
    mesh = build_mesh(config)
    start = mesh.config.ranks(rank.rank, "dp", "sp").index(rank.rank)
    size = mesh.size("dp", "sp")
    data = data_parallel(make(100 + rank.rank if start else 0), mesh)  # all take the first's
    optimizer = data.optimizer(adam)
    gradients, weights = one_process()
    for number, step in enumerate(batches()):
        optimizer.zero_grad()
        said = []
        for i, (x, target) in enumerate(step):
            before = calls(mesh.data_group)
            with data.accumulate(last=i == MICROBATCHES - 1):
                own = slice(start * ROWS // size, (start + 1) * ROWS // size)
                (loss_fn(data.module(x[own]), target[own]) / MICROBATCHES).backward()
            said.append(calls(mesh.data_group) - before)
        check_silence(config, number, said)
        names = dict(data.original.named_parameters())
        for name, wanted in gradients[number].items():
            error = (full(names[name].grad) - wanted).abs().max()
            assert error <= 1e-12, (config, number, name, float(error))
        optimizer.step()
        if number == 1 and not config.zero:  # a checkpoint, read again: states, weights, rates
            states = copy.deepcopy(optimizer.state_dict())
            saved = copy.deepcopy(data.original.state_dict())
            with torch.no_grad():
                for parameter in data.original.parameters():
                    parameter.zero_()
            optimizer = data.optimizer(lambda p: torch.optim.AdamW(p, lr=1.0))
            data.original.load_state_dict(saved)
            optimizer.load_state_dict(states)
    for name, parameter in data.original.named_parameters():
        error = (full(parameter.detach()) - weights[name]).abs().max()
        assert error < 1e-9, (config, name, float(error))  # AdamW divides by roots of small numbers
    held = sum(p.numel() for s in [optimizer] for p in own_states(s))
    whole = sum(p.numel() for p in make(0).parameters())
    return held / whole


def check_silence(config, number, said):
    """Calls of the replicas' group in each of a step's microbatches: what is said when."""
    *early, last = said
    if config.data == 1 or config.replicas > 1:  # those have groups of their own
        assert not any(said)
    elif config.zero < 2:  # DDP tells the order of its buckets once, at the second step's start
        assert not any(early[number == 1 :])
        assert last
    elif config.zero == 2:  # weights, once per step
        assert not any(early[1:])
        assert last == UNITS
    else:  # weights, every time; of the last one gradients too
        assert set(early) == {last - UNITS}


def own_states(optimizer):
    """First moments of what this rank steps."""
    inner = getattr(optimizer, "optim", optimizer)
    for state in inner.state.values():
        moment = state["exp_avg"]
        yield getattr(moment, "_local_tensor", moment)


CONFIGS = [
    ParallelConfig(dp=4),
    ParallelConfig(dp=2, sp=2, zero=1),
    ParallelConfig(dp=4, zero=2),
    ParallelConfig(dp=2, sp=2, zero=3),
    ParallelConfig(dp=4, zero=3, replicas=2),
    ParallelConfig(dp=2, tp=2, zero=1, order="dp-sp-tp-pp"),
    ParallelConfig(tp=2, pp=2, zero=3),
    ParallelConfig(dp=4, offload_optimizer=True),
    ParallelConfig(dp=2, sp=2, zero=1, offload_optimizer=True),
    ParallelConfig(dp=4, zero=2, offload_optimizer=True),
]


def test_every_stage_of_zero_trains_as_one_process(tmp_path):
    jobs = [(trained, config) for config in CONFIGS]
    offloaded = [ParallelConfig(dp=4, zero=zero, offload_optimizer=True) for zero in range(4)]
    more = [(kept, str(tmp_path), config) for config in offloaded]
    results = run_ranks(several, 4, *jobs, (refused,), (meshes,), (in_a_pipeline,), (fused,), *more)
    for number, config in enumerate(CONFIGS):
        held = [rank[number] for rank in results]
        if config.zero == 0:
            assert held == [1.0] * 4
        elif config.zero == 1:  # whole parameters: shares differ, and groups hold each once
            for group in config.groups("dp", "sp"):
                assert sum(held[r] for r in group) == pytest.approx(1.0)
                assert max(held[r] for r in group) < 1.0
        else:
            rows = [(len(p), p.numel()) for p in make(0).parameters()]
            most = sum(-(-r // config.shards) * n / r for r, n in rows) / sum(n for _, n in rows)
            assert max(held) <= most + 1e-9, (config, held)
            assert sum(held) == pytest.approx(4 / config.shards)


def kept(rank, folder, config):
    """A training with states in host memory goes on from its checkpoint bit for bit."""
    mesh = build_mesh(config)
    torch.manual_seed(30 + rank.rank)
    samples = [(torch.randn(4, WIDTH).double(), torch.randn(4, 5).double()) for _ in range(3)]

    def begin(seed):
        data = data_parallel(make(seed), mesh)
        return data, data.optimizer(adam)

    def step(data, optimizer, number):
        optimizer.zero_grad()
        loss_fn(data.module(samples[number][0]), samples[number][1]).backward()
        optimizer.step()

    data, optimizer = begin(0)
    step(data, optimizer, 0)
    step(data, optimizer, 1)
    keeper = Checkpointer(f"{folder}/zero-{config.zero}", mesh, asynchronous=False)
    keeper.save(2, model=data.original, optimizer=optimizer)
    step(data, optimizer, 2)
    again, optimizer = begin(1)
    assert keeper.load(model=again.original, optimizer=optimizer) == 2
    step(again, optimizer, 2)
    for name, parameter in data.original.named_parameters():
        assert torch.equal(full(parameter), full(again.original.get_parameter(name))), name


def in_a_pipeline(rank):
    """What zero 2 and 3 cost a stage: said once, refused, or allowed; counted as said."""
    inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    refuse = ParallelConfig(dp=2, pp=2, microbatch_gathers="refuse")
    with pytest.raises(ValueError, match="zero=3 of a stage of pp=2: every microbatch of a stage"):
        data_parallel(inner, build_mesh(refuse), zero=3)
    gathered = {}
    for zero, wish in ((3, "price"), (2, "price"), (3, "allow")):
        mesh = build_mesh(ParallelConfig(dp=2, pp=2, zero=zero, microbatch_gathers=wish))
        torch.manual_seed(5)
        stage = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = data_parallel(stage, mesh)
        said = [str(w.message) for w in caught if "of a stage" in str(w.message)]
        assert len(said) == (wish == "price" and mesh.rank == 0)
        counts = count_gathers(data.module)
        executor = PipelineExecutor(
            {mesh.coordinates.pp: data.module}, loss_fn, group=mesh.group("pp")
        )
        plan = with_transfers(generate("1f1b", 2, 4))
        x = list(torch.randn(4, 8, 64))
        executor.step(plan, x if mesh.coordinates.pp == 0 else None, x)
        gathered[zero, wish] = sum(counts)
        # Two linear layers of float32 on two ranks. What a backward has gathered, the next forward
        # finds; how often that comes is the schedule's affair.
        weights = 4 * 2 * (64 * 64 + 64)
        once = weights / 2
        if zero == 3:
            assert 5 * once <= gathered[zero, wish] <= 8 * once
        else:
            assert gathered[zero, wish] == once
        if said:
            assert f"gradients ({weights / 2**20:.3g} MiB) stay whole" in said[0]
            more = f"receives up to {2 * once / 2**20:.3g} MiB of weights"
            assert (more in said[0]) == (zero == 3)


def count_gathers(module):
    """Bytes that a rank receives of other ranks' weights, by call."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    counts = []

    class Counting(AllGather):
        def allocate(self, size, *, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            counts.append((group.size() - 1) * input_tensor.nbytes)
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    for unit in module.modules():
        if hasattr(unit, "set_custom_all_gather"):
            unit.set_custom_all_gather(Counting())
    return counts


def fused(rank):
    """tp_sequence_parallel is no flag that may do nothing: of 3 layers, both products whose results
    are cut run as one op with their reduce-scatter, and the others with their all-gather."""
    for split, ran in ((True, "matmul_reduce_scatter"), (False, "matmul_all_reduce")):
        mesh = build_mesh(ParallelConfig(dp=2, tp=2, tp_sequence_parallel=split))
        model = ParallelModel(llama().float(), mesh)
        with torch.profiler.profile() as trace:
            model.forward_backward(*batch(2, 12))
        names = [event.name for event in trace.events()]
        for op in ("matmul_reduce_scatter", "matmul_all_reduce"):
            assert names.count(f"pyparallel::{op}") == (6 if op == ran else 0), (split, op)
        assert (names.count("pyparallel::all_gather_matmul") == 6) == split


def refused(rank):
    mesh = build_mesh(ParallelConfig(dp=4))
    frozen = copy.deepcopy(make(0)).requires_grad_(False)
    for module, options, text in (
        (make(0), {"zero": 5}, "0, 1, 2 or 3"),
        (make(0), {"zero": 5}, "0, 1, 2 or 3"),
        (make(0), {"zero": 1, "policy": object()}, "policy has no effect with zero=1"),
        (make(0), {"zero": 0, "units": ["head"]}, "units has no effect with zero=0"),
        (make(0), {"zero": 3, "units": ["tail"]}, "no submodules; there are blocks"),
        (frozen, {}, "no parameter of Model requires gradients"),
    ):
        with pytest.raises(ValueError, match=text):
            data_parallel(module, mesh, **options)


def meshes(rank):
    """Every group over every set of axes is there, with ranks in the order of coordinates."""
    with pytest.raises(ValueError, match="and there are 4. Nearest layouts of 4"):
        build_mesh(ParallelConfig(dp=3))
    with pytest.raises(ValueError, match="differs between ranks: rank 0 has"):
        build_mesh(ParallelConfig(dp=2, tp=2, zero=int(rank.rank == 2)))
    with pytest.raises(ValueError, match="initialised already"):
        build_mesh(ParallelConfig(dp=4), backend="gloo")
    for config in (ParallelConfig(dp=2, tp=2), ParallelConfig(sp=2, pp=2, order="dp-pp-sp-tp")):
        mesh = build_mesh(config)
        for axes in ((), ("dp",), ("tp", "sp"), ("dp", "tp"), ("pp", "sp", "dp"), ("sp",)):
            group = mesh.group(*axes)
            assert dist.get_process_group_ranks(group) == config.ranks(rank.rank, *axes)
            assert group.size() == mesh.size(*axes)
            total = torch.tensor([1.0 + rank.rank])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(1 + r for r in config.ranks(rank.rank, *axes))
        for axis in ("dp", "tp", "sp", "pp"):
            here = getattr(mesh.coordinates, axis)
            assert mesh.group(axis).rank() == here
            assert mesh.device_mesh[axis].get_local_rank() == here
            assert mesh.device_mesh[axis].size() == mesh.size(axis)
            assert mesh.device_mesh.get_group(axis) is mesh.group(axis)


def alone(rank):
    """Without torchrun's environment a world of one is made; of more, it says how to start."""
    assert "RANK" not in os.environ
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 2"):
        build_mesh(ParallelConfig(dp=2))
    mesh = build_mesh(ParallelConfig())
    assert mesh.group("dp", "tp").size() == 1
    module = make(0)
    assert data_parallel(module, mesh, zero=3).module is module


def placed(rank):
    """As torchrun starts ranks, on two hosts that take turns: tp pairs are brought together."""
    meeting = rank.store()
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting.set("port", str(store.port))
    os.environ.update(
        RANK=str(rank.rank),
        WORLD_SIZE="4",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=meeting.get("port").decode(),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    like = [{"name": "near", "like": "cpu"}, {"name": "far", "like": "cpu"}]
    topology = Topology.from_description({"levels": like, "ranks": [[0, 2], [1, 3]]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = build_mesh(ParallelConfig(dp=2, tp=2), topology=topology)
    assert dist.get_rank() == mesh.rank == (0, 2, 1, 3)[rank.rank]
    everyone = [None] * 2
    dist.all_gather_object(everyone, rank.rank, group=mesh.group("tp"))
    assert everyone == [rank.rank % 2, rank.rank % 2 + 2]
    # Ranks that are numbered already stay: the layout crosses, and that is said once, with a price.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_mesh(ParallelConfig(tp=4), topology=topology)
        build_mesh(ParallelConfig(dp=2, tp=2), topology=topology)
    said = [str(w.message) for w in caught]
    assert len(said) == (2 if mesh.rank == 0 else 0)
    if said:
        assert "reach over far: an all-reduce of 64 MiB is predicted to take" in said[0]
        assert "Ranks in the order [0, 2, 1, 3] would do better" in said[1]
        assert "would do better" not in said[0]
    dist.barrier()  # the store is rank 0's: it stays until all have made their groups


def test_processes_are_numbered_by_their_places():
    run_ranks(placed, 4)


def test_one_process_needs_no_launcher():
    run_ranks(alone, 1)

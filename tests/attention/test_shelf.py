"""Keys fetched from symmetric memory (attention/shelf.py, triton_kernels/key_shelf.py).

Layers of proof: the layout by itself; N processes in Triton's interpreter, the very code that CUDA
tensors take but for streams: results and gradients bit for bit those of sent keys, with ranks that
come late, memory that grows, a peer that does not come; the compiled kernels, read
(tests/triton_kernels/test_compiled.py). No GPU has run this: copies beside kernels are not shown.
"""

import time

import pytest
import torch

from tests.attention.test_ranks import on_one_rank
from tests.attention.whole import Case
from tests.launch import run_ranks
from tests.ops.seats import make_groups

# Larger and smaller in turn: buffers alternate, memory grows with the second case.
CASES = {
    "wide values": {"rows": 2, "d_v": 20, "causal": True},
    "window": {"rows": 40, "causal": True, "window_size": (4, 0), "batch": 3},
    "striped": {"rows": 33, "causal": True, "sharding": "striped", "dtype": torch.bfloat16},
    "documents": {"rows": 90, "causal": True, "cu_seqlens": [0, 3, 5, 9, 10, 90], "d": 24},
}
STRATEGIES = {3: ("ring", "all_gather"), 4: ("ring", "hybrid")}


def fetched(rank):
    from pyparallel.attention.transport import transport_of

    torch.set_num_threads(1)
    torch.manual_seed(5)
    world = rank.world_size
    cases = {n: Case.random(heads=6, kv_heads=2, **o) for n, o in CASES.items()}
    wrong = []
    for kind, group in make_groups(rank, ("communicator", "gloo")).items():
        transport = transport_of(group, torch.device("cpu"))
        shelf = transport.shelf
        shelf.on_cpu = True
        moved = []
        for number, (name, case) in enumerate(cases.items()):
            if number and (kind == "gloo" or (world == 4 and number != 2)):
                continue
            for strategy in STRATEGIES[world]:
                results = []
                for way in (shelf, None):  # fetched, then sent
                    transport.shelf = way
                    before = vars(transport.traffic).copy()
                    if way is not None and number % world == rank.rank:
                        time.sleep(0.02)  # another rank is late in each case
                    results.append(on_one_rank(rank, case, group, strategy=strategy))
                    moved.append({k: n - before[k] for k, n in vars(transport.traffic).items()})
                for got, want in zip(*results, strict=True):
                    same = got is want is None or (got is not None and torch.equal(got, want))
                    if not same and not (kind == "gloo" and got.dim() == 1):  # gloo's own order
                        wrong.append((kind, name, strategy))
                if moved[-1] != moved[-2]:
                    wrong.append((kind, name, strategy, moved[-2:]))
        transport.shelf = shelf
        path = shelf._seat().device_path(torch.device("cpu"))
        wrong += [] if path._spaces["keys",][1].turn else [(kind, "was not used")]
    return wrong


@pytest.mark.parametrize("world", [3, 4])
def test_fetched_keys_give_the_bits_of_sent_ones(world):
    for wrong in run_ranks(fetched, world, env={"TRITON_INTERPRET": "1"}):
        assert wrong == []


def faults(rank):
    from pyparallel.attention import sequence_parallel_attention
    from pyparallel.attention.transport import transport_of
    from pyparallel.comm import Communicator
    from pyparallel.ops import device_path
    from pyparallel.triton_kernels.signals import DeviceWaitError

    torch.set_num_threads(1)
    group = Communicator.from_store(rank.store(), rank.rank, rank.world_size, timeout=20.0)
    q = torch.randn(1, 8, 2, 8)

    def call(x):
        return sequence_parallel_attention(x, x, x, group=group, strategy="ring")

    shelf = transport_of(group, q.device).shelf
    shelf.on_cpu = True
    # Memory is never made while a graph is captured; what is there serves.
    really = device_path.is_capturing
    try:
        device_path.is_capturing = lambda device: rank.rank == 1
        with pytest.raises(ValueError, match="no workspace can be made"):
            call(q)
        device_path.is_capturing = lambda device: False
        call(q)
        device_path.is_capturing = lambda device: True
        call(q)
    finally:
        device_path.is_capturing = really
    # A rank that has left: its keys are waited for until the deadline, and it is named.
    shapes = [((1, 8, 2, 8),) * 2] * 2
    path = shelf._seat().device_path(q.device)
    path._communicator.timeout = 0.3
    if rank.rank == 0:
        from pyparallel.attention.needs import Part
        from pyparallel.attention.pieces import Pieces

        laid = shelf.lay((q, q), shapes, ("alone",))
        with pytest.raises(DeviceWaitError, match=r"wait for keys: rank 1 absent after \d+\.\d s"):
            laid.fetch(1, Part(((0, 8),), Pieces([])), (q.clone(), q.clone()))()
    return True


def test_a_peer_that_does_not_come_is_named_and_nothing_grows_under_capture():
    assert run_ranks(faults, 2, env={"TRITON_INTERPRET": "1"}) == [True, True]


def spans(rank):
    from pyparallel.attention import sequence_parallel_attention
    from pyparallel.attention.transport import transport_of
    from pyparallel.comm import Communicator

    group = Communicator.from_store(rank.store(), rank.rank, rank.world_size)
    group._spans_hosts = True
    q = torch.randn(1, 8, 2, 8)
    shelf = transport_of(group, q.device).shelf
    shelf.on_cpu = True
    sequence_parallel_attention(q, q, q, group=group, strategy="ring")
    return shelf.reason


def test_ranks_on_several_hosts_send():
    want = "the group's ranks are on several hosts"
    assert run_ranks(spans, 2, env={"TRITON_INTERPRET": "1"}) == [want] * 2


def test_a_layout_holds_what_it_says():
    from pyparallel.triton_kernels.key_shelf import ShelfLayout, bytes_of

    layout = ShelfLayout(3, 1000)
    starts = [layout.control, layout.failed, layout.ready, layout.done, layout.rows(0)]
    assert starts == sorted(set(starts))
    assert layout.rows(1) - layout.rows(0) >= 1000
    assert layout.nbytes == layout.rows(2)
    assert bytes_of([(3, 5), (0, 4), (1,)], torch.bfloat16) == 256 + 256
    with pytest.raises(ValueError, match="1 to 14 buffers"):
        ShelfLayout(2, 10, buffers=15)

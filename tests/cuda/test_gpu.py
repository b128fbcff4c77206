"""The kernels on a GPU, ranks as streams of one process; skipped without one (CI has none).

Layers: the cases that also run on the stand-in (test_python.py); then what only CUDA has: replayed
graphs, streams other than the default, no allocation under capture.
"""

import pytest
import torch

from bench.gpu.virtual_ranks import rank_order_sum
from tests.cuda import virtual_ranks_cases as cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.fixture
def setup():
    torch.manual_seed(11)
    return cases.Setup("cuda")


@pytest.mark.parametrize(
    "case",
    [
        cases.collectives,
        cases.algorithms_give_the_same_bits,
        cases.in_place_and_misaligned,
        cases.signals,
        cases.misfits_name_the_call,
        cases.a_missing_rank_raises,
        cases.another_grid_raises,
        cases.abort_raises,
    ],
    ids=lambda case: case.__name__,
)
def test_case(setup, case):
    case(setup)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_captured_graph_is_replayed_between_eager_calls(setup, algorithm):
    ranks = setup.ranks(3)
    x = [setup.random(5000, torch.bfloat16) for _ in range(3)]
    out = [torch.empty_like(t) for t in x]
    setup.ready()

    def call(seat, rank, stream):
        seat.all_reduce(x[rank], out=out[rank], algorithm=algorithm, grid=setup.grid, stream=stream)

    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    allocated = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph, stream=main):
        for stream in ranks.cuda_streams:
            stream.wait_stream(main)
        ranks.on_all(call)
        for stream in ranks.cuda_streams:
            main.wait_stream(stream)
    assert torch.cuda.memory_allocated() == allocated
    for replay in range(7):
        for tensor in x:
            tensor.copy_(torch.randn(5000, device="cuda"))
        setup.ready()
        (graph.replay if replay % 3 else lambda: ranks.on_all(call))()
        ranks.synchronize()
        expected = rank_order_sum(x)
        for rank in range(3):
            assert torch.equal(out[rank], expected), (replay, rank)


def test_calls_go_to_the_current_stream(setup):
    """And not to the default one: what was queued before them on that stream is seen."""
    ranks = setup.ranks(2)
    x = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]
    setup.ready()
    for rank, stream in enumerate(ranks.cuda_streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x[rank].fill_(rank + 1.0)
            ranks.seats[rank].all_reduce(x[rank], algorithm="two_shot", grid=setup.grid)
    ranks.synchronize()
    for tensor in x:
        assert bool((tensor == 3.0).all())


def test_the_call_number_wraps(setup):
    """From just before 2^32: the phase is the first word, the flags follow from line 1 on."""
    ranks = setup.ranks(2)
    before = 0xFFFFFFFD
    for memory in ranks._memory:
        words = memory[(-memory.data_ptr()) % 128 :][: 128 * (1 + 2 * 4 * 2)].view(torch.int64)
        words[16::16] = before - (1 << 32) << 32
        words.view(torch.int32)[0] = before - (1 << 32)
    x = [setup.random(999, torch.float32) for _ in range(2)]
    out = [torch.empty_like(t) for t in x]
    setup.ready()
    for _ in range(6):
        ranks.on_all(
            lambda seat, rank, stream: seat.all_reduce(
                x[rank], out=out[rank], algorithm="one_shot", grid=setup.grid, stream=stream
            )
        )
        ranks.synchronize()
        assert torch.equal(out[0], rank_order_sum(x))
        assert torch.equal(out[1], out[0])

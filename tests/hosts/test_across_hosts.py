"""The backend between real network name spaces: what one host's memory cannot hide.

Layers: tests/torch_backend/test_hosts.py compares every operation bit for bit, here again with each
rank in the name space of its host, whose identity is the name space's own; then the cable between
the hosts is cut in the middle of a collective. Needs root and iproute2, else skips; CI runs it.
"""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pyparallel.comm  # noqa: F401 (registers the backend)
from pyparallel.comm import CommError
from tests.comm.reference import data
from tests.hosts import cable
from tests.launch import Rank, spawn_ranks
from tests.torch_backend import test_hosts as on_one_host

DEADLINE = 4.0  # seconds, of each call
SLACK = 3.0

Pair = tuple[cable.Host, cable.Host]


def place(rank: Rank, pair: Pair, places: str) -> None:
    pair["AB".index(places[rank.rank])].enter()


def operations(rank: Rank, pair: Pair, places: str, names: tuple[str, ...]) -> object:
    place(rank, pair, places)
    on_one_host.live_on = lambda rank, places: None  # the name space is identity enough
    return [getattr(on_one_host, name)(rank, places) for name in names]


@pytest.mark.parametrize(
    ("places", "names"),
    [
        ("AABB", ("reductions", "moves")),
        ("ABA", ("moves", "reductions")),
        ("ABB", ("messages", "queued")),
    ],
)
def test_every_operation(places: str, names: tuple[str, ...]) -> None:
    with cable.two_hosts() as pair:
        results = run_fresh(operations, len(places), pair.hosts, places, names)
    assert all(result == results[0] for result in results), "ranks hold different bits"


def run_fresh(*arguments: object) -> list[object]:
    """As run_ranks, in processes that nobody uses afterwards: these have moved to a host."""
    with spawn_ranks(*arguments) as ranks:
        outcomes = ranks.wait()
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback or outcome
    return [outcome.value for outcome in outcomes]


def until_cut(rank: Rank, pair: Pair, places: str, op: str) -> tuple[str, str, float]:
    """Collectives over and over until one fails: kind and text of the error, seconds it took."""
    place(rank, pair, places)
    store = dist.TCPStore(
        pair[0].address, 4001, is_master=rank.rank == 0, timeout=timedelta(seconds=30)
    )
    dist.init_process_group(
        "pyparallel",
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=DEADLINE),
    )
    x = data((1 << 20,), torch.float32, rank.rank)
    parts = torch.empty(rank.world_size << 20)
    call = {
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_gather": lambda: dist.all_gather_into_tensor(parts, x),
        "broadcast": lambda: dist.broadcast(x, src=1),
        "barrier": lambda: dist.barrier(),
        "message": lambda: exchange(rank, x),
    }[op]
    call()
    rank.report("running")
    while True:
        start = time.monotonic()
        try:
            call()
        except CommError as error:
            return type(error).__name__, str(error), time.monotonic() - start


def exchange(rank: Rank, x: torch.Tensor) -> None:
    """A message each way between two ranks."""
    peer = 1 - rank.rank
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty_like(x), peer)]
    )
    for work in works:
        work.wait()


@pytest.mark.parametrize(
    ("op", "places"),
    [
        ("all_reduce", "AABB"),
        ("all_gather", "ABA"),
        ("broadcast", "AAB"),
        ("barrier", "AB"),
        ("message", "AB"),
    ],
)
def test_a_cut_cable_is_a_named_error_on_every_rank(op: str, places: str) -> None:
    """Within the deadline of the call (and some slack for a busy machine), wherever it was."""
    world = len(places)
    with cable.two_hosts() as pair, spawn_ranks(until_cut, world, pair.hosts, places, op) as ranks:
        for r in range(world):
            assert ranks.next_report(r) == "running"
        time.sleep(0.2)
        pair.cut()
        cut = time.monotonic()
        outcomes = ranks.wait()
        elapsed = time.monotonic() - cut
    assert elapsed < 2 * DEADLINE + SLACK
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback or outcome
        kind, text, seconds = outcome.value
        where = f"rank {outcome.rank} after {seconds:.1f} s: {kind}: {text}"
        assert kind in ("Timeout", "PeerLost", "Aborted"), where
        assert seconds < DEADLINE + SLACK, where
        names = ("send to", "receive from") if op == "message" else (op,)
        assert any(name in text for name in names), where
        assert re.search(r"rank \d|ranks \d", text), where
    assert any(o.value[0] in ("Timeout", "PeerLost") for o in outcomes), "nobody found the cause"

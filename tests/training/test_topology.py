"""Where ranks are, and which of them should sit where.

Layers: integers and predicted times; descriptions and reports of doctor, read
and refused; no process is started. What processes make of a placement is in test_data_parallel.py.
"""

import json
import random
import re

import pytest

from pyparallel.doctor_gpu import parse_topology
from pyparallel.training import ParallelConfig, Topology

FAST = {"name": "NVLink", "like": "h100"}
SLOW = {"name": "network", "like": "h100"}


def described(ranks, *levels):
    return Topology.from_description({"levels": list(levels) or [FAST, SLOW], "ranks": ranks})


def seats_inside(topology, config, axis):
    """How many groups of an axis stay in one of the fastest domains, as placed."""
    order = topology.place(config)
    return sum(topology.level([order[r] for r in group]) == 0 for group in config.groups(axis))


def test_ranks_that_alternate_between_hosts_are_brought_together():
    """mpirun's round robin: even ranks on one host, odd ones on the other. Taken as they come, tp
    would cross the network in every layer."""
    topology = described([[0, 2, 4, 6], [1, 3, 5, 7]])
    config = ParallelConfig(dp=2, tp=4)
    assert topology.place(config) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert topology.crossings(config, topology.place(config)) == []
    (crossing,) = topology.crossings(config)
    assert (crossing.axis, crossing.level) == ("tp", "network")
    # 64 MiB over 4 ranks, 2 on each host, by hand. Across: half of 1/2 of it at 40 GB/s each way,
    # beside half of it inside at 342; in two pieces, the smaller part shows in one of them.
    size, across, inside = 64 * 2**20, 50e9 * 0.8, 450e9 * 0.76
    slow, fast = size / 2 / 2 / across, size / 2 / inside
    assert slow < crossing.seconds < 2 * (slow + fast) + 2e-4
    assert crossing.inside < crossing.seconds / 2
    assert re.search(r"64 MiB is predicted to take [\d.]+ ms, and [\d.]+ ms inside", str(crossing))


def test_every_rank_has_one_place_and_tp_stays_inside_where_it_can():
    rng = random.Random(3)
    for _ in range(40):
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        world = sum(sizes)
        numbers = rng.sample(range(world), world)
        ranks, at = [], 0
        for size in sizes:
            ranks.append(numbers[at : at + size])
            at += size
        topology = described(ranks)
        for config in ParallelConfig(tp=2, sp=2, dp=2).nearest(world, 100):
            order = topology.place(config)
            assert sorted(order) == list(range(world))
            inside = seats_inside(topology, config, "tp")
            assert inside == sum(size // config.tp for size in sizes) or config.tp == 1
            naive = sum(topology.level(g) == 0 for g in config.groups("tp"))
            assert inside >= naive


def test_three_levels_are_filled_from_the_inside():
    """Pairs by NVLink, two pairs on a host, two hosts: tp takes the pairs, sp the host."""
    pcie = {"name": "PCIe", "like": "a100-pcie"}
    topology = described([[[0, 5], [2, 7]], [[1, 4], [3, 6]]], FAST, pcie, SLOW)
    config = ParallelConfig(dp=2, tp=2, sp=2)
    assert topology.place(config) == (0, 5, 2, 7, 1, 4, 3, 6)
    (crossing,) = topology.crossings(config, topology.place(config))
    assert (crossing.axis, crossing.level) == ("sp", "PCIe")
    assert topology.level([0, 5]) == 0
    assert topology.level([0, 2, 7]) == 1
    assert topology.level([0, 1]) == 2
    # A domain that is too small: crossing is allowed, and costs more the farther it reaches.
    wide = topology.crossings(ParallelConfig(tp=4, dp=2), (0, 5, 2, 7, 1, 4, 3, 6))
    wider = topology.crossings(ParallelConfig(tp=8), (0, 5, 2, 7, 1, 4, 3, 6))
    assert [c.level for c in (*wide, *wider)] == ["PCIe", "network"]
    assert wide[0].seconds < wider[0].seconds


def test_a_wrong_world_is_refused():
    with pytest.raises(ValueError, match="and there are 2"):
        described([[0], [1]]).place(ParallelConfig(dp=3))


MATRIX = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV4\tPHB\tSYS\t0-15
GPU1\tNV4\t X \tPHB\tSYS\t0-15
GPU2\tPHB\tPHB\t X \tSYS\t0-15
GPU3\tSYS\tSYS\tSYS\t X \t16-31
"""


def report(matrix, count):
    name = {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": 80 * 2**30}
    devices = [{"index": i, **name} for i in range(count)]
    return {
        "gpus": {"devices": devices, "links": parse_topology(matrix) if matrix else []},
        "memory": {"total_bytes": 2**40},
        "cpu": {"usable": 32, "simd": []},
    }


def test_doctors_reports():
    """NVLinks, NUMA nodes, hosts; what adds no domain is no level."""
    topology = Topology.from_doctor([report(MATRIX, 4)] * 2)
    assert topology.world_size == 8
    assert topology.levels == ("4 NVLinks", "links of a NUMA node", "links of a host",
                               "InfiniBand HDR")  # fmt: skip
    reached = [topology.level(pair) for pair in ([0, 1], [1, 2], [2, 3], [3, 4])]
    assert reached == [0, 1, 2, 3]
    assert topology.links[0].gbps == 100
    rates = [link.rate for link in topology.links]
    assert rates[0] > rates[1]
    # Without GPUs: NUMA nodes, over which ranks are spread, where there are several; hosts.
    two = report("", 0)
    two["cpu"]["numa_nodes"] = [{"node": 0}, {"node": 1}]
    spread = Topology.from_doctor([two, two], ranks_per_host=4)
    assert [spread.level(pair) for pair in ([0, 1], [1, 2], [3, 4])] == [0, 1, 2]
    assert spread.place(ParallelConfig(tp=2, dp=4)) == tuple(range(8))
    plain = Topology.from_doctor([report("", 0)] * 3, ranks_per_host=2)
    assert (plain.world_size, len(plain.levels)) == (6, 2)
    assert [plain.level(pair) for pair in ([0, 1], [1, 2])] == [0, 1]
    with pytest.raises(ValueError, match="has 4 GPUs, and ranks_per_host=5"):
        Topology.from_doctor([report(MATRIX, 4)], ranks_per_host=5)
    with pytest.raises(ValueError, match="a number of ranks is needed"):
        Topology.from_doctor([report("", 0)])
    with pytest.raises(ValueError, match="no reports"):
        Topology.from_doctor([])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": [[0, 1], [1, 2]]}, "1: a number of a rank is expected, once"),
        ({"ranks": [[0, 1], [3]]}, "each of 0 to 2 is expected once"),
        ({"ranks": [0, 1]}, "0 where a list of 1 levels belongs"),
        ({"ranks": [[[0]], [[1]]]}, "a number of a rank"),
        ({"ranks": []}, "no ranks"),
        ({"levels": []}, "a list of links is expected"),
        ({"levels": [FAST, {"like": "h100"}]}, "an object with a name"),
        ({"levels": [FAST, {"name": "x", "like": "moon"}]}, "known are .*h100"),
        ({"levels": [FAST, {"name": "x", "gbps": 1}]}, "call_us, latency_us, share, sm_share miss"),
        ({"levels": [FAST, {**SLOW, "speed": 1}]}, "unknown keys speed"),
        ({"levels": [FAST, {**SLOW, "gbps": 0}]}, "gbps=0: a number expected"),
        ({"hosts": 3}, "'levels' and 'ranks' are expected"),
    ],
)
def test_descriptions_that_cannot_be(change, text):
    with pytest.raises(ValueError, match=text):
        Topology.from_description({"levels": [FAST, SLOW], "ranks": [[0, 1], [2, 3]], **change})


def test_domains_that_do_not_nest():
    whole = described([[0, 1], [2, 3]])
    with pytest.raises(ValueError, match=r"'a' lies in 'x' and \(rank 1\) in 'y'"):
        Topology(("a", "b", "c"), whole.links[:1] * 3, (("a", "x"), ("a", "y")))
    with pytest.raises(ValueError, match="rank 1 has 0 domains, 2 levels need 1"):
        Topology(whole.levels, whole.links, (("a",), ()))


def test_files(tmp_path):
    path = tmp_path / "topology.json"
    path.write_text(json.dumps({"levels": [FAST, SLOW], "ranks": [[1, 0], [2]]}))
    assert Topology.read(path).seats == (("0",), ("0",), ("1",))
    hosts = [tmp_path / f"host{i}.json" for i in range(2)]
    for host in hosts:
        host.write_text(json.dumps(report(MATRIX, 4)))
    assert Topology.read(*hosts) == Topology.from_doctor([report(MATRIX, 4)] * 2)
    assert Topology.read(*hosts, ranks_per_host=2).world_size == 4
    for options in ({"ranks_per_host": 2}, {}):
        with pytest.raises(ValueError, match=r"topology.json describes all ranks"):
            Topology.read(path, *hosts[: not options], **options)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"topology.json: line 1"):
        Topology.read(path)

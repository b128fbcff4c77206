"""explain(): shapes to problem to choice to table, without a group and with one of each kind."""

import json

import pytest
import torch
import torch.distributed as dist

from pyparallel import ops
from pyparallel.comm import Communicator
from pyparallel.errors import InvalidArgument
from pyparallel.ops import explain
from pyparallel.ops.choosing import algorithms
from pyparallel.ops.model import OPS
from pyparallel.ops.rule import Point, save
from tests.launch import run_ranks

GATHER, SCATTER, REDUCE = OPS


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_RULE", "none")
    monkeypatch.delenv("PYPARALLEL_ALGORITHM", raising=False)


@pytest.mark.parametrize(
    ("op", "shapes", "options", "m", "n", "k"),
    [
        (GATHER, ((8, 64), (32, 64)), {}, 32, 32, 64),
        (GATHER, ((2, 8, 64), ([16, 64], [8, 64])), {}, 64, 24, 64),
        (GATHER, ((5, 64), (32, 64)), {"shard_sizes": [5, 0, 3, 1]}, 9, 32, 64),
        (GATHER, ((5, 2, 64), (32, 64)), {"shard_sizes": [5, 0, 3, 1]}, 18, 32, 64),
        (SCATTER, ((2, 8, 64), (32, 64)), {}, 16, 32, 64),
        (REDUCE, ((64,), (32, 64)), {}, 1, 32, 64),
    ],
)
def test_the_problem_is_that_of_the_call(op, shapes, options, m, n, k):
    found = explain(op, shapes, 4, dtype=torch.bfloat16, **options)
    p = found.problem
    assert (p.op, p.m, p.n, p.k, p.world, p.dtype) == (op, m, n, k, 4, "bf16")


@pytest.mark.parametrize("machine", ["H100 NVLink", "L20 PCIe", "B200"])
@pytest.mark.parametrize("op", OPS)
def test_it_prints_every_algorithm_and_is_data(op, machine):
    found = explain(
        op, ((1024, 4096), (4096, 4096)), 8, dtype=torch.bfloat16, device="cuda", machine=machine
    )
    text = str(found)
    for name in algorithms(op, "cuda"):
        assert name in text
    assert f"-> {found.choice.algorithm}" in text
    assert "nothing is measured here" in text
    data = json.loads(json.dumps(found.to_dict()))
    assert data["choice"]["algorithm"] == found.choice.algorithm
    assert {t["algorithm"] for t in data["timings"]} == set(algorithms(op, "cuda"))
    barred = {t.algorithm: t.basis for t in found.timings if t.us is None}
    assert set(barred) == ({"multimem"} if op == REDUCE else set())
    assert all("ask for it" in why for why in barred.values())


def test_what_must_be_asked_for_is_told_and_can_be():
    arguments = (REDUCE, ((1024, 4096), (4096, 4096)), 8)
    options = {"dtype": torch.bfloat16, "device": "cuda", "machine": "H100"}
    found = explain(*arguments, algorithm="multimem", **options)
    assert (found.choice.algorithm, found.choice.basis) == ("multimem", "argument")
    assert next(t for t in found.timings if t.algorithm == "multimem").us
    options["dtype"] = torch.float8_e4m3fn
    with pytest.raises(InvalidArgument, match="signal.*cannot run: it rounds parts to the dtype"):
        explain(*arguments, algorithm="signal", **options)


def test_a_small_shape_says_that_the_overhead_is_not_worth_it():
    found = explain(
        SCATTER, ((64, 512), (4096, 512)), 8, dtype=torch.bfloat16, device="cuda", machine="H100"
    )
    assert found.choice.algorithm == "plain"
    times = {t.algorithm: t.us for t in found.timings}
    assert times["push"] > times["plain"]
    assert "nothing is faster by more than noise" in found.choice.reason


def test_the_table_has_what_the_choice_was_made_by(tmp_path, monkeypatch):
    """Near a measured shape its times are shown, and no predicted ones that might say otherwise."""
    path = tmp_path / "rule.json"
    monkeypatch.setenv("PYPARALLEL_RULE", str(path))
    times = [{"plain": 100.0, "symmetric": 60.0}, {"plain": 50.0, "symmetric": 45.0}]
    points = [Point(REDUCE, "cpu", "fp32", 2, 64, 512, k, us)
              for k, us in zip((256, 2048), times, strict=True)]  # fmt: skip
    save(points, path)
    near = explain(REDUCE, ((80, 256), (512, 256)), 2)
    assert near.choice.algorithm == "symmetric"
    shown = {t.algorithm: (t.us and round(t.us, 3), t.basis) for t in near.timings}
    assert shown == {
        "plain": (70.711, "nearby"),
        "symmetric": (51.962, "nearby"),
        "chunked": (None, "not measured with the others"),
    }
    exact = explain(REDUCE, ((64, 256), (512, 256)), 2)
    assert {(t.us, t.basis) for t in exact.timings} >= {(100.0, "measured"), (60.0, "measured")}
    assert "would be faster here" not in str(exact)
    # Faster at one size of a part, slower at another: not taken, and both are said.
    save([Point(REDUCE, "cpu", "fp32", 2, 64, 512, 2048, {"plain": 50.0, "symmetric": 60.0})], path)
    found = explain(REDUCE, ((64, 256), (512, 256)), 2)
    assert found.choice.algorithm == "plain"
    assert "but 1.20 of plain's time at one of the sizes of a part" in found.choice.reason
    assert "symmetric would be faster here; what is taken holds for every part" in str(found)


def test_tensors_bring_their_dtype_and_device():
    x, w = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(6, 8, dtype=torch.bfloat16)
    found = explain(REDUCE, (x, w), 2)
    assert (found.problem.dtype, found.device, found.problem.n) == ("bf16", "cpu", 6)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (("gemm", ((1, 2), (1, 2)), 2), {}, "op is 'gemm'; expected one of all_gather_matmul"),
        ((REDUCE, ((1, 2),), 2), {}, "shapes has 1 entries"),
        ((REDUCE, ((4, 8), (8, 6)), 2), {}, r"x is \[4, 8\] and weight \[8, 6\]; expected"),
        ((REDUCE, ((4, 8), ([6, 8], [6, 8])), 2), {}, "has one weight, not 2"),
        ((SCATTER, ((4, 8), (6, 8)), 2), {"shard_sizes": [1, 3]}, "shard_sizes is for all_gather"),
        ((GATHER, ((4, 8), (6, 8)), 2), {"shard_sizes": [4]}, "1 entries; expected one for each"),
        ((REDUCE, ((4, 8), (6, 8)), 0), {}, "group is 0; expected a group"),
        ((REDUCE, ((4, 8), (6, 8)), 2), {"machine": "V100"}, "machine 'V100' is not known"),
        ((REDUCE, ((4, 8), (6, 8)), 2), {"dtype": torch.int8}, "dtype is torch.int8"),
        ((REDUCE, ((4, 8), (6, 8)), 2), {"device": "tpu"}, "device is 'tpu'"),
        ((REDUCE, ((4, 8), (6, 8)), 2), {"algorithm": "magic"}, "on cpu has plain, symmetric"),
        ((REDUCE, ((4, 8), (6, 8)), None), {}, "group is None"),
    ],
)
def test_bad_requests_say_what_would_do(arguments, options, said):
    with pytest.raises((InvalidArgument, ValueError), match=said):
        explain(*arguments, **options)


def _on_groups(rank):
    """A Communicator and a process group of each backend give the same choice on every rank."""
    import os

    os.environ["PYPARALLEL_RULE"] = "none"
    found = []
    shapes = ((16, 256), (128, 256))
    with Communicator.from_file(rank.rendezvous + ".c", rank.rank, rank.world_size) as comm:
        found.append(explain(REDUCE, shapes, comm))
        with pytest.raises(InvalidArgument, match="a group has its own machine"):
            explain(REDUCE, shapes, comm, machine="H100")
    dist.init_process_group("gloo", store=rank.store(), rank=rank.rank, world_size=rank.world_size)
    for backend in ("gloo", "pyparallel"):
        group = dist.new_group(backend=backend)
        found.append(explain(REDUCE, shapes, group))
        x, w = torch.randn(16, 256), torch.randn(128, 256)
        y = ops.matmul_all_reduce(x, w, group)  # the group is as usable as before
        assert y.shape == (16, 128)
    del os.environ["PYPARALLEL_RULE"]
    return [f.to_dict() for f in found]


def test_on_groups_of_every_kind():
    found = run_ranks(_on_groups, 3, timeout=90)
    assert found[0] == found[1] == found[2]
    bases = [explained["choice"]["basis"] for explained in found[0]]
    assert bases == ["model", "only", "model"]  # gloo's data go through gloo
    for explained in found[0]:
        assert explained["problem"]["world"] == 3
        assert "PYPARALLEL_RULE is none" in explained["known_from"]

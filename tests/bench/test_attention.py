"""Suite `attention`: its cases and float64 check in one process, then a small run on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import cli, providers, runner
from bench.attention_case import OPS, PATTERNS, AttentionCase, Output, Sizes
from bench.case import Row
from bench.gpu import attention as gpu_attention
from bench.options import Options
from bench.suites import attention
from bench.targets import target

LACKS = "; ".join(filter(None, map(providers.missing, ("attention", "stock_attention"))))
SMALL = Sizes(rows=96, heads=4, kv_heads=2, head_dim=16)


def right(case: AttentionCase, rows: torch.Tensor) -> Output:
    """What a rank with these rows of everything would have, by torch, on the whole."""
    x = case.inputs(0, 0)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    every = torch.arange(case.sizes.rows)
    heads = (t.transpose(1, 2) for t in leaves)
    mask = case.visible(every, every)
    out = scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    grads = torch.autograd.grad(out, leaves, x.dout)
    tensors = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    return Output(rows, {name: t[:, rows] for name, t in tensors.items()})


@pytest.mark.parametrize("op", OPS)
def test_right_results_pass_and_wrong_ones_are_seen(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.attention_case.WINDOW", 20)
    monkeypatch.setattr("bench.attention_case.MEAN_DOCUMENT", 24)
    case = AttentionCase(op, SMALL, 2)
    reference = case.reference(0, 0)
    rows = torch.arange(1, 96, 2).flip(0)
    good = right(case, rows)
    assert case.check(reference, good, stock=False).ok
    for name in ("out", "dq", "dk", "dv") if case.train else ("out",):
        for wrong in (good.tensors[name] * 1.01, good.tensors[name].roll(1, 1)):
            assert not case.check(reference, Output(rows, {**good.tensors, name: wrong}), False).ok
        nothing = {**good.tensors, name: good.tensors[name][:, :0]}
        assert not case.check(reference, Output(rows, nothing), stock=False).ok
    assert not case.check(reference, Output(rows[:0], {}), stock=False).ok


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pairs_are_counted(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.attention_case.WINDOW", 20)
    monkeypatch.setattr("bench.attention_case.MEAN_DOCUMENT", 24)
    case = AttentionCase(f"{pattern}_forward", SMALL, 2)
    every = torch.arange(96)
    assert case.pairs == int(case.visible(every, every).sum())
    assert case.flops == 2 * 2 * 4 * 16 * case.pairs // 2


def test_cases_and_goals() -> None:
    full, quick = (attention.cases(Options(quick=quick), 2) for quick in (False, True))
    assert {case.op for case in quick} == {case.op for case in full} == set(OPS)
    assert {c.op for c in full if c.sizes.rows == 32768} == {"causal_forward", "full_forward"}
    asked = attention.cases(Options(rows=(99, 5), ops=("full_train",)), 2)
    assert [(c.op, c.size) for c in asked] == [
        ("full_train", "99 x 8/2 x 128"), ("full_train", "5 x 8/2 x 128")
    ]  # fmt: skip
    (few,) = attention.cases(Options(rows=(99,), ops=("full_train",), heads=(4, 1)), 2)
    assert few.size == "99 x 4/1 x 128"
    assert not attention.cases(Options(dtypes=("bfloat16",)), 2)
    row = Row(
        "attention", "causal_forward", "attention", [8192, 8, 2, 128], "float32", 2, "torch+gloo",
        None, None, None, None, None, True, True, 0, 0, None,
    )  # fmt: skip
    assert target(row) == 1.3
    assert target(replace(row, op="documents_train")) == 2.0
    assert target(replace(row, op="full_train")) == 1.0
    assert target(replace(row, world_size=4, crowded=True)) == 1.0


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
def test_all_sides_are_verified_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of others are stand-ins that take their arguments."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "stand_ins"))
    ops = ("causal_forward", "full_forward", "documents_train", "window_forward")
    replace = {"context_parallel": "tests.bench.stand_ins.context_parallel:ContextParallel"}
    options = Options(
        quick=True, worlds=(2,), ops=ops, peers=providers.CUDA_PEERS, seconds=0.4, timeout=150.0,
        replace=replace,
    )  # fmt: skip
    rows, problems = runner.run("attention", options, lambda _: None)
    assert not problems
    found = {(row.op, row.peer) for row in rows if row.peer_verified and row.speedup}
    assert len([row for row in rows if row.verified]) == len(rows)
    names = ("torch+gloo", "flash-attn", "ring-flash-attn", "torch context_parallel")
    without = {  # what they have none of
        ("window_forward", "ring-flash-attn"),
        ("window_forward", "torch context_parallel"),
        ("documents_train", "torch context_parallel"),
    }
    assert found == {(op, name) for op in ops for name in names} - without
    for row in rows:
        assert set(row.parts) == {
            "one_process", "sent MB", "needed MB", "GFLOP/s", "efficiency %"
        }  # fmt: skip
        assert row.parts["needed MB"] <= row.parts["sent MB"]


def test_peers_on_gpus_are_asked_for_there() -> None:
    parse = cli.parser().parse_args
    for arguments, text in (
        (["attention", "--peer", "flash_attn"], "flash_attn runs on GPUs, in suite attention"),
        (["attention", "--device", "cuda", "--peer", "mpich"], "mpich moves CPU memory"),
        (["attention", "--rows", "0"], "--rows 0: want at least one"),
    ):
        with pytest.raises(ValueError, match=text):
            cli.options_from(parse(arguments))
    with pytest.raises(ValueError, match="--peer context_parallel has no effect: only suite"):
        cli._refuse_without_effect(parse(["gemm", "--peer", "context_parallel"]), ["gemm"])
    on_cuda = Options(device="cuda", peers=providers.CUDA_PEERS)
    assert [peer for _, peer in attention.pairs(on_cuda)] == [
        "stock_attention", "flash_attn", "ring_flash_attn", "context_parallel"
    ]  # fmt: skip
    assert {case.dtype for case in attention.cases(on_cuda, 8)} == {"bfloat16"}


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_in_turn_is_the_whole_call(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's run does, on the CPU's engine; and that a wrong step would be seen."""
    case = gpu_attention.Case(96, causal, "cpu", heads=4, kv_heads=2, head_dim=16, ranks=3)
    result = gpu_attention.measure(60.0, [case], samples=2)
    assert result["problems"] == []
    assert [row["op"] for row in result["rows"]] == ["forward", "backward"]
    for row in result["rows"]:
        assert row["verified"]
        assert {"whole", "ring", "torch"} <= set(row["tflops"])
        ratio = row["us"]["ring"]["median"] / row["us"]["whole"]["median"]
        assert row["ring_overhead"] == pytest.approx(ratio - 1)
    real = gpu_attention.Ring._hop
    monkeypatch.setattr(gpu_attention.Ring, "_hop", lambda self, r, h: real(self, r, min(h, 1)))
    wrong = gpu_attention.measure(60.0, [case], samples=2)
    assert not wrong["rows"][0]["verified"]
    assert "ring" in wrong["problems"][0]


def test_bfloat16_passes_where_weights_are_rounded_and_not_where_more_is() -> None:
    case = AttentionCase("causal_train", replace(SMALL, rows=256), 2, dtype="bfloat16")
    reference = case.reference(0, 0)
    rows = torch.arange(256)
    good = right(case, rows)
    assert good.tensors["dq"].dtype == torch.bfloat16
    assert case.check(reference, good, stock=False).ok
    for name in good.tensors:
        off = {**good.tensors, name: good.tensors[name] * 1.02}
        assert not case.check(reference, Output(rows, off), stock=True).ok

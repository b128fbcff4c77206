"""The Triton kernels under the strategies, between processes, in Triton's interpreter (which is set
before kernels are decorated, and runs one program of a process at a time). The kernels by
themselves: tests/triton_kernels."""

import pytest
import torch

from pyparallel.attention import choose_engine
from tests.attention.test_ranks import on_one_rank
from tests.attention.whole import Case, rms_error
from tests.launch import run_ranks
from tests.ops.seats import make_groups

OPTIONS = {
    "ring": {"causal": True, "window_size": (9, 0), "sinks": True},
    "ulysses": {"causal": True, "cu_seqlens": [0, 7, 20, 34], "deterministic": True},
    "all_gather": {"dropout_p": 0.2, "dropout_seed": 2**63 + 5, "softcap": 2.0},
    "decode": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25])},
}


def both_engines(rank):
    import pyparallel.triton_kernels.flash_attention  # noqa: F401  off CUDA only who asks gets it

    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = make_groups(rank, ("communicator",))["communicator"]
    errors = {}
    for strategy, options in OPTIONS.items():
        case = Case.random(rows=34, heads=2, kv_heads=1, d=16, **options)
        got, want = (
            on_one_rank(rank, case, group, strategy=strategy, engine=engine)
            for engine in ("triton", "plain")
        )
        errors[strategy] = max(
            rms_error(a, b) for a, b in zip(got, want, strict=True) if b is not None
        )
    return errors


def test_strategies_run_on_the_kernels():
    for errors in run_ranks(both_engines, 2, env={"TRITON_INTERPRET": "1"}):
        assert all(error <= 2e-6 for error in errors.values()), errors


def test_it_says_why_it_is_not_taken():
    q = torch.zeros(1, 4, 2, 8)
    mask = Case.random(rows=4).mask
    with pytest.raises(ValueError, match="engine 'triton' cannot run this attention: .*cpu"):
        choose_engine(q, q, q, mask, "triton")
    wide = torch.zeros(1, 4, 2, 264)
    engine, reason = choose_engine(wide, wide, wide, mask)
    assert engine.name == "plain"
    assert "not native: head_dim is 264" in reason
    assert "not triton: " in reason

"""Clipping, loss scale, dropout and recompute on four ranks: their own files' checks, one start."""

from tests.launch import run_ranks
from tests.pipeline.executor_models import start
from tests.training import test_clipping, test_precision, test_random, test_recompute


def everything(rank):
    start(rank, "pyparallel")
    test_random.tensor_parallel()
    test_recompute.tensor_parallel()
    state = test_precision.one_overflows()
    norms = test_clipping.on_four()
    test_precision.fully_sharded()
    return repr((state, norms))


def test_four_ranks():
    results = run_ranks(everything, 4)
    assert len(set(results)) == 1, "the same bits on all ranks"
    assert "'scale_factor': 2.0, 'good': 1, 'steps': 4, 'skipped': 2" in results[0]

"""The launcher itself: results, failures, deadlines, deaths, and that nothing is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launch import RanksFailedError, close_pool, run_ranks, spawn_ranks


def _answer(rank, factor):
    return rank.rank * factor, rank.world_size, os.getpid()


def _pids(rank):
    return os.getpid()


def _fail_on_one(rank):
    if rank.rank == 1:
        raise LookupError("one is missing")


def _sleep(rank, seconds):
    rank.report("asleep")
    time.sleep(seconds)


def _die(rank):
    print("last words", flush=True)
    os._exit(7)


def _environment(rank, name):
    return os.environ.get(name)


def _set_environment(rank, name, removed):
    os.environ[name] = "left behind"
    del os.environ[removed]


def _skip(rank):
    pytest.skip("not on this machine")


def _exchange_by_file(rank):
    paths = [Path(f"{rank.rendezvous}.{other}") for other in range(rank.world_size)]
    assert not paths[rank.rank].exists()
    paths[rank.rank].touch()
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def _gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_results_come_in_rank_order():
    results = run_ranks(_answer, 3, 10)
    assert [result[:2] for result in results] == [(0, 3), (10, 3), (20, 3)]
    assert len({result[2] for result in results}) == 3


def test_processes_are_reused():
    first = run_ranks(_pids, 3)
    assert set(run_ranks(_pids, 2)) <= set(first)


def test_ranks_share_a_rendezvous():
    run_ranks(_exchange_by_file, 2)
    run_ranks(_exchange_by_file, 2)


def test_failure_has_the_traceback_and_ends_its_processes():
    pids = run_ranks(_pids, 2)
    message = r"(?s)rank 0 after .* ended well.*in _fail_on_one.*one is missing"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(_fail_on_one, 2)
    assert all(_gone(pid) for pid in pids)


def test_deadline_kills_and_says_where():
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"(?s)without an end.*in _sleep"):
        run_ranks(_sleep, 2, 60, timeout=4)
    assert time.monotonic() - start < 20


def test_death_is_told_with_the_output():
    with pytest.raises(RanksFailedError, match=r"(?s)exit code 7.*last words"):
        run_ranks(_die, 1)


def test_environment_is_the_run_s_own():
    assert run_ranks(_environment, 2, "SOME_NAME", env={"SOME_NAME": "x"}) == ["x", "x"]
    assert run_ranks(_environment, 2, "SOME_NAME") == [None, None]


def test_what_a_function_sets_is_gone_for_the_next_one():
    set_for_all = {"KEPT_NAME": "kept"}
    run_ranks(_set_environment, 2, "SOME_NAME", "KEPT_NAME", env=set_for_all)
    assert run_ranks(_environment, 2, "SOME_NAME", env=set_for_all) == [None, None]
    assert run_ranks(_environment, 2, "KEPT_NAME", env=set_for_all) == ["kept", "kept"]


def test_skip_passes_through():
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        run_ranks(_skip, 2)


def test_spawned_ranks_can_be_killed():
    with spawn_ranks(_sleep, 2, 30) as ranks:
        pids = [ranks.pid(0), ranks.pid(1)]
        assert [ranks.next_report(rank) for rank in (0, 1)] == ["asleep", "asleep"]
        ranks.kill(1)
        (outcome,) = ranks.wait([1])
        assert outcome.exit_code == -signal.SIGKILL
        assert not outcome.ok
        assert not _gone(pids[0])
    assert all(_gone(pid) for pid in pids)


def test_closing_the_pool_ends_all():
    pids = run_ranks(_pids, 2)
    close_pool()
    assert all(_gone(pid) for pid in pids)

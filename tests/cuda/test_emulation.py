"""The CUDA kernels as host threads under sanitizers, 1 to 8 ranks, stragglers included.

Layers: pure functions (layout, misfits, choice); the kernels' results, bits and guards; the
protocol (replay, wrap, groups, signals); faults; and negative controls: with one memory order
weakened the results stay right and ThreadSanitizer objects. For GPUs see test_gpu.py.
"""

import os
import subprocess

import pytest

from tests.cuda import programs

# The first test of a run compiles: minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

CASES = [
    *("all_reduce_one_shot", "all_reduce_two_shot", "all_reduce_multimem"),
    *("all_gather", "reduce_scatter", "many_phases", "eight_ranks", "blocks_one_after_another"),
    *("recorded_launches_are_replayed", "the_call_number_wraps", "barrier_orders_memory"),
    *("groups_do_not_interfere", "overlapping_groups", "signals_carry_data"),
    *("layouts_are_disjoint", "misfits_are_refused"),
    *("late_rank_one_shot", "late_rank_two_shot", "late_rank_multimem"),
    *("late_rank_all_gather", "late_rank_reduce_scatter"),
    *("another_grid_raises", "another_block_size_raises", "another_size_raises"),
    *("another_op_raises", "another_dtype_raises", "another_layout_raises"),
    *("a_barrier_against_a_collective_raises", "abort_ends_a_wait"),
    *("an_absent_signal_expires", "opposite_orders_end_by_deadline"),
    *("one_shot_then_two_shot", "multimem_needs_a_switch", "nccl_takes_the_large_ones"),
    *("grids_fit", "traffic_is_counted"),
]
SOURCES = [
    *("main.cpp", "data_cases.cpp", "protocol_cases.cpp", "fault_cases.cpp", "choice_cases.cpp"),
    "emulated_kernels.cpp",
]
CONTROL = ["order_control.cpp", "emulated_kernels.cpp"]
SANITIZERS = {"thread": "thread", "address": "address,undefined"}
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}


def _run(program, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, **OPTIONS)
    return subprocess.run(
        [str(program), *arguments], env=env, capture_output=True, text=True, timeout=100
    )


@pytest.fixture(scope="module", params=sorted(SANITIZERS))
def program(request):
    return programs.emulation(SOURCES, SANITIZERS[request.param])


def test_all_cases_are_run(program):
    assert _run(program, "--list").stdout.split() == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_case(program, case):
    done = _run(program, case)
    assert done.returncode == 0, (done.stdout + done.stderr)[:6000]
    assert done.stdout == f"{case}: passed\n"


@pytest.mark.parametrize("order", ["RELEASE", "ACQUIRE"])
def test_a_weakened_order_is_found(order):
    """The results are right all the same: results alone prove nothing about memory order."""
    weakened = f"PYPARALLEL_ORDER_{order}=__ATOMIC_RELAXED"
    program = programs.emulation(CONTROL, "thread", weakened)
    done = _run(program)
    assert "ThreadSanitizer: data race" in done.stderr
    assert done.returncode != 0


def test_the_orders_as_they_are_pass_the_same_program():
    done = _run(programs.emulation(CONTROL, "thread"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "results right\n", "")

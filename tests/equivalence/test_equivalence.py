"""Every layout trains as one process does: losses, gradient norms and weights of twenty steps.

Layers: the lists of cases, pure; a covering part of them on 2, 4 and 8 ranks, one start each, on
four and eight for as many steps as the rate warms up and three more; `python -m tests.equivalence`
runs the whole cross product. The bounds are in bounds.py; a control shows that they bite.
"""

import pytest
import torch

from tests.equivalence.bounds import control, relative, shares
from tests.equivalence.cases import AXES, Case, covering, every_case, in_ci, pairs_of
from tests.equivalence.training import STEPS, on_ranks, reference
from tests.launch import run_ranks


def test_the_part_covers_the_whole():
    """Every pair of settings' values that fits four ranks, every three axes together, and each
    layout once in the whole."""
    whole, part = every_case(), in_ci()
    small = [case for case in whole if case.world < 8]
    assert set().union(*map(pairs_of, small)) <= set().union(*map(pairs_of, part))
    used = {tuple(a for a in AXES if getattr(case, a) > 1) for case in part}
    assert used == {tuple(a for a in AXES if getattr(case, a) > 1) for case in whole}
    assert set(part) <= set(whole)
    assert len(whole) == len(set(whole)) == 436
    assert set().union(*map(pairs_of, covering(whole))) == set().union(*map(pairs_of, whole))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_seed_of_dropout_is_too_far(precision):
    """Also by the widest bound of a layout of eight ranks; and the model learns."""
    far = Case(1, 8, 1, 1, 0, "none", precision, False)
    assert min(control(far).loss, control(far).weights) > 1
    losses = reference(1, precision).losses
    assert losses[-1] < 0.75 * losses[0]
    assert torch.isfinite(losses).all()


@pytest.mark.parametrize("stages", [1, 8])
def test_one_process_is_itself_near_float64(stages):
    """What float32 does to one process is less than half the bound: the trainings are no chaos."""
    assert relative(reference(stages, "fp32"), reference(stages, "fp64")).worst < 0.5


@pytest.mark.slow
@pytest.mark.timeout(330)  # idle a tenth of it
@pytest.mark.parametrize(("world", "steps"), [(2, STEPS), (4, 8), (8, 8)])
def test_layouts_train_as_one_process_does(world, steps):
    cases = [case for case in in_ci() if case.world == world]
    results = run_ranks(on_ranks, world, cases, steps, timeout=300)
    misfits = []
    for number, case in enumerate(cases):
        if len({result[number][0] for result in results}) != 1:
            misfits.append(f"{case}: ranks differ")
        used = shares(case, results[0][number][1])
        if used.worst > 1:
            misfits.append(f"{case}: {used} of what is allowed")
    assert not misfits, "\n".join(misfits)

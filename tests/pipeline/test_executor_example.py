"""examples/pipeline_gpt.py trains on two ranks as it stands."""

import re

from tests.test_examples import torchrun


def test_a_gpt_trains_in_two_stages():
    printed = torchrun("examples/pipeline_gpt.py")
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 5
    assert losses[0] > 3.5  # about the logarithm of the vocabulary's 64
    assert losses[-1] < losses[0] - 0.5, printed
    assert re.search(r"simulated / measured [0-9.]+", printed)

"""What tests of this folder share."""

from pathlib import Path
from typing import Any

import pytest

from pyparallel.training.checkpoint import Checkpointer
from tests.training.checkpoints import contents, trained


@pytest.fixture
def saved(tmp_path: Path) -> dict[int, list[Any]]:
    """Steps 1 to 3, in tmp_path: what each holds."""
    found = {}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            model, optimizer = trained(step)
            result = checkpointer.save(step, model=model, optimizer=optimizer, at={"n": step})
            found[step] = contents(model, optimizer)
    assert result.result().ok
    return found

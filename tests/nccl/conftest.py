from pathlib import Path

import pytest

from pyparallel._core import nccl as core
from tests.nccl.harness import Standin
from tests.nccl.libraries import Libraries


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    made = Libraries(tmp_path_factory.mktemp("nccl"))
    core.use_driver(str(made.cuda))
    return made


@pytest.fixture(autouse=True)
def world_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in's ranks meet. Empty again once they have."""
    folder = tmp_path / "worlds"
    folder.mkdir()
    monkeypatch.setenv("STANDIN_DIR", str(folder))
    return folder


@pytest.fixture
def standin(libraries: Libraries) -> Standin:
    """The stand-in of the newest release, with all functions."""
    made = Standin(libraries.build(), libraries.cuda)
    made.log()
    return made

"""What the importers' tests share."""

import json

import pytest

from pyparallel.planner.importers import import_configuration


@pytest.fixture
def read(tmp_path):
    """Writes a file of the given ending and imports it."""

    def do(content, ending, **arguments):
        path = tmp_path / f"config{ending}"
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        return import_configuration(str(path), **arguments)

    return do

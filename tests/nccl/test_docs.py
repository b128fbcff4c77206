"""docs/nccl.md against the lists it is made from."""

from pathlib import Path

import pytest

from pyparallel._core import nccl as core
from pyparallel.comm import nccl, nccl_table
from tests.nccl.libraries import ROOT

PAGE = ROOT / "docs/nccl.md"


def test_tables_are_up_to_date() -> None:
    assert PAGE.read_text() == nccl_table.filled(PAGE.read_text()), (
        "run: python -m pyparallel.comm.nccl_table docs/nccl.md"
    )


def test_every_function_is_in_the_table() -> None:
    table = nccl_table.tables()["functions"]
    for name, _, _ in core.symbols():
        assert table.count(f"`{name}`") == 1


def test_a_page_is_filled(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marks = [f"<!-- table: {n} -->\nold\n<!-- end: {n} -->" for n in nccl_table.tables()]
    page.write_text("\n".join(marks) + "\ntail\n")
    assert nccl_table.main([str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("\ntail\n")
    assert nccl_table.filled(text) == text
    with pytest.raises(ValueError, match="once each"):
        nccl_table.filled("no marks")
    assert nccl_table.main([]) == 2


def test_public_names() -> None:
    """Each growth is a deliberate edit."""
    assert sorted(nccl.__all__) == [
        "NcclCommunicator",
        "NcclConfig",
        "NcclError",
        "NcclInternalError",
        "NcclInvalidArgument",
        "NcclInvalidUsage",
        "NcclMemory",
        "NcclMemoryStats",
        "NcclRemoteError",
        "NcclResultError",
        "NcclSystemError",
        "NcclTimeout",
        "NcclUnhandledCudaError",
        "RawArray",
        "Registration",
        "SignalWait",
        "Window",
        "group",
        "load",
        "nccl_info",
        "open_library",
        "unique_id",
    ]

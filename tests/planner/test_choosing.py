"""docs/choosing.md: every command of it runs, and prints the lines that the page shows.
Layers of proof: the commands themselves, in process; all of it runs in CI."""

import shlex
from pathlib import Path

import pytest

from pyparallel.plan import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"


def _blocks() -> list[tuple[str, list[str]]]:
    """(command, lines below it) of every block that begins with "$ pyparallel plan"."""
    found: list[tuple[str, list[str]]] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("    $ pyparallel "):
            found.append((line.removeprefix("    $ pyparallel "), []))
        elif line.startswith("    ") and found:
            found[-1][1].append(line[4:])
    return found


BLOCKS = _blocks()


def test_the_page_has_its_blocks():
    assert len(BLOCKS) == 17
    assert all(lines for _, lines in BLOCKS)


@pytest.mark.parametrize(("command", "lines"), BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_is_what_the_command_prints(command, lines, capsys):
    assert main(shlex.split(command)[1:]) in (0, 1)
    printed = capsys.readouterr().out.splitlines()
    missing = [line for line in lines if line not in printed]
    assert missing == []


def test_the_planners_page_runs_as_printed(capsys):
    """docs/planner.md: its sample, as it stands."""
    text = (PAGE.parent / "planner.md").read_text()
    sample = text.split("```python\n")[1].split("```")[0]
    exec(compile(sample, "docs/planner.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("True ")
    assert "tp 8" in second

"""The README's example runs as it stands (examples/c_abi is run by tests/capi)."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(example: str) -> str:
    """What two ranks of an example print."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", example),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_by_torchrun():
    printed = torchrun("examples/two_ranks.py")
    # Both ranks write to one pipe: a line's end may come after the other's line.
    lines = ["rank 0 of 2: [3.0, 3.0, 3.0]", "rank 1 of 2: [3.0, 3.0, 3.0]"]
    assert [printed.count(line) for line in lines] == [1, 1], printed
    assert len("".join(printed.split("\n"))) == len("".join(lines)), printed


def test_the_readme_shows_these_files():
    readme = (ROOT / "README.md").read_text()
    for name in ("two_ranks.py", "four_ranks.py"):
        assert f"```python\n{(ROOT / 'examples' / name).read_text()}```" in readme

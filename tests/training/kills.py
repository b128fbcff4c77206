"""A training killed again and again at random moments, against the same one left alone.

python -m tests.training.kills 20        20 kills; prints how each continuation compared
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.launch import ROOT
from tests.training import recovery_job


def torchrun(folder: Path, steps: int, kills: list[dict[str, Any]], timeout: float) -> str:
    """Runs the job on two ranks under torchrun, which restarts it after every kill; its output."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kills.json").write_text(json.dumps(kills))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={len(kills)}", "-m", "tests.training.recovery_job"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, str(folder), str(steps)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers then
            output, _ = process.communicate(timeout=60)
            raise AssertionError(f"not done after {timeout} s:\n{output[-6000:]}") from None
    assert process.returncode == 0, output[-6000:]
    return output


def losses(folder: Path) -> dict[int, list[tuple[int, str]]]:
    """Of each step: (attempt, loss) of every attempt that got there."""
    found: dict[int, list[tuple[int, str]]] = {}
    for line in (folder / "losses.jsonl").read_text().splitlines():
        told = json.loads(line)
        found.setdefault(told["step"], []).append((told["attempt"], told["loss"]))
    return found


def compare(folder: Path, alone: dict[int, str], digests: list[str], kills: int) -> list[str]:
    """What differs from the run that was left alone; nothing, if recovery is exact."""
    wrong, seen = [], losses(folder)
    for step, loss in alone.items():
        for attempt, other in seen.get(step, [(-1, "none")]):
            if other != loss:
                wrong.append(f"step {step}, attempt {attempt}: {other}, alone {loss}")
    for rank, digest in enumerate(digests):
        end = json.loads((folder / f"end-{rank}.json").read_text())
        if end["digest"] != digest:
            wrong.append(f"rank {rank} ended with other weights, moments or random numbers")
        if end["attempt"] != kills:
            wrong.append(f"rank {rank} ended in attempt {end['attempt']}; {kills} were killed")
    left = [p.name for p in (folder / "saved").iterdir() if not p.name[0].isdigit()]
    if left != [".lock"]:
        wrong.append(f"left behind: {left}")
    return wrong


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    kills = recovery_job.plan(count, seed)
    steps = 4 * count
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder, "alone"), Path(folder, "killed")
        torchrun(alone, steps, [], 600)
        begun = time.time()
        torchrun(killed, steps, kills, 120 * (count + 1))
        seconds = time.time() - begun
        digests = [
            json.loads((alone / f"end-{rank}.json").read_text())["digest"] for rank in range(2)
        ]
        undisturbed = {step: found[0][1] for step, found in losses(alone).items()}
        wrong = compare(killed, undisturbed, digests, count)
        seen = losses(killed)
    for n, kill in enumerate(kills):
        first = min(
            (s for s, found in seen.items() if any(a == n + 1 for a, _ in found)), default=0
        )
        print(f"kill {n + 1:2}: rank {kill['rank']}, {kill['phase']}; went on with step {first}")
    print("\n".join(wrong) or f"{count} continuations identical to the bit, {steps} steps", end="")
    print(f"; {seconds:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""A rank dies, and training goes on as if nothing had happened.

Layers: torchrun with two ranks, killed with SIGKILL in three attempts; the launcher's words for a
death. `python -m tests.training.kills 20` kills twenty times; CI runs three of these.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pyparallel.training.data import ElasticSampler
from tests.launch import ROOT, Rank, run_ranks
from tests.training import kills, recovery_job

STEPS = 12
KILLS = [
    {"phase": "write", "rank": 1, "after": 3, "delay": 0},
    {"phase": "start", "rank": 1, "after": 1, "delay": 0},
    {"phase": "publish", "rank": 0, "after": 1, "delay": 0},
]


def alone(rank: Rank, folder: Path) -> tuple[str, int]:
    """The same training, left alone; and once more, with half of the ranks, from its middle."""
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    folder.mkdir(exist_ok=True)
    return recovery_job.train(folder, STEPS), dist.get_rank()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_ranks_leave_no_trace_in_what_is_trained(tmp_path: Path) -> None:
    digests = [digest for digest, _ in run_ranks(alone, 2, tmp_path / "alone", timeout=300)]
    undisturbed = {s: found[0][1] for s, found in kills.losses(tmp_path / "alone").items()}
    assert sorted(undisturbed) == list(range(1, STEPS + 1))
    output = kills.torchrun(tmp_path / "killed", STEPS, KILLS, 600)
    assert kills.compare(tmp_path / "killed", undisturbed, digests, len(KILLS)) == []
    assert output.count("exitcode: -9") == len(KILLS)
    # the comparison can fail
    changed = {**undisturbed, 3: float(1).hex()}
    assert len(kills.compare(tmp_path / "killed", changed, ["x", *digests[1:]], 4)) >= 4
    # one rank goes on where two stopped: the same samples, in the same steps
    (tmp_path / "fewer").mkdir()
    (tmp_path / "killed" / "saved").rename(tmp_path / "fewer" / "saved")
    run_ranks(fewer, 1, tmp_path / "fewer", timeout=300)
    resumed = kills.losses(tmp_path / "fewer")
    assert sorted(resumed) == list(range(STEPS + 1, STEPS + 5))


def fewer(rank: Rank, folder: Path) -> None:
    dist.init_process_group("pyparallel", store=rank.store(), rank=0, world_size=1)
    recovery_job.train(folder, STEPS + 4)


@pytest.mark.parametrize("seed", [None, 4])
def test_no_sample_is_lost_or_read_twice_when_ranks_change(seed: "int | None") -> None:
    samples, batch = 53, 12
    whole = ElasticSampler(samples, batch, seed=seed)
    expected = [number for _ in range(20) for number in whole.next()]
    read: list[int] = []
    state = ElasticSampler(samples, batch, seed=seed).state_dict()
    for size in (4, 2, 3, 1, 12):
        ranks = [ElasticSampler(samples, batch, rank=r, size=size, seed=9) for r in range(size)]
        for sampler in ranks:
            sampler.load_state_dict(state)
        for _ in range(4):
            read += [number for sampler in ranks for number in sampler.next()]
        states = [sampler.state_dict() for sampler in ranks]
        assert all(one == states[0] for one in states)
        state = json.loads(json.dumps(states[0]))
    assert read == expected
    for epoch in range(4):
        assert sorted(read[epoch * samples :][:samples]) == list(range(samples))


def test_what_a_sampler_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match=r"pieces for 5 .* \[1, 2, 3, 4, 6, 12\] ranks fit"):
        ElasticSampler(53, 12, rank=0, size=5)
    with pytest.raises(ValueError, match="one among 53 samples, and there are 54"):
        ElasticSampler(54, 12).load_state_dict(ElasticSampler(53, 12).state_dict())
    with pytest.raises(ValueError, match="0 samples"):
        ElasticSampler(0, 1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ElasticSampler(5, 2, rank=2, size=2)


# --- launch


SCRIPT = """
import os, pathlib, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, {sys.argv[1:]}, {__name__}", flush=True)
once = pathlib.Path("once")
if what == "killed" and not once.exists():
    if rank == 0:
        time.sleep(600)
    once.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0 and what == "raises":
    raise ValueError("the learning rate is blue")
if what == "hangs":
    time.sleep(600)
"""


def launch(folder: Path, *arguments: str) -> tuple[int, str, float]:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pyparallel", "launch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_launch_names_the_cause_of_death(tmp_path: Path) -> None:
    script = str(tmp_path / "script.py")
    Path(script).write_text(SCRIPT)
    job = [script, "killed", "--ranks", "7"]
    status, output, _ = launch(tmp_path, "--ranks=2", "--restarts=1", *job)
    assert status == 0, output
    for rank in (0, 1):
        assert f"rank {rank} of 2, ['killed', '--ranks', '7'], __main__" in output
    assert output.count("rank 1 (process ") == 1
    assert output.count("was killed by SIGKILL after ") == 1
    assert "; attempt 2 of 2" in output
    status, output, _ = launch(tmp_path, "--ranks=2", "-m", "script", "raises")
    assert status == 1, output
    assert "rank 0 (process " in output
    assert "exited with 1 after " in output
    assert "ValueError: the learning rate is blue; no attempt is left" in output
    status, output, seconds = launch(tmp_path, "--ranks=1", "--deadline=6", script, "hangs")
    assert status == 124, output
    assert "6 s have passed" in output
    assert seconds < 400


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "2", "nothing.py"], "there is no file nothing.py"),
        (["--ranks", "0", __file__], "--ranks 0"),
        (["--ranks", "1", "--deadline", "-3", __file__], "positive deadline"),
        ([__file__], "--ranks says how many"),
    ],
)
def test_launch_refuses(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from pyparallel import launch

    with pytest.raises(SystemExit):
        launch.main(arguments)
    assert told in capsys.readouterr().err

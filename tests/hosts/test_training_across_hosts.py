"""A training on two hosts has the losses of one host, and goes on when the cable was cut for some
seconds, or with one host when the other is gone.

Layers: torchrun in two network name spaces. Needs root and iproute2, else skips; CI runs it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.hosts import cable
from tests.hosts.held_training import Settings, Training
from tests.launch import ROOT, Rank, run_ranks

PORT = 29400
# Of agents: how long they wait for more hosts, and for a sign of life (2 x 3 s).
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3"
HELD_AT = 6  # behind a save at 4
SMALL = {
    "layers": 1, "hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 2, "rows": 32,
    "batch": 4, "steps": 10, "log_every": 1, "evaluate_every": 10, "evaluate_batches": 1,
    "save_every": 4, "warmup": 0.2, "peak_gflops": 10.0, "generate": 0, "dropout": 0.1,
    "timeout": 60.0, "data": str(ROOT / "pyparallel/training/model.py"),
}  # fmt: skip


@dataclass
class Agent:
    """torchrun on a host; it ends with the host."""

    process: "subprocess.Popen[str]"
    output: Path

    @property
    def told(self) -> str:
        return self.output.read_text()


@contextmanager
def torchrun(hosts: Any, nodes: str, folder: Path) -> Iterator[list[Agent]]:
    """One agent and one rank on each host."""
    folder.mkdir()
    settings = folder / "settings.json"
    settings.write_text(json.dumps({**SMALL, "folder": str(folder)}))
    agents: list[Agent] = []
    try:
        for number, host in enumerate(hosts):
            # A host is told by its name, which these two share: so the first one is told.
            options = f"is_host={1 - number},{RENDEZVOUS}"
            command = [
                *("nsenter", "--target", str(host.keeper), "--net"),
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:{PORT}"),
                *("--rdzv-conf", options, "--local-addr", host.address),
                *("-m", "tests.hosts.held_training", str(settings), str(HELD_AT)),
            ]
            output = folder / f"output-{host.address}"
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": cable.INTERFACE,
            }
            with output.open("w") as file:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            agents.append(Agent(process, output))
        yield agents
    finally:
        for agent in agents:
            agent.process.kill()
            agent.process.wait(30)


def until(what: Callable[[], bool], agents: list[Agent], seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not what():
        told = "\n".join(agent.told[-3000:] for agent in agents)
        assert time.monotonic() < end, told
        assert all(agent.process.poll() in (None, 0) for agent in agents), told
        time.sleep(0.05)


def alone(rank: Rank, folder: str) -> None:
    dist.init_process_group(
        "pyparallel", store=rank.store(), rank=rank.rank, world_size=rank.world_size
    )
    Training(Settings(**{**SMALL, "folder": folder, "save_every": 0})).run()


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every attempt."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(told["step"], told["loss"]) for told in map(json.loads, lines)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """On two ranks of one host."""
    if reason := cable.reason_to_skip():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(alone, 2, str(folder), timeout=200)
    return dict(losses(folder))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cut_cable(undisturbed: dict[int, float], tmp_path: Path) -> None:
    """Both ranks say within their deadline that the other is out of reach, and start again."""
    folder = tmp_path / "run"
    with cable.two_hosts() as pair, torchrun(pair.hosts, "2", folder) as agents:
        until((folder / "held").exists, agents)
        pair.cut()
        (folder / "go_on").touch()
        until(lambda: all("did not answer within" in agent.told for agent in agents), agents)
        pair.mend()
        until(lambda: all(agent.process.poll() == 0 for agent in agents), agents)
    found = losses(folder)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]
    assert all(loss == undisturbed[step] for step, loss in found), (found, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_host_that_is_gone(undisturbed: dict[int, float], tmp_path: Path) -> None:
    """The other goes on with one rank, from the checkpoint of two."""
    folder = tmp_path / "run"
    with cable.two_hosts() as pair, torchrun(pair.hosts, "1:2", folder) as agents:
        until((folder / "held").exists, agents)
        pair.end(1)
        agents.pop().process.wait(30)
        (folder / "go_on").touch()
        until(lambda: agents[0].process.poll() == 0, agents)
        assert "on 1 ranks (dp=1 " in agents[0].told
    found = losses(folder)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]
    for step, loss in found:  # float32: one rank sums in another order
        assert loss == pytest.approx(undisturbed[step], rel=1e-5)

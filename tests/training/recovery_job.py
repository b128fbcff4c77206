"""A small training that is killed and goes on: what torchrun starts in tests of recovery.

    torchrun --max-restarts 3 ... -m tests.training.recovery_job FOLDER STEPS

FOLDER/kills.json says who dies in which attempt, where; losses.jsonl is what every attempt saw,
end.json what came out.
"""

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pyparallel.training import Checkpointer, ParallelConfig, build_mesh, data_parallel
from pyparallel.training.checkpoint import files, writing
from pyparallel.training.data import ElasticSampler

PHASES = ("start", "forward", "backward", "collective", "write", "publish", "published", "any time")
SAMPLES, BATCH, SAVE_EVERY = 57, 6, 2


class RandomState:
    """torch's own generator, of each rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])

    def load_resharded(self, states: Any, sizes: Any) -> None:
        """Fewer ranks go on with the streams of as many of those that were."""
        dp = dist.get_rank()
        torch.set_rng_state(next(s["torch"] for at, s in states if at.get("dp", 0) == dp))


def plan(kills: int, seed: int) -> list[dict[str, Any]]:
    """Who dies in each attempt: every phase in turn, the rest at random."""
    chance = random.Random(seed)
    phases = [PHASES[n % len(PHASES)] for n in range(kills)]
    chance.shuffle(phases)
    return [
        {
            "phase": phase,
            "rank": 0 if phase in ("publish", "published") else chance.randrange(2),
            "after": chance.randint(1, 3),  # steps of this attempt
            "delay": chance.random() * 0.05,
        }
        for phase in phases
    ]


class Death:
    """Kills this process with SIGKILL at one place of one attempt."""

    def __init__(self, kill: "dict[str, Any] | None", rank: int) -> None:
        self._kill = kill if kill is not None and kill["rank"] == rank else None
        self.step = 0  # of this attempt

    def due(self, phase: str) -> None:
        if self._kill and self._kill["phase"] == phase and self.step >= self._kill["after"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_step(self) -> None:
        self.step += 1
        if self._kill and self._kill["phase"] == "any time" and self.step == self._kill["after"]:
            threading.Timer(self._kill["delay"], os.kill, (os.getpid(), signal.SIGKILL)).start()


@contextmanager
def deadly_saves(death: Death) -> Iterator[None]:
    """Saves in which this process may die: half-way through a file, before and after publishing."""
    write, publish = files._write, writing.publish

    def half(descriptor: int, data: memoryview) -> None:
        write(descriptor, data[: len(data) // 2])
        death.due("write")
        write(descriptor, data[len(data) // 2 :])

    def published(*arguments: Any) -> None:
        death.due("publish")
        publish(*arguments)
        death.due("published")

    files._write, writing.publish = half, published
    try:
        yield
    finally:
        files._write, writing.publish = write, publish


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 7, generator=generator)
    return x, torch.randn(SAMPLES, 3, generator=generator)


def model_and_data() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Dropout(0.3), nn.Linear(33, 3))


def train(folder: Path, steps: int, kill: "dict[str, Any] | None" = None, attempt: int = 0) -> str:
    """Trains to `steps` from what is saved; a digest of all that was trained."""
    mesh = build_mesh(ParallelConfig(dp=dist.get_world_size()))
    data = data_parallel(model_and_data(), mesh)
    optimizer = data.optimizer(lambda params: torch.optim.AdamW(params, lr=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    order = ElasticSampler(SAMPLES, BATCH, mesh=mesh, seed=2)
    torch.manual_seed(11 + mesh.rank)
    death = Death(kill, mesh.rank)
    layers: Any = getattr(data.module, "module", data.module)
    layers[0].register_forward_hook(lambda *_: death.due("forward"))
    layers[3].weight.register_hook(lambda _: death.due("backward"))
    x, y = samples()
    kept = {"model": data, "optimizer": optimizer, "order": order, "random": RandomState()}
    kept["schedule"] = schedule
    with deadly_saves(death), Checkpointer(folder / "saved", mesh, keep=2, deadline=60) as saver:
        start = saver.load(**kept) or 0
        for step in range(start + 1, steps + 1):
            death.begin_step()
            numbers = order.next()
            optimizer.zero_grad()
            loss = functional.mse_loss(data.module(x[numbers]), y[numbers])
            loss.backward()
            optimizer.step()
            schedule.step()
            death.due("collective")
            total = loss.detach().clone()
            dist.all_reduce(total)
            if mesh.rank == 0:
                told = {"attempt": attempt, "step": step, "loss": float(total).hex()}
                with (folder / "losses.jsonl").open("a") as file:
                    file.write(json.dumps(told) + "\n")
            if step % SAVE_EVERY == 0:
                saver.save(step, **kept)
    digest = hashlib.sha256()
    for tensor in [*data.module.state_dict().values(), torch.get_rng_state()]:
        digest.update(tensor.numpy().tobytes())
    for parameter in data.module.parameters():
        for name, value in sorted(optimizer.state[parameter].items()):
            digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kills = json.loads((folder / "kills.json").read_text())
    begun = time.time()
    kill = kills[attempt] if attempt < len(kills) else None
    if kill is not None and kill["phase"] == "start" and kill["rank"] == int(os.environ["RANK"]):
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("pyparallel")
    rank = dist.get_rank()
    digest = train(folder, steps, kill, attempt)
    told = {"digest": digest, "attempt": attempt, "begun": begun}
    (folder / f"end-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

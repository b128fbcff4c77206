"""What torchrun starts on each host: examples/train_gpt.py, held before one of its steps.

    torchrun ... -m tests.hosts.held_training SETTINGS.json HELD_AT

Rank 0 leaves a file `held` in the run's folder when it has come there, and all go on when there is
a file `go_on`.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pyparallel.comm.torch_backend import communicator_of
from tests.launch import ROOT

sys.path.insert(0, str(ROOT / "examples"))  # as where the example is started

from train_gpt import Settings, Training

DEADLINE = 3.0  # seconds, of a call; to meet they have the setting's


class Held(Training):
    def __init__(self, settings: Settings, at: int) -> None:
        super().__init__(settings)
        self.at = at
        for group in self.mesh._groups.values():
            communicator = communicator_of(group)
            assert communicator is not None
            communicator.timeout = DEADLINE

    def step(self, progress: float) -> dict[str, float]:
        if self.batches.position == self.at * self.settings.batch:
            if self.speaks:
                (self.folder / "held").touch()
            while not (self.folder / "go_on").exists():
                time.sleep(0.02)
        return super().step(progress)


def main() -> None:
    torch.set_num_threads(1)
    Held(Settings(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[2])).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

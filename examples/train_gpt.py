"""Trains a Llama-style model on Python's own sources, over any layout of ranks.

    torchrun --nproc-per-node 4 examples/train_gpt.py --tp 2 --folder runs/first
    torchrun --nproc-per-node 4 examples/train_gpt.py --config settings.yaml --steps 1000

Started again with the same --folder it goes on from the newest whole checkpoint, also at another
layout. Every field of `Settings` is an option here, and a key of the YAML file.
"""

import argparse
import math
import os
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama import Llama, LlamaConfig
from text import CLASSES, Batches, Corpus
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from pyparallel.planner import ModelSpec
from pyparallel.profile import read_traces
from pyparallel.training import (
    Checkpointer,
    HostOffload,
    MetricsLog,
    ParallelConfig,
    ParallelMesh,
    ParallelModel,
    Utilization,
    build_mesh,
    measured_peak,
    peak_bytes,
)


@dataclass
class Settings:
    """The whole configuration of a run."""

    folder: str = "runs/llama"  # of everything that is written
    data: str = ""  # a file of bytes; "": Python's standard library
    # layout: dp takes the ranks that are left
    tp: int = 1
    sp: int = 1
    pp: int = 1
    order: str = "tp-sp-pp-dp"
    zero: int = 0
    tp_sequence_parallel: bool = False
    microbatches: int = 1
    schedule: str = "1f1b"
    precision: str = "fp32"
    recompute: str = "none"
    offload: bool = False  # what a forward keeps for backward goes to the host (CUDA)
    # model
    layers: int = 4
    hidden: int = 192
    intermediate: int = 512
    heads: int = 6
    kv_heads: int = 2
    dropout: float = 0.0
    tied: bool = False
    # data and optimizer
    rows: int = 128  # of a sample, in bytes
    batch: int = 16  # samples of a step, over all ranks
    steps: int = 1000  # the cosine ends here
    seconds: float = 0.0  # and the run before, if this is not 0: the cosine is then over time
    lr: float = 2e-3
    lr_last: float = 0.1  # of lr, at the end
    warmup: float = 0.03  # share of the run
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    # what is told and kept
    log_every: int = 10
    evaluate_every: int = 100  # 0: at the end alone
    evaluate_batches: int = 4
    save_every: int = 100  # 0: never
    keep: int = 3
    tensorboard: bool = False
    peak_gflops: float = 0.0  # of one rank; 0: measured by matrix products
    profile: bool = False  # trace one step and write it to the run's folder
    prompt: str = "def "
    generate: int = 120  # bytes, at the end
    temperature: float = 0.7
    device: str = "cpu"
    timeout: float = 600.0  # seconds after which a call that ranks have not come to is an error


# The least that a number may be; those of layout and model are checked by what is built of them.
LEAST: dict[str, float] = dict.fromkeys(
    ("rows", "batch", "steps", "log_every", "evaluate_batches", "keep"), 1
) | dict.fromkeys(
    ("evaluate_every", "save_every", "seconds", "lr", "clip", "generate", "peak_gflops"), 0
)


def read_settings(argv: list[str] | None = None) -> Settings:
    """Defaults, then the YAML file, then the command line."""
    parser = argparse.ArgumentParser(description="Trains a small Llama over any layout of ranks.")
    parser.add_argument("--config", type=Path, help="YAML file of the settings below")
    defaults = Settings()
    for field in fields(Settings):
        value = getattr(defaults, field.name)
        kind: Any = {"type": type(value)}
        if isinstance(value, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, default=None, help=f"{value!r} by default", **kind)
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    chosen: dict[str, Any] = {}
    if path is not None:
        import yaml

        chosen = yaml.safe_load(path.read_text()) or {}
        for name, value in chosen.items():
            wanted = type(getattr(defaults, name, None))
            fits = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
            if not hasattr(defaults, name) or not fits:
                known = ", ".join(f"{f.name}: {f.type.__name__}" for f in fields(Settings))  # type: ignore[union-attr]
                parser.error(f"{path}: {name}: {value!r} is none of the settings {known}")
    chosen |= {name: value for name, value in given.items() if value is not None}
    settings = Settings(**chosen)
    for name, least in LEAST.items():
        if not getattr(settings, name) >= least:
            parser.error(
                f"{name}: {getattr(settings, name)} is less than {least}, the least it can be"
            )
    if not settings.temperature > 0:
        parser.error(f"temperature: {settings.temperature}; a number above 0 is expected")
    return settings


class Training:
    """One rank's part of a run."""

    def __init__(self, settings: Settings) -> None:
        s = self.settings = settings
        started = dist.is_initialized()
        world = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
        layout = ParallelConfig(
            dp=max(1, world // (s.tp * s.sp * s.pp)),
            tp=s.tp,
            sp=s.sp,
            pp=s.pp,
            order=s.order,
            zero=s.zero,
            tp_sequence_parallel=s.tp_sequence_parallel,
        )
        limit = None if started else timedelta(seconds=s.timeout)
        self.mesh: ParallelMesh = build_mesh(layout, device_type=s.device, timeout=limit)
        self.folder = Path(s.folder)
        torch.manual_seed(s.seed)  # the same model on every rank; of it, this rank trains its part
        config = LlamaConfig(
            vocab_size=CLASSES,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            dropout=s.dropout,
            tie_word_embeddings=s.tied,
        )
        self.model = ParallelModel(
            Llama(config).to(s.device),
            self.mesh,
            microbatches=s.microbatches,
            schedule=s.schedule,
            precision=s.precision,
            recompute=s.recompute,
            offload=HostOffload(s.device) if s.offload else None,
            seed=s.seed,
        )
        self.optimizer = self.model.optimizer(self.make_optimizer)
        path = Path(s.data) if s.data else None
        corpus = Corpus.of_file(path) if path else Corpus.of_standard_library(self.folder.parent)
        self.batches = Batches(corpus.part("train"), s.rows, s.batch, s.seed)
        self.held_back = corpus.part("evaluation")
        spec = ModelSpec(
            "llama", s.layers, s.hidden, s.heads, CLASSES, s.intermediate, s.kv_heads, tied=s.tied
        )
        peak, source = s.peak_gflops * 1e9, "as given"
        if not peak:
            dtype = self.model.precision.dtype
            peak, source = measured_peak(s.device, dtype), "matrix products of 1024, measured"
        self.utilization = Utilization.of(spec, s.rows, world, peak, source)
        self.speaks = self.mesh.rank == 0
        self.log = MetricsLog(self.folder, tensorboard=s.tensorboard) if self.speaks else None
        self.communication: float | None = None  # share of the last step that was traced
        self.done = {"seconds": 0.0}  # of training, over all starts
        self.last_step = 0.0  # seconds

    def __str__(self) -> str:
        s, layout = self.settings, self.mesh.config
        return (
            f"{s.layers} layers of {s.hidden} on {layout.world_size} ranks ({layout.label} "
            f"zero={s.zero}), {s.batch} samples of {s.rows} bytes a step"
        )

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        s = self.settings
        decayed = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": s.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        chosen = [group for group in groups if group["params"]]
        return torch.optim.AdamW(chosen, lr=s.lr, betas=(0.9, 0.95))

    def progress(self, step: int) -> float:
        """0 to 1: how much of the run is over; the same on all ranks, by the first one's clock."""
        s = self.settings
        last = torch.tensor([self.last_step], dtype=torch.float64, device=s.device)
        dist.broadcast(last, 0)
        self.last_step = 0.0
        self.done["seconds"] += float(last)
        return min(1.0, max(step / s.steps, self.done["seconds"] / s.seconds if s.seconds else 0.0))

    def learning_rate(self, progress: float) -> float:
        """Warm-up, then a cosine from lr to lr_last x lr."""
        s = self.settings
        if progress < s.warmup:
            return s.lr * (progress / s.warmup if progress else 0.1)
        along = (progress - s.warmup) / (1 - s.warmup)
        return s.lr * (s.lr_last + (1 - s.lr_last) * (1 + math.cos(math.pi * along)) / 2)

    def step(self, progress: float) -> dict[str, float]:
        """One step of the optimizer."""
        dp, s = self.mesh.coordinates.dp, self.settings
        with record_function("data"):
            tokens, labels = self.batches.next(dp, self.mesh.size("dp"))
        with record_function("forward and backward"):
            loss = self.model.forward_backward(tokens.to(s.device), labels.to(s.device))
        with record_function("clip"):
            norm = self.model.clip_grad_norm_(s.clip)
        rate = self.learning_rate(progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with record_function("optimizer"):
            self.model.step(self.optimizer)
            self.optimizer.zero_grad()
        return {"loss": loss, "norm": norm, "lr": rate}

    def traced(self) -> AbstractContextManager[Any]:
        """Around a step: where its time goes, in a file that `python -m pyparallel profile` reads
        (the folder holds one of each rank)."""
        kinds = [ProfilerActivity.CPU]
        if self.settings.device == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        return torch_profile(activities=kinds, profile_memory=self.settings.profile)

    def keep_trace(self, trace: Any) -> None:
        folder = self.folder / "trace"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.mesh.rank}.json"
        trace.export_chrome_trace(str(path))
        (mine,) = read_traces([path])
        self.communication = mine.exposed / mine.span if mine.span else None
        if not self.settings.profile:
            path.unlink()

    def evaluate(self) -> float:
        """The mean loss of the first batches of the held back part."""
        s = self.settings
        held = Batches(self.held_back, s.rows, s.batch, s.seed)
        dp, size = self.mesh.coordinates.dp, self.mesh.size("dp")
        batches = (held.next(dp, size) for _ in range(s.evaluate_batches))
        losses = [self.model.evaluate(x.to(s.device), y.to(s.device)) for x, y in batches]
        return sum(losses) / len(losses)

    def text(self) -> str:
        """What the model writes behind the prompt; all ranks draw the same."""
        s = self.settings
        generator = torch.Generator().manual_seed(s.seed)
        written = list(s.prompt.encode())
        for _ in range(s.generate):
            context = torch.tensor([written[-s.rows :]], device=s.device)
            logits = self.model.logits(context)[0, -1].float().cpu()
            shares = (logits / s.temperature).softmax(-1)
            written.append(int(torch.multinomial(shares, 1, generator=generator)))
        return bytes(written).decode(errors="replace")

    def run(self) -> None:
        s, state = self.settings, {"batches": self.batches, "random": self.model.streams}
        state |= {"progress": self.model.run_state, "time": self.done}
        with Checkpointer(self.folder / "checkpoints", self.mesh, keep=s.keep) as checkpoints:
            step = checkpoints.load(model=self.model, optimizer=self.optimizer, **state) or 0
            if self.speaks:
                print(f"{self}, from step {step}\n{self.utilization}", flush=True)
            recent: deque[float] = deque(maxlen=20)
            first, progress = step, self.progress(step)
            while progress < 1.0:
                evaluated = s.evaluate_every and step > first and step % s.evaluate_every == 0
                trace = step - first == 3 or evaluated
                begin = time.perf_counter()
                with self.traced() if trace else nullcontext() as found:
                    values = self.step(progress)
                took = time.perf_counter() - begin
                step += 1
                self.last_step = took
                if trace:
                    self.keep_trace(found)
                else:
                    recent.append(took)
                progress = self.progress(step)
                if (s.evaluate_every and step % s.evaluate_every == 0) or progress == 1.0:
                    values["evaluation"] = self.evaluate()
                if step % s.log_every == 0 or "evaluation" in values:
                    self.tell(step, values, recent)
                if s.save_every and (step % s.save_every == 0 or progress == 1.0):
                    checkpoints.save(step, model=self.model, optimizer=self.optimizer, **state)
        written = self.text() if s.generate else ""
        if self.speaks and written:
            print(f"\n{written}", flush=True)
            (self.folder / "sample.txt").write_text(written)
        if self.speaks and s.profile:
            print(f"where a step's time went: python -m pyparallel profile {self.folder / 'trace'}")

    def tell(self, step: int, values: dict[str, Any], recent: "deque[float]") -> None:
        """A line, and a line of the file."""
        s = self.settings
        if self.log is None:
            return
        rate = s.batch * s.rows * len(recent) / sum(recent) if recent else 0.0
        values |= {
            "tokens_per_second": rate,
            "mfu": self.utilization.at(rate),
            "mfu_convention": self.utilization.convention,
            "peak_gib": peak_bytes(s.device) / 2**30,
            "communication": self.communication,
            "seconds": self.done["seconds"],
        }
        self.log.write(step, values)
        over = max(step / s.steps, self.done["seconds"] / s.seconds if s.seconds else 0.0)
        bar = ("#" * round(20 * min(1.0, over))).ljust(20, ".")
        share = "  ?  " if self.communication is None else f"{100 * self.communication:4.1f} %"
        held = f"  held back {values['evaluation']:.4f}" if "evaluation" in values else ""
        print(
            f"[{bar}] step {step:5}  loss {values['loss']:.4f}  {rate:7.0f} tokens/s  "
            f"MFU {100 * values['mfu']:4.1f} %  peak {values['peak_gib']:.2f} GiB  "
            f"communication {share}{held}",
            flush=True,
        )


def main() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # traces come and go without a line of torch's
    Training(read_settings()).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

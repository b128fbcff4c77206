"""Runs the parts one after another; each is guarded, and its result saved before the next begins.

A part that fails, hangs or dies costs its own result and no other. The one JSON file is replaced
whole, so it is valid at any moment. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.gpu.parts import PARTS, TOTAL_SECONDS, Part

ROOT = Path(__file__).resolve().parents[2]
TAIL = 6000  # characters of output that are kept
ARCHITECTURES = "PYPARALLEL_CUDA_ARCHS"


def run_parts(parts: Sequence[Part], out: Path, seconds: float) -> dict[str, Any]:
    """All parts within `seconds`; returns what is in out/gpu.json at the end."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    result: dict[str, Any] = {
        "meta": {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")},
        "parts": {},
    }
    for part in parts:
        print(f"== {part.name}: {part.why}", flush=True)
        # What a part outside this run's list would have built may be there already.
        missing = [
            need
            for need in part.needs
            if need in result["parts"] and result["parts"][need]["status"] != "ok"
        ]
        left = end - time.monotonic()
        if missing:
            entry = {"status": "skipped", "reason": f"needs {', '.join(missing)}"}
        elif left < 5:
            entry = {"status": "skipped", "reason": f"the {seconds:.0f} s were used up"}
        else:
            facts = result["parts"].get("machine", {}).get("result") or {}
            entry = _run(part, out, min(part.seconds, left), facts)
        result["parts"][part.name] = {"why": part.why, **entry}
        _save(result, out / "gpu.json")
        print(
            f"   {entry['status']} {entry.get('seconds', '')} {entry.get('reason', '')}", flush=True
        )
    return result


def _run(part: Part, out: Path, seconds: float, facts: dict[str, Any]) -> dict[str, Any]:
    file = out / f"{part.name}.json"
    file.unlink(missing_ok=True)
    env = dict(os.environ, BENCH_GPU_RESULT=str(file.resolve()), **part.environment)
    if part.architecture and facts.get("architecture"):
        env.setdefault(ARCHITECTURES, facts["architecture"])
    start = time.monotonic()
    log = out / f"{part.name}.log"
    with log.open("wb") as sink:
        # A session of its own, so that its children can be ended with it.
        child = subprocess.Popen(
            part.command, cwd=ROOT, env=env, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            status = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    entry: dict[str, Any] = {
        "status": "ok" if status == 0 else "timeout" if status is None else "failed",
        "seconds": round(time.monotonic() - start, 1),
        "command": shlex.join(part.command),
        "output": log.read_text(errors="replace")[-TAIL:],
        "result": None,
    }
    if status is None:
        entry["reason"] = f"ended after {seconds:.0f} s"
    elif status != 0:
        entry["reason"] = f"exit status {status}"
    if file.exists():
        try:
            entry["result"] = json.loads(file.read_text())
        except ValueError as error:
            entry.update(status="failed", reason=f"its result is no JSON: {error}")
    result = entry["result"]
    if entry["status"] == "ok" and isinstance(result, dict) and result.get("skipped"):
        entry.update(status="skipped", reason=result["skipped"])
    return entry


def _save(result: dict[str, Any], file: Path) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(file)


def chosen(only: Sequence[str]) -> list[Part]:
    """The parts of these names, in their order; all without names."""
    names = [part.name for part in PARTS]
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise SystemExit(f"no part {', '.join(unknown)}; there are {', '.join(names)}")
    return [part for part in PARTS if not only or part.name in only]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu/run.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench_results" / "gpu", metavar="DIR")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for everything")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--dry-run", action="store_true", help="show the parts, run nothing")
    options = parser.parse_args(arguments)
    parts = chosen(options.only)
    if options.dry_run:
        for part in parts:
            env = "".join(f"{name}={shlex.quote(v)} " for name, v in part.environment.items())
            print(f"{part.name} (at most {part.seconds:.0f} s): {part.why}")
            print(f"    {env}{shlex.join(part.command)}")
        return 0
    result = run_parts(parts, options.out, options.seconds)
    print(f"results: {options.out / 'gpu.json'}")
    return int(any(p["status"] in ("failed", "timeout") for p in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())

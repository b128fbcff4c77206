"""`python -m pyparallel doctor`: versions, build, machine, NCCL, and what works here and what not.

It changes nothing. The text is for people, `--json` for programs and bug reports.
"""

import argparse
import dataclasses
import difflib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pyparallel
from pyparallel import doctor_capabilities, doctor_gpu, doctor_machine
from pyparallel.environment import VARIABLES
from pyparallel.help_text import Paragraphs

__all__ = ["main", "report"]

_DESCRIPTION = """
Says what this machine is (versions, build, cores, memory, GPUs, NCCL), what of pyparallel works
here, what does not and why, and what would mend it. It changes nothing and needs no GPU.
"""
_EXAMPLES = """
examples:

  pyparallel doctor
  pyparallel doctor --json > host.json
  pyparallel plan --cluster host.json --model llama-3-8b --gpus 8

The JSON is for bug reports, and for a plan of this machine. Exit status: 0 the native core works; 1
it does not.
"""

Facts = dict[str, Any]

_DISTRIBUTIONS = ("torch", "triton", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "pybind11")


def report() -> Facts:
    """All that doctor knows, as plain data; `capabilities` is the last entry."""
    facts: Facts = {
        "pyparallel": {
            "version": pyparallel.__version__,
            "path": str(Path(pyparallel.__file__).resolve().parent),
        },
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in _DISTRIBUTIONS},
        "build": _build_info(),
        "system": {
            "system": platform.system(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()),
        },
        "cpu": doctor_machine.cpu(),
        "memory": doctor_machine.memory(),
        "shared_memory": doctor_machine.shared_memory(),
        "gpus": doctor_gpu.gpus(),
        "nccl": _nccl(),
        "environment": _environment(),
    }
    found = [check(facts) for check in doctor_capabilities.ALL]
    facts["capabilities"] = [dataclasses.asdict(capability) for capability in found]
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; the exit status is 0 when the native core works."""
    parser = argparse.ArgumentParser(
        prog="pyparallel doctor",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=Paragraphs,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    facts = report()
    if options.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
    else:
        print("\n".join(render(facts)))
    core = next(c for c in facts["capabilities"] if c["name"] == "native core")
    return 0 if core["available"] else 1


def render(facts: Facts) -> Iterator[str]:
    """The report as lines of text."""
    yield f"pyparallel {facts['pyparallel']['version']} in {facts['pyparallel']['path']}"
    for title in ("versions", "build", "system", "cpu", "memory", "shared_memory", "nccl"):
        yield ""
        yield title.replace("_", " ")
        yield from _lines(facts[title])
    yield ""
    yield "gpus"
    gpus = facts["gpus"]
    if gpus["error"]:
        yield f"  {gpus['error']}"
    for device in gpus["devices"]:
        yield "  " + _one_line(device)
    for link in gpus["links"]:
        yield f"  GPU {link['a']} - GPU {link['b']}: {link['link']} ({link['meaning']})"
    yield ""
    yield "environment"
    for name, value in facts["environment"]["set"].items():
        yield f"  {name}={value}"
    for name, guess in facts["environment"]["unknown"].items():
        yield f"  {name} is set but has no effect" + (f"; did you mean {guess}?" if guess else "")
    if not facts["environment"]["set"] and not facts["environment"]["unknown"]:
        yield "  no PYPARALLEL_ variable is set"
    yield ""
    yield "capabilities"
    for capability in facts["capabilities"]:
        answer = "yes" if capability["available"] else "no "
        yield f"  {answer} {capability['name']}: {capability['reason']}"
        if capability["mend"]:
            yield f"      mend: {capability['mend']}"


def _lines(facts: Facts | None) -> Iterator[str]:
    if not facts:
        yield "  none"
        return
    for key, value in facts.items():
        label = f"  {key.replace('_bytes', '').replace('_', ' ')}: "
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                yield label + _one_line(item)
        else:
            yield label + _text(key, value)


def _one_line(facts: Facts) -> str:
    return ", ".join(f"{key.replace('_bytes', '')} {_text(key, facts[key])}" for key in facts)


def _text(key: str, value: Any) -> str:
    if value is None:
        return "unknown" if key.endswith("bytes") and "limit" not in key else "none"
    if key.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if key in ("memfd", "abstract_sockets"):
        return value or "usable"
    if key == "features":
        lacking = [name for name, has in value.items() if not has]
        return (
            f"{len(value) - len(lacking)} of {len(value)}; without {', '.join(lacking) or 'none'}"
        )
    if isinstance(value, dict):
        return _one_line(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _build_info() -> Facts | None:
    path = Path(pyparallel.__file__).resolve().parent / "lib" / "build_info.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _nccl() -> Facts:
    try:
        return dict(import_module("pyparallel.comm.nccl").nccl_info())
    except (ImportError, RuntimeError) as error:
        return {"error": str(error)}


def _environment() -> Facts:
    known = [variable.name for variable in VARIABLES]
    ours = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("PYPARALLEL_")}
    unknown = {}
    for name in ours.keys() - known:
        unknown[name] = next(iter(difflib.get_close_matches(name, known, 1, 0.85)), None)
    return {"set": {n: v for n, v in ours.items() if n in known}, "unknown": unknown}

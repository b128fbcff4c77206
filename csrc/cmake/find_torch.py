"""Prints `folder;version;CUDA version or none` of the installed torch, without a slow import."""

import importlib.util
import pathlib
import runpy
import sys

OLDEST = (2, 9)

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(f"torch is not installed for {sys.executable}")
root = pathlib.Path(spec.origin).parent
facts = runpy.run_path(str(root / "version.py"))
version = str(facts["__version__"])
if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
    sys.exit(f"torch {version} in {root} is older than {OLDEST[0]}.{OLDEST[1]}")
print(root, version, facts.get("cuda") or "none", sep=";")

"""Builds the stand-in libraries: one compilation, one cheap link for each that differs."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from pyparallel._core import nccl as core

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LATEST = 23203


def code_of(version: str) -> int:
    major, minor, patch = (int(part) for part in version.split("."))
    wide = major > 2 or minor > 8
    return major * (10000 if wide else 1000) + minor * 100 + patch


class Libraries:
    """Stand-ins in one folder, each in a folder of its own and named libnccl.so.2."""

    def __init__(self, folder: Path, flags: Iterable[str] = ("-O0",)) -> None:
        self.folder = folder
        self.flags = list(flags)
        self.compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        self._built: dict[tuple[object, ...], Path] = {}
        self.cuda = folder / "libstandin_cuda.so"
        self._compile(
            *("-shared", HERE / "standin/cuda.cpp", "-o", self.cuda),
            "-Wl,-soname,libstandin_cuda.so",
        )
        self.objects = [folder / f"{name}.o" for name in ("nccl", "data", "hooks")]
        for made in self.objects:
            self._compile("-c", HERE / f"standin/{made.stem}.cpp", "-o", made)

    def _compile(self, *arguments: object) -> None:
        command = [
            *(self.compiler, "-std=c++17", *self.flags, "-fPIC", "-fno-gnu-unique", "-pthread"),
            *("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"),
            *("-Werror", f"-I{ROOT / 'csrc'}", *map(str, arguments)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"

    def build(
        self,
        version: int = LATEST,
        *,
        fault: str = "",
        without: Iterable[str] = (),
        copy: int = 0,
        needs: str = "",
    ) -> Path:
        """A library of that version, which has the functions that the version had.

        `copy` tells apart files that are otherwise the same; `needs` is a library to depend on.
        """
        without = frozenset(without)
        key = (version, fault, without, copy, needs)
        if key not in self._built:
            self._built[key] = self._link(version, fault, without, needs)
        return self._built[key]

    def _link(self, version: int, fault: str, without: frozenset[str], needs: str) -> Path:
        folder = self.folder / f"library-{len(self._built)}"
        folder.mkdir()
        exported = [
            name
            for name, since, _ in core.symbols()
            if code_of(since) <= version and name not in without
        ]
        script = folder / "exports.map"
        names = " ".join(f"{name};" for name in exported)
        script.write_text(f"{{ global: {names} standin*; local: *; }};\n")
        path = folder / "libnccl.so.2"
        self._compile(
            *(f"-DSTANDIN_VERSION={version}", f'-DSTANDIN_FAULT="{fault}"', "-shared"),
            *(HERE / "standin/variant.cpp", *self.objects, self.cuda, "-o", path),
            *(f"-Wl,--version-script={script}", "-Wl,-soname,libnccl.so.2", "-Wl,--no-as-needed"),
            *(f"-Wl,-rpath,{self.folder}", *([needs] if needs else [])),
        )
        return path

    def plain(self, name: str, source: str, *, soname: str = "") -> Path:
        """Any small library from source text."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        text = path.with_suffix(".cpp")
        text.write_text(source)
        options = [f"-Wl,-soname,{soname}"] if soname else []
        self._compile("-shared", text, "-o", path, *options)
        return path

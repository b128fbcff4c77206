"""Compiles C++ test programs with parts of csrc, with or without sanitizers.

Objects and programs are kept under build/native_tests by a hash of what the preprocessor made of
their source, so that a second run compiles only what changed, and each change costs one file.
"""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "tests" / "native"
CSRC = ROOT / "csrc"
CACHE = ROOT / "build" / "native_tests"
COMMON = [
    *("-std=gnu++17", "-Wall", "-Wextra", "-Wno-unused-parameter", "-pthread"),
    *(f"-I{CSRC}", f"-I{ROOT}"),
]
# -O1 keeps the sanitizers' reports readable and the programs fast enough.
MODES = {
    "plain": ["-O2"],
    "address": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
}


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def _version() -> str:
    return subprocess.run([str(compiler()), "--version"], capture_output=True, text=True).stdout


def _flags(source: Path) -> list[str]:
    """Those of one file, which names them itself."""
    wanted = re.search(r'compile with (-[^"\n]*)', source.read_text())
    machine = platform.machine() == "x86_64"
    return [f for f in (wanted[1].split() if wanted else []) if machine or not f.startswith("-m")]


def _run(command: Sequence[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, timeout=600)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{done.stderr.decode(errors='replace')}")
    return done.stdout


def _kept(name: str, key: bytes, make: Sequence[str]) -> Path:
    """The file that `make` + [path] makes, once per key. Safe with several runs at once."""
    path = CACHE / f"{name}-{hashlib.sha256(key).hexdigest()[:24]}"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / "made"
            _run([*make, str(made)])
            made.replace(path)
    os.utime(path)
    return path


def object_of(source: Path, flags: Sequence[str], extra: Sequence[str] = ()) -> Path:
    """`extra` comes last, so that it wins."""
    # A definition that changes nothing in this file costs no second object.
    defined = [flag for flag in extra if flag.startswith("-D")]
    command = [str(compiler()), *COMMON, *flags, *_flags(source)]
    command += [flag for flag in extra if not flag.startswith("-D")]
    text = _run([*command, *defined, "-E", "-P", str(source)])
    key = b"\0".join([text, " ".join(command).encode(), _version().encode()])
    return _kept(source.stem, key, [*command, *defined, "-c", str(source), "-o"])


def _library(mode: str, extra: Sequence[str]) -> Path | None:
    """The library as it was built, for programs that need nothing of their own in it."""
    path = ROOT / "pyparallel" / "lib" / "libpyparallel.so"
    return path if mode == "plain" and not extra and path.exists() else None


def files_of(
    program: str, sources: Sequence[str], mode: str, extra: Sequence[str] = ()
) -> list[Path]:
    """What is compiled for a program: csrc too, unless the program takes the built library."""
    files = [NATIVE / f"{program}.cpp"]
    for pattern in sources:
        found = sorted(CSRC.glob(pattern))
        assert found, f"no file in csrc matches {pattern}"
        files += found if _library(mode, extra) is None else []
    return files


def build(program: str, sources: Sequence[str], mode: str, extra: Sequence[str] = ()) -> Path:
    """tests/native/`program`.cpp with the csrc files that match `sources` (globs)."""
    files = files_of(program, sources, mode, extra)
    library = _library(mode, extra)
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(lambda file: object_of(file, MODES[mode], extra), files))
    command = [str(compiler()), *COMMON, *MODES[mode], *map(str, objects), "-ldl"]
    if library is not None:
        command += [str(library), f"-Wl,-rpath,{library.parent}"]
    return _kept(program, "\0".join([*command, _version()]).encode(), [*command, "-o"])


def run(program: Path, *args: str, timeout: float = 100, **environment: str) -> str:
    """Its output; an AssertionError with all it said when it fails or is late."""
    # ThreadSanitizer of older compilers cannot start where addresses are randomised by 32 bits.
    command = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
    options = {
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    }
    try:
        done = subprocess.run(
            [*command, str(program), *args],
            env=os.environ | options | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{program.name} not done after {timeout} s: {late}") from None
    text = done.stdout + done.stderr
    assert done.returncode == 0, (
        f"{program.name} {' '.join(args)}: status {done.returncode}\n{text}"
    )
    return text

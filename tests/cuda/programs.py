"""Builds the emulated kernels with g++ and the real ones with nvcc; results are kept by content."""

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.static.cuda_kernels import compile_kernels

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ROOT / "tests" / "cuda" / "emulation"
KEPT = ROOT / "build" / "tests" / "cuda"
CORE = ("cuda/calls.cpp", "cuda/choice.cpp", "cuda/loader.cpp", "base/error.cpp")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".py")


def _fingerprint(command: list[str], folders: list[Path]) -> str:
    digest = hashlib.sha256("\0".join(command).encode())
    for folder in folders:
        for path in sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def _checked(command: list[str]) -> str:
    done = run(command, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def emulation(sources: list[str], sanitizers: str, *defines: str) -> Path:
    """A program of emulation sources and the host half of csrc/cuda, under these sanitizers."""
    flags = [
        # The other sanitizers take four times as long to compile optimised code.
        "-O1" if sanitizers == "thread" else "-O0",
        *(f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"),
    ]
    return _build("emulation", flags, defines, sources, CORE, ["-ldl"])


def shared_object(sources: list[str], *defines: str) -> Path:
    """A libpyparallel_cuda.so of emulation sources, to be found by PYPARALLEL_CUDA_LIB."""
    return _build("stand_in.so", ["-O1", "-fPIC"], defines, sources, CORE[:1], ["-shared"])


def _build(
    name: str,
    flags: list[str],
    defines: tuple[str, ...],
    sources: list[str],
    core: tuple[str, ...],
    link: list[str],
) -> Path:
    compiler = os.environ.get("CXX", "g++")
    flags = [
        *flags,
        *("-std=c++20", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread"),
        *("-DPYPARALLEL_CUDA_EMULATION", f"-I{ROOT / 'csrc'}", f"-I{EMULATION}"),
        *(f"-D{define}" for define in defines),
    ]
    files = [EMULATION / source for source in sources] + [ROOT / "csrc" / file for file in core]
    folders = [EMULATION, ROOT / "csrc" / "cuda", ROOT / "csrc" / "base"]
    folder = KEPT / _fingerprint([compiler, *flags, *map(str, files)], folders)
    program = folder / name
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [ccache] if (ccache := shutil.which("ccache")) else []

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        _checked([*launcher, compiler, *flags, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, files))
    _checked([compiler, *flags, *objects, *link, "-o", f"{program}.new"])
    Path(f"{program}.new").rename(program)
    return program


def compiled_kernels(nvcc: str, arch: str) -> tuple[Path, Path, str]:
    """Cubin and PTX of all kernels for one architecture, and what the assembler said of them."""
    sources = [ROOT / "csrc" / "cuda", ROOT / "csrc" / "base", ROOT / "bench" / "static"]
    folder = KEPT / _fingerprint([nvcc, arch], sources)
    report = folder / "report.txt"
    if not report.exists():
        folder.mkdir(parents=True, exist_ok=True)
        report.write_text(compile_kernels(nvcc, arch, folder)[2])
    return folder / "kernels.cubin", folder / "kernels.ptx", report.read_text()

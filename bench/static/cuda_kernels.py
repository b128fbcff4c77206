"""The CUDA kernels of csrc/cuda as the assembler made them: python -m bench.static.cuda_kernels.

Compiles csrc/cuda/kernels.cu with nvcc for each architecture and prints, per kernel: registers,
spilled bytes, blocks of 512 threads that fit a multiprocessor, 16-byte loads that are under way at
once, PTX instructions. It ranks variants; it is no measurement.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "cuda" / "kernels.cu"
ARCHITECTURES = ("80", "90a", "100a")
THREADS = 512
REGISTERS_PER_MULTIPROCESSOR = 65536
THREADS_PER_MULTIPROCESSOR = 2048

ENTRY = re.compile(
    r"_ZN10pyparallel4cuda\d+([a-z_]+?)(?:I(f|NS0_4HalfE|NS0_8BFloat16E)E)?(?:Ev|E)NS0_4CallE"
)
ELEMENT = {None: "", "f": "f32", "NS0_4HalfE": "f16", "NS0_8BFloat16E": "bf16"}


@dataclass(frozen=True)
class Usage:
    """What the assembler's report says of one kernel."""

    kernel: str
    registers: int
    stack_bytes: int
    spill_bytes: int

    @property
    def resident_blocks(self) -> int:
        """Blocks of 512 threads that fit one multiprocessor; registers come in steps of 8."""
        per_thread = -(-self.registers // 8) * 8
        by_registers = REGISTERS_PER_MULTIPROCESSOR // (per_thread * THREADS)
        return min(by_registers, THREADS_PER_MULTIPROCESSOR // THREADS)


def readable(mangled: str) -> str:
    """all_gather<f16> for its mangled name; a name that is no kernel of ours is a ValueError."""
    found = ENTRY.search(mangled)
    if found is None:
        raise ValueError(f"{mangled} is no kernel of csrc/cuda")
    element = ELEMENT[found[2]]
    return f"{found[1]}<{element}>" if element else found[1]


def read_report(report: str) -> list[Usage]:
    """Kernels in an -Xptxas -v report."""
    usages = []
    parts = re.split(r"Function properties for (\S+)", report)
    for mangled, text in zip(parts[1::2], parts[2::2], strict=True):
        stack, *spills = (int(n) for n in re.findall(r"(\d+) bytes (?:stack|spill)", text)[:3])
        registers = re.search(r"Used (\d+) registers", text)
        if registers is None:
            raise ValueError(f"no register count for {mangled} in the report")
        usages.append(Usage(readable(mangled), int(registers[1]), stack, sum(spills)))
    return sorted(usages, key=lambda usage: usage.kernel)


def kernels_of(ptx: str) -> dict[str, list[str]]:
    """Instructions of each kernel in a PTX file, in order, without labels and directives."""
    kernels = {}
    parts = re.split(r"\.entry\s+(\w+)\(", ptx)
    for mangled, text in zip(parts[1::2], parts[2::2], strict=True):
        lines = (line.strip() for line in text[text.index("{") :].splitlines())
        code = [line for line in lines if line.endswith(";") and not line.startswith(".")]
        kernels[readable(mangled)] = code
    return kernels


def loads_at_once(code: list[str]) -> int:
    """The longest row of 16-byte loads without a 16-byte store or a barrier in between."""
    longest = row = 0
    for line in code:
        if re.match(r"(@\S+\s+)?ld\.(global\.)?v4", line):
            row += 1
            longest = max(longest, row)
        elif re.match(r"(@\S+\s+)?(st\.(global\.)?v4|bar)", line):
            row = 0
    return longest


def compile_kernels(nvcc: str, arch: str, folder: Path) -> tuple[Path, Path, str]:
    """Cubin, PTX and the assembler's report; nvcc's own words when it fails."""
    flags = ["-std=c++17", "-O3", f"-I{ROOT / 'csrc'}", f"-arch=sm_{arch}", str(SOURCE)]
    cubin, ptx = folder / "kernels.cubin", folder / "kernels.ptx"
    said = ""
    for more in (["-ptx", "-o", str(ptx)], ["-Xptxas", "-v", "-cubin", "-o", str(cubin)]):
        done = subprocess.run([nvcc, *flags, *more], capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"{nvcc} for sm_{arch} failed:\n{done.stdout}{done.stderr}")
        said = done.stdout + done.stderr
    return cubin, ptx, said


def find_nvcc() -> str | None:
    """Path of the CUDA compiler, None where there is none."""
    default = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(default) if default.exists() else None)


def table(arch: str, usages: list[Usage], kernels: dict[str, list[str]]) -> str:
    head = f"sm_{arch:<6}{'registers':>24}{'spilled':>9}{'blocks/SM':>11}{'loads':>7}{'code':>6}"
    rows = [
        f"{u.kernel:<28}{u.registers:>5}{u.spill_bytes:>9}{u.resident_blocks:>11}"
        f"{loads_at_once(kernels[u.kernel]):>7}{len(kernels[u.kernel]):>6}"
        for u in usages
    ]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="as in 90a")
    arguments = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        raise SystemExit("nvcc is needed, on PATH or in /usr/local/cuda/bin")
    for arch in arguments.arch:
        with tempfile.TemporaryDirectory() as folder:
            _, ptx, report = compile_kernels(nvcc, arch, Path(folder))
            print(table(arch, read_report(report), kernels_of(ptx.read_text())), end="\n\n")


if __name__ == "__main__":
    main()

"""Triton kernels compiled ahead of time, on any machine: description -> cubin, PTX, listing.

No GPU and no driver is needed: the Triton wheel brings ptxas, cuobjdump and nvdisasm. Triton keeps
what it compiled, by content; listings are kept beside that, by the cubin's digest.
"""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.static.listing import Listing

ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True)
class Description:
    """All that a compiler needs to know of a launch.

    `arguments` names each argument that is no constant with its type as Triton spells it, and what
    it is a multiple of behind a colon: `"*bf16:16"`, `"i32:16"`, `"i64"`. Those that `constants`
    names are `tl.constexpr`. A tuple argument is a tuple of such texts, and of the constants in it.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    description: Description
    arch: int
    cubin: bytes
    ptx: str
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    warps: int  # of a program, those of its roles too
    text: str

    @cached_property
    def listing(self) -> Listing:
        return Listing(self.text)

    @property
    def spills(self) -> int:
        """Stack and local bytes of a thread, or else the loads and stores of local memory."""
        return self.stack_bytes + self.local_bytes or self.listing.count("STL", "LDL")


def compile_for(description: Description, arch: int) -> Compiled:
    """The kernel for sm_`arch`.

    Raises:
        ValueError: the description does not fit the kernel's arguments.
        RuntimeError: the disassembler failed, in its own words. What Triton raises passes through.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    names = list(description.kernel.arg_names)
    _check(description, names)
    types: dict[str, Any] = {}
    multiples: dict[tuple[int, ...], list[list[Any]]] = {}
    constants = {(names.index(name),): value for name, value in description.constants.items()}
    for index, name in enumerate(names):
        given = description.arguments.get(name)
        if isinstance(given, tuple):
            parts = [((index, part), one) for part, one in enumerate(given)]
        else:
            parts = [((index,), given)]
        kinds = []
        for place, one in parts:
            kind, _, multiple = (
                one.partition(":") if isinstance(one, str) else ("constexpr", "", "")
            )
            kinds.append(kind)
            if multiple:
                multiples[place] = [["tt.divisibility", int(multiple)]]
            if len(place) > 1 and kind == "constexpr":
                constants[place] = one
        types[name] = tuple(kinds) if isinstance(given, tuple) else kinds[0]
    source = _source(description.kernel)(description.kernel, types, constants, multiples)
    options = {
        "num_warps": description.num_warps,
        "num_stages": description.num_stages,
        **description.options,
    }
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    usage, text = _disassemble(kernel.asm["cubin"])
    return Compiled(
        description,
        arch,
        kernel.asm["cubin"],
        kernel.asm["ptx"],
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        text=text,
    )


def _source(kernel: Any) -> Any:
    """The class that a kernel's source is compiled as: Triton or Gluon."""
    import triton

    if not kernel.is_gluon():
        return triton.compiler.ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def tool(name: str) -> Path:
    """A program of the CUDA toolkit that the Triton wheel carries."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise RuntimeError(f"this Triton ({triton.__version__}) carries no {name} at {path}")
    return path


def _check(description: Description, names: list[str]) -> None:
    given = {*description.arguments, *description.constants}
    both = sorted(set(description.arguments) & set(description.constants))
    missing = [name for name in names if name not in given]
    unknown = sorted(given - set(names))
    if missing or unknown or both:
        raise ValueError(
            f"{description.name}: arguments {missing} are not described, {unknown} are not the "
            f"kernel's, {both} are both argument and constant; the kernel takes {names}"
        )


def _disassemble(cubin: bytes) -> tuple[dict[str, int], str]:
    from triton.runtime.cache import get_cache_manager

    kept = get_cache_manager(hashlib.sha256(b"listing 1" + cubin).hexdigest())
    path = kept.get_file("kernel.sass")
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(cubin)
            usage, listing = (
                _say([tool("cuobjdump"), "-res-usage", file]),
                _say([tool("nvdisasm"), "-c", file]),
            )
        path = kept.put(f"// {' '.join(usage.split())}\n{listing}", "kernel.sass", binary=False)
    text = Path(path).read_text()
    head, _, listing = text.partition("\n")
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", head)}
    if set(found) != {"REG", "STACK", "LOCAL"}:
        raise RuntimeError(f"cuobjdump told no registers, stack and local bytes: {head}")
    return found, listing


def _say(command: list[Any]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{command[0].name} failed: {done.stderr or done.stdout}")
    return done.stdout

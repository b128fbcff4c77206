"""csrc/nccl under sanitizers: threads as ranks, the stand-in instrumented too."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.native import build
from tests.nccl.libraries import HERE, Libraries

SOURCES = [
    "nccl/*.cpp",
    *(f"base/{name}.cpp" for name in ("error", "fork", "interrupt", "env", "thread")),
]


def files() -> list[Path]:
    """What the program is made of."""
    return [HERE / "native.cpp", *(f for p in SOURCES for f in sorted(build.CSRC.glob(p)))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["address", "thread"])
def test_under_a_sanitizer(tmp_path: Path, world_folder: Path, mode: str) -> None:
    flags = build.MODES[mode]
    libraries = Libraries(tmp_path, flags)
    objects = [build.object_of(file, flags) for file in files()]
    program, standin = tmp_path / "native", libraries.build()
    # The stand-in is linked, though the binding opens it as ever: ThreadSanitizer takes the freeing
    # of the thread-local memory of a library that came later for a race.
    subprocess.run(
        [
            *(str(build.compiler()), *flags, "-pthread", *map(str, objects), "-o", str(program)),
            *("-Wl,--no-as-needed", str(standin), str(libraries.cuda), "-ldl"),
            f"-Wl,-rpath,{tmp_path}:{standin.parent}",
        ],
        check=True,
        timeout=300,
    )
    text = build.run(program, str(standin), str(libraries.cuda))
    done = re.search(r"nccl: (\d+) checks, 0 failed", text)
    assert done, text
    assert int(done[1]) > 500
    assert list(world_folder.iterdir()) == []

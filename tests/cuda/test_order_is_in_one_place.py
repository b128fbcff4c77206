"""Order and scope between ranks are spelled in csrc/cuda/memory_order.h and nowhere else."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPELLED = re.compile(
    r"\basm\b|__atomic|std::atomic|\batomic[A-Z]\w+|__threadfence|\bvolatile\b|cuda::atomic|__ldcg|__stcg"
)
# The clock is no order; the host's side of the status page is no kernel.
ALLOWED = {"memory_order.h": None, "device.h": 1, "loader.cpp": 3}


def test_no_file_spells_an_order_of_its_own():
    found = {}
    for path in sorted((ROOT / "csrc" / "cuda").iterdir()):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            lines = [line for line in path.read_text().splitlines() if SPELLED.search(line)]
            if lines and not (path.name in ALLOWED and ALLOWED[path.name] in (None, len(lines))):
                found[path.name] = lines
    assert found == {}


def test_every_function_of_the_header_names_its_scope():
    text = (ROOT / "csrc" / "cuda" / "memory_order.h").read_text()
    names = set(re.findall(r"PYPARALLEL_ORDER_(?:LOAD|STORE|ADD)\((\w+),", text)) - {"name"}
    assert names
    for name in names:
        assert name.endswith(("_system", "_device")), name
    for name, scope in re.findall(
        r"PYPARALLEL_ORDER_\w+\((\w+), [\w:]+, \"\w+\.\w+\.(\w+)\.", text
    ):
        assert scope == {"system": "sys", "device": "gpu"}[name.rsplit("_", 1)[1]], name

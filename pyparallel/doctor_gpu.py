"""What `doctor` sees of the GPUs: the driver's tool is asked, so no CUDA library is loaded."""

import re
import shutil
import subprocess
from typing import Any

Facts = dict[str, Any]

_FIELDS = ("index", "name", "memory.total", "compute_cap", "driver_version", "pci.bus_id")
_LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe host bridge of one CPU",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPUs",
}


def gpus() -> Facts:
    """`{"devices": [...], "links": [...], "error": ""}`; the error says why there are none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"devices": [], "links": [], "error": "no nvidia-smi on PATH: no NVIDIA driver"}
    query = [tool, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    listing, error = _ask(query)
    if error:
        return {"devices": [], "links": [], "error": error}
    devices = [
        _device(line)
        for line in listing.splitlines()
        if line.count(",") >= len(_FIELDS) - 1 and line.partition(",")[0].strip().isdecimal()
    ]
    if not devices:
        return {"devices": [], "links": [], "error": "nvidia-smi lists no GPU"}
    topology, error = _ask([tool, "topo", "-m"])
    return {"devices": devices, "links": parse_topology(topology), "error": error}


def parse_topology(text: str) -> list[Facts]:
    """Each pair of GPUs and the link between them, from the matrix of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    links = []
    for row in rows:
        if not row or row is header or row[0] not in columns or len(row) <= len(columns):
            continue
        a = int(row[0][3:])
        for name, link in zip(columns, row[1:], strict=False):
            if a < (b := int(name[3:])):
                links.append({"a": a, "b": b, "link": link, "meaning": _meaning(link)})
    return links


def _meaning(link: str) -> str:
    lanes = re.fullmatch(r"NV(\d+)", link)
    if lanes:
        return f"{lanes[1]} NVLinks"
    return _LINKS.get(link, "unknown")


def _device(line: str) -> Facts:
    index, *name, memory, capability, driver, bus = (part.strip() for part in line.split(","))
    return {
        "index": int(index),
        "name": ", ".join(name),
        "memory_bytes": int(memory) * 2**20 if memory.isdigit() else None,
        "compute_capability": capability,
        "driver": driver,
        "pci": bus,
    }


def _ask(command: list[str]) -> tuple[str, str]:
    """What a command printed, or why it printed nothing of use."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]}: {error}"
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return "", f"{command[0]} failed ({done.returncode}): {' '.join(said[:2])}"
    return done.stdout, ""

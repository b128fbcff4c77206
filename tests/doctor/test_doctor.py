"""doctor: the report on this machine, then on machines made of files, then GPUs by a stand-in.

Layers of proof: facts read from fake /proc and /sys trees (exact); the driver's tool played by a
script; the real command in processes of its own. A machine with GPUs is not needed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyparallel
from pyparallel import doctor, doctor_capabilities, doctor_gpu, doctor_machine

ROOT = Path(__file__).resolve().parents[2]

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X \t\t

Legend:
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def _doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYPARALLEL_")} | environment
    return subprocess.run(
        [sys.executable, "-m", "pyparallel", "doctor", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def report():
    done = _doctor("--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _files(root: Path, texts: dict[str, str]) -> Path:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_report_has_every_part(report):
    assert list(report) == [
        *("pyparallel", "versions", "build", "system", "cpu", "memory", "shared_memory"),
        *("gpus", "nccl", "environment", "capabilities"),
    ]
    assert report["pyparallel"]["version"] == pyparallel.__version__ == report["build"]["version"]
    assert report["cpu"]["usable"] >= 1
    assert report["shared_memory"]["memfd"] == ""
    assert report["shared_memory"]["open_files_limit"] > 0


def test_each_capability_has_a_reason_and_a_lacking_one_its_mend(report):
    assert len(report["capabilities"]) == len(doctor_capabilities.ALL)
    for capability in report["capabilities"]:
        assert capability["reason"], capability
        assert capability["available"] or capability["mend"], capability
    available = {c["name"] for c in report["capabilities"] if c["available"]}
    assert {"native core", "groups across hosts", "build tools"} <= available


def test_text_names_every_capability(report):
    text = "\n".join(doctor.render(report))
    for capability in report["capabilities"]:
        answer = "yes" if capability["available"] else "no "
        assert f"  {answer} {capability['name']}: " in text


def test_variables_that_are_set_and_those_without_effect():
    done = _doctor("--json", PYPARALLEL_SIMD="portable", PYPARALLEL_SIMDD="avx2", PYPARALLEL_QQ="1")
    facts = json.loads(done.stdout)
    assert facts["environment"]["set"] == {"PYPARALLEL_SIMD": "portable"}
    assert facts["environment"]["unknown"] == {
        "PYPARALLEL_SIMDD": "PYPARALLEL_SIMD",
        "PYPARALLEL_QQ": None,
    }
    reductions = next(c for c in facts["capabilities"] if "reductions" in c["name"])
    assert not reductions["available"]
    assert reductions["mend"] == "unset PYPARALLEL_SIMD"


def test_a_wrong_variable_is_mended_by_unsetting_it():
    facts = json.loads(_doctor("--json", PYPARALLEL_SIMD="avx9").stdout)
    wrong = [c for c in facts["capabilities"] if "avx9" in c["reason"]]
    assert len(wrong) == 3  # reductions, the communicator, symmetric memory
    assert {c["mend"] for c in wrong} == {"unset PYPARALLEL_SIMD, or name what this CPU has"}


def test_without_a_built_core_it_says_how_to_build(tmp_path):
    package = tmp_path / "pyparallel"
    package.mkdir()
    for file in (ROOT / "pyparallel").glob("*.py"):
        shutil.copy(file, package)
    done = subprocess.run(
        # -S: an editable install would find the core of the tree.
        [sys.executable, "-S", "-m", "pyparallel", "doctor", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    assert facts["build"] is None
    assert "\nbuild\n  none\n" in "\n".join(doctor.render(facts))
    core = next(c for c in facts["capabilities"] if c["name"] == "native core")
    assert "pip install -e ." in core["mend"]


def test_cpu_numa_and_quota_of_a_large_machine(tmp_path):
    root = _files(
        tmp_path,
        {
            "proc/cpuinfo": "model name\t: Chip X\nflags\t\t: sse2 avx2 f16c\n\nmodel name\t: Y\n",
            "proc/self/cgroup": "0::/pod/rank\n",
            "sys/fs/cgroup/pod/cpu.max": "600000 100000\n",
            "sys/fs/cgroup/pod/rank/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/memory.max": "1000000\n",
            "sys/fs/cgroup/pod/memory.current": "400000\n",
            "sys/fs/cgroup/pod/rank/memory.max": "2000000\n",
            "sys/fs/cgroup/pod/rank/memory.current": "3\n",
            "sys/devices/system/node/node10/cpulist": "64-127\n",
            "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:  2048 kB\n",
            "sys/devices/system/node/node10/distance": "32 10\n",
            "sys/devices/system/node/node2/cpulist": "0-63\n",
            "sys/devices/system/node/node2/distance": "10 32\n",
            "proc/meminfo": "MemTotal:  4096 kB\nMemFree: 5 kB\nMemAvailable:  1024 kB\n",
        },
    )
    cpu = doctor_machine.cpu(root)
    assert (cpu["model"], cpu["simd"], cpu["cgroup_cpus"]) == ("Chip X", ["avx2", "f16c"], 6.0)
    assert cpu["numa_nodes"] == [
        {"node": 2, "cpus": "0-63", "memory_bytes": None, "distances": [10, 32]},
        {"node": 10, "cpus": "64-127", "memory_bytes": 2**21, "distances": [32, 10]},
    ]
    assert doctor_machine.memory(root) == {
        "total_bytes": 2**22,
        "available_bytes": 2**20,
        "cgroup_limit_bytes": 1000000,
        "cgroup_used_bytes": 400000,
    }


def test_control_groups_of_version_1(tmp_path):
    root = _files(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "70\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    memory = doctor_machine.memory(root)
    assert (memory["cgroup_limit_bytes"], memory["cgroup_used_bytes"]) == (5000, 70)
    assert doctor_machine.cpu(root)["cgroup_cpus"] == 1.5


def test_an_empty_machine_is_no_error(tmp_path):
    assert doctor_machine.cpu(tmp_path)["numa_nodes"] == []
    assert doctor_machine.memory(tmp_path)["total_bytes"] is None


def test_topology_gives_each_pair_once():
    links = {(link["a"], link["b"]): link for link in doctor_gpu.parse_topology(TOPOLOGY)}
    assert {pair: link["link"] for pair, link in links.items()} == {
        (0, 1): "NV18",
        (0, 2): "SYS",
        (1, 2): "PHB",
    }
    assert links[0, 1]["meaning"] == "18 NVLinks"
    assert doctor_gpu.parse_topology("") == []


def _stand_in(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_gpus_by_the_driver_s_tool(tmp_path, monkeypatch):
    (tmp_path / "topology").write_text(TOPOLOGY)
    _stand_in(
        tmp_path,
        'if [ "$1" = topo ]; then exec cat "$(dirname "$0")/topology"; fi\n'
        'echo "0, NVIDIA H200, 143771, 9.0, 580.65, 00000000:18:00.0"\n'
        'echo "1, NVIDIA H200, [N/A], 9.0, 580.65, 00000000:2A:00.0"',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = doctor_gpu.gpus()
    assert found["error"] == ""
    assert [d["memory_bytes"] for d in found["devices"]] == [143771 * 2**20, None]
    assert found["devices"][0]["compute_capability"] == "9.0"
    assert len(found["links"]) == 3
    lines = list(doctor.render(doctor.report()))
    assert "  GPU 0 - GPU 1: NV18 (18 NVLinks)" in lines


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'has failed because it could not communicate' >&2; exit 9", "could not communicate"),
        ("true", "lists no GPU"),
    ],
)
def test_a_driver_that_does_not_answer(tmp_path, monkeypatch, script, expected):
    _stand_in(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = doctor_gpu.gpus()
    assert found["devices"] == []
    assert expected in found["error"]


def test_no_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no nvidia-smi on PATH" in doctor_gpu.gpus()["error"]


def test_a_backend_built_for_another_torch_is_named():
    facts = {
        "build": {"torch": {"built": True, "version": "2.9.0", "cuda": False}},
        "versions": {"torch": "2.13.0+cpu"},
    }
    found = doctor_capabilities.torch_backend(facts)
    assert not found.available
    assert "built for torch 2.9.0, but torch 2.13.0+cpu is installed" in found.reason


def test_odd_entries_of_the_kernel_are_unknown_and_no_error(tmp_path):
    files = {
        "proc/meminfo": b"MemTotal:\nMemAvailable: abc kB\n\xff",
        "proc/cpuinfo": b"\xff\xff: x\n",
        "proc/self/cgroup": b"odd\n\n1:2\n0::/\n",
        "sys/fs/cgroup/cpu.max": b"100 0\n",
        "sys/fs/cgroup/memory.max": b"--5\n",
        "sys/devices/system/node/node0/meminfo": b"Node 0 MemTotal: kB\n",
        "sys/devices/system/node/node0/distance": b"a b\n",
        "sys/devices/system/node/node0x/meminfo": b"",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert set(doctor_machine.memory(tmp_path).values()) == {None}
    cpu = doctor_machine.cpu(tmp_path)
    assert cpu["cgroup_cpus"] is None
    (node,) = cpu["numa_nodes"]
    assert (node["memory_bytes"], node["distances"]) == (None, [])

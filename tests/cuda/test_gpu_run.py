"""bench/gpu: the driver's guards with made-up parts, the parts themselves, and the measurements on
the stand-in library. What a GPU does is in test_gpu.py.
"""

import json
import subprocess
import sys
import time

import pytest

from bench.gpu import driver, facts, parts
from bench.gpu.parts import Part
from tests.cuda import programs
from tests.cuda.test_python import STAND_IN

# The first test of a run compiles: minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)


def _part(name: str, code: str, seconds: float = 30.0, **more) -> Part:
    return Part(name, "made up", (sys.executable, "-c", code), seconds, **more)


LEAVE = "from bench.gpu.results import leave; leave({})"


def test_each_part_is_guarded_and_saved(tmp_path, monkeypatch):
    seen = []
    save = driver._save

    def noting(result, file):
        save(result, file)
        seen.append(list(json.loads(file.read_text())["parts"]))

    monkeypatch.setattr(driver, "_save", noting)
    hang = "import subprocess, time; subprocess.Popen(['sleep', '77.25']); time.sleep(60)"
    result = driver.run_parts(
        [
            _part("good", LEAVE.format({"rows": [1]}) + "; print('said')"),
            _part("bad", LEAVE.format({"half": 2}) + "; raise SystemExit(3)"),
            _part("hanging", hang, 1.0),
            _part("dependent", "print('never')", needs=("good", "bad")),
            _part("independent", "import os; print(os.environ['X'])", environment={"X": "y"}),
            _part("not_there", LEAVE.format({"skipped": "no GPU"})),
            _part("garbage", "import os; open(os.environ['BENCH_GPU_RESULT'], 'w').write('{')"),
        ],
        tmp_path,
        100.0,
    )["parts"]
    assert {name: entry["status"] for name, entry in result.items()} == {
        "good": "ok",
        "bad": "failed",
        "hanging": "timeout",
        "dependent": "skipped",
        "independent": "ok",
        "not_there": "skipped",
        "garbage": "failed",
    }
    assert result["good"]["result"] == {"rows": [1]}
    assert result["good"]["output"] == "said\n"
    assert result["bad"]["result"] == {"half": 2}, "what a failed part left is kept"
    assert result["bad"]["reason"] == "exit status 3"
    assert result["dependent"]["reason"] == "needs bad"
    assert result["independent"]["output"] == "y\n"
    assert result["not_there"]["reason"] == "no GPU"
    assert [len(names) for names in seen] == [1, 2, 3, 4, 5, 6, 7]
    left = subprocess.run(["pgrep", "-f", "sleep 77.25"], capture_output=True, text=True)
    assert left.stdout == "", "children of a part that ran out of time are ended with it"


def test_the_whole_ends_in_time(tmp_path):
    start = time.monotonic()
    result = driver.run_parts(
        [_part("long", "import time; time.sleep(50)"), _part("late", "print(1)")], tmp_path, 6.0
    )["parts"]
    assert time.monotonic() - start < 20
    assert result["long"]["status"] == "timeout"
    assert "used up" in result["late"]["reason"]


def test_the_architecture_of_the_machine_is_built(tmp_path, monkeypatch):
    monkeypatch.delenv(driver.ARCHITECTURES, raising=False)
    show = "import os; print(os.environ.get('PYPARALLEL_CUDA_ARCHS'))"
    machine = _part("machine", LEAVE.format({"architecture": "90a"}))
    result = driver.run_parts(
        [machine, _part("build", show, architecture=True), _part("other", show)], tmp_path, 60.0
    )["parts"]
    assert result["build"]["output"] == "90a\n"
    assert result["other"]["output"] == "None\n"
    assert facts.architecture(8, 0) == "80"
    assert facts.architecture(9, 0) == "90a"
    assert facts.architecture(10, 0) == "100a"


def test_parts_are_in_order_and_fit():
    names = [part.name for part in parts.PARTS]
    assert len(set(names)) == len(names)
    assert parts.TOTAL_SECONDS < 480
    for at, part in enumerate(parts.PARTS):
        assert set(part.needs) <= set(names[:at]), part.name
    # The parts that say most must fit even when each of them takes all its time.
    first = parts.PARTS[: names.index("kernels") + 1]
    assert sum(part.seconds for part in first) <= parts.TOTAL_SECONDS


@pytest.mark.parametrize("module", ["facts", "kernels", "nccl_ranks", "tests", "virtual_ranks"])
def test_the_python_parts_import(module):
    command = [sys.executable, "-c", f"import bench.gpu.{module}"]
    done = programs.run(command, timeout=60)
    assert done.returncode == 0, done.stderr


def test_tests_that_did_not_run_do_not_pass(tmp_path):
    """pytest is content when everything is skipped; the report is not."""
    (tmp_path / "skips.py").write_text("import pytest\ndef test_it(): pytest.skip('no GPU')\n")
    (tmp_path / "mixed.py").write_text("def test_a(): pass\ndef test_b(): assert False\n")
    for name, status, expected in (
        ("skips", "skipped", {"test_it": "skipped"}),
        ("mixed", "failed", {"test_a": "passed", "test_b": "failed"}),
    ):
        command = (sys.executable, "-m", "bench.gpu.tests", str(tmp_path / f"{name}.py"))
        result = driver.run_parts([Part(name, "made up", command, 60)], tmp_path / name, 60.0)
        entry = result["parts"][name]
        assert entry["status"] == status, entry["output"]
        tests = {key.split("::")[1]: value for key, value in entry["result"]["tests"].items()}
        assert tests == expected


def test_the_driver_needs_nothing_but_python():
    code = "import sys; import bench.gpu.driver; print('torch' in sys.modules)"
    done = programs.run([sys.executable, "-S", "-c", code], timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_dry_run_shows_every_command():
    done = programs.run(["sh", "bench/gpu/run.sh", "--dry-run"], timeout=60)
    assert done.returncode == 0, done.stderr
    for part in parts.PARTS:
        assert f"{part.name} (at most" in done.stdout
        assert " ".join(part.command[1:3]) in done.stdout
    only = programs.run(["sh", "bench/gpu/run.sh", "--dry-run", "--only", "machine"], timeout=60)
    assert only.stdout.count("at most") == 1
    wrong = programs.run(["sh", "bench/gpu/run.sh", "--only", "nothing"], timeout=60)
    assert wrong.returncode != 0
    assert "there are machine, build" in wrong.stderr


def test_kernels_are_verified_then_timed(tmp_path, monkeypatch):
    """The measurement itself, on the stand-in: small, and once with a wrong result."""
    small = (
        "import json, sys; from bench.gpu import kernels\n"
        "def measure():\n"
        "    return kernels.measure('cpu', 60, worlds=(2,), sizes=(512,), rounds=2, samples=3,\n"
        "        grid=(2, 4), layout={'max_blocks': 2, 'slot_bytes': 256})\n"
        "right = measure()\n"
        "kernels.rank_order_sum = lambda inputs: inputs[0]\n"
        "wrong = measure()\n"
        "print('JSON' + json.dumps([right, wrong]))\n"
        "import os; sys.stdout.flush(); os._exit(0)\n"
    )
    monkeypatch.setenv("PYPARALLEL_CUDA_LIB", str(programs.shared_object(STAND_IN)))
    monkeypatch.setenv("BENCH_GPU_RESULT", str(tmp_path / "kernels.json"))
    done = programs.run([sys.executable, "-c", small], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    right, wrong = json.loads(done.stdout.split("JSON")[1])
    assert right["problems"] == []
    assert [row["op"] for row in right["rows"]] == [
        *("barrier", "one_shot", "one_shot", "two_shot", "two_shot"),
        *("all_gather", "all_gather", "reduce_scatter", "reduce_scatter"),
    ]
    for row in right["rows"]:
        assert row["verified"]
        assert 0 < row["ours_us"]["p10"] <= row["ours_us"]["median"] <= row["ours_us"]["p90"]
        assert row["speedup"] > 0
    bad = {row["op"] for row in wrong["rows"] if not row["verified"]}
    assert bad == {"one_shot", "two_shot", "reduce_scatter"}
    assert all("ours_us" not in row for row in wrong["rows"] if not row["verified"])
    assert any("one_shot float32 512 B on 2 ranks: wrong" in text for text in wrong["problems"])
    assert json.loads((tmp_path / "kernels.json").read_text()) == wrong

"""`python -m pyparallel`: its commands are frozen here, so that a new one is a deliberate edit."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pyparallel
from pyparallel import cli

ROOT = Path(__file__).resolve().parents[1]


def test_commands():
    assert set(cli.COMMANDS) == {
        "doctor",
        "launch",
        "plan",
        "simulate",
        "profile",
        "bench",
        "calibrate",
    }


def test_help_names_every_command(capsys):
    assert cli.main([]) == 0
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan", ("--model NAME --gpus N", "pyparallel plan --from ds_config.json", "Exit status")),
        ("simulate", ("--pp N --microbatches N", "--schedule zb-h1 --svg", "Exit status")),
        ("profile", ("a folder of traces", "export_chrome_trace", "Exit status")),
        ("doctor", ("--json", "plan --cluster host.json", "Exit status")),
        ("calibrate", ("--op OP",)),
        ("launch", ("SCRIPT",)),
    ],
)
def test_help_is_for_newcomers_and_as_wide_as_the_terminal(command, words, capsys, monkeypatch):
    """Usage, what it is for, examples to copy; only these may be wider than a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)
    wide = [line for line in text.splitlines() if len(line) > 60]
    assert all(line.lstrip().startswith(("pyparallel", "usage:", "[--")) for line in wide)
    assert max(map(len, wide), default=0) <= 80


def test_what_the_terminal_cannot_show_is_escaped(tmp_path):
    """An ASCII terminal, a file's name and a key in other letters: no traceback."""
    config = tmp_path / "d\N{LATIN SMALL LETTER E WITH ACUTE}.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "\\u4e2d": 3}')
    arguments = ["--from", str(config), "--gpus", "8", "--model", "llama-3-8b", "--seq", "4096"]
    done = subprocess.run(
        [sys.executable, "-m", "pyparallel", "plan", *arguments],
        env={**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "d\\xe9.json" in done.stdout
    assert "\\u4e2d" in done.stdout


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == pyparallel.__version__


def test_unknown_command(capsys):
    assert cli.main(["docter"]) == 2
    assert "no command 'docter'" in capsys.readouterr().err


def test_a_reader_that_has_gone_is_no_error():
    """`pyparallel simulate ... | head`: no traceback, and the status that SIGPIPE leaves.
    The pipe has no reader before the first word is written."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "pyparallel", "simulate", "--pp", "2", "--microbatches", "2"],
            stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


def test_bench_outside_a_source_tree_says_where_it_is(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pyparallel", "bench"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(_package_alone(tmp_path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "source tree" in done.stderr


def _package_alone(folder: Path) -> Path:
    alone = folder / "site"
    alone.mkdir()
    (alone / "pyparallel").symlink_to(ROOT / "pyparallel")
    return alone


def test_a_tree_that_is_not_built_says_how_to_build(tmp_path):
    """Without the extension modules, whose suffix names the interpreter they were built for."""
    for file in (ROOT / "pyparallel").rglob("*.py"):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    done = subprocess.run(
        # -S: the finder of an editable install would supply the core of the tree.
        [sys.executable, "-S", "-c", "import pyparallel.comm"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "ImportError: pyparallel's native core does not load" in done.stderr
    assert "pip install -e . --no-build-isolation" in done.stderr


def test_importing_the_package_loads_neither_torch_nor_the_core():
    code = "import pyparallel, sys; print([m for m in sys.modules if 'torch' in m or '_core' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("helper", ["cmake_dir", "get_include"])
def test_paths_for_other_builds_exist_or_say_why(helper, monkeypatch, tmp_path):
    assert Path(getattr(pyparallel, helper)()).is_dir()
    monkeypatch.setattr(pyparallel, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="pip install -e"):
        getattr(pyparallel, helper)()

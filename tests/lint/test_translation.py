"""README.zh-CN.md is README.md in Chinese: the same headings, tables, commands and pages."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
)
MEND = "translate the change into README.zh-CN.md too"


def blocks(text: str) -> list[str]:
    """Fenced and indented code."""
    fenced = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return fenced + re.findall(r"^    .*$", outside, re.MULTILINE)


def test_headings_are_of_the_same_levels() -> None:
    def levels(text: str) -> list[int]:
        outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        return [len(mark) for mark in re.findall(r"^(#+) ", outside, re.MULTILINE)]

    assert levels(ENGLISH) == levels(CHINESE), MEND


def test_code_and_commands_are_the_same() -> None:
    assert blocks(ENGLISH) == blocks(CHINESE), MEND


def test_tables_and_lists_are_of_the_same_length() -> None:
    for mark in (r"^\|.*\|$", r"^\d+\. ", r"^- "):
        counts = [len(re.findall(mark, text, re.MULTILINE)) for text in (ENGLISH, CHINESE)]
        assert counts[0] == counts[1], f"{mark}: {counts}; {MEND}"


def test_the_same_files_are_named_and_exist() -> None:
    names = [
        set(re.findall(r"[\w./-]+\.(?:md|py|h|c)\b", text)) - {"README.md", "README.zh-CN.md"}
        for text in (ENGLISH, CHINESE)
    ]
    assert names[0] == names[1], MEND
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    there = [f"/{path}" for path in listed]
    missing = [name for name in names[0] if not any(path.endswith(f"/{name}") for path in there)]
    assert not missing


def test_it_is_chinese() -> None:
    chinese = re.findall("[\u4e00-\u9fff]", CHINESE)
    assert len(chinese) > 500
    for heading in re.findall(r"^## (.*)$", CHINESE, re.MULTILINE):
        assert re.search("[\u4e00-\u9fff]", heading), heading

"""A configuration file, or flags, as nested values with known lines: JSON, TOML, YAML, shell."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from pyparallel.planner.errors import PlanError, named
from pyparallel.planner.importers.shell import LONGEST, OpenQuote, TooLong, read_flags

__all__ = ["ConfigError", "Source", "read_source"]

_LARGEST = 4 << 20  # bytes of a file that is still taken for a configuration
_BRANCHES = ("of the script's conditions every branch is read, and the last value of a flag wins",)
_KINDS = {".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
Path_ = tuple[str, ...]


class ConfigError(PlanError):
    """A configuration cannot be read: it says which file, line and key, and what would work."""


@dataclass(frozen=True)
class Source:
    """What a file or a command line holds.

    Attributes:
        name: the file as it was named, or "the flags".
        kind: "json", "toml", "yaml" or "flags".
        values: nested by key; of flags, names without their dashes, and text, lists of text or
            True.
        lines: path of keys -> line of the file, from 1.
        notes: what was assumed in reading it.
    """

    name: str
    kind: str
    values: dict[str, Any]
    lines: Mapping[Path_, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def where(self, path: Path_) -> str:
        """File, line and key of a value, for messages; the nearest line above where it has none."""
        key = f"--{path[0]}" if self.kind == "flags" and len(path) == 1 else ".".join(path)
        key = named(key)
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.name}, line {line}, {key}"
        return f"{self.name}, {key}"

    def fail(self, path: Path_, problem: str) -> ConfigError:
        return ConfigError(f"{self.where(path)}: {problem}")


def read_source(argument: str) -> Source:
    """Reads a file by its ending (.json, .toml, .yaml, .yml; any other holds shell commands with
    flags), or the flags themselves.

    Raises:
        ConfigError: no such file and no flags; or it cannot be read, with line and key.
    """
    path = Path(argument)
    if argument.lstrip().startswith("--"):
        values, _ = _read_flags("the flags", argument)
        return Source("the flags", "flags", values)
    try:
        if not path.is_file():
            raise ConfigError(
                f"{argument}: no such file; name a .json, .toml, .yaml or shell file, or give "
                'flags in one argument, as in --from "--tensor-model-parallel-size 4 ..."'
            )
        size = path.stat().st_size
        if size > _LARGEST:
            raise ConfigError(f"{argument}: {size} bytes; a configuration has at most {_LARGEST}")
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{argument}: cannot be read: {error}") from None
    kind = _KINDS.get(path.suffix.lower(), "flags")
    if kind == "flags":
        values, lines = _read_flags(argument, text)
        notes = _BRANCHES if re.search(r"^\s*(else|elif|case)\b", text, re.MULTILINE) else ()
        if not values:
            raise ConfigError(
                f"{argument}: no flag in it; .json, .toml and .yaml files are known by their names"
            )
        return Source(argument, kind, values, lines, notes)
    reader = {"json": _read_json, "toml": _read_toml, "yaml": _read_yaml}[kind]
    try:
        values, lines = reader(argument, text)
    except RecursionError:
        raise ConfigError(f"{argument}: nested too deeply for a configuration") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of more digits than Python reads
        raise ConfigError(f"{argument}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{argument}: a {type(values).__name__}; keys with values are expected")
    return Source(argument, kind, values, lines)


def _read_flags(name: str, text: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    try:
        return read_flags(text)
    except TooLong as error:
        raise ConfigError(
            f"{name}: ${named(str(error))} has grown to more than {LONGEST} characters; give it "
            "short"
        ) from None
    except OpenQuote as error:
        raise ConfigError(
            f"{name}, line {error.line}: a quote begins here and never ends"
        ) from None


_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def _read_json(name: str, text: str) -> tuple[Any, dict[Path_, int]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        near = _last_key(text[: error.pos])
        raise ConfigError(
            f"{name}, line {error.lineno}, column {error.colno}{near}: no JSON: {error.msg}"
        ) from None
    lines: dict[Path_, int] = {}
    keys: list[str] = []
    seen: list[set[str]] = []
    tokens = list(_JSON_TOKEN.finditer(text))
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        word = token.group()
        if word in "{[":
            keys.append("")
            seen.append(set())
        elif word in "}]":
            keys.pop()
            seen.pop()
        elif word[0] == '"' and after is not None and after.group() == ":":
            key = json.loads(word)
            line = text.count("\n", 0, token.start()) + 1
            if key in seen[-1]:
                raise _twice(name, line, key)
            seen[-1].add(key)
            keys[-1] = key
            lines.setdefault(tuple(filter(None, keys)), line)
    return values, lines


def _twice(name: str, line: int, key: str) -> ConfigError:
    return ConfigError(f"{name}, line {line}, {named(key)}: the key stands twice; keep one")


def _last_key(text: str) -> str:
    keys = re.findall(r'"((?:\\.|[^"\\])*)"\s*:', text)
    return f", after key {named(keys[-1])}" if keys else ""


_TOML_TABLE = re.compile(r"^\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(?:#.*)?$")
_TOML_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")


def _read_toml(name: str, text: str) -> tuple[Any, dict[Path_, int]]:
    parser = _toml()
    try:
        values = parser.loads(text)
    except parser.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        line = int(found[1]) if found else text.count("\n") + 1
        text_line = (text.splitlines() or [""])[min(line, len(text.splitlines())) - 1]
        key = _TOML_KEY.match(text_line)
        at = f", {named(key[1])}" if key else ""
        raise ConfigError(f"{name}, line {line}{at}: no TOML: {named(str(error))}") from None
    lines: dict[Path_, int] = {}
    table: Path_ = ()
    for number, line_text in enumerate(text.splitlines(), 1):
        if header := _TOML_TABLE.match(line_text):
            table = _dotted(header[1])
            lines.setdefault(table, number)
        elif key := _TOML_KEY.match(line_text):
            lines.setdefault((*table, *_dotted(key[1])), number)
    return values, lines


def _dotted(text: str) -> Path_:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _read_yaml(name: str, text: str) -> tuple[Any, dict[Path_, int]]:
    parser = _yaml()
    try:
        node = parser.compose(text, Loader=parser.SafeLoader)
        values = parser.load(text, Loader=parser.SafeLoader)
    except parser.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        near = ""
        if mark:
            above = "\n".join(text.splitlines()[: mark.line + 1])
            before = re.findall(r"^\s*([\w.-]+)\s*:", above, re.MULTILINE)
            near = f", at key {named(before[-1])}" if before else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{name}{line}{near}: no YAML: {named(problem)}") from None
    lines: dict[Path_, int] = {}
    if node is not None:
        _yaml_lines(name, parser, node, (), lines)
    return values, lines


def _yaml_lines(name: str, parser: Any, node: Any, path: Path_, lines: dict[Path_, int]) -> None:
    if not isinstance(node, parser.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise _twice(name, line, key.value)
        seen.add(key.value)
        inner = (*path, str(key.value))
        lines.setdefault(inner, line)
        _yaml_lines(name, parser, value, inner, lines)


def _toml() -> Any:
    """The standard library's parser, or before Python 3.11 the package that it came from."""
    try:
        return import_module("tomllib")
    except ImportError:
        return _package("TOML", "tomli", lambda: import_module("tomli"))


def _yaml() -> Any:
    return _package("YAML", "pyyaml", lambda: import_module("yaml"))


def _package(format_: str, name: str, load: Callable[[], Any]) -> Any:
    """A parser that is loaded only where its format is read."""
    try:
        return load()
    except ImportError:
        raise ConfigError(f"reading {format_} needs {name}: pip install {name}") from None

"""Flags out of a command line or a shell script: its variables filled in, its lines known."""

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from typing import Any

__all__ = ["LONGEST", "OpenQuote", "TooLong", "read_flags"]

_ASSIGNMENT = re.compile(r"^(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)$", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


LONGEST = 100_000  # characters of a variable: text doubled line by line fills any memory
_GREATEST = 10**18  # of an intermediate number


class TooLong(ValueError):
    """The variable whose text would grow without end."""


class OpenQuote(ValueError):
    """A quote that begins on this line does not end."""

    def __init__(self, line: int) -> None:
        super().__init__(line)
        self.line = line


def read_flags(text: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """All flags of a text, in the order they stand, later ones winning.

    Reads `--name value`, `--name=value`, `--name` and `--name value value`, in plain words, in
    arrays and in quoted strings that a script assigns; `$NAME`, `${NAME}`, `${NAME:-value}` and
    `$((2 * NAME))` where the text itself says what NAME is. Nothing is executed; what has no value
    in the text stays as it is written.

    Of a script's conditions every branch is read.

    Raises:
        OpenQuote: a quote does not end.
        TooLong: a variable's text has more than `LONGEST` characters.

    Returns:
        name without dashes -> text, list of texts, or True where no value follows; and the lines.
    """
    values: dict[str, Any] = {}
    lines: dict[tuple[str, ...], int] = {}
    name: str | None = None
    for word, line in _opened(_words(text, 1, {})):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values[name] = value if equals else True
            lines[(name,)] = line
            if equals:
                name = None
        elif name is not None:
            if word in ("&&", ";", "|", ">", "2>&1", "&", ")") or _ASSIGNMENT.match(word):
                name = None
                continue
            before = values[name]
            if before is True:
                values[name] = word
            else:
                values[name] = [*(before if isinstance(before, list) else [before]), word]
    return values, lines


def _opened(words: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Flags that stand in one quoted word with their values, word by word."""
    for word, line in words:
        if word.startswith("--") and any(letter.isspace() for letter in word):
            yield from ((part, line) for part in _split(word))
        else:
            yield word, line


def _words(text: str, first: int, known: dict[str, str]) -> list[tuple[str, int]]:
    """Words with their lines; assignments are remembered, and those that hold flags opened."""
    found: list[tuple[str, int]] = []
    pending, start = "", first
    for number, line in enumerate(text.splitlines(), first):
        if not pending:
            start = number
        pending += line
        if _open_quote(pending):
            pending += "\n"
            continue
        for word in _split(_filled(pending.rstrip().removesuffix("\\"), known)):
            assigned = _ASSIGNMENT.match(word)
            if assigned is None:
                bare = word.rstrip(";")
                closes = bare.endswith(")") and "(" not in bare  # the end of an array
                found.append((bare[:-1] if closes else bare, start))
                if closes:
                    found.append((")", start))
                continue
            name, value = assigned.groups()
            if "--" in value or value.startswith("("):
                found += [(f"{name}=", start), *_words(value.removeprefix("("), start, known)]
                if not value.startswith("("):  # an array ends at its bracket, a string here
                    found.append((")", start))
            else:
                known[name] = value.rstrip(";")
                found.append((f"{name}=", start))
        pending = ""
    if pending:
        raise OpenQuote(start)
    return found


def _open_quote(line: str) -> bool:
    try:
        shlex.split(line.rstrip().removesuffix("\\"), comments=True)
    except ValueError:
        return True
    return False


def _split(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that closes elsewhere
        words = line.split()
    return [word for word in words if word not in ("export", "\\")]


def _filled(line: str, known: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if len(known.get(name, "")) > LONGEST:
            raise TooLong(name)
        if name in known:
            return known[name]
        return match[2] if match[2] is not None else match[0]

    def result(match: re.Match[str]) -> str:
        inner = _NAME.sub(lambda m: known.get(m[0], m[0]), match[1].replace("$", ""))
        number = _arithmetic(inner)
        return match[0] if number is None else str(number)

    return _VARIABLE.sub(value, _ARITHMETIC.sub(result, line))


def _arithmetic(text: str) -> int | None:
    """Whole numbers joined by + - * / % and brackets; None for anything else."""

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            number = int(_OPERATORS[type(node.op)](of(node.left), of(node.right)))
            if abs(number) <= _GREATEST:
                return number
        raise ValueError(text)

    try:
        return of(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None

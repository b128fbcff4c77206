"""Reading a configuration key by key, and keeping account: defaults taken, keys left unread, values
left to be filled in later, rules broken."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from pyparallel.planner.errors import named, shown
from pyparallel.planner.importers.source import Source

__all__ = ["BYTES", "LARGEST", "BrokenRule", "Note", "Reader"]

Path_ = tuple[str, ...]
LARGEST = 2**24  # of a size: heads, layers, tokens, ranks
BYTES = 2**62  # of a count of bytes or elements
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Note:
    """A key and what was done about it."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


@dataclass(frozen=True)
class BrokenRule:
    """A rule of the framework that the configuration breaks.

    Attributes:
        where: file, line and key, or the keys that do not fit together.
        rule: what has to hold.
        found: the values that were found.
        mend: what to change.
    """

    where: str
    rule: str
    found: str
    mend: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}; found {self.found}; {self.mend}"


@dataclass
class Reader:
    """Takes values out of a source. Keys are dotted paths; of flags, names without dashes."""

    source: Source
    defaults: list[Note] = field(default_factory=list)
    undetermined: list[Note] = field(default_factory=list)
    violations: list[BrokenRule] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    _read: set[Path_] = field(default_factory=set)

    def path(self, key: str) -> Path_:
        return (key,) if self.source.kind == "flags" else tuple(key.split("."))

    def has(self, key: str) -> bool:
        return self._find(self.path(key)) is not None

    def is_auto(self, key: str) -> bool:
        """Whether its value is to be filled in later."""
        return bool(self._find(self.path(key)) == "auto")

    def _find(self, path: Path_) -> Any:
        value: Any = self.source.values
        for part in path:
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def _take(self, key: str, default: object, expected: str) -> Any:
        """The raw value, or None where the default stands for it, which is noted."""
        path = self.path(key)
        for length in range(1, len(path)):
            above = self._find(path[:length])
            if above is not None and not isinstance(above, Mapping):
                raise self.source.fail(
                    path[:length], f"{shown(above)}; keys with values are expected"
                )
        value = self._find(path)
        self._read.add(path)
        told = f"--{key}" if self.source.kind == "flags" else key
        if value is None:
            # A switch that is not there is off: that is no value taken.
            switch = self.source.kind == "flags" and default is False
            if default is not None and not switch:
                self.defaults.append(Note(told, _shown(default)))
            return None
        if value == "auto":
            taken = "unknown" if default is None else f"{_shown(default)} is assumed"
            self.undetermined.append(Note(told, f'"auto", which is filled in later; {taken}'))
            return None
        if isinstance(value, str) and value.startswith("$"):
            taken = "unknown" if default is None else f"{_shown(default)} is assumed"
            self.undetermined.append(Note(told, f"{named(value)} has no value here; {taken}"))
            return None
        if isinstance(value, Mapping):
            raise self.source.fail(path, f"keys with values; {expected} is expected")
        return value

    def _take_one(self, key: str, default: object, expected: str) -> Any:
        """The same; of the words that follow a flag, the first."""
        value = self._take(key, default, expected)
        return value[0] if isinstance(value, list) and self.source.kind == "flags" else value

    def whole(
        self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST
    ) -> int | None:
        """A whole number from `least` to `most`, by default of a size that a model can have."""
        value = self._take_one(key, default, "a whole number")
        if value is None:
            return default
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = None
        if (
            number is None
            or isinstance(value, bool)
            or not isfinite(number)
            or number != int(number)
        ):
            raise self.source.fail(self.path(key), f"{shown(value)}; a whole number is expected")
        if number < least:
            raise self.source.fail(
                self.path(key),
                f"{shown(value)}; allowed are {least}, {least + 1}, ...; nearest {least}",
            )
        if number > most:
            raise self.source.fail(self.path(key), f"{shown(value)}; at most {most} is expected")
        return int(number)

    def number(self, key: str, default: float | None = None, least: float = 0) -> float | None:
        value = self._take_one(key, default, "a number")
        if value is None:
            return default
        try:
            number = float(value)
            if isinstance(value, bool) or not number >= least:
                raise ValueError
        except (TypeError, ValueError):
            raise self.source.fail(
                self.path(key), f"{shown(value)}; a number of at least {least} is expected"
            ) from None
        return number

    def truth(self, key: str, default: bool = False) -> bool:
        """True or false; a flag without a value is true."""
        value = self._take_one(key, default, "true or false")
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if self.source.kind == "flags":
            # A word that follows a switch belongs to the program, not to the switch.
            return str(value).lower() not in _FALSE
        if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise self.source.fail(self.path(key), f"{shown(value)}; true or false is expected")

    def word(self, key: str, default: str | None = None, allowed: Iterable[str] = ()) -> str | None:
        """Text; one of `allowed`, whatever its case, where any are named."""
        value = self._take_one(key, default, "text")
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.source.fail(self.path(key), f"{shown(value)}; text is expected")
        choices = tuple(allowed)
        if not choices:
            return value
        for choice in choices:
            if choice.lower() == value.lower():
                return choice
        close = difflib.get_close_matches(value, choices, n=1)
        nearest = f"; nearest {close[0]}" if close else ""
        raise self.source.fail(
            self.path(key), f"{shown(value)}; allowed are {', '.join(choices)}{nearest}"
        )

    def words(self, key: str) -> list[str]:
        """Several words: a list, or all that follows a flag."""
        value = self._take(key, None, "a list")
        if value is None or value is True:
            return []
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]

    def lists(self, key: str) -> list[list[str]]:
        """A list of lists of words."""
        value = self._take(key, None, "a list of lists")
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(inner, list) for inner in value):
            raise self.source.fail(self.path(key), f"{shown(value)}; a list of lists is expected")
        return [[str(word) for word in inner] for inner in value]

    def breaks(self, key: str, rule: str, found: object, mend: str) -> None:
        """Notes a broken rule; all of them are told together."""
        where = self.source.where(self.path(key))
        self.violations.append(BrokenRule(where, rule, named(str(found)), mend))

    def lacks(self, key: str, mend: str) -> None:
        """Notes that a key the framework asks for is not there."""
        self.breaks(key, "the key is required", "none", mend)

    def broken(self, rule: str, found: str, mend: str) -> BrokenRule:
        """A broken rule that is of no one key."""
        return BrokenRule(self.source.name, rule, found, mend)

    @staticmethod
    def nearest(key: str, known: Iterable[str]) -> str:
        close = difflib.get_close_matches(key, known, n=1)
        return f"did you mean {close[0]}? Otherwise remove it" if close else "remove it"

    def unread(self, known: Iterable[str] = ()) -> list[Note]:
        """Every key that was not asked for; one that resembles a known key says so."""
        asked = {".".join(path) for path in self._read} | set(known)
        notes = []
        for path in _leaves(self.source.values):
            if any(path[: len(read)] == read for read in self._read):
                continue
            key = ".".join(path)
            close = [] if key in asked else difflib.get_close_matches(key, asked, n=1, cutoff=0.9)
            told = named(f"--{key}" if self.source.kind == "flags" else key)
            text = "not needed for a plan"
            if close:
                text = f"not known; {close[0]} resembles it, and was not given by this name"
            notes.append(Note(told, text))
        return notes


def _leaves(values: Mapping[str, Any], above: Path_ = ()) -> list[Path_]:
    found: list[Path_] = []
    for key, value in values.items():
        path = (*above, str(key))
        found += _leaves(value, path) if isinstance(value, Mapping) and value else [path]
    return found


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)

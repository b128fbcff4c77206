"""Our own JSON: a job and a layout as `plan --emit pyparallel` writes them."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from pyparallel.planner.errors import PlanError, nearest_names, shown
from pyparallel.planner.importers.reader import LARGEST
from pyparallel.planner.importers.source import Source
from pyparallel.planner.layout import Job, Layout

__all__ = ["FORMAT", "read_own"]

FORMAT = 1  # the number under the key "pyparallel"
# What `to_json` adds for readers: it follows from the rest.
_DERIVED = {("job", "model"): {"parameters"}, ("layout",): {"devices", "label"}}
_WORDS = {bool: "true or false", int: f"a whole number up to {LARGEST}", str: "text"}


def read_own(source: Source) -> tuple[Job, Layout]:
    """The job and the layout of the file.

    Raises:
        ConfigError: another format number, missing or unknown keys, values of another type or
            sizes that cannot be; it names line and key.
    """
    if source.values.get("pyparallel") != FORMAT:
        found = source.values.get("pyparallel")
        raise source.fail(("pyparallel",), f"format {shown(found)}; this version reads {FORMAT}")
    job, layout = (source.values.get(name) for name in ("job", "layout"))
    _check(source, ("job",), Job, job)
    _check(source, ("layout",), Layout, layout)
    assert isinstance(job, Mapping)
    assert isinstance(layout, Mapping)
    try:
        return Job.from_json(job), Layout.from_json(layout)
    except (PlanError, TypeError) as error:
        raise source.fail(("job",), str(error)) from None


def _check(source: Source, path: tuple[str, ...], kind: Any, value: object) -> None:
    """That a value is what a field of this kind takes, and all below it."""
    options = get_args(kind) or (kind,)
    if NoneType in options:
        if value is None:
            return
        (kind,) = (option for option in options if option is not NoneType)
    if is_dataclass(kind):
        _check_keys(source, path, kind, value)
    elif get_args(kind):  # tuple[int, ...]
        if not isinstance(value, list):
            raise source.fail(path, f"{shown(value)}; a list of whole numbers is expected")
        for item in value:
            _check(source, path, get_args(kind)[0], item)
    elif type(value) is not kind or (isinstance(value, int) and abs(value) > LARGEST):
        raise source.fail(path, f"{shown(value)}; {_WORDS[kind]} is expected")


def _check_keys(source: Source, path: tuple[str, ...], kind: Any, value: object) -> None:
    if not isinstance(value, Mapping):
        raise source.fail(
            path, "keys with values, as `plan --emit pyparallel` writes them, are expected"
        )
    kinds = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for f in fields(kind):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in value:
            raise source.fail((*path, f.name), "the key is missing")
    for key in value:
        if key in _DERIVED.get(path, ()):
            continue
        if key not in known:
            near = nearest_names(key, known)
            raise source.fail((*path, key), f"unknown key{'; ' + near if near else ''}")
        _check(source, (*path, key), kinds[key], value[key])

"""Memory order in the PTX of a Triton kernel: what must lie between data and its flags.

    before a release    stores of the program, all bulk stores complete, a barrier of the program
    after an acquire    a barrier of the program, then loads

A flag is set by one thread and read by one thread, so only the barrier carries the order to the
others. Read in the order of the text, which Triton writes as the source runs.
"""

import re
from dataclasses import dataclass

_KINDS = (
    ("barrier", re.compile(r"bar(rier)?\.(cta\.)?sync\b")),
    ("bulk wait", re.compile(r"cp\.async\.bulk\.wait_group\s+0\b")),
    ("bulk store", re.compile(r"cp\.async\.bulk\.(tensor\.\S*)?global\.shared")),
    ("release", re.compile(r"(atom|red|st)\.\S*\b(release|acq_rel)\b")),
    ("acquire", re.compile(r"(ld|atom)\.\S*\b(acquire|acq_rel)\b")),
    ("load", re.compile(r"(ld\.global|multimem\.ld_reduce|cp\.async\.(ca|cg)\.shared\.global)")),
    ("load", re.compile(r"cp\.async\.bulk\.(tensor\.\S*)?shared\S*\.global")),
    ("store", re.compile(r"(st\.global|multimem\.st)\b")),
)


@dataclass(frozen=True)
class Event:
    """An instruction that has to do with order; its scope is "sys", "gpu", "cta" or ""."""

    kind: str
    scope: str
    text: str


def events(ptx: str) -> list[Event]:
    """Loads, stores, flags and barriers of a kernel, as written."""
    found = []
    for line in ptx.splitlines():
        text = re.sub(r"^\s*(\{\s*)?(@!?%p\d+\s+)?", "", line)
        for kind, pattern in _KINDS:
            if pattern.match(text):
                scope = re.search(r"\.(sys|gpu|cta)\b", text)
                found.append(Event(kind, scope[1] if scope else "", text.strip()))
                break
    return found


def misfits(ptx: str, local: str = "gpu") -> list[str]:
    """What is out of order. Flags of `local` scope, between programs of one rank, count as well."""
    wrong: list[str] = []
    stored = bulk = acquired = ""
    for event in events(ptx):
        if event.kind == "barrier":
            stored = acquired = ""
        elif event.kind == "bulk wait":
            bulk = ""
        elif event.kind == "store":
            stored = event.text
        elif event.kind == "bulk store":
            stored = bulk = event.text
        elif event.kind == "release":
            wrong += [f"{event.text} after {stored} without a barrier"] if stored else []
            wrong += [f"{event.text} before {bulk} is complete"] if bulk else []
            if event.scope not in ("sys", local):
                wrong.append(f"{event.text} at scope {event.scope or 'unknown'}")
        elif event.kind == "acquire":
            acquired = event.text
            if event.scope not in ("sys", local):
                wrong.append(f"{event.text} at scope {event.scope or 'unknown'}")
        elif event.kind == "load" and acquired:
            wrong.append(f"{event.text} after {acquired} without a barrier")
    return wrong


def empty_releases(ptx: str) -> list[str]:
    """Flags that are set behind a wait with nothing stored in between: what was it that is ready?

    For kernels that wait, move rows and tell: a flag before its rows is a release in order, too.
    """
    found, waited = [], False
    for event in events(ptx):
        if event.kind == "acquire":
            waited = True
        elif event.kind in ("store", "bulk store"):
            waited = False
        elif event.kind == "release":
            found += [event.text] if waited else []
    return found


def flags(ptx: str, scope: str = "sys") -> dict[str, int]:
    """How many releases and acquires the kernel has at a scope."""
    at_scope = [event.kind for event in events(ptx) if event.scope == scope]
    return {kind: at_scope.count(kind) for kind in ("release", "acquire")}

"""One page with the four views of a plan: everything is inside of it, it loads nothing.

The page is page.html with page.css, the scripts (app.js, bars.js and one per view), words.json in
English and Chinese, the planner's notes in Chinese, and the plotting library in vendor/ put into
it.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from pyparallel.planner import Plan
from pyparallel.viz.views import compare, flow, overview, trend

__all__ = ["plan_page"]

_SCRIPTS = ("app.js", "bars.js", "overview.js", "flow.js", "compare.js", "trend.js")


def plan_page(plan: Plan, others: Sequence[Plan] = (), title: str | None = None) -> str:
    """The page as HTML.

    Args:
        others: layouts to compare it with; the first of the comparison is the plan itself.
        title: by default the model and the layout.
    """
    heading = title or f"{plan.job.model.name}: {plan.layout.label}"
    data = {
        "title": heading,
        "gpu": plan.cluster.gpu.name,
        "notes": [{"text": note, "key": note.key, "values": note.values} for note in plan.notes],
        "overview": overview(plan),
        "flow": flow(plan),
        "compare": compare([plan, *others]),
        "trend": trend(plan),
        "words": json.loads(_asset("words.json")),
        "notes_zh": json.loads(_asset("notes.zh.json")),
    }
    parts = {
        "TITLE": escape(heading),
        "NOTICE": _notice(),
        "STYLE": _asset("page.css"),
        "DATA": _embedded(data),
        "ECHARTS": _asset("vendor/echarts.min.js"),
        "SCRIPT": "\n".join([*map(_asset, _SCRIPTS), "start();"]),
    }
    page = _asset("page.html")
    pieces = page.split("@")  # text and names of parts in turn
    return "".join(parts.get(piece, piece) for piece in pieces)


def _embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _notice() -> str:
    """Whose work is inside, in the words that its licences ask for."""
    parts = (_asset("vendor/NOTICE-echarts"), _asset("vendor/LICENSE-d3"))
    return "\n\n".join(part.strip().replace("--", "- -") for part in parts)


def _asset(name: str) -> str:
    return files(__name__).joinpath(*PurePosixPath(name).parts).read_text(encoding="utf-8")

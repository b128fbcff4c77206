"""docs/schedules.md and docs/pipeline.md: their pictures are what the code draws, and both
have every schedule, the first with its closed forms."""

import importlib.util
from pathlib import Path

from pyparallel.schedule import FAMILIES, generate, simulate, validate

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _draw():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "schedules" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_what_the_code_draws():
    made = dict(_draw().drawings())
    assert {path.name for path in (DOCS / "schedules").glob("*.svg")} == set(made)
    for name, svg in made.items():
        assert (DOCS / "schedules" / name).read_text() == svg, "run python docs/schedules/draw.py"


def test_every_schedule_has_its_section_and_picture():
    page = (DOCS / "schedules.md").read_text()
    for name in (*FAMILIES, "auto"):
        assert f"`{name}`" in page
        assert f"](schedules/{name}" in page
    for path in (DOCS / "schedules").glob("*.svg"):
        assert f"(schedules/{path.name})" in page
    running = (DOCS / "pipeline.md").read_text()
    for name, family in FAMILIES.items():
        assert f"`{name}`: {family.effect}.\n\n![" in running
        assert f"](schedules/{name}.svg)" in running


def test_the_table_says_what_the_simulator_says():
    """| name | stages per rank | idle of a step | peak | for p = 4, m = 8, equal passes."""
    rows = {}
    for line in (DOCS / "schedules.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0].strip("`") in FAMILIES:
            rows[cells[0].strip("`")] = cells[1:]
    assert rows.keys() == FAMILIES.keys()
    for name, (chunks, idle, span, kept) in rows.items():
        schedule = generate(name, 4, 8)
        result = simulate(schedule)
        v = FAMILIES[name].default_chunks()
        # A stage of a schedule with v chunks is 1/v of the rank's share of the model.
        part = v // FAMILIES[name].copies
        assert chunks == str(v)
        assert float(idle) == result.bubble[0] / part
        assert float(span) == result.span_bubble / part
        assert float(kept) == max(validate(schedule).peak_bytes) / part

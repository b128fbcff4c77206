"""Drawings of schedules and plans: SVG without dependencies, PNG through matplotlib, traces for
Perfetto, and one HTML page of a plan.

Everything is drawn from a `Simulation` (pyparallel.schedule.simulate) or a `Plan`
(pyparallel.planner.evaluate), a sharded sequence from its rows' owners. Knows nothing of torch.
"""

from pyparallel.viz.figures import VIEWS, plan_figure
from pyparallel.viz.page import plan_page
from pyparallel.viz.png import timeline_png
from pyparallel.viz.sharding_svg import sharding_svg
from pyparallel.viz.svg import timeline_svg
from pyparallel.viz.trace import chrome_trace

__all__ = [
    "VIEWS",
    "chrome_trace",
    "plan_figure",
    "plan_page",
    "sharding_svg",
    "timeline_png",
    "timeline_svg",
]

"""Drawings of schedules: SVG without dependencies, PNG through matplotlib, traces for Perfetto.

Everything is drawn from a `Simulation` (pyparallel.schedule.simulate). Knows nothing of torch.
"""

from pyparallel.viz.png import timeline_png
from pyparallel.viz.svg import timeline_svg
from pyparallel.viz.trace import chrome_trace

__all__ = ["chrome_trace", "timeline_png", "timeline_svg"]

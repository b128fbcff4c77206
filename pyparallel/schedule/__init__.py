"""Pipeline schedules as data: generate, insert communication, prove, simulate, write and read.

    plan = with_transfers(generate("1f1b", ranks=4, microbatches=8))
    validate(plan)
    print(simulate(plan, Costs(forward=1, backward_input=1, backward_weight=1)).step_time)

Knows nothing of torch.
"""

from pyparallel.schedule.actions import NO_MICROBATCH, Action, Kind, Place
from pyparallel.schedule.auto import auto_schedule
from pyparallel.schedule.costs import Costs
from pyparallel.schedule.errors import ScheduleError
from pyparallel.schedule.forms import FORMS, dumps, loads
from pyparallel.schedule.generate import FAMILIES, Family, generate
from pyparallel.schedule.grid import grid
from pyparallel.schedule.schedule import Channel, Schedule
from pyparallel.schedule.simulate import Simulation, Span, simulate
from pyparallel.schedule.steps import with_steps
from pyparallel.schedule.transfers import with_transfers
from pyparallel.schedule.units import Unit, units
from pyparallel.schedule.validate import Report, validate

__all__ = [
    "FAMILIES",
    "FORMS",
    "NO_MICROBATCH",
    "Action",
    "Channel",
    "Costs",
    "Family",
    "Kind",
    "Place",
    "Report",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "Unit",
    "auto_schedule",
    "dumps",
    "generate",
    "grid",
    "loads",
    "simulate",
    "units",
    "validate",
    "with_steps",
    "with_transfers",
]

"""Our own JSON: the job and the layout, as they are."""

import json

from pyparallel.planner.emitters.form import Emission
from pyparallel.planner.importers.own import FORMAT

__all__ = ["own_json"]


def own_json(emission: Emission) -> str:
    """Read by `plan --from`; `schedule` has the arguments of `pyparallel.schedule.generate`."""
    layout = emission.layout
    document = {
        "pyparallel": FORMAT,
        "job": emission.job.to_json(),
        "layout": layout.to_json(),
        "schedule": {
            "name": layout.schedule,
            "ranks": layout.pp,
            "microbatches": emission.microbatches,
            "chunks": layout.chunks,
            "group_size": layout.group_size or None,
        },
    }
    return json.dumps(document, indent=1) + "\n"

"""What must come before an action: stated once, for the validator, the simulator and the passes.

Of each microbatch, a forward needs the forward of the stage before; a backward needs the backward
of the stage after, which itself needed its forward (on the last stage: the forward of the same
stage); a weight half needs its input half. So every action needs at most one other directly, and
the rest follows.
"""

from pyparallel.schedule.actions import Action, Kind

__all__ = ["PHASES", "phase", "predecessor"]

# The three passes a microbatch makes through a stage. A whole backward is the second and third.
PHASES = 3
_PHASE = {
    Kind.FORWARD: 0,
    Kind.BACKWARD: 1,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 2,
}


def phase(kind: Kind) -> int:
    """0 forward, 1 backward (whole, or for the input), 2 backward for the weight."""
    return _PHASE[kind]


def predecessor(kind: Kind, stage: int, stages: int) -> tuple[int, int] | None:
    """(phase, stage) of the one pass of the same microbatch that a compute action waits for.

    None for the forward of stage 0.
    """
    if kind is Kind.FORWARD:
        return (0, stage - 1) if stage > 0 else None
    if kind is Kind.BACKWARD_WEIGHT:
        return (1, stage)
    return (1, stage + 1) if stage + 1 < stages else (0, stage)


def describe(needed: tuple[int, int], microbatch: int) -> str:
    """The needed pass as it is written: `3F0`."""
    return f"{needed[1]}{'FBW'[needed[0]]}{microbatch}"


def crosses(action: Action, stages: int) -> bool:
    """True where the result of a compute action is the input of another stage."""
    if action.kind is Kind.FORWARD:
        return action.stage + 1 < stages
    return action.kind.is_backward and action.stage > 0

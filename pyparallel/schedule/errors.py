"""What goes wrong with schedules: a choice that cannot work, or a schedule that is wrong."""

__all__ = ["ScheduleError"]


class ScheduleError(ValueError):
    """A schedule that cannot run, or a choice that gives none; found before anything runs.

    Attributes:
        rank: the rank of the faulty action, or None where no single one is at fault.
        position: its position in that rank's row, or None.
    """

    def __init__(self, message: str, rank: int | None = None, position: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.position = position

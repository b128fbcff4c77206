"""What all emitters share: the job at hand, what cannot be said, what has to be done besides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyparallel.planner.errors import PlanError
from pyparallel.planner.layout import Job, Layout
from pyparallel.planner.models import ModelSpec

__all__ = ["Emission"]


@dataclass
class Emission:
    """A configuration in the making."""

    framework: str
    job: Job
    layout: Layout
    node_size: int
    notes: list[str] = field(default_factory=list)
    _misfits: list[str] = field(default_factory=list)

    @property
    def model(self) -> ModelSpec:
        return self.job.model

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.job)

    def cannot(self, wrong: bool, what: str, mend: str) -> None:
        """Notes what the framework has no word for; all of it is told at once."""
        if wrong:
            self._misfits.append(f"{what} ({mend})")

    def choice(self, what: str, value: str, words: Mapping[str, str]) -> str:
        """The framework's word for a choice."""
        self.cannot(value not in words, f"{what} {value}", f"it has {', '.join(words)}")
        return words.get(value, "")

    def finish(self) -> None:
        """Raises PlanError where anything could not be said."""
        if self._misfits:
            raise PlanError(
                f"{self.framework} cannot do {self.layout.label}: {'; '.join(self._misfits)}"
            )

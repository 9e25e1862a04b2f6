"""What a run knows of a dashboard that shows it. Package: ports. `ensemble_ray.studio.dashboard` fulfils it, above everything that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ensemble_ray.events.listeners import EnsembleListener
    from ensemble_ray.values.reviews import Reviewing
    from ensemble_ray.values.trace import ExecutionTraceExporter

__all__ = ["Dashboard", "EnteredRun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredRun:
    """A run that a dashboard shows, and where its record will be."""

    run_id: str
    #: whether anything is recorded of it
    is_recorded: bool = False
    #: directory that holds the records
    home: str = ""
    #: a database in place of files
    url: str = ""


@runtime_checkable
class Dashboard(Protocol):
    """A page beside the runs of this process (S-WEB-10)."""

    @property
    def streaming_listener(self) -> EnsembleListener:
        """What is told of their events."""
        ...

    @property
    def review_handler(self) -> Reviewing:
        """What asks at their gates."""
        ...

    @property
    def trace_exporter(self) -> ExecutionTraceExporter | None:
        """What takes their traces; None: nothing of the dashboard's."""
        ...

    def enter_run(self, run: EnteredRun) -> None:
        """Take notice that a run begins: serve from now on, where that is not done yet (S-WEB-11).

        Raises:
            EnsembleError: it cannot.
        """
        ...

    def leave_run(self) -> None:
        """Take notice that a run has ended: stop serving where it was begun for runs alone, and this was the last (S-WEB-12)."""
        ...

"""What a run and its launcher are to each other. Contracts and values only.

A `Run` has the life that all runs have: a state, events, a result, a record that may answer it. A launcher knows one kind of
work: what it is made of, how it is begun, and what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.record.opening import store_at
from ensemble_ray.runs.submission import SubmissionReason
from ensemble_ray.values.metrics import NOTHING, Amount

if TYPE_CHECKING:
    import asyncio

    from ensemble_ray.definition.run_rules import Watched
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.record.result import RunEnd, RunResultHead, RunResults
    from ensemble_ray.record.stores import RunStore, StoreAddress
    from ensemble_ray.runs.ports import Runtime
    from ensemble_ray.runs.run_events import RunEvents
    from ensemble_ray.values.outputs import EnsembleOutput, ExitReason
    from ensemble_ray.values.reviews import RunDirective
    from ensemble_ray.values.trace import CaptureMode, RunTracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """That a run is in the record already and goes on."""

    #: its first fact
    header: PlanRecorded
    #: how many tasks have recorded outputs
    recorded_tasks: int = 0
    #: how many of them are of items of a map-reduce
    recorded_items: int = 0
    #: whether it is over, so that its recorded output is all there is to give
    is_completed: bool = False
    #: why it is submitted
    submission: SubmissionReason = SubmissionReason.RESUMED
    #: whether another definition than the recorded one may go on with it (S-DUR-36)
    allows_changes: bool = False
    #: what its recorded answers cost, where it has a budget
    spent: Amount = NOTHING
    #: how often it was resumed, this time included
    beginning: int = 1
    #: what was done until then was told of by an earlier beginning; Unix time, s
    told_until: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScope:
    """What a launcher knows of the run that it launches."""

    run_id: str
    runtime: Runtime
    #: where the run is recorded; None: nowhere
    store_address: StoreAddress | None
    events: RunEvents
    log_fields: Mapping[str, str]
    #: where the definition came from
    origin: str
    #: whether its caller chose the id
    is_named: bool
    #: None: the run begins
    resumption: Resumption | None
    #: set when the run is cancelled
    cancelled: asyncio.Event
    #: set when its work was handed to the runtime
    begun: asyncio.Event
    #: what its spans have in common; None: nobody traces it
    tracing: RunTracing | None = None

    @property
    def store(self) -> RunStore:
        """The records of the runtime, also where this run has none."""
        return store_at(self.runtime.store_address)

    @property
    def submission(self) -> SubmissionReason:
        """Why the run is submitted."""
        return SubmissionReason.FIRST if self.resumption is None else self.resumption.submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What will run, for people and for traces."""

    workflow: str
    inputs: Mapping[str, str]
    #: 0 where nobody knows yet
    total_tasks: int
    #: such as `3 tasks, 2 agents`
    size: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """How a run ended, and what its tasks gave."""

    end: RunEnd
    results: RunResults
    #: what the run raises; None: it did not fail
    failure: BaseException | None = None
    #: what to warn of, such as a budget that is spent; "": nothing
    warning: str = ""


class Launcher(Protocol):
    """Prepares the work of one run, launches it, and brings back how it ended. Everything on the library's loop."""

    @property
    def definition(self) -> Watched:
        """What runs, with the options of this run."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether the work was handed to the runtime."""
        ...

    async def prepare(self, scope: RunScope) -> Prepared | ExitReason:
        """Find out what will run; give why the run ends where it was cancelled meanwhile, or has spent its budget.

        Raises:
            EnsembleError: the definition cannot run.
        """
        ...

    def describe(self) -> PlanRecorded:
        """Return what the record's first fact says of the prepared work."""
        ...

    async def replay(
        self, scope: RunScope, header: PlanRecorded | None, description: RunResultHead
    ) -> EnsembleOutput | None:
        """Return what a finished run of that id gave; it is not run again (S-SET-39). None: there is none.

        Args:
            scope: The run.
            header: The first fact that the run would record; None: that has been compared.
            description: What its trace says of it.

        Raises:
            EnsembleError: it ended otherwise, or was of another definition.
        """
        ...

    async def launch(self, scope: RunScope, header: PlanRecorded, mode: CaptureMode) -> Conclusion | ExitReason:
        """Launch the work and wait for its end; give why the run ends where it was cancelled before it began.

        Raises:
            EnsembleError: it broke, so that there is no end of it.
        """
        ...

    async def stop(self) -> None:
        """Ask what goes on to end; the scope is marked as cancelled already."""
        ...

    async def inject(self, directive: RunDirective) -> bool:
        """Tell the tasks that start from now on, and return when that is on record; False: none will start.

        Raises:
            EnsembleError: it cannot be recorded, or whoever coordinates the run cannot be reached.
        """
        ...

    def close(self) -> None:
        """Tell readers that nothing comes any more."""
        ...

"""RunService: the port through which routes start, follow, steer and cancel runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ensemble_ray.serve.metrics import Sample
from ensemble_ray.serve.schemas import (
    AcceptedRun,
    Capabilities,
    DecidedReview,
    EnsembleInfo,
    NewDecision,
    NewDirective,
    NewModel,
    NewRun,
    ReviewConflict,
    ReviewOfEnsemble,
    RunDetail,
    RunEvent,
    RunFilter,
    RunPage,
    ToolCallBody,
    ToolReply,
)

#: Runs on one page of a list.
DEFAULT_PAGE, LARGEST_PAGE = 50, 200


class RunService(Protocol):
    """The runs of all served teams. `RunDriver` implements it on a cluster.

    An operation on a run raises `Refusal` if the run does not exist.
    """

    async def ensembles(self) -> Sequence[EnsembleInfo]:
        """Return the teams, sorted by name."""
        ...

    async def metrics(self) -> Sequence[Sample]:
        """Return usage and cost of the runs of all teams since the driver started."""
        ...

    async def start(self, asked: NewRun, *, idempotency_key: str | None = None) -> AcceptedRun:
        """Accept a run and return before it starts.

        The run survives the loss of the caller and the replica, and a restart of the driver. A repeated request with the
        same `run_id` or key returns the existing run (S-SRV-14, S-SRV-15).

        Args:
            asked: The run to start.
            idempotency_key: The client's name for this request, if it sent one.

        Raises:
            Refusal: the team is unknown, inputs are missing, another request used the id, or a limit is exceeded.
        """
        ...

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        """Return the state of the run when it has ended, waits for a person, or `timeout_s` is over."""
        ...

    async def get(self, run_id: str) -> RunDetail:
        """Return the current state of the run."""
        ...

    async def list(self, wanted: RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE) -> RunPage:
        """Return a page of runs, newest first.

        Args:
            wanted: Selects the runs.
            cursor: `next_cursor` of the previous page; None: the first page.
            size: Maximum number of runs on the page.

        Raises:
            Refusal: the cursor is not from this list.
        """
        ...

    def events(self, run_id: str, after: str | None = None) -> AsyncGenerator[RunEvent]:
        """Yield the events of a run from its start or behind a cursor. The last one is `ensemble_completed`.

        Every reader receives each event with a cursor once and in the same order, also long after the run ended. A slow
        reader blocks nothing: it misses events without a cursor.

        Raises:
            Refusal: there is no such run, or the cursor is invalid.
        """
        ...

    async def cancel(self, run_id: str) -> RunDetail:
        """Request the end of the run, and return its current state.

        Raises:
            Refusal: there is no such run, or it has ended.
        """
        ...

    async def inject(self, run_id: str, directive: NewDirective, *, by: str = "") -> RunDetail:
        """Send a directive to the tasks that start from now on, and return the state of the run.

        Args:
            run_id: Id of the run.
            directive: Text and duration.
            by: Name of the caller; empty if the endpoint does not identify callers.

        Raises:
            Refusal: there is no such run, it has ended, or it is not running at the moment.
        """
        ...

    async def switch_model(self, run_id: str, model: NewModel, *, by: str = "") -> RunDetail:
        """Switch the model of the tasks that start from now on, and return the state of the run.

        Args:
            run_id: Id of the run.
            model: The model, and the agent whose tasks use it.
            by: Name of the caller; empty if the endpoint does not identify callers.

        Raises:
            Refusal: there is no such run, model or agent, the run has ended, or it is not running at the moment.
        """
        ...

    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[ReviewOfEnsemble]:
        """Return the open gates of runs of these teams, oldest first; None: of all teams."""
        ...

    async def decide(
        self, run_id: str, gate_id: str, decision: NewDecision, *, by: str = ""
    ) -> DecidedReview | ReviewConflict:
        """Decide a gate. Return the decision, or the earlier decision that counts.

        Raises:
            Refusal: there is no such run or gate, or the gate is closed.
        """
        ...

    async def capabilities(self) -> Capabilities:
        """Return the callable tools, and the models and tasks of all teams."""
        ...

    async def invoke_tool(self, name: str, body: ToolCallBody) -> ToolReply:
        """Call a tool outside of a run.

        Raises:
            Refusal: there is no such tool, too many calls are running, or the call timed out.
        """
        ...

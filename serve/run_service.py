"""RunService: the port through which routes start, follow, steer and cancel runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ensemble_ray.serve import schemas
from ensemble_ray.serve.metrics import Sample

#: Runs on one page of a list.
DEFAULT_PAGE, LARGEST_PAGE = 50, 200


class RunService(Protocol):
    """The runs of all served teams. `DrivenRuns` implements it in the process that drives them, `RemoteRuns` in a replica.

    An operation on a run raises `Refusal` if the run does not exist. `by` is the name of the caller; empty if the endpoint does
    not identify callers.
    """

    async def ensembles(self) -> Sequence[schemas.EnsembleInfo]:
        """Return the teams, sorted by name."""
        ...

    async def metrics(self) -> Sequence[Sample]:
        """Return usage and cost of the runs of all teams since the driver started."""
        ...

    async def start(self, asked: schemas.NewRun, *, idempotency_key: str | None = None) -> schemas.AcceptedRun:
        """Accept a run and return before it starts.

        The run survives the loss of the caller and the replica, and a restart of the driver. A repeated request with the
        same `run_id` or key returns the existing run (S-SRV-14, S-SRV-15).

        Raises:
            Refusal: the team is unknown, inputs are missing, another request used the id, or a limit is exceeded.
        """
        ...

    async def wait(self, run_id: str, timeout_s: float) -> schemas.RunDetail:
        """Return the run when it has ended, waits for a person, or `timeout_s` is over."""
        ...

    async def get(self, run_id: str) -> schemas.RunDetail: ...

    async def list(
        self, wanted: schemas.RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE
    ) -> schemas.RunPage:
        """Return a page of at most `size` runs, newest first. `cursor` is the `next_cursor` of the previous page.

        Raises:
            Refusal: the cursor is not from this list.
        """
        ...

    def events(self, run_id: str, after: str | None = None) -> AsyncGenerator[schemas.RunEvent]:
        """Yield the events of a run from its start or behind a cursor. The last one is `ensemble_completed`.

        Every reader receives each event with a cursor once and in the same order, also long after the run ended. A slow
        reader blocks nothing: it misses events without a cursor.

        Raises:
            Refusal: there is no such run, or the cursor is invalid.
        """
        ...

    async def cancel(self, run_id: str) -> schemas.RunDetail:
        """Request the end of the run, and return its current state.

        Raises:
            Refusal: there is no such run, or it has ended.
        """
        ...

    async def inject(self, run_id: str, directive: schemas.NewDirective, *, by: str = "") -> schemas.RunDetail:
        """Send a directive to the tasks that start from now on, and return the state of the run.

        Raises:
            Refusal: there is no such run, it has ended, or it is not running at the moment.
        """
        ...

    async def switch_model(self, run_id: str, model: schemas.NewModel, *, by: str = "") -> schemas.RunDetail:
        """Switch the model of the tasks that start from now on, and return the state of the run.

        Raises:
            Refusal: there is no such run, model or agent, the run has ended, or it is not running at the moment.
        """
        ...

    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[schemas.ReviewOfEnsemble]:
        """Return the open gates of runs of these teams, oldest first; None: of all teams."""
        ...

    async def decide(
        self, run_id: str, gate_id: str, decision: schemas.NewDecision, *, by: str = ""
    ) -> schemas.DecidedReview | schemas.ReviewConflict:
        """Decide a gate. Return the decision, or the earlier decision that counts.

        Raises:
            Refusal: there is no such run or gate, or the gate is closed.
        """
        ...

    async def capabilities(self) -> schemas.Capabilities:
        """Return the callable tools, and the models and tasks of all teams."""
        ...

    async def invoke_tool(self, name: str, body: schemas.ToolCallBody) -> schemas.ToolReply:
        """Call a tool outside of a run.

        Raises:
            Refusal: there is no such tool, too many calls are running, or the call timed out.
        """
        ...

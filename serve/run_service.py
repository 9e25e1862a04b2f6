"""The port through which routes start, follow, steer and cancel runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ensemble_ray.serve import schemas
from ensemble_ray.serve.metrics import Sample

#: Runs on one page of a list.
DEFAULT_PAGE, LARGEST_PAGE = 50, 200


class RunService(Protocol):
    """The runs of all served teams, in the process that drives them (`DrivenRuns`) or in a replica (`RemoteRuns`).

    An operation raises `Refusal` if its run, gate or tool does not exist. `by` is the caller's name, empty if unknown.
    """

    async def ensembles(self) -> Sequence[schemas.EnsembleInfo]:
        """Return the teams, sorted by name."""
        ...

    async def metrics(self) -> Sequence[Sample]:
        """Return usage and cost since the driver started."""
        ...

    async def start(self, asked: schemas.NewRun, *, idempotency_key: str | None = None) -> schemas.AcceptedRun:
        """Accept a run, which then survives the loss of any process, and return before it starts.

        A repeated `run_id` or key returns the existing run (S-SRV-14, S-SRV-15). `Refusal`: the request is invalid, its id is used by
        another one, or a limit is exceeded.
        """
        ...

    async def wait(self, run_id: str, timeout_s: float) -> schemas.RunDetail:
        """Return the run when it has ended, waits for a person, or `timeout_s` is over."""
        ...

    async def get(self, run_id: str) -> schemas.RunDetail: ...

    async def list(
        self, wanted: schemas.RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE
    ) -> schemas.RunPage:
        """Return the newest runs, or those behind the `next_cursor` of a page."""
        ...

    def events(self, run_id: str, after: str | None = None) -> AsyncGenerator[schemas.RunEvent]:
        """Yield the events of a run from its start or behind a cursor, up to `ensemble_completed`.

        Events with a cursor arrive once and in order, also long after the end. A slow reader misses the others.
        """
        ...

    async def cancel(self, run_id: str) -> schemas.RunDetail:
        """Request the end of the run. `Refusal`: it has ended."""
        ...

    async def inject(self, run_id: str, directive: schemas.NewDirective, *, by: str = "") -> schemas.RunDetail:
        """Send a directive to the tasks that start from now on. `Refusal`: the run is not running."""
        ...

    async def switch_model(self, run_id: str, model: schemas.NewModel, *, by: str = "") -> schemas.RunDetail:
        """Switch the model of the tasks that start from now on. `Refusal`: the run is not running."""
        ...

    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[schemas.ReviewOfEnsemble]:
        """Return the open gates of these teams, oldest first; None: of all teams."""
        ...

    async def decide(
        self, run_id: str, gate_id: str, decision: schemas.NewDecision, *, by: str = ""
    ) -> schemas.DecidedReview | schemas.ReviewConflict:
        """Decide a gate. Return the decision, or the earlier decision that counts. `Refusal`: the gate is closed."""
        ...

    async def capabilities(self) -> schemas.Capabilities:
        """Return the callable tools, and the models and tasks of all teams."""
        ...

    async def invoke_tool(self, name: str, body: schemas.ToolCallBody) -> schemas.ToolReply:
        """Call a tool outside of a run. `Refusal`: too many calls are running, or it timed out."""
        ...

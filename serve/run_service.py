"""RunService: the port through which every route begins, looks at, follows, steers and cancels runs.

Routes know this port alone, and nothing of a run lives in them. `RunDriver` fulfils it on a cluster, doubles do in tests.
Every refusal is a `Refusal`, which has the answer's status and its code.
"""

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
    """The runs of all teams that are served."""

    async def ensembles(self) -> Sequence[EnsembleInfo]:
        """Return the teams, by name."""
        ...

    async def metrics(self) -> Sequence[Sample]:
        """Return what runs did and cost since their driver began, of all teams."""
        ...

    async def start(self, asked: NewRun, *, idempotency_key: str | None = None) -> AcceptedRun:
        """Take a run, and return before it begins. It survives the caller, the replica and a restart of what drives it.

        The same request under the same `run_id` or key gives the run that there is (S-SRV-14, S-SRV-15).

        Args:
            asked: What to run.
            idempotency_key: The client's name for this request; None: it gave none.

        Raises:
            Refusal: the team is unknown, inputs are missing, the id is taken by another request, limits are passed, or
                too many runs are there.
        """
        ...

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        """Return the run as it stands when it ended, or waits for a person, or the time is up.

        Raises:
            Refusal: there is no such run.
        """
        ...

    async def get(self, run_id: str) -> RunDetail:
        """Return the run as it stands.

        Raises:
            Refusal: there is no such run.
        """
        ...

    async def list(self, wanted: RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE) -> RunPage:
        """Return a page of runs, newest first.

        Args:
            wanted: Which runs.
            cursor: `next_cursor` of the page before; None: the first page.
            size: Most runs of the page.

        Raises:
            Refusal: the cursor is none of this list's.
        """
        ...

    def events(self, run_id: str, after: str | None = None) -> AsyncGenerator[RunEvent]:
        """Return what happens in a run, from its beginning or behind a cursor; it ends with `ensemble_completed`.

        Events that have a cursor come once each, in one order, to every reader, also when the run ended long ago. A
        reader that does not ask for more holds up nothing: what is only shown as it happens is left out for it.

        Raises:
            Refusal: there is no such run, or the cursor is none.
        """
        ...

    async def cancel(self, run_id: str) -> RunDetail:
        """Ask the run to end, and return it as it stands.

        Raises:
            Refusal: there is no such run, or it is over.
        """
        ...

    async def inject(self, run_id: str, directive: NewDirective, *, by: str = "") -> RunDetail:
        """Tell the tasks of a run that start from now on, and return the run as it stands.

        Args:
            run_id: The run's id.
            directive: What they are told.
            by: Who tells them; empty: nobody asked who it is.

        Raises:
            Refusal: there is no such run, it is over, or it does not run just now.
        """
        ...

    async def switch_model(self, run_id: str, model: NewModel, *, by: str = "") -> RunDetail:
        """Let the tasks of a run that start from now on ask another model, and return the run as it stands.

        Args:
            run_id: The run's id.
            model: Which one, and whose tasks.
            by: Who says so; empty: nobody asked who it is.

        Raises:
            Refusal: there is no such run, model or agent, the run is over, or it does not run just now.
        """
        ...

    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[ReviewOfEnsemble]:
        """Return the gates at which runs of these teams wait, oldest first; None: of all."""
        ...

    async def decide(
        self, run_id: str, gate_id: str, decision: NewDecision, *, by: str = ""
    ) -> DecidedReview | ReviewConflict:
        """Decide at a gate; return the decision, or the one that came first and counts.

        Raises:
            Refusal: there is no such run or gate, or nobody waits there any more.
        """
        ...

    async def capabilities(self) -> Capabilities:
        """Return the tools that can be called, and the models and tasks of all teams."""
        ...

    async def invoke_tool(self, name: str, body: ToolCallBody) -> ToolReply:
        """Call a tool once, outside of any run.

        Raises:
            Refusal: there is no such tool, too many calls go on, or it gave nothing in its time.
        """
        ...

"""AskedTeam: one call of a tool, from its arguments to the run's output. Holds nothing of a run but its id.

A call ends in one answer: the output's text, an error of the tool, or the forms of the gates at which the run waits. A client that fills
them in sends the call again, with the run's id as its state; that may be another replica's. The id opens nothing: it is looked up as
that of `GET /runs/{run_id}` is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import pydantic
from mcp import MCPError
from mcp_types import INVALID_PARAMS, CallToolResult, InputRequiredResult, TextContent
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ensemble_ray.access.keys import Right
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.review.elicitation import make_gate_form, read_client_answer, shows_forms
from ensemble_ray.serve.asked_run import AskedRun, DoneTask
from ensemble_ray.serve.control_schemas import NewDecision, Verdict
from ensemble_ray.serve.mcp_api.tools import ITEMS
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.rights import caller_of
from ensemble_ray.serve.routes.visible_runs import visible_run
from ensemble_ray.serve.run_schemas import NewRun, RunStatus
from ensemble_ray.serve.trace_context import traceparent_of
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import Edit, ExitEarly, ReviewDecision

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext
    from mcp_types import InputRequest, InputResponse
    from starlette.requests import Request

    from ensemble_ray.serve.run_schemas import EnsembleInfo, RunDetail
    from ensemble_ray.serve.run_service import RunService

#: Names in `_meta`: of a request its key, of an answer its run.
IDEMPOTENCY_KEY, RUN_ID = "ensemble-ray/idempotency-key", "ensemble-ray/run-id"
_LONGEST_KEY = 255
#: How long the last notes of progress are waited for when the run has ended, s.
_LAST_PROGRESS_S = 5.0
#: Characters of a task's description in a note of progress.
_SHOWN = 120


class AskedTeam:
    """A call of a team by a caller who may run it."""

    def __init__(self, context: ServerRequestContext[dict[str, Any]], request: Request, info: EnsembleInfo) -> None:
        self._context = context
        self._request = request
        self._info = info
        self._service: RunService = request.app.state.service
        self._caller = caller_of(request)
        self._key = _idempotency_key(context, request)

    async def begin(self, arguments: Mapping[str, object]) -> CallToolResult | InputRequiredResult:
        """Begin a run and wait for its end, or until a person has to decide."""
        takes_items = self._info.takes_items and ITEMS not in self._info.inputs
        known = [*self._info.inputs, *([ITEMS] if takes_items else [])]
        if spare := [name[:200] for name in arguments if name not in known]:
            return _make_failure(f"Unknown inputs {spare[:10]}. Known: {known}")
        inputs = {name: value for name, value in arguments.items() if name in self._info.inputs}
        try:
            asked = NewRun.model_validate(
                {
                    "ensemble": self._info.name,
                    "inputs": inputs,
                    "items": arguments.get(ITEMS),
                    "traceparent": traceparent_of(self._request, (self._context.meta or {}).get("traceparent")),
                }
            )
            run = await AskedRun.begin(
                self._service,
                asked,
                # Keys of several callers must not meet.
                idempotency_key=None if self._key is None else f"{self._caller.name}:{self._key}",
                ends_with_client=self._ends_with_client,
            )
        except pydantic.ValidationError as error:
            return _make_failure("; ".join(f"{_place(each['loc'])}: {each['msg']}" for each in error.errors()[:10]))
        except Refusal as refusal:
            return _make_failure(refusal.message, run_id=refusal.run_id)
        return await self._finish(run)

    async def go_on(self, run_id: str, answers: Mapping[str, InputResponse]) -> CallToolResult | InputRequiredResult:
        """Take what was decided at a run's gates, and wait again.

        Raises:
            MCPError: the caller has no such run of this team.
        """
        try:
            found = await visible_run(self._service, self._caller, run_id)
        except Refusal as refusal:
            raise MCPError(INVALID_PARAMS, refusal.message) from None
        if found.ensemble != self._info.name:
            raise MCPError(INVALID_PARAMS, f"There is no run '{run_id[:200]}'")
        if not self._can_decide:
            return self._waiting(found)
        is_left_open = False
        for gate in found.reviews:
            answer = answers.get(gate.gate_id)
            if answer is not None and not await self._decide(run_id, gate.gate_id, answer):
                is_left_open = True
        if is_left_open:
            return self._waiting(await self._service.get(run_id))
        return await self._finish(AskedRun(self._service, run_id, ends_with_client=self._ends_with_client))

    async def _decide(self, run_id: str, gate_id: str, answer: InputResponse) -> bool:
        """Record a decision; return whether the gate is decided now, by whomever."""
        decided = read_client_answer(answer)
        if decided is None:
            return False
        with contextlib.suppress(
            Refusal
        ):  # nobody waits there any more; where somebody was first, that decision counts
            await self._service.decide(run_id, gate_id, _wire(decided), by=self._caller.name)
        return True

    async def _finish(self, run: AskedRun) -> CallToolResult | InputRequiredResult:
        """Wait for the end of the run, or for an open gate, and return the answer to the call."""
        telling = None
        if (self._context.meta or {}).get("progress_token") is not None:
            telling = asyncio.ensure_future(self._tell_progress(run.run_id))
        try:
            found = await run.end_or_gate()
            if telling is not None and found.status.is_final:
                await asyncio.wait({telling}, timeout=_LAST_PROGRESS_S)
        finally:
            if telling is not None:
                telling.cancel()
            await run.leave()
        return self._forms(found) if found.status is RunStatus.WAITING else _result(found)

    def _forms(self, found: RunDetail) -> CallToolResult | InputRequiredResult:
        """Return the open gates of a run as forms; where the client cannot be asked, as an error that says what to do."""
        if not self._can_decide:
            return self._waiting(found)
        forms: dict[str, InputRequest] = {each.gate_id: make_gate_form(each) for each in found.reviews}
        return InputRequiredResult(input_requests=forms, request_state=found.run_id)

    @property
    def _can_decide(self) -> bool:
        """Whether the client shows forms, and its caller may decide."""
        return (
            shows_forms(self._context)
            and self._context.protocol_version in MODERN_PROTOCOL_VERSIONS
            and Right.REVIEW in self._caller.rights
        )

    @property
    def _ends_with_client(self) -> bool:
        return bool(self._request.app.state.cancel_on_disconnect) and self._key is None

    def _waiting(self, found: RunDetail) -> CallToolResult:
        gates = "; ".join(
            f"POST /reviews/{found.run_id}/{each.gate_id} ({brief(each.task_description, _SHOWN)})"
            for each in found.reviews
        )
        text = (
            f"Run {found.run_id} waits for a person to decide. What to do: {gates or 'GET /reviews has its gates'}, with the "
            f"right 'review'; its output is at GET /runs/{found.run_id} when that is done"
        )
        return _make_failure(text, run_id=found.run_id)

    async def _tell_progress(self, run_id: str) -> None:
        """Tell each task that is done or failed: how many, of all."""
        done = 0
        async with aclosing(self._service.events(run_id)) as events:
            async for each in events:
                if each.type not in {"task_completed", "task_failed"}:
                    continue
                done += 1
                total = max(done, self._info.tasks or 0)
                task = DoneTask.model_validate(each.data)
                text = f"{task.agent_role}: {brief(task.task_description, _SHOWN)}"
                await self._context.session.report_progress(done, total, text)


def _idempotency_key(context: ServerRequestContext[dict[str, Any]], request: Request) -> str | None:
    """Return the client's name for a call: of the call itself, else the header's.

    Raises:
        MCPError: it is none.
    """
    meta = cast("Mapping[str, object]", context.meta or {})
    key = meta.get(IDEMPOTENCY_KEY, request.headers.get("idempotency-key"))
    if key is None:
        return None
    if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY:
        raise MCPError(INVALID_PARAMS, f"{IDEMPOTENCY_KEY} must be a text of 1 to {_LONGEST_KEY} characters")
    return key


def _wire(decision: ReviewDecision) -> NewDecision:
    """Return a decision as the run service takes it."""
    match decision:
        case Edit(revised_output=text):
            return NewDecision(decision=Verdict.EDIT, text=text)
        case ExitEarly():
            return NewDecision(decision=Verdict.EXIT)
        case _:
            return NewDecision(decision=Verdict.APPROVE)


def _result(found: RunDetail) -> CallToolResult:
    """Return what came of a run that has ended."""
    if found.error is not None:
        return _make_failure("\n".join([found.error.message, *found.error.causes]), run_id=found.run_id)
    if found.result is None:
        return _make_failure(f"Run {found.run_id} ended without an output: {found.status}", run_id=found.run_id)
    if found.result.exit_reason != ExitReason.COMPLETED.value:
        text = f"The run ended early ({found.result.exit_reason}). It gave so far:\n{found.result.raw}"
        return _make_failure(text, run_id=found.run_id)
    return CallToolResult(content=[TextContent(text=found.result.raw)], _meta={RUN_ID: found.run_id})


def _make_failure(text: str, *, run_id: str | None = None) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(text=text)], is_error=True, _meta=None if run_id is None else {RUN_ID: run_id}
    )


def _place(parts: tuple[int | str, ...]) -> str:
    return ".".join(map(str, parts))[:200]

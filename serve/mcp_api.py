"""`/mcp`: teams as tools of an MCP server (S-INT-25 to S-INT-29)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from typing import Any, cast

import mcp_types as types
import pydantic
from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from starlette.requests import Request

from ensemble_ray.access.admission import Right
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.review.elicitation import make_gate_form, read_client_answer, shows_forms
from ensemble_ray.process.config import package_version
from ensemble_ray.serve.blocking_run import BlockingRun, DoneTask
from ensemble_ray.serve.middleware import caller_of, traceparent_of
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import (
    EnsembleInfo,
    NewDecision,
    NewRun,
    OpenReview,
    Refusal,
    RunDetail,
    RunStatus,
    Verdict,
)
from ensemble_ray.serve.visible_runs import visible_run, visible_teams
from ensemble_ray.tools.tool import make_tool_name
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import Edit, ExitEarly, ReviewDecision

#: Argument for items, unless the team has an input of that name.
ITEMS = "items"
#: Keys in `_meta`: the first in a request, the second in an answer.
IDEMPOTENCY_KEY, RUN_ID = "ensemble-ray/idempotency-key", "ensemble-ray/run-id"
_LONGEST_KEY = 255
#: Wait for the last progress notifications, s.
_LAST_PROGRESS_S = 5.0
_SHOWN = 120


def tools_by_name(teams: Iterable[EnsembleInfo]) -> Mapping[str, EnsembleInfo]:
    """Return teams by tool name. Two teams that would share a name keep their own."""
    known = list(teams)
    tool_names = {each.name: make_tool_name(each.name) for each in known}
    count = Counter(tool_names.values())
    return {(tool_names[each.name] if count[tool_names[each.name]] == 1 else each.name): each for each in known}


def tool_of(name: str, team: EnsembleInfo) -> types.Tool:
    properties: dict[str, object] = {each: {"type": "string"} for each in team.inputs}
    if team.takes_items and ITEMS not in properties:
        properties[ITEMS] = {"type": "array", "description": "What is mapped, in place of the team's own items"}
    of_tasks = "" if team.tasks is None else f" of {team.tasks} tasks"
    about = f"Runs the team '{team.name}', a {team.workflow} workflow{of_tasks}, and returns its last output."
    return types.Tool(
        name=name,
        title=team.name,
        description=f"{team.description}\n{about}" if team.description else about,
        input_schema={
            "type": "object",
            "properties": properties,
            "required": list(team.inputs),
            "additionalProperties": False,
        },
    )


class McpTeam:
    def __init__(self, context: ServerRequestContext[dict[str, Any]], request: Request, info: EnsembleInfo) -> None:
        self._context = context
        self._request = request
        self._info = info
        self._service: RunService = request.app.state.service
        self._caller = caller_of(request)
        self._key = _idempotency_key(context, request)

    async def begin(self, arguments: Mapping[str, object]) -> types.CallToolResult | types.InputRequiredResult:
        """Start a run, and answer at its end or an open gate."""
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
            run = await BlockingRun.begin(
                self._service,
                self._caller.sign(asked),
                idempotency_key=self._caller.own_key(self._key),
                account=self._caller.account,
                ends_with_client=self._ends_with_client,
            )
        except pydantic.ValidationError as error:
            found = [(".".join(map(str, each["loc"]))[:200], each["msg"]) for each in error.errors()[:10]]
            return _make_failure("; ".join(f"{place}: {text}" for place, text in found))
        except Refusal as refusal:
            return _make_failure(refusal.message, run_id=refusal.run_id)
        return await self._finish(run)

    async def resume(
        self, run_id: str, answers: Mapping[str, types.InputResponse]
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Record decisions at a run's gates, and wait again."""
        try:
            found = await visible_run(self._service, self._caller, run_id)
        except Refusal as refusal:
            raise MCPError(types.INVALID_PARAMS, refusal.message) from None
        if found.ensemble != self._info.name:
            raise MCPError(types.INVALID_PARAMS, f"There is no run '{run_id[:200]}'")
        if not self._can_decide:
            return self._waiting(found)
        is_left_open = False
        for gate_id in (gate.gate_id for gate in found.reviews if answers.get(gate.gate_id) is not None):
            decision = read_client_answer(answers[gate_id])
            if decision is None:
                is_left_open = True
                continue
            try:
                await self._service.decide(
                    run_id, gate_id, _to_wire(decision), by=self._caller.name, roles=self._caller.roles
                )
            except Refusal as refusal:
                if refusal.code == "ROLE_REQUIRED":
                    return _make_failure(refusal.message, run_id=run_id)
                # The gate is closed; its earlier decision counts.
        if is_left_open:
            return self._waiting(await self._service.get(run_id))
        return await self._finish(BlockingRun(self._service, run_id, ends_with_client=self._ends_with_client))

    async def _finish(self, run: BlockingRun) -> types.CallToolResult | types.InputRequiredResult:
        progress = None
        if (self._context.meta or {}).get("progress_token") is not None:
            progress = asyncio.ensure_future(self._report_progress(run.run_id))
        try:
            found = await run.end_or_gate()
            if progress is not None and found.status.is_final:
                await asyncio.wait({progress}, timeout=_LAST_PROGRESS_S)
        finally:
            if progress is not None:
                progress.cancel()
            await run.detach()
        if found.status is not RunStatus.WAITING:
            return _result(found)
        decidable = [each for each in found.reviews if self._has_role(each)]
        if not self._can_decide or (found.reviews and not decidable):
            return self._waiting(found)
        forms: dict[str, types.InputRequest] = {each.gate_id: make_gate_form(each) for each in decidable}
        return types.InputRequiredResult(input_requests=forms, request_state=found.run_id)

    def _has_role(self, gate: OpenReview) -> bool:
        roles = self._caller.roles
        return roles is None or gate.required_role is None or gate.required_role in roles

    @property
    def _can_decide(self) -> bool:
        is_modern = self._context.protocol_version in MODERN_PROTOCOL_VERSIONS
        return is_modern and shows_forms(self._context) and Right.REVIEW in self._caller.rights

    @property
    def _ends_with_client(self) -> bool:
        return bool(self._request.app.state.cancel_on_disconnect) and self._key is None

    def _waiting(self, found: RunDetail) -> types.CallToolResult:
        gates = "; ".join(
            f"POST /reviews/{found.run_id}/{each.gate_id} ({brief(each.task_description, _SHOWN)})"
            for each in found.reviews
        )
        text = (
            f"Run {found.run_id} waits for a person to decide. What to do: {gates or 'GET /reviews lists its gates'}, with the "
            f"right 'review'; its output is at GET /runs/{found.run_id} when that is done"
        )
        return _make_failure(text, run_id=found.run_id)

    async def _report_progress(self, run_id: str) -> None:
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
    meta = cast("Mapping[str, object]", context.meta or {})
    key = meta.get(IDEMPOTENCY_KEY, request.headers.get("idempotency-key"))
    if key is None:
        return None
    if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY:
        raise MCPError(types.INVALID_PARAMS, f"{IDEMPOTENCY_KEY} must be a text of 1 to {_LONGEST_KEY} characters")
    return key


def _to_wire(decision: ReviewDecision) -> NewDecision:
    match decision:
        case Edit(revised_output=text):
            return NewDecision(decision=Verdict.EDIT, text=text)
        case ExitEarly():
            return NewDecision(decision=Verdict.EXIT)
        case _:
            return NewDecision(decision=Verdict.APPROVE)


def _result(found: RunDetail) -> types.CallToolResult:
    if found.error is not None:
        return _make_failure("\n".join([found.error.message, *found.error.causes]), run_id=found.run_id)
    if found.result is None:
        return _make_failure(f"Run {found.run_id} ended without an output: {found.status}", run_id=found.run_id)
    if found.result.exit_reason != ExitReason.COMPLETED.value:
        text = f"The run ended early ({found.result.exit_reason}). It gave so far:\n{found.result.raw}"
        return _make_failure(text, run_id=found.run_id)
    return types.CallToolResult(content=[types.TextContent(text=found.result.raw)], _meta={RUN_ID: found.run_id})


def _make_failure(text: str, *, run_id: str | None = None) -> types.CallToolResult:
    meta = None if run_id is None else {RUN_ID: run_id}
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True, _meta=meta)


def build_session_manager(*, max_body_bytes: int) -> StreamableHTTPSessionManager:
    async def list_tools(
        context: ServerRequestContext[dict[str, Any]], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        _, teams = await _visible(context)
        return types.ListToolsResult(tools=[tool_of(name, info) for name, info in teams.items()])

    server: Server[dict[str, Any]] = Server(
        "ensemble-ray",
        version=package_version(),
        on_list_tools=list_tools,
        on_call_tool=_call,
        # Without this the SDK lists the tools for each call.
        get_tool_input_schema=lambda _name: None,
    )
    return StreamableHTTPSessionManager(server, stateless=True, max_request_body_size=max_body_bytes)


async def _call(
    context: ServerRequestContext[dict[str, Any]], params: types.CallToolRequestParams
) -> types.CallToolResult | types.InputRequiredResult:
    request, teams = await _visible(context)
    info = teams.get(params.name)
    if info is None:
        raise MCPError(types.INVALID_PARAMS, f"Unknown tool '{params.name[:200]}'. Known: {list(teams)}")
    asked = McpTeam(context, request, info)
    if params.request_state is None:
        return await asked.begin(params.arguments or {})
    return await asked.resume(params.request_state, params.input_responses or {})


async def _visible(context: ServerRequestContext[dict[str, Any]]) -> tuple[Request, Mapping[str, EnsembleInfo]]:
    request: Request | None = context.request
    if request is None:
        raise RuntimeError("a call of a tool came without its HTTP request")
    return request, tools_by_name(await visible_teams(request.app.state.service, caller_of(request)))

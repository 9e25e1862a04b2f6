"""Teams as tools of an MCP server on standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_PARAMS,
    PARSE_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ErrorData,
    InputRequiredResult,
    JSONRPCError,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from ensemble_ray.cli.view.failures import describe_error
from ensemble_ray.cli.view.terminal import role_option
from ensemble_ray.definition.fields import Durability
from ensemble_ray.ensemble import Ensemble, stream_run
from ensemble_ray.errors import EnsembleError, IllegalStateError, ReviewDecidedError, ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.events import Event, TaskCompleteEvent, TaskFailedEvent
from ensemble_ray.execute.review.elicitation import (
    GATE_FORM,
    gate_message,
    make_gate_form,
    read_client_answer,
    shows_forms,
)
from ensemble_ray.execute.review.handlers import ConsoleReviewHandler
from ensemble_ray.plan.planner import check_foreign_values, needed_inputs
from ensemble_ray.process.concurrency import bridge
from ensemble_ray.recovery.deciding import adecide, apending_reviews
from ensemble_ray.recovery.resuming import start_resumed
from ensemble_ray.tools.mcp.address import ReadMessages
from ensemble_ray.tools.tool import make_tool_name
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason
from ensemble_ray.values.reviews import ReviewDecision, ReviewRequest, ReviewWait

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, WriteStream
    from mcp_types import InputRequest, InputResponse

    from ensemble_ray.values.reviews import OpenReview

_CLIENT = "a client of MCP"  # recorded as the person who decided a review
_SHOWN = 120
_RELEASE_S = 15.0  # time for runs to end after the client has left


class TeamCall:
    """A cancelled call ends its run.

    Open reviews wait in the record, because standard input belongs to the protocol.
    """

    def __init__(
        self,
        team: Ensemble,
        context: ServerRequestContext[dict[str, Any]],
        runs: set[asyncio.Task[EnsembleOutput]],
        *,
        runtime: str | None,
    ) -> None:
        self._context = context
        self._runs = runs
        self._runtime = runtime
        self._can_ask = shows_forms(context)
        self._team = _with_recorded_reviews(team, can_ask=self._can_ask)
        self._done = 0

    async def begin(self, inputs: Mapping[str, object]) -> CallToolResult | InputRequiredResult:
        # The declared type of the generator is wider.
        work = cast("AsyncGenerator[Event | EnsembleOutput]", self._team.stream(inputs, runtime=self._runtime))
        return await self._answer(work)

    async def resume(self, run_id: str, answers: Mapping[str, InputResponse]) -> CallToolResult | InputRequiredResult:
        """Record a client's answers at a run's gates, and resume the run."""
        try:
            gates = [each for each in await apending_reviews(runtime=self._runtime) if each.run_id == run_id]
            if left_open := await self._decide(gates, answers):
                return _waiting(left_open)
        except (EnsembleError, IllegalStateError) as error:
            return make_failure(describe_error(error))
        return await self._answer(self._resume(run_id))

    async def _answer(self, work: AsyncGenerator[Event | EnsembleOutput]) -> CallToolResult | InputRequiredResult:
        try:
            output = await self._wait_for_end(work)
            while gates := output.open_reviews:
                if not self._can_ask:
                    return _waiting(gates)
                if self._context.protocol_version in MODERN_PROTOCOL_VERSIONS:
                    forms: dict[str, InputRequest] = {each.gate_id: make_gate_form(each) for each in gates}
                    return InputRequiredResult(input_requests=forms, request_state=gates[0].run_id)
                if left_open := await self._decide(gates, await self._ask(gates)):
                    return _waiting(left_open)
                output = await self._wait_for_end(self._resume(gates[0].run_id))
        except (EnsembleError, IllegalStateError) as error:
            return make_failure(describe_error(error))
        if output.exit_reason is not ExitReason.COMPLETED:
            return make_failure(f"The run ended early ({output.exit_reason}). Output so far:\n{output.raw}")
        return CallToolResult(content=[TextContent(text=output.raw)])

    async def _ask(self, gates: Sequence[OpenReview]) -> Mapping[str, InputResponse]:
        """For clients of the older protocol; a gate without an answer stays open."""
        answers: dict[str, InputResponse] = {}
        for gate in gates:
            with contextlib.suppress(MCPError):
                answers[gate.gate_id] = await self._context.session.elicit_form(
                    gate_message(gate), dict(GATE_FORM), related_request_id=self._context.request_id
                )
        return answers

    async def _decide(self, gates: Sequence[OpenReview], answers: Mapping[str, InputResponse]) -> Sequence[OpenReview]:
        left_open: list[OpenReview] = []
        for gate in gates:
            decision = read_client_answer(answers.get(gate.gate_id))
            if decision is None:
                left_open.append(gate)
            else:
                with contextlib.suppress(ReviewDecidedError):  # the first decision counts
                    await adecide(gate.run_id, gate.gate_id, decision, by=_CLIENT, runtime=self._runtime)
        return left_open

    async def _wait_for_end(self, work: AsyncGenerator[Event | EnsembleOutput]) -> EnsembleOutput:
        # A cancelled scope leaves the run no time to end.
        run = asyncio.create_task(self._watch(work))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        try:
            return await asyncio.shield(run)
        except asyncio.CancelledError:
            run.cancel()
            raise

    async def _resume(self, run_id: str) -> AsyncGenerator[Event | EnsembleOutput]:
        begun = await bridge(start_resumed(run_id, self._team, runtime=self._runtime, is_watched=True))
        async with aclosing(stream_run(cast("Any", begun), begun.events())) as stream:
            async for each in stream:
                yield each

    async def _watch(self, work: AsyncGenerator[Event | EnsembleOutput]) -> EnsembleOutput:
        async with aclosing(work) as stream:
            async for update in stream:
                match update:
                    case EnsembleOutput():
                        return update
                    case TaskCompleteEvent() | TaskFailedEvent():
                        self._done += 1
                        text = f"{update.agent_role}: {brief(update.task_description, _SHOWN)}"
                        total = max(self._done, update.total_tasks)
                        await self._context.session.report_progress(self._done, total, text)
                    case _:
                        pass
        raise IllegalStateError("the run's events ended before its output")


def make_failure(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=text)], is_error=True)


def _exit_early(_request: ReviewRequest) -> ReviewDecision:
    return ReviewDecision.exit_early()


def _with_recorded_reviews(team: Ensemble, *, can_ask: bool) -> Ensemble:
    """Reviews wait in the record instead of at the console."""
    is_console = isinstance(team.review_handler, ConsoleReviewHandler)
    if not is_console and (team.review_handler is not None or not can_ask):
        return team
    if team.durability is Durability.OFF:
        # A run without a record cannot wait.
        return team.replace(review_handler=_exit_early) if is_console else team
    return team.replace(review_handler=None, review_wait=ReviewWait.DETACH).with_source(team.source)


def _waiting(gates: Sequence[OpenReview]) -> CallToolResult:
    commands = "\n".join(
        f"ensemble-ray review {each.run_id} {each.gate_id} approve --resume{role_option(each.required_role)}   # {brief(each.task_description, _SHOWN)}"
        for each in gates
    )
    return make_failure(f"The run waits for a person to decide (approve, edit FILE or exit). What to do:\n{commands}")


class TeamTools:
    def __init__(self, *, runtime: str | None = None) -> None:
        self._runtime = runtime
        self._teams: dict[str, Ensemble] = {}
        self._runs: set[asyncio.Task[EnsembleOutput]] = set()

    def add(self, target: str, team: Ensemble) -> None:
        """Name it after the team, its file or attribute."""
        stem = target.rpartition(":")[2] if ":" in target and not Path(target).suffix else Path(target).stem
        name = make_tool_name(team.name or stem)
        if name in self._teams or not name.strip("_"):  # a name in another script leaves only underscores
            name = make_tool_name(stem)
        if name in self._teams:
            reason = f"Two teams would be the tool '{name}': rename one of the teams."
            raise ValidationError(f"{reason} The second: {target}")
        self._teams[name] = team

    async def list_tools(self, _context: object, _params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_tool_of(name, team) for name, team in self._teams.items()])

    async def serve(self) -> None:
        server: Server[dict[str, Any]] = Server(
            "ensemble-ray", version=version("ensemble-ray"), on_list_tools=self.list_tools, on_call_tool=self._call
        )
        try:
            async with stdio_server() as (received, sent):
                requests = _AnsweredErrors(received, sent)
                await server.run(requests, sent, server.create_initialization_options())
        finally:
            for run in self._runs:
                run.cancel()
            if self._runs:
                await asyncio.wait(self._runs, timeout=_RELEASE_S)

    async def _call(
        self, context: ServerRequestContext[dict[str, Any]], params: CallToolRequestParams
    ) -> CallToolResult | InputRequiredResult:
        team = self._teams.get(params.name)
        if team is None:
            raise MCPError(INVALID_PARAMS, f"Unknown tool '{params.name}'. Known: {list(self._teams)}")
        arguments = params.arguments or {}
        known = needed_inputs(team.all_tasks)
        if spare := [name for name in arguments if name not in known]:
            return make_failure(f"Unknown inputs {spare}. Known: {list(known)}")
        try:
            check_foreign_values(team.all_tasks, arguments)
        except ValidationError as error:
            return make_failure(str(error))
        call = TeamCall(team, context, self._runs, runtime=self._runtime)
        if params.request_state is None:
            return await call.begin(arguments)
        return await call.resume(params.request_state, params.input_responses or {})


class _AnsweredErrors(ReadMessages):
    """The server answers an unreadable request with the protocol's error (S-INT-89)."""

    def __init__(self, received: ReadStream[SessionMessage | Exception], sent: WriteStream[SessionMessage]) -> None:
        self._received = received
        self._sent = sent

    @property
    def last_context(self) -> object:
        """Read by the SDK."""
        return getattr(self._received, "last_context", None)

    async def aclose(self) -> None:
        await self._received.aclose()

    async def receive(self) -> SessionMessage | Exception:
        while isinstance(item := await self._received.receive(), Exception):
            error = ErrorData(code=PARSE_ERROR, message="The line is no JSON-RPC message in UTF-8")
            await self._sent.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=None, error=error)))
        return item


def _tool_of(name: str, team: Ensemble) -> Tool:
    properties: dict[str, object] = {}
    for each, users in needed_inputs(team.all_tasks).items():
        shown: dict[str, object] = {"type": "string", "description": f"Used by: {', '.join(users)}"}
        if each in team.inputs:
            shown["default"] = str(team.inputs[each])
        properties[each] = shown
    tasks = "; ".join(brief(task.description, _SHOWN) for task in team.all_tasks)
    about = f"Runs a team of agents and returns what its last task gave. Its tasks: {tasks}"
    required = [each for each in properties if each not in team.inputs]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    described = f"{team.description}\n{about}" if team.description else about
    return Tool(name=name, title=team.name, description=described, input_schema=schema)

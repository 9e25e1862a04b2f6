"""Teams as agents of the A2A protocol (extra `a2a`)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from a2a import types
from a2a.server.context import ServerCallContext
from a2a.server.events.event_queue import Event
from a2a.server.request_handlers.request_handler import RequestHandler
from a2a.server.request_handlers.response_helpers import agent_card_to_dict
from a2a.server.routes.jsonrpc_dispatcher import JsonRpcDispatcher
from a2a.utils import errors
from a2a.utils.constants import PROTOCOL_VERSION_0_3, PROTOCOL_VERSION_1_0, TransportProtocol
from fastapi import Request
from fastapi.responses import Response
from google.protobuf.json_format import Parse, ParseError
from google.protobuf.struct_pb2 import Value
from pydantic import JsonValue, ValidationError
from sse_starlette import EventSourceResponse
from starlette.types import Receive
from typing_extensions import override

from ensemble_ray.access.admission import Right
from ensemble_ray.process.config import package_version
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve import schemas
from ensemble_ray.serve.blocking_run import BlockingRun, DoneTask, token_of
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.middleware import json_text, traceparent_of
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import EnsembleInfo, NewRun, Refusal, RunDetail, RunStatus
from ensemble_ray.serve.visible_runs import visible_run
from ensemble_ray.studio.http_server import SEND_TIMEOUT_S, STREAM_HEADERS
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.a2a.client import IDEMPOTENT_MESSAGES, plain_value

_SENT_AGAIN = "A message that is sent again with the same messageId is the same task"
_TEXT, _JSON = "text/plain", "application/json"
_KEY = "key"
HOW_TO_DECIDE = (
    "Answer with a message on this task: the text approve, exit or 'edit: NEW TEXT', or a data part "
    '{"gate_id": ..., "decision": "approve" | "edit" | "exit", "text": ..., "comment": ...}'
)
_EDIT = "edit:"
CONTEXT_TAG = "a2a.context"
_OUTPUT = "output"
#: The SDK reads messages to a depth of 100.
_DEEPEST = 80
_STATES: Mapping[RunStatus, types.TaskState] = {
    RunStatus.ACCEPTED: types.TaskState.TASK_STATE_SUBMITTED,
    RunStatus.RUNNING: types.TaskState.TASK_STATE_WORKING,
    RunStatus.WAITING: types.TaskState.TASK_STATE_INPUT_REQUIRED,
    RunStatus.COMPLETED: types.TaskState.TASK_STATE_COMPLETED,
    RunStatus.FAILED: types.TaskState.TASK_STATE_FAILED,
    RunStatus.CANCELLED: types.TaskState.TASK_STATE_CANCELED,
    RunStatus.REJECTED: types.TaskState.TASK_STATE_REJECTED,
    RunStatus.BUDGET_EXHAUSTED: types.TaskState.TASK_STATE_FAILED,
    RunStatus.INTERRUPTED: types.TaskState.TASK_STATE_FAILED,
}
_SHOWN = 200
_log = bounded_logger(__name__)
#: Sent as HTTP answers, because the protocol has no errors for them.
_HTTP_STATUSES = frozenset(
    {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT}
)
_ERRORS: Mapping[str, type[errors.A2AError]] = {
    "RUN_NOT_FOUND": errors.TaskNotFoundError,
    "RUN_OVER": errors.TaskNotCancelableError,
}
_LONGEST_CONTEXT = 256
#: Polling for the driver that resumes a decided run: interval and limit, s.
_LOOK_S, _PATIENCE_S = 0.25, 30.0
#: How long a cancellation waits for the end of the run, s.
_CANCEL_S = 5.0
#: Loggers of both versions of the protocol.
_LOGGERS = ("a2a.server.routes.jsonrpc_dispatcher", "a2a.compat.v0_3.jsonrpc_adapter")
#: First words of logged defects of the SDK.
_DEFECTS = ("Unhandled", "Error during stream")


def agent_card(info: EnsembleInfo, url: str, *, asks_for_keys: bool) -> types.AgentCard:
    takes_text = not missing_beside_text(info)
    modes = [_TEXT, _JSON] if takes_text else [_JSON]
    example = ", ".join(f'"{name}": ...' for name in info.inputs)
    text = f"a text, which is the input '{info.chat.input}', or " if takes_text else ""
    size = (
        "tasks that each run creates"
        if info.tasks is None
        else "one task"
        if info.tasks == 1
        else f"{info.tasks} tasks"
    )
    card = types.AgentCard(
        name=info.name,
        description=info.description or f"The team '{info.name}': {size}, {info.workflow}",
        version=package_version(),
        supported_interfaces=[
            types.AgentInterface(url=url, protocol_binding=TransportProtocol.JSONRPC.value, protocol_version=version)
            for version in (PROTOCOL_VERSION_1_0, PROTOCOL_VERSION_0_3)
        ],
        capabilities=types.AgentCapabilities(
            streaming=True,
            push_notifications=False,
            extended_agent_card=False,
            extensions=[types.AgentExtension(uri=IDEMPOTENT_MESSAGES, description=_SENT_AGAIN)],
        ),
        default_input_modes=modes,
        default_output_modes=[_TEXT, _JSON],
        skills=[
            types.AgentSkill(
                id="run",
                name=f"Run {info.name}",
                description=f"Takes {text}a data part {{{example}}}",
                tags=[info.workflow, *(f"{name}:{value}" if value else name for name, value in info.tags.items())],
            )
        ],
    )
    if asks_for_keys:
        scheme = types.HTTPAuthSecurityScheme(scheme="bearer", description="A key of this endpoint")
        card.security_schemes[_KEY].CopyFrom(types.SecurityScheme(http_auth_security_scheme=scheme))
        card.security_requirements.append(types.SecurityRequirement(schemes={_KEY: types.StringList()}))
    return card


def missing_beside_text(info: EnsembleInfo) -> list[str]:
    """Return the inputs that a message with only a text leaves without a value."""
    if info.chat.input is None:
        return list(info.inputs) or ["an input"]
    return [name for name in info.inputs if name != info.chat.input]


def inputs_of(parts: Sequence[types.Part], info: EnsembleInfo) -> dict[str, JsonValue]:
    texts, data = _read(parts)
    if texts is None:
        return data
    beside = [name for name in missing_beside_text(info) if name not in data]
    if info.chat.input is None or beside:
        needed = ", ".join(info.inputs) or "none"
        what = f"Send its inputs as one data part. It needs: [{needed}]"
        raise _wrong(f"The team '{info.name}' needs more than a text. {what}")
    if info.chat.input in data:
        raise _wrong(f"The input '{info.chat.input}' comes twice: as a text, and in a data part")
    return {**data, info.chat.input: texts}


def decision_of(parts: Sequence[types.Part], reviews: Sequence[schemas.OpenReview]) -> tuple[str, schemas.NewDecision]:
    texts, data = _read(parts)
    gate = data.pop("gate_id", None)
    if texts is not None and data:
        raise _wrong(f"A decision is a text or a data part, and not both. {HOW_TO_DECIDE}")
    try:
        decision = _parse_decision(texts) if texts is not None else schemas.NewDecision.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
        raise _wrong(f"The data part is no decision: {problems}. {HOW_TO_DECIDE}") from None
    known = [each.gate_id for each in reviews]
    if gate is None and len(known) == 1:
        return known[0], decision
    if not isinstance(gate, str) or gate not in known:
        raise _wrong(f"Say in a data part which gate is decided, as gate_id. There are: [{', '.join(known)}]")
    return gate, decision


def _parse_decision(text: str) -> schemas.NewDecision:
    word = text.strip()
    match word.lower().rstrip(".!"):
        case "approve":
            return schemas.NewDecision(decision=schemas.Verdict.APPROVE)
        case "exit":
            return schemas.NewDecision(decision=schemas.Verdict.EXIT)
        case _ if word.lower().startswith(_EDIT):
            return schemas.NewDecision(decision=schemas.Verdict.EDIT, text=word[len(_EDIT) :].strip())
        case _:
            raise _wrong(f"The run waits for a decision, and this text is none. {HOW_TO_DECIDE}")


def _read(parts: Iterable[types.Part]) -> tuple[str | None, dict[str, JsonValue]]:
    """Return the joined text parts of a message, or None, and the merged data parts."""
    texts: list[str] = []
    data: dict[str, JsonValue] = {}
    for index, part in enumerate(parts):
        match part.WhichOneof("content"):
            case "text":
                texts.append(whole_text(part.text))
            case "data":
                try:
                    value = plain_value(part.data)
                except ValueError as error:
                    raise _wrong(f"parts[{index}].data: a number is not one of JSON") from error
                if not isinstance(value, dict):
                    raise _wrong(f"parts[{index}].data: must be an object with the inputs by name")
                if twice := sorted(data.keys() & value.keys()):
                    raise _wrong(f"parts[{index}].data: [{', '.join(twice)}] came before")
                data |= value
            case kind:
                raise _wrong(f"parts[{index}]: a team takes texts and data, and no '{kind or 'empty'}' part")
    return ("\n\n".join(texts) if texts else None), data


def _wrong(text: str) -> Refusal:
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", text)


def context_of(run: RunDetail) -> str:
    """Return the A2A context that the client named, else the id of the run."""
    return run.tags.get(CONTEXT_TAG, run.run_id)


def task_of(run: RunDetail) -> types.Task:
    artifacts = [] if (artifact := _artifact(run)) is None else [artifact]
    return types.Task(id=run.run_id, context_id=context_of(run), status=_status(run), artifacts=artifacts)


def working_event(run: RunDetail, text: str = "") -> types.TaskStatusUpdateEvent:
    status = types.TaskStatus(state=types.TaskState.TASK_STATE_WORKING)
    status.timestamp.GetCurrentTime()
    if text:
        status.message.CopyFrom(_message(run, RunStatus.RUNNING, [types.Part(text=text)]))
    return types.TaskStatusUpdateEvent(task_id=run.run_id, context_id=context_of(run), status=status)


def artifact_event(run: RunDetail, artifact: types.Artifact, *, append: bool) -> types.TaskArtifactUpdateEvent:
    context = context_of(run)
    return types.TaskArtifactUpdateEvent(task_id=run.run_id, context_id=context, artifact=artifact, append=append)


def _status(run: RunDetail) -> types.TaskStatus:
    status = types.TaskStatus(state=_STATES[run.status])
    status.timestamp.FromDatetime(run.ended_at or run.created_at)
    parts = _describe_status(run)
    if parts:
        status.message.CopyFrom(_message(run, run.status, parts))
    return status


def _message(run: RunDetail, status: RunStatus, parts: list[types.Part]) -> types.Message:
    return types.Message(
        message_id=f"{run.run_id}:{status}",
        context_id=context_of(run),
        task_id=run.run_id,
        role=types.Role.ROLE_AGENT,
        parts=parts,
    )


def _describe_status(run: RunDetail) -> list[types.Part]:
    if run.status is RunStatus.WAITING:
        return _questions(run)
    if run.error is not None:
        causes = f" Causes: {'; '.join(run.error.causes)}" if run.error.causes else ""
        return [types.Part(text=f"{run.error.error}: {run.error.message}{causes}")]
    match run.status:
        case RunStatus.BUDGET_EXHAUSTED:
            return [types.Part(text="The run exhausted its budget before its end")]
        case RunStatus.INTERRUPTED:
            return [types.Part(text="The run was interrupted. Its record is complete up to that point")]
        case _:
            return []


def _questions(run: RunDetail) -> list[types.Part]:
    gates = [
        {"gate_id": each.gate_id, "timing": each.timing, "prompt": each.prompt, "task": each.task_description,
         "output": each.task_output, "expires_at": None if each.expires_at is None else each.expires_at.isoformat()}
        for each in run.reviews
    ]  # fmt: skip
    texts = [
        "\n\n".join(filter(None, (each.prompt, f"Task: {each.task_description}", each.task_output)))
        for each in run.reviews
    ]
    return [types.Part(text="\n\n".join((*texts, HOW_TO_DECIDE))), types.Part(data=_value({"gates": gates}))]


def _artifact(run: RunDetail) -> types.Artifact | None:
    result = run.result
    if result is None or (run.status is not RunStatus.COMPLETED and not result.raw):
        return None
    parts = [types.Part(text=result.raw)]
    structured = next((each.structured for each in reversed(result.tasks) if each.text == result.raw), None)
    if structured is not None:
        with contextlib.suppress(ParseError, RecursionError):  # the text part contains the data as well (S-INT-97)
            parts.append(types.Part(data=_value(structured)))
    return types.Artifact(artifact_id=_OUTPUT, name=_OUTPUT, parts=parts)


def _value(data: object) -> Value:
    return Parse(json_text(data), Value(), max_recursion_depth=_DEEPEST)


class TaskStream:
    """Translates events of a run. Tokens of `streamed_task` are the output."""

    def __init__(self, run: RunDetail, streamed_task: str | None) -> None:
        self._run = run
        self._streamed_task = streamed_task
        self._sent = ""
        self._turn = 0
        self._is_working = False

    def events(
        self, happened: schemas.RunEvent | RunDetail
    ) -> list[types.TaskStatusUpdateEvent | types.TaskArtifactUpdateEvent]:
        if isinstance(happened, RunDetail):
            return self._end(happened)
        if (token := token_of(happened)) is not None:
            if token.instance != self._streamed_task or token.is_reasoning or not token.token:
                return []
            if token.iteration_index != self._turn:
                self._turn, self._sent = token.iteration_index, ""
            is_first = not self._sent
            self._sent += token.token
            piece = types.Artifact(artifact_id=_OUTPUT, name=_OUTPUT, parts=[types.Part(text=token.token)])
            return [artifact_event(self._run, piece, append=not is_first)]
        match happened.type:
            case "task_started" if not self._is_working:
                self._is_working = True
                return [working_event(self._run)]
            case "task_completed":
                self._is_working = True
                done = DoneTask.model_validate(happened.data)
                text = f"Done by {done.agent_role}: {done.task_description[:_SHOWN]}"
                return [working_event(self._run, text)]
            case _:
                return []

    def _end(self, run: RunDetail) -> list[types.TaskStatusUpdateEvent | types.TaskArtifactUpdateEvent]:
        status = types.TaskStatusUpdateEvent(task_id=run.run_id, context_id=context_of(run), status=_status(run))
        output = _artifact(run)
        if output is None or [each.text for each in output.parts] == [self._sent]:
            return [status]
        whole = artifact_event(run, output, append=False)
        whole.last_chunk = True
        return [whole, status]


class TeamHandler(RequestHandler):
    """One team as an agent, for one request of one caller. Its runs belong to the span `traceparent` (S-INT-38)."""

    def __init__(
        self,
        service: RunService,
        caller: Caller,
        info: EnsembleInfo,
        receive: Receive,
        *,
        traceparent: str | None = None,
    ) -> None:
        self._service = service
        self._caller = caller
        self._info = info
        self._receive = receive
        self._traceparent = traceparent
        #: replaces an error of the protocol
        self.refusal: Refusal | None = None

    @override
    async def on_message_send(self, params: types.SendMessageRequest, context: ServerCallContext) -> types.Task:
        with self._protocol_errors():
            run = await self._carry_out(params.message)
            if not params.configuration.return_immediately and not _is_settled(run):
                waiting = BlockingRun(self._service, run.run_id, ends_with_client=False)
                run = await waiting.end_for(self._receive, or_gate=True)
            return task_of(run)

    @override
    async def on_message_send_stream(
        self, params: types.SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        with self._protocol_errors():
            run = await self._carry_out(params.message)
            async with aclosing(self._follow_run(run)) as events:
                async for event in events:
                    yield event

    @override
    async def on_subscribe_to_task(
        self, params: types.SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event]:
        with self._protocol_errors():
            run = await self._get_own_run(params.id, Right.READ)
            if run.status.is_final:
                raise errors.UnsupportedOperationError(f"Task '{run.run_id}' has ended: read it with GetTask")
            async with aclosing(self._follow_run(run)) as events:
                async for event in events:
                    yield event

    @override
    async def on_get_task(self, params: types.GetTaskRequest, context: ServerCallContext) -> types.Task:
        with self._protocol_errors():
            return task_of(await self._get_own_run(params.id, Right.READ))

    @override
    async def on_cancel_task(self, params: types.CancelTaskRequest, context: ServerCallContext) -> types.Task:
        with self._protocol_errors():
            await self._get_own_run(params.id, Right.RUN)
            await self._service.cancel(params.id)
            return task_of(await self._service.wait(params.id, _CANCEL_S))

    @override
    async def on_list_tasks(
        self, params: types.ListTasksRequest, context: ServerCallContext
    ) -> types.ListTasksResponse:
        raise errors.UnsupportedOperationError("This agent does not list tasks: use GET /runs of the endpoint")

    @override
    async def on_get_extended_agent_card(
        self, params: types.GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> types.AgentCard:
        raise errors.ExtendedAgentCardNotConfiguredError

    async def _refuse_push_notifications(self, params: Any, context: ServerCallContext) -> Any:  # noqa: ARG002
        raise errors.PushNotificationNotSupportedError

    on_create_task_push_notification_config = _refuse_push_notifications
    on_get_task_push_notification_config = _refuse_push_notifications
    on_list_task_push_notification_configs = _refuse_push_notifications
    on_delete_task_push_notification_config = _refuse_push_notifications

    async def _carry_out(self, message: types.Message) -> RunDetail:
        if message.task_id:
            return await self._decide(message)
        self._caller.check(Right.RUN)
        tags = {CONTEXT_TAG: message.context_id} if message.context_id else {}
        if len(message.context_id) > _LONGEST_CONTEXT:
            raise _wrong(f"context_id has more than {_LONGEST_CONTEXT} characters")
        inputs = inputs_of(message.parts, self._info)
        asked = NewRun(ensemble=self._info.name, inputs=inputs, tags=tags, traceparent=self._traceparent)
        digest = hashlib.sha256(f"{self._info.name}\n{message.message_id}".encode()).hexdigest()
        key = self._caller.own_key(f"a2a:{digest}") if message.message_id else None
        taken = await self._service.start(self._caller.sign(asked), idempotency_key=key, account=self._caller.account)
        return await self._service.get(taken.run_id)

    async def _decide(self, message: types.Message) -> RunDetail:
        run = await self._get_own_run(message.task_id, Right.REVIEW)
        if message.context_id and message.context_id != context_of(run):
            raise _wrong(f"Task '{run.run_id}' is of another context than '{message.context_id[:200]}'")
        if not run.reviews:
            raise _wrong(f"Task '{run.run_id}' asks nothing: it is {run.status}. Begin another one without a task_id")
        gate_id, decision = decision_of(message.parts, run.reviews)
        decided = await self._service.decide(
            run.run_id, gate_id, decision, by=self._caller.name, roles=self._caller.roles
        )
        if isinstance(decided, schemas.ReviewConflict):
            raise _wrong(f"Gate '{gate_id}' was decided before: {decided.first.decision}, by {decided.first.by}")
        return await self._service.get(run.run_id)

    async def _get_own_run(self, run_id: str, right: Right) -> RunDetail:
        self._caller.check(right)
        run = await visible_run(self._service, self._caller, run_id)
        if run.ensemble != self._info.name:
            raise Refusal(HTTPStatus.NOT_FOUND, "RUN_NOT_FOUND", f"There is no run '{run_id[:200]}'")
        return run

    async def _follow_run(self, run: RunDetail) -> AsyncGenerator[Event]:
        yield task_of(run)
        if _is_settled(run):
            return
        for _ in range(int(_PATIENCE_S / _LOOK_S)):  # its driver has not handled the decisions yet
            if run.status is not RunStatus.WAITING or run.reviews:
                break
            await asyncio.sleep(_LOOK_S)
            run = await self._service.get(run.run_id)
        stream = TaskStream(run, self._info.chat.streamed_task)
        following = BlockingRun(self._service, run.run_id, ends_with_client=False).follow()
        async with aclosing(following) as happening:
            async for each in happening:
                for event in stream.events(each):
                    yield event

    @contextlib.contextmanager
    def _protocol_errors(self) -> Generator[None]:
        """Turn a refusal into an error of the protocol. The text of a defect is only logged."""
        try:
            yield
        except errors.A2AError:
            raise
        except Refusal as refusal:
            if refusal.status in _HTTP_STATUSES or refusal.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self.refusal = refusal
                raise errors.InternalError(refusal.message) from refusal
            raise _ERRORS.get(refusal.code, errors.InvalidParamsError)(refusal.message) from refusal
        except Exception as error:  # noqa: BLE001  a defect of ours
            _log.error("Team '%s': %s in an answer of A2A", self._info.name, type(error).__name__, exc_info=error)
            raise errors.InternalError(f"{type(error).__name__} in the endpoint. Its log says more") from None


def _is_settled(run: RunDetail) -> bool:
    """Return whether the run has ended or has an open gate. Without gates, a waiting run continues soon."""
    return run.status.is_final or (run.status is RunStatus.WAITING and bool(run.reviews))


# Without this filter the SDK logs each invalid request with a traceback and parts of its content.
for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(lambda line: not isinstance(line.msg, str) or line.msg.startswith(_DEFECTS))


async def dispatch(request: Request, service: RunService, caller: Caller, info: EnsembleInfo) -> Response:
    handler = TeamHandler(service, caller, info, request.receive, traceparent=traceparent_of(request))
    answer = await JsonRpcDispatcher(handler, enable_v0_3_compat=True).handle_requests(request)
    if handler.refusal is not None:
        raise handler.refusal
    if isinstance(answer, EventSourceResponse):
        answer.send_timeout = SEND_TIMEOUT_S
        answer.headers.update(STREAM_HEADERS)
    return answer


def card_data(request: Request, info: EnsembleInfo) -> dict[str, Any]:
    public: str | None = request.app.state.public_url
    base = (public or str(request.base_url)).rstrip("/")
    asks_for_keys: bool = request.app.state.asks_for_keys
    return agent_card_to_dict(agent_card(info, f"{base}/a2a/{quote(info.name)}", asks_for_keys=asks_for_keys))

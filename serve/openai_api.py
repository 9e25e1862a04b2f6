"""The OpenAI API of an endpoint, where each team is a model (S-SRV-100 to S-SRV-128)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from msgspec import Struct
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StrictBool
from sse_starlette import ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from ensemble_ray.access.admission import Right
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.serve import schemas
from ensemble_ray.serve.blocking_run import BlockingRun, StreamedText
from ensemble_ray.serve.callers import Caller, describe_refusal
from ensemble_ray.serve.catalog import HISTORY_INPUT
from ensemble_ray.serve.middleware import CallerDependency, answer, json_text, problems_of, traceparent_of
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import (
    EnsembleInfo,
    Failure,
    Metrics,
    NewRun,
    Refusal,
    RunDetail,
    RunPriority,
    RunStatus,
    Text,
    Wire,
)
from ensemble_ray.serve.visible_runs import ServiceDependency, visible_run, visible_team, visible_teams
from ensemble_ray.studio.http_server import EventAnswer
from ensemble_ray.text.foreign_text import whole_data, whole_text
from ensemble_ray.values.messages import Reasoning

__path__: list[str] = []  # old names of its parts are imported as modules below it
RUN_HEADER = "x-run-id"
#: Clients must not repeat failed runs, which cost money.
_NO_RETRY = {"x-should-retry": "false"}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_CODES = {"ENSEMBLE_NOT_FOUND": "model_not_found"}
_UNREADABLE = "The body cannot be read: it is no text, is nested too deeply, or has a number of thousands of digits"
_Name = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(whole_data)]
#: An unsupported field may have these values.
_NOTHING: tuple[JsonValue, ...] = (None, False, 0, "", [], {})
_CHAT = ("tools", "functions", "logprobs", "top_logprobs", "audio", "web_search_options", "stop")
_RESPONSE = ("tools", "top_logprobs", "previous_response_id", "conversation", "background", "prompt")
_WHY = {
    "previous_response_id": "send the earlier messages in 'input'",
    "conversation": "send the earlier messages in 'input'",
    "background": "start the run with POST /runs, and read it with GET /v1/responses/{run_id}",
    "tools": "a team has its own tools",
    "functions": "a team has its own tools",
}
_TIERS = {"priority": RunPriority.HIGH, "flex": RunPriority.LOW}
#: Characters of a piece of an answer that is not streamed.
_PIECE = 200


class Asking(Struct, frozen=True, kw_only=True):
    request: Request
    service: RunService
    caller: Caller
    idempotency_key: str | None

    @classmethod
    def of(
        cls,
        request: Request,
        service: ServiceDependency,
        caller: CallerDependency,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    ) -> Self:
        caller.check(Right.RUN)
        return cls(request=request, service=service, caller=caller, idempotency_key=caller.own_key(idempotency_key))

    async def begin(
        self,
        info: EnsembleInfo,
        inputs: Mapping[str, JsonValue],
        tags: Mapping[str, str],
        priority: RunPriority | None,
    ) -> BlockingRun:
        span = traceparent_of(self.request)
        asked = NewRun(ensemble=info.name, inputs=dict(inputs), tags=dict(tags), traceparent=span, priority=priority)
        return await BlockingRun.begin(
            self.service,
            self.caller.sign(asked),
            idempotency_key=self.idempotency_key,
            account=self.caller.account,
            ends_with_client=bool(self.request.app.state.cancel_on_disconnect),
        )


AskingDependency = Annotated[Asking, Depends(Asking.of)]


class ApiError(Wire):
    """An error.

    Attributes:
        type: Kind of the error, which depends on the status.
        param: The wrong field of the request.
        code: Stable name of the reason, in lower case.
    """

    message: Text
    type: str
    param: str | None = None
    code: str | None = None


class ApiErrorBody(Wire):
    """The body of every answer that is not 2xx."""

    error: ApiError


API_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ApiErrorBody}, "5XX": {"model": ApiErrorBody}}


def wrong_parameter(param: str, message: str, code: str = "UNSUPPORTED_PARAMETER") -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, code, message, param=param)


def api_error(failure: Failure, param: str | None = None) -> ApiErrorBody:
    status = HTTPStatus(failure.status)
    kind = _TYPES.get(status, "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    causes = f" Causes: {'; '.join(failure.causes)}" if failure.causes else ""
    code = _CODES.get(failure.code, failure.code.lower())
    return ApiErrorBody(error=ApiError(message=f"{failure.message}{causes}", type=kind, param=param, code=code))


def run_error(failure: Failure, run_id: str) -> JSONResponse:
    headers = {RUN_HEADER: run_id, **_NO_RETRY}
    return answer(api_error(failure), HTTPStatus(failure.status), headers)


def refusal_error(refusal: Refusal) -> JSONResponse:
    error = api_error(describe_refusal(refusal), refusal.param)
    return answer(error, HTTPStatus(refusal.status), refusal.all_headers)


class ApiRoute(APIRoute):
    """Answers refusals in the format of this API."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_in_form(request: Request) -> Response:
            try:
                return await handle(request)
            except Refusal as refusal:
                return refusal_error(refusal)
            except RequestValidationError as error:
                first = ".".join(str(part) for part in error.errors()[0]["loc"][1:]) if error.errors() else ""
                return _invalid("; ".join(problems_of(error)), first[:200] or None)
            except HTTPException as error:
                if error.status_code != HTTPStatus.BAD_REQUEST:
                    raise
                return _invalid(_UNREADABLE)

        return handle_in_form


def _invalid(message: str, param: str | None = None) -> JSONResponse:
    error = ApiError(message=message, type="invalid_request_error", param=param, code="invalid_request")
    return answer(ApiErrorBody(error=error), HTTPStatus.BAD_REQUEST)


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MessageBody(_Body):
    """A message of a conversation.

    Attributes:
        role: Role of the sender; empty for items that are not messages.
        content: A text, or its parts.
    """

    role: str = ""
    type: str = "message"
    content: Text | list[dict[str, JsonValue]] | None = None


class StreamOptions(_Body):
    """Options of a stream.

    Attributes:
        include_usage: Whether the last chunk contains the token counts.
    """

    include_usage: StrictBool | None = None


class ChatBody(_Body):
    """Body of `POST /v1/chat/completions`.

    Attributes:
        model: Name of the team.
        messages: The conversation. The user's last message is the team's input.
        metadata: Tags of the run.
        service_tier: `priority` and `flex` are a high and a low priority in the team's queue.
    """

    model: _Name
    messages: list[MessageBody] = Field(min_length=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    metadata: schemas.RunTags | None = None
    service_tier: JsonValue = None
    n: JsonValue = None
    response_format: JsonValue = None
    modalities: JsonValue = None
    tools: JsonValue = None
    functions: JsonValue = None
    logprobs: JsonValue = None
    top_logprobs: JsonValue = None
    audio: JsonValue = None
    web_search_options: JsonValue = None
    stop: JsonValue = None

    def check(self) -> None:
        if self.n is not None and (isinstance(self.n, bool) or self.n != 1):
            raise wrong_parameter("n", "n: a run of a team returns one answer; repeat the request for another one")
        if self.modalities is not None and self.modalities != ["text"]:
            raise wrong_parameter("modalities", "modalities: teams only answer in text")
        _check_format(self.response_format, "response_format")
        _check_unset(self, _CHAT)
        if self.stream_options is not None and not self.stream:
            raise wrong_parameter("stream_options", "stream_options: only allowed with stream=true")


class ResponseBody(_Body):
    """Body of `POST /v1/responses`.

    Attributes:
        model: Name of the team.
        input: One message, or a conversation whose last message of the user is the team's input.
        instructions: A message before the conversation.
        metadata: Tags of the run.
        service_tier: `priority` and `flex` are a high and a low priority in the team's queue.
    """

    model: _Name
    input: Text | Annotated[list[MessageBody], Field(min_length=1)]
    instructions: Text | None = None
    stream: StrictBool | None = None
    metadata: schemas.RunTags | None = None
    service_tier: JsonValue = None
    text: JsonValue = None
    tools: JsonValue = None
    top_logprobs: JsonValue = None
    previous_response_id: JsonValue = None
    conversation: JsonValue = None
    background: JsonValue = None
    prompt: JsonValue = None

    def check(self) -> None:
        if self.text is not None and not isinstance(self.text, dict):
            raise wrong_parameter("text", "text: must be an object", code="INVALID_REQUEST")
        _check_format(None if self.text is None else self.text.get("format"), "text.format")
        _check_unset(self, _RESPONSE)


def priority_of(service_tier: JsonValue) -> RunPriority | None:
    return _TIERS.get(service_tier) if isinstance(service_tier, str) else None


def _check_format(value: JsonValue, name: str) -> None:
    if value is not None and not (isinstance(value, dict) and value.get("type") == "text"):
        why = "the team determines the format of its answer (the output_type of its last task); request text"
        raise wrong_parameter(name, f"{name}: {why}")


def _check_unset(body: BaseModel, names: tuple[str, ...]) -> None:
    for name in names:
        value: JsonValue = getattr(body, name)
        if not any(value == each for each in _NOTHING):
            why = _WHY.get(name, "leave it out")
            raise wrong_parameter(name, f"{name}: not supported by teams; {why}")


class TeamAnswer(Struct, frozen=True, kw_only=True):
    text: str
    #: the budget was exhausted before the end
    is_cut: bool
    metrics: Metrics
    #: of the last task's model
    reasoning: str | None = None


def answer_of(run: RunDetail) -> TeamAnswer | Failure:
    """Return the answer of a run that has ended or waits for a person (S-SRV-110, S-SRV-112)."""
    if run.error is not None:
        return run.error
    match run.status:
        case RunStatus.WAITING:
            gates = ", ".join(each.gate_id for each in run.reviews)
            named = f"at [{gates}]" if gates else f"(GET /runs/{run.run_id} names the gates)"
            text = (
                f"Run '{run.run_id}' waits for a person to decide {named}. Its answer is at GET /v1/responses/{run.run_id} "
                "when that is done"
            )
            return _failure(run, HTTPStatus.CONFLICT, "RUN_WAITING", text)
        case RunStatus.CANCELLED:
            return _failure(run, HTTPStatus.BAD_GATEWAY, "RUN_CANCELLED", f"Run '{run.run_id}' was cancelled")
        case RunStatus.INTERRUPTED:
            text = f"Run '{run.run_id}' was interrupted. Its record is complete up to that point"
            return _failure(run, HTTPStatus.SERVICE_UNAVAILABLE, "RUN_INTERRUPTED", text)
        case _:
            pass
    is_cut = run.status is RunStatus.BUDGET_EXHAUSTED
    if run.result is None or (is_cut and not run.result.raw):
        text = f"Run '{run.run_id}' ended without an answer: {run.status}"
        return _failure(run, HTTPStatus.BAD_GATEWAY, "NO_ANSWER", text)
    reasoning = run.result.tasks[-1].reasoning if run.result.tasks else None
    return TeamAnswer(text=run.result.raw, is_cut=is_cut, metrics=run.result.metrics, reasoning=reasoning)


def _failure(run: RunDetail, status: HTTPStatus, code: str, message: str) -> Failure:
    return Failure(error="RunError", code=code, status=status, message=message, run_id=run.run_id)


class AnswerStream(EventAnswer):
    """The stream of one run's answer. Its end detaches the client from the run."""

    def __init__(self, run: BlockingRun, events: AsyncGenerator[ServerSentEvent]) -> None:
        super().__init__(events, headers={RUN_HEADER: run.run_id})
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._run.detach()


async def texts_of(run: BlockingRun, streamed_task: str | None) -> AsyncGenerator[str | TeamAnswer | Failure]:
    """Yield pieces of the answer and of reasoning (`Reasoning`), then the whole answer, or the failure."""
    said, has_thought = StreamedText(), False
    async with aclosing(run.answer(streamed_task, said)) as pieces:
        async for each in pieces:
            if not isinstance(each, str):
                for last in _end(each, said, has_thought=has_thought):
                    yield last
            elif each:
                has_thought = has_thought or isinstance(each, Reasoning)
                yield each


def _end(run: RunDetail, said: StreamedText, *, has_thought: bool) -> list[str | TeamAnswer | Failure]:
    found = answer_of(run)
    if not isinstance(found, TeamAnswer):
        return [found]
    rest = said.rest(found.text)
    if rest is None:  # S-SRV-123
        text = (
            f"The model started the answer again during the stream, so the streamed text is not the answer. The answer is at "
            f"GET /v1/responses/{run.run_id}"
        )
        return [_failure(run, HTTPStatus.BAD_GATEWAY, "ANSWER_BEGUN_ANEW", text)]
    thought = [Reasoning(found.reasoning)] if found.reasoning and rest == found.text and not has_thought else []
    return [*thought, *(rest[start : start + _PIECE] for start in range(0, len(rest), _PIECE)), found]


def render(data: Mapping[str, object], event: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(data=json_text(data), event=event, sep="\n")


class Model(Wire):
    """A team.

    Attributes:
        created: Unix time, s; always 0.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "ensemble-ray"


class ModelList(Wire):
    """Answer to `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class ChatDetails(Wire):
    """Parts of the output tokens."""

    reasoning_tokens: int


class InputDetails(Wire):
    """Parts of a run's input tokens; 0 also if no provider counted them."""

    cached_tokens: int = 0


class ChatUsage(Wire):
    """Tokens of all tasks of a run.

    Attributes:
        prompt_tokens_details: Left out if no provider read tokens from its cache.
        completion_tokens_details: Left out if no provider counted reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: InputDetails | None = Field(default=None, exclude_if=schemas.is_none)
    completion_tokens_details: ChatDetails | None = Field(default=None, exclude_if=schemas.is_none)


class AnswerMessage(Wire):
    """The team's answer.

    Attributes:
        reasoning_content: Reasoning of the last task's model; left out if there is none.
    """

    role: Literal["assistant"] = "assistant"
    content: Text
    reasoning_content: Text | None = Field(default=None, exclude_if=schemas.is_none)
    refusal: None = None


class Choice(Wire):
    """The only choice.

    Attributes:
        finish_reason: `length` if the budget was exhausted before the end.
    """

    index: Literal[0] = 0
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class ChatCompletion(Wire):
    """Answer to `POST /v1/chat/completions`.

    Attributes:
        id: Id of the run.
        created: Unix time, s.
        usage: Null if a provider did not report it.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice] = Field(min_length=1, max_length=1)
    usage: ChatUsage | None

    @classmethod
    def of(cls, answer: TeamAnswer, *, run_id: str, model: str, created: int) -> Self:
        choice = Choice(
            message=AnswerMessage(content=answer.text, reasoning_content=answer.reasoning),
            finish_reason=_finish_reason(answer),
        )
        return cls(id=run_id, created=created, model=model, choices=[choice], usage=chat_usage(answer.metrics))


class ChatChunks:
    """Builds chunks of a streamed answer, each with `usage` if requested."""

    def __init__(self, *, run_id: str, model: str, created: int, has_usage: bool) -> None:
        kind = "chat.completion.chunk"
        self._head: dict[str, object] = {"id": run_id, "object": kind, "created": created, "model": model}
        self._usage: dict[str, object] = {"usage": None} if has_usage else {}

    def last(self, answer: TeamAnswer) -> list[dict[str, object]]:
        end = self.chunk({}, _finish_reason(answer))
        if not self._usage:
            return [end]
        usage = chat_usage(answer.metrics)
        return [end, {**self._head, "choices": [], "usage": None if usage is None else usage.model_dump()}]

    def chunk(self, delta: Mapping[str, object], finish_reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "choices": [choice], **self._usage}


def chat_usage(metrics: Metrics) -> ChatUsage | None:
    """Return the tokens of a run; None if a provider did not report them."""
    tokens_in, tokens_out, thought = metrics.input_tokens, metrics.output_tokens, metrics.reasoning_tokens
    if tokens_in is None or tokens_out is None:
        return None
    return ChatUsage(
        prompt_tokens=tokens_in,
        completion_tokens=tokens_out,
        total_tokens=tokens_in + tokens_out,
        prompt_tokens_details=InputDetails(cached_tokens=metrics.cached_tokens) if metrics.cached_tokens else None,
        completion_tokens_details=ChatDetails(reasoning_tokens=thought) if thought else None,
    )


def _finish_reason(answer: TeamAnswer) -> Literal["stop", "length"]:
    return "length" if answer.is_cut else "stop"


_ROLES = frozenset({"system", "developer", "user", "assistant"})
_USER, _ASSISTANT = "user", "assistant"
_TEXTS = frozenset({"text", "input_text", "output_text"})


def inputs_of(
    messages: Sequence[MessageBody], info: EnsembleInfo, *, place: str, instructions: str | None = None
) -> Mapping[str, JsonValue]:
    """Return the inputs of a run. `place` names the conversation in the request."""
    said = [(each.role, _text_of(each, f"{place}[{index}]")) for index, each in enumerate(messages)]
    last = max((index for index, (role, _) in enumerate(said) if role == _USER), default=None)
    if last is None:
        raise wrong_parameter(place, f"{place}: there is no message of the user", code="INVALID_REQUEST")
    _, message = said.pop(last)
    if instructions:
        said.insert(0, ("system", instructions))
    history = "\n\n".join(f"{role}: {text}" for role, text in said if text)
    return {_message_input(info): message, **({HISTORY_INPUT: history} if info.chat.takes_history else {})}


def _message_input(info: EnsembleInfo) -> str:
    given = {info.chat.input, *({HISTORY_INPUT} if info.chat.takes_history else ())}
    missing = tuple(each for each in info.inputs if each not in given)
    if info.chat.input is not None and not missing:
        return info.chat.input
    if info.chat.input is not None:
        why = f"besides '{info.chat.input}', the variable of the message, it needs [{', '.join(missing)}]"
        what = "set them in the team's 'inputs', or start the run with POST /runs"
    elif missing:
        why = f"it needs [{', '.join(missing)}], and a message is one value"
        what = "name one with the team's 'chat_input', and set the others in its 'inputs'"
    else:
        why = "its texts have no variable for a message"
        what = "add one such as {message}, or name one that has a value with the team's 'chat_input'"
    text = f"The team '{info.name}' cannot answer as a model: {why}. What to do: {what}"
    raise Refusal(HTTPStatus.BAD_REQUEST, "INPUTS_MISSING", text, missing=missing)


def _text_of(message: MessageBody, place: str) -> str:
    if message.type != "message" or message.role not in _ROLES:
        what = message.type if message.type != "message" else f"a message of '{message.role}'"
        raise wrong_parameter(place, f"{place}: '{what[:60]}' cannot be passed to a team, which has its own tools")
    # An assistant's message may consist of tool calls.
    if not message.content and message.content != "" and message.role != _ASSISTANT:
        raise wrong_parameter(f"{place}.content", f"{place}.content: must be a text", code="INVALID_REQUEST")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(_text_of_part(part, f"{place}.content[{index}]") for index, part in enumerate(message.content))


def _text_of_part(part: Mapping[str, JsonValue], place: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in _TEXTS:
        what = f"'{str(kind)[:60]}' cannot be passed to a team, which only accepts texts"
        raise wrong_parameter(place, f"{place}: {what}")
    if not isinstance(text, str):
        raise wrong_parameter(place, f"{place}.text: must be a text", code="INVALID_REQUEST")
    return whole_text(text)


chat_router: APIRouter = APIRouter(prefix="/v1", tags=["openai"], responses=API_ERRORS, route_class=ApiRoute)
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@chat_router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses={200: {"description": "The answer; with `stream`, chunks of it", "content": _STREAM}},
)
async def post_chat(body: ChatBody, asking: AskingDependency) -> Response:
    """Answer the user's last message."""
    body.check()
    info = await visible_team(asking.service, asking.caller, body.model, kind="model")
    inputs = inputs_of(body.messages, info, place="messages")
    run = await asking.begin(info, inputs, body.metadata or {}, priority_of(body.service_tier))
    created = int(SystemClock().now())
    if body.stream:
        has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        chunks = ChatChunks(run_id=run.run_id, model=info.name, created=created, has_usage=has_usage)
        return AnswerStream(run, _chat_events(run, info, chunks))
    found = answer_of(await run.end_for(asking.request.receive))
    if not isinstance(found, TeamAnswer):
        return run_error(found, run.run_id)
    completion = ChatCompletion.of(found, run_id=run.run_id, model=info.name, created=created)
    return answer(completion, HTTPStatus.OK, {RUN_HEADER: run.run_id})


async def _chat_events(run: BlockingRun, info: EnsembleInfo, chunks: ChatChunks) -> AsyncGenerator[ServerSentEvent]:
    yield render(chunks.chunk({"role": "assistant", "content": ""}))
    async with aclosing(texts_of(run, info.chat.streamed_task)) as texts:
        async for each in texts:
            if isinstance(each, str):
                kind = "reasoning_content" if isinstance(each, Reasoning) else "content"
                yield render(chunks.chunk({kind: each}))
            elif isinstance(each, TeamAnswer):
                for chunk in chunks.last(each):
                    yield render(chunk)
            else:
                yield render(api_error(each).model_dump())
    yield ServerSentEvent(data="[DONE]", sep="\n")


model_router: APIRouter = APIRouter(prefix="/v1", tags=["openai"], responses=API_ERRORS, route_class=ApiRoute)


@model_router.get("/models", response_model=ModelList)
async def get_models(service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """List the teams as models."""
    caller.check(Right.READ)
    return answer(ModelList(data=[Model(id=each.name) for each in await visible_teams(service, caller)]))


@model_router.get("/models/{model}", response_model=Model)
async def get_model(model: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return a team as a model."""
    caller.check(Right.READ)
    return answer(Model(id=(await visible_team(service, caller, model, kind="model")).name))


_Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]
_STATUSES: Mapping[RunStatus, _Status] = {
    RunStatus.ACCEPTED: "queued",
    RunStatus.RUNNING: "in_progress",
    RunStatus.WAITING: "in_progress",
    RunStatus.CANCELLED: "cancelled",
}


class ResponseText(Wire):
    """A text of an answer."""

    type: Literal["output_text"] = "output_text"
    text: Text
    annotations: list[JsonValue] = Field(default_factory=list[JsonValue])
    logprobs: list[JsonValue] = Field(default_factory=list[JsonValue])


class ResponseMessage(Wire):
    """The team's answer."""

    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[ResponseText]


class ResponseFailure(Wire):
    """The reason why there is no answer."""

    code: Literal["server_error"] = "server_error"
    message: Text


class OutputDetails(Wire):
    """Parts of a run's output tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(Wire):
    """Tokens of all tasks of a run."""

    input_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class IncompleteDetails(Wire):
    """The reason for a partial answer: the budget was exhausted."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(Wire):
    """Answer to `POST /v1/responses` and `GET /v1/responses/{response_id}`.

    Attributes:
        id: Id of the run.
        created_at: Unix time, s.
        usage: Null before the end, or if a provider did not report it.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: _Status
    model: str
    output: list[ResponseMessage]
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: Text | None = None
    metadata: dict[str, str]
    usage: ResponseUsage | None = None
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    temperature: None = None
    tool_choice: Literal["auto"] = "auto"
    tools: list[JsonValue] = Field(default_factory=list[JsonValue])
    top_p: None = None


def make_answered(response: ResponseObject, answer: TeamAnswer) -> ResponseObject:
    state: Literal["completed", "incomplete"] = "incomplete" if answer.is_cut else "completed"
    return response.model_copy(
        update={
            "status": state,
            "output": [message_of(response.id, state, answer.text)],
            "incomplete_details": IncompleteDetails() if answer.is_cut else None,
            "usage": _response_usage(answer.metrics),
        }
    )


def make_failed(response: ResponseObject, failure: Failure) -> ResponseObject:
    error = ResponseFailure(message=api_error(failure).error.message)
    return response.model_copy(update={"status": "failed", "error": error})


def response_of(run: RunDetail) -> ResponseObject:
    """Return a run in any state as a response (S-SRV-126)."""
    response = ResponseObject(
        id=run.run_id,
        created_at=int(run.created_at.timestamp()),
        status="in_progress",
        model=run.ensemble,
        output=[],
        metadata=run.tags,
    )
    if (status := _STATUSES.get(run.status)) is not None:
        return response.model_copy(update={"status": status})
    found = answer_of(run)
    return make_answered(response, found) if isinstance(found, TeamAnswer) else make_failed(response, found)


def message_of(run_id: str, status: Literal["in_progress", "completed", "incomplete"], *texts: str) -> ResponseMessage:
    return ResponseMessage(id=f"msg_{run_id}", status=status, content=[ResponseText(text=text) for text in texts])


class ResponseEvents:
    """Builds the events of one response, in order (S-SRV-125)."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = -1
        self._is_said = False
        self._place: dict[str, object] = {"item_id": f"msg_{response.id}", "output_index": 0, "content_index": 0}

    def first(self) -> list[dict[str, object]]:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def piece(self, text: str) -> list[dict[str, object]]:
        events = [] if self._is_said else self._begin_text()
        return [*events, self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])]

    def last(self, answer: TeamAnswer) -> list[dict[str, object]]:
        events = [] if self._is_said else self._begin_text()
        self._response = make_answered(self._response, answer)
        (message,) = self._response.output
        (part,) = message.content
        return [
            *events,
            self._event("response.output_text.done", **self._place, text=part.text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=part.model_dump()),
            self._event("response.output_item.done", output_index=0, item=message.model_dump()),
            self._whole(f"response.{self._response.status}"),
        ]

    def make_failure(self, failure: Failure) -> list[dict[str, object]]:
        self._response = make_failed(self._response, failure)
        return [self._whole("response.failed")]

    def _begin_text(self) -> list[dict[str, object]]:
        self._is_said = True
        item = message_of(self._response.id, "in_progress").model_dump()
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=ResponseText(text="").model_dump()),
        ]

    def _whole(self, kind: str) -> dict[str, object]:
        return self._event(kind, response=self._response.model_dump())

    def _event(self, kind: str, **data: object) -> dict[str, object]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **data}


def _response_usage(metrics: Metrics) -> ResponseUsage | None:
    tokens_in, tokens_out = metrics.input_tokens, metrics.output_tokens
    if tokens_in is None or tokens_out is None:
        return None
    return ResponseUsage(
        input_tokens=tokens_in,
        input_tokens_details=InputDetails(cached_tokens=metrics.cached_tokens),
        output_tokens=tokens_out,
        output_tokens_details=OutputDetails(reasoning_tokens=metrics.reasoning_tokens),
        total_tokens=tokens_in + tokens_out,
    )


response_router: APIRouter = APIRouter(prefix="/v1", tags=["openai"], responses=API_ERRORS, route_class=ApiRoute)


@response_router.post(
    "/responses",
    response_model=ResponseObject,
    responses={200: {"description": "The answer; with `stream`, events about it", "content": _STREAM}},
)
async def post_response(body: ResponseBody, asking: AskingDependency) -> Response:
    """Answer a message or a conversation."""
    body.check()
    info = await visible_team(asking.service, asking.caller, body.model, kind="model")
    said = [MessageBody(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    inputs = inputs_of(said, info, place="input", instructions=body.instructions)
    run = await asking.begin(info, inputs, body.metadata or {}, priority_of(body.service_tier))
    response = ResponseObject(
        id=run.run_id,
        created_at=int(SystemClock().now()),
        status="in_progress",
        model=info.name,
        output=[],
        instructions=body.instructions,
        metadata=body.metadata or {},
    )
    if body.stream:
        return AnswerStream(run, _response_events(run, info, ResponseEvents(response)))
    found = answer_of(await run.end_for(asking.request.receive))
    if not isinstance(found, TeamAnswer):
        return run_error(found, run.run_id)
    return answer(make_answered(response, found), HTTPStatus.OK, {RUN_HEADER: run.run_id})


@response_router.get("/responses/{response_id}", response_model=ResponseObject)
async def get_response(response_id: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return a run as a response, in any state and from any route."""
    caller.check(Right.READ)
    run = await visible_run(service, caller, response_id)
    return answer(response_of(run), HTTPStatus.OK, {RUN_HEADER: run.run_id})


async def _response_events(
    run: BlockingRun, info: EnsembleInfo, events: ResponseEvents
) -> AsyncGenerator[ServerSentEvent]:
    for event in events.first():
        yield render(event, str(event["type"]))
    async with aclosing(texts_of(run, info.chat.streamed_task)) as texts:
        async for each in texts:
            if isinstance(each, str):
                found = [] if isinstance(each, Reasoning) else events.piece(each)
            else:
                found = events.last(each) if isinstance(each, TeamAnswer) else events.make_failure(each)
            for event in found:
                yield render(event, str(event["type"]))

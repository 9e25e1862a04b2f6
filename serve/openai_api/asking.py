"""Requests, runs, errors and streams that both parts of the OpenAI API share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StrictBool
from sse_starlette import ServerSentEvent
from starlette.exceptions import HTTPException

from ensemble_ray.access.keys import Right
from ensemble_ray.serve.answers import answer, json_text, problems_of
from ensemble_ray.serve.asked_run import BlockingRun, StreamedText
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.failures import describe_refusal
from ensemble_ray.serve.middleware import CallerDependency, traceparent_of
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.serve.schemas import EnsembleInfo, Failure, NewRun, Refusal, RunStatus, RunTags, Text, Wire
from ensemble_ray.serve.visible_runs import ServiceDependency
from ensemble_ray.studio.event_answer import EventAnswer
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.messages import Reasoning

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from ensemble_ray.serve.schemas import Metrics, RunDetail


#: Header with the run id, in each answer about a run.
RUN_HEADER = "x-run-id"
#: Tells clients not to repeat a request after a failed run, because each run costs money.
_NO_RETRY = {"x-should-retry": "false"}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
#: Codes with another name in this API.
_CODES = {"ENSEMBLE_NOT_FOUND": "model_not_found"}
_UNREADABLE = "The body cannot be read: it is no text, is nested too deeply, or has a number of thousands of digits"
_Name = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(whole_data)]
#: Values with which an unsupported field is accepted.
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
#: Characters of a piece, if the answer is only known at the end.
_PIECE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A request with its dependencies."""

    request: Request
    service: RunService
    caller: Caller
    idempotency_key: str | None

    async def begin(self, info: EnsembleInfo, inputs: Mapping[str, JsonValue], tags: Mapping[str, str]) -> BlockingRun:
        """Start a run of a team.

        Raises:
            Refusal: see `RunService.start`.
        """
        # Keys of different callers must not collide.
        key = None if self.idempotency_key is None else f"{self.caller.name}:{self.idempotency_key}"
        return await BlockingRun.begin(
            self.service,
            NewRun(
                ensemble=info.name,
                inputs=dict(inputs),
                tags=dict(tags),
                traceparent=traceparent_of(self.request),
            ),
            idempotency_key=key,
            ends_with_client=bool(self.request.app.state.cancel_on_disconnect),
        )


def _asking(
    request: Request,
    service: ServiceDependency,
    caller: CallerDependency,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Asking:
    caller.check(Right.RUN)
    return Asking(request=request, service=service, caller=caller, idempotency_key=idempotency_key)


AskingDependency = Annotated[Asking, Depends(_asking)]


async def find_models(service: RunService, caller: Caller) -> list[EnsembleInfo]:
    """Return the teams that a caller may use."""
    return [each for each in await service.ensembles() if caller.sees(each.name)]


async def model_of(service: RunService, caller: Caller, name: str) -> EnsembleInfo:
    """Return the team that a request names as its model.

    Raises:
        Refusal: the caller has no such team.
    """
    found = await find_models(service, caller)
    for each in found:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in found)
    text = f"There is no model '{name[:200]}'. There are: [{known}]"
    raise Refusal(HTTPStatus.NOT_FOUND, "ENSEMBLE_NOT_FOUND", text)


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


#: Declaration of error answers in the OpenAPI document.
API_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ApiErrorBody}, "5XX": {"model": ApiErrorBody}}


def wrong_parameter(param: str, message: str, code: str = "UNSUPPORTED_PARAMETER") -> Refusal:
    """Return the refusal of a field that is wrong or that no team supports."""
    return Refusal(HTTPStatus.BAD_REQUEST, code, message, param=param)


def api_error(failure: Failure, param: str | None = None) -> ApiErrorBody:
    """Return a failure in the format of this API."""
    status = HTTPStatus(failure.status)
    kind = _TYPES.get(status, "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    causes = f" Causes: {'; '.join(failure.causes)}" if failure.causes else ""
    code = _CODES.get(failure.code, failure.code.lower())
    return ApiErrorBody(error=ApiError(message=f"{failure.message}{causes}", type=kind, param=param, code=code))


def run_error(failure: Failure, run_id: str) -> JSONResponse:
    """Return the answer for a run without an output."""
    headers = {RUN_HEADER: run_id, **_NO_RETRY}
    return answer(api_error(failure), HTTPStatus(failure.status), headers)


def refusal_error(refusal: Refusal) -> JSONResponse:
    """Return a refusal as an answer, with its status and headers."""
    headers = dict(refusal.headers)
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(refusal.retry_after_s)
    return answer(api_error(describe_refusal(refusal), refusal.param), HTTPStatus(refusal.status), headers)


class ApiRoute(APIRoute):
    """A route that answers refusals in the format of this API."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_in_form(request: Request) -> Response:
            try:
                return await handle(request)
            except Refusal as refusal:
                return refusal_error(refusal)
            except RequestValidationError as error:
                return _invalid("; ".join(problems_of(error)), _place(error))
            except HTTPException as error:
                if error.status_code != HTTPStatus.BAD_REQUEST:
                    raise
                return _invalid(_UNREADABLE)

        return handle_in_form


def _invalid(message: str, param: str | None = None) -> JSONResponse:
    error = ApiError(message=message, type="invalid_request_error", param=param, code="invalid_request")
    return answer(ApiErrorBody(error=error), HTTPStatus.BAD_REQUEST)


def _place(error: RequestValidationError) -> str | None:
    """Return the first wrong field."""
    places = [".".join(str(part) for part in each["loc"][1:]) for each in error.errors()]
    return (places[0][:200] or None) if places else None


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
    """

    model: _Name
    messages: list[MessageBody] = Field(min_length=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    metadata: RunTags | None = None
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
        """Raise a `Refusal` for the first field that no team supports."""
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
    """

    model: _Name
    input: Text | Annotated[list[MessageBody], Field(min_length=1)]
    instructions: Text | None = None
    stream: StrictBool | None = None
    metadata: RunTags | None = None
    text: JsonValue = None
    tools: JsonValue = None
    top_logprobs: JsonValue = None
    previous_response_id: JsonValue = None
    conversation: JsonValue = None
    background: JsonValue = None
    prompt: JsonValue = None

    def check(self) -> None:
        """Raise a `Refusal` for the first field that no team supports."""
        if self.text is not None and not isinstance(self.text, dict):
            raise wrong_parameter("text", "text: must be an object", code="INVALID_REQUEST")
        _check_format(None if self.text is None else self.text.get("format"), "text.format")
        _check_unset(self, _RESPONSE)


def _check_format(value: JsonValue, name: str) -> None:
    if value is not None and not (isinstance(value, dict) and value.get("type") == "text"):
        raise wrong_parameter(
            name,
            f"{name}: the team determines the format of its answer (the output_type of its last task); request text",
        )


def _check_unset(body: BaseModel, names: tuple[str, ...]) -> None:
    for name in names:
        value: JsonValue = getattr(body, name)
        if not any(value == each for each in _NOTHING):
            why = _WHY.get(name, "leave it out")
            raise wrong_parameter(name, f"{name}: not supported by teams; {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamAnswer:
    """The answer of a team."""

    text: str
    #: whether the budget was exhausted before the end
    is_cut: bool
    metrics: Metrics
    #: reasoning of the last task's model, if it is known
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


def begun_anew(run: RunDetail) -> Failure:
    """Return the failure of a stream whose text differs from the answer (S-SRV-123)."""
    text = (
        f"The model started the answer again during the stream, so the streamed text is not the answer. The answer is at "
        f"GET /v1/responses/{run.run_id}"
    )
    return _failure(run, HTTPStatus.BAD_GATEWAY, "ANSWER_BEGUN_ANEW", text)


def _failure(run: RunDetail, status: HTTPStatus, code: str, message: str) -> Failure:
    return Failure(error="RunError", code=code, status=status, message=message, run_id=run.run_id)


class AnswerStream(EventAnswer):
    """The stream of one run's answer. When it ends, for any reason, the run learns that its client has left."""

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
    if rest is None:
        return [begun_anew(run)]
    # Without streamed text, the reasoning comes before the answer.
    thought = [Reasoning(found.reasoning)] if found.reasoning and rest == found.text and not has_thought else []
    return [*thought, *(rest[start : start + _PIECE] for start in range(0, len(rest), _PIECE)), found]


def render(data: Mapping[str, object], event: str | None = None) -> ServerSentEvent:
    return ServerSentEvent(data=json_text(data), event=event, sep="\n")

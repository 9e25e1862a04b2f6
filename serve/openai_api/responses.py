"""`/v1/responses`: a team answers, in the newer format of the OpenAI API (S-SRV-125 to S-SRV-128)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import Field, JsonValue
from sse_starlette import ServerSentEvent

from ensemble_ray.access.keys import Right
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.serve.answers import answer
from ensemble_ray.serve.asked_run import BlockingRun
from ensemble_ray.serve.middleware import CallerDependency
from ensemble_ray.serve.openai_api.asking import (
    API_ERRORS,
    RUN_HEADER,
    AnswerStream,
    ApiRoute,
    AskingDependency,
    MessageBody,
    ResponseBody,
    TeamAnswer,
    answer_of,
    api_error,
    model_of,
    render,
    run_error,
    texts_of,
)
from ensemble_ray.serve.openai_api.chat import inputs_of
from ensemble_ray.serve.schemas import EnsembleInfo, RunStatus, Text, Wire
from ensemble_ray.serve.visible_runs import ServiceDependency, visible_run
from ensemble_ray.values.messages import Reasoning

if TYPE_CHECKING:
    from ensemble_ray.serve.schemas import Failure, Metrics, RunDetail


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


class InputDetails(Wire):
    """Parts of a run's input tokens; unknown."""

    cached_tokens: int = 0


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


def make_begun(
    run_id: str, *, model: str, created_at: int, metadata: Mapping[str, str], instructions: str | None
) -> ResponseObject:
    """Return the response for an accepted run."""
    return ResponseObject(
        id=run_id,
        created_at=created_at,
        status="in_progress",
        model=model,
        output=[],
        instructions=instructions,
        metadata=dict(metadata),
    )


def make_answered(response: ResponseObject, answer: TeamAnswer) -> ResponseObject:
    state: Literal["completed", "incomplete"] = "incomplete" if answer.is_cut else "completed"
    return response.model_copy(
        update={
            "status": state,
            "output": [message_of(response.id, state, answer.text)],
            "incomplete_details": IncompleteDetails() if answer.is_cut else None,
            "usage": _usage(answer.metrics),
        }
    )


def make_failed(response: ResponseObject, failure: Failure) -> ResponseObject:
    return response.model_copy(
        update={"status": "failed", "error": ResponseFailure(message=api_error(failure).error.message)}
    )


def response_of(run: RunDetail) -> ResponseObject:
    """Return a run in any state as a response (S-SRV-126)."""
    response = make_begun(
        run.run_id,
        model=run.ensemble,
        created_at=int(run.created_at.timestamp()),
        metadata=run.tags,
        instructions=None,
    )
    if (status := _STATUSES.get(run.status)) is not None:
        return response.model_copy(update={"status": status})
    found = answer_of(run)
    return make_answered(response, found) if isinstance(found, TeamAnswer) else make_failed(response, found)


def message_of(run_id: str, status: Literal["in_progress", "completed", "incomplete"], *texts: str) -> ResponseMessage:
    """Return the only message of a response."""
    return ResponseMessage(id=f"msg_{run_id}", status=status, content=[ResponseText(text=text) for text in texts])


class ResponseEvents:
    """Builds the events of one response, in the order of this API (S-SRV-125)."""

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = -1
        self._is_said = False
        self._place: dict[str, object] = {"item_id": f"msg_{response.id}", "output_index": 0, "content_index": 0}

    def first(self) -> list[dict[str, object]]:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def piece(self, text: str) -> list[dict[str, object]]:
        """Return the events for a piece of text. The first piece starts the text item."""
        events = [] if self._is_said else self._begin_text()
        return [*events, self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])]

    def last(self, answer: TeamAnswer) -> list[dict[str, object]]:
        """Return the final events."""
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
        """Return the final event of a response without an answer."""
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


def _usage(metrics: Metrics) -> ResponseUsage | None:
    """Return the tokens of a run; None if a provider did not report them."""
    tokens_in, tokens_out = metrics.input_tokens, metrics.output_tokens
    if tokens_in is None or tokens_out is None:
        return None
    return ResponseUsage(
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        output_tokens_details=OutputDetails(reasoning_tokens=metrics.reasoning_tokens),
        total_tokens=tokens_in + tokens_out,
    )


response_router: APIRouter = APIRouter(prefix="/v1", tags=["openai"], responses=API_ERRORS, route_class=ApiRoute)
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@response_router.post(
    "/responses",
    response_model=ResponseObject,
    responses={200: {"description": "The answer; with `stream`, events about it", "content": _STREAM}},
)
async def post_response(body: ResponseBody, asking: AskingDependency) -> Response:
    """Answer a message or a conversation."""
    body.check()
    info = await model_of(asking.service, asking.caller, body.model)
    said = [MessageBody(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    inputs = inputs_of(said, info, place="input", instructions=body.instructions)
    run = await asking.begin(info, inputs, body.metadata or {})
    response = make_begun(
        run.run_id,
        model=info.name,
        created_at=int(SystemClock().now()),
        metadata=body.metadata or {},
        instructions=body.instructions,
    )
    if body.stream:
        return AnswerStream(run, _events(run, info, ResponseEvents(response)))
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


async def _events(run: BlockingRun, info: EnsembleInfo, events: ResponseEvents) -> AsyncGenerator[ServerSentEvent]:
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

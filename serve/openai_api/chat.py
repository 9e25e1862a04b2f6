"""`/v1/chat/completions` and `/v1/models`: a team answers a conversation (S-SRV-100 to S-SRV-123)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, Self

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
    ChatBody,
    TeamAnswer,
    answer_of,
    api_error,
    find_models,
    model_of,
    render,
    run_error,
    texts_of,
    wrong_parameter,
)
from ensemble_ray.serve.schemas import EnsembleInfo, Refusal, Text, Wire
from ensemble_ray.serve.team import HISTORY_INPUT
from ensemble_ray.serve.visible_runs import ServiceDependency
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.messages import Reasoning

if TYPE_CHECKING:
    from ensemble_ray.serve.openai_api.asking import MessageBody
    from ensemble_ray.serve.schemas import Metrics


def _is_none(value: object) -> bool:
    return value is None


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


class ChatUsage(Wire):
    """Tokens of all tasks of a run.

    Attributes:
        completion_tokens_details: Left out if no provider counted reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: ChatDetails | None = Field(default=None, exclude_if=_is_none)


class AnswerMessage(Wire):
    """The team's answer.

    Attributes:
        reasoning_content: Reasoning of the last task's model; left out if there is none.
    """

    role: Literal["assistant"] = "assistant"
    content: Text
    reasoning_content: Text | None = Field(default=None, exclude_if=_is_none)
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
    """Builds the chunks of one streamed answer. With `has_usage`, every chunk has the field `usage`."""

    def __init__(self, *, run_id: str, model: str, created: int, has_usage: bool) -> None:
        self._head: dict[str, object] = {
            "id": run_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._usage: dict[str, object] = {"usage": None} if has_usage else {}

    def first(self) -> dict[str, object]:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, object]:
        return self._chunk({"content": text})

    def thought(self, text: str) -> dict[str, object]:
        return self._chunk({"reasoning_content": text})

    def last(self, answer: TeamAnswer) -> list[dict[str, object]]:
        """Return the final chunks."""
        end = self._chunk({}, _finish_reason(answer))
        if not self._usage:
            return [end]
        usage = chat_usage(answer.metrics)
        return [end, {**self._head, "choices": [], "usage": None if usage is None else usage.model_dump()}]

    def _chunk(self, delta: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "choices": [choice], **self._usage}


def chat_usage(metrics: Metrics) -> ChatUsage | None:
    """Return the tokens of a run; None if a provider did not report them."""
    tokens_in, tokens_out = metrics.input_tokens, metrics.output_tokens
    if tokens_in is None or tokens_out is None:
        return None
    return ChatUsage(
        prompt_tokens=tokens_in,
        completion_tokens=tokens_out,
        total_tokens=tokens_in + tokens_out,
        completion_tokens_details=ChatDetails(reasoning_tokens=thought)
        if (thought := metrics.reasoning_tokens)
        else None,
    )


def _finish_reason(answer: TeamAnswer) -> Literal["stop", "length"]:
    return "length" if answer.is_cut else "stop"


_ROLES = frozenset({"system", "developer", "user", "assistant"})
_USER, _ASSISTANT = "user", "assistant"
_TEXTS = frozenset({"text", "input_text", "output_text"})


def inputs_of(
    messages: Sequence[MessageBody], info: EnsembleInfo, *, place: str, instructions: str | None = None
) -> Mapping[str, JsonValue]:
    """Return the inputs of a run.

    Args:
        messages: The conversation.
        info: The team.
        place: Name of the request field with the conversation.
        instructions: A system message before the conversation.

    Raises:
        Refusal: there is no message of the user, a part is not text, or the team needs more than one message.
    """
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
    """Return the variable for the message.

    Raises:
        Refusal: there is none, or another input has no value.
    """
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
    """Return the text of a message.

    Raises:
        Refusal: it is not a text.
    """
    if message.type != "message" or message.role not in _ROLES:
        what = message.type if message.type != "message" else f"a message of '{message.role}'"
        raise wrong_parameter(place, f"{place}: '{what[:60]}' cannot be passed to a team, which has its own tools")
    # Only an assistant's message may be without content: it may consist of tool calls.
    if not message.content and message.content != "" and message.role != _ASSISTANT:
        raise wrong_parameter(f"{place}.content", f"{place}.content: must be a text", code="INVALID_REQUEST")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(_text_of_part(part, f"{place}.content[{index}]") for index, part in enumerate(message.content))


def _text_of_part(part: Mapping[str, JsonValue], place: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind not in _TEXTS:
        raise wrong_parameter(
            place, f"{place}: '{str(kind)[:60]}' cannot be passed to a team, which only accepts texts"
        )
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
    info = await model_of(asking.service, asking.caller, body.model)
    inputs = inputs_of(body.messages, info, place="messages")
    run = await asking.begin(info, inputs, body.metadata or {})
    created = int(SystemClock().now())
    if body.stream:
        has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        chunks = ChatChunks(run_id=run.run_id, model=info.name, created=created, has_usage=has_usage)
        return AnswerStream(run, _events(run, info, chunks))
    found = answer_of(await run.end_for(asking.request.receive))
    if not isinstance(found, TeamAnswer):
        return run_error(found, run.run_id)
    completion = ChatCompletion.of(found, run_id=run.run_id, model=info.name, created=created)
    return answer(completion, HTTPStatus.OK, {RUN_HEADER: run.run_id})


async def _events(run: BlockingRun, info: EnsembleInfo, chunks: ChatChunks) -> AsyncGenerator[ServerSentEvent]:
    yield render(chunks.first())
    async with aclosing(texts_of(run, info.chat.streamed_task)) as texts:
        async for each in texts:
            if isinstance(each, str):
                yield render(chunks.thought(each) if isinstance(each, Reasoning) else chunks.piece(each))
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
    return answer(ModelList(data=[Model(id=each.name) for each in await find_models(service, caller)]))


@model_router.get("/models/{model}", response_model=Model)
async def get_model(model: str, service: ServiceDependency, caller: CallerDependency) -> JSONResponse:
    """Return a team as a model."""
    caller.check(Right.READ)
    return answer(Model(id=(await model_of(service, caller, model)).name))

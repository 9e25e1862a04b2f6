"""Answers of `/v1/models` and `/v1/chat/completions`. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field

from ensemble_ray.serve.schemas import Text, Wire

if TYPE_CHECKING:
    from ensemble_ray.serve.openai_api.endings import TeamAnswer
    from ensemble_ray.serve.schemas import Metrics


def _is_none(value: object) -> bool:
    return value is None


class Model(Wire):
    """A team.

    Attributes:
        created: Unix time, s; 0, since teams do not have it.
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
        completion_tokens_details: Left out where no provider counted reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: ChatDetails | None = Field(default=None, exclude_if=_is_none)


class AnswerMessage(Wire):
    """What the team said.

    Attributes:
        reasoning_content: What the model of its last task thought; left out where there is nothing.
    """

    role: Literal["assistant"] = "assistant"
    content: Text
    reasoning_content: Text | None = Field(default=None, exclude_if=_is_none)
    refusal: None = None


class Choice(Wire):
    """The one answer.

    Attributes:
        finish_reason: `length` where the team's budget was spent before it was done.
    """

    index: Literal[0] = 0
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class ChatCompletion(Wire):
    """Answer to `POST /v1/chat/completions`.

    Attributes:
        id: The run's id.
        created: Unix time, s.
        usage: Null where a provider did not count.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice] = Field(min_length=1, max_length=1)
    usage: ChatUsage | None

    @classmethod
    def of(cls, answer: TeamAnswer, *, run_id: str, model: str, created: int) -> Self:
        """Return the answer of a run."""
        choice = Choice(
            message=AnswerMessage(content=answer.text, reasoning_content=answer.reasoning),
            finish_reason=_finish_reason(answer),
        )
        return cls(id=run_id, created=created, model=model, choices=[choice], usage=chat_usage(answer.metrics))


class ChatChunks:
    """Makes the chunks of one streamed answer."""

    def __init__(self, *, run_id: str, model: str, created: int, has_usage: bool) -> None:
        """Name the answer.

        Args:
            run_id: Its id.
            model: The team.
            created: Unix time, s.
            has_usage: Whether the client asked for the tokens: then every chunk has the field.
        """
        self._head: dict[str, object] = {
            "id": run_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._usage: dict[str, object] = {"usage": None} if has_usage else {}

    def first(self) -> dict[str, object]:
        """Return the chunk that begins an answer."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, object]:
        """Return a piece of the text."""
        return self._chunk({"content": text})

    def thought(self, text: str) -> dict[str, object]:
        """Return a piece of the reasoning."""
        return self._chunk({"reasoning_content": text})

    def last(self, answer: TeamAnswer) -> list[dict[str, object]]:
        """Return what ends an answer."""
        end = self._chunk({}, _finish_reason(answer))
        if not self._usage:
            return [end]
        usage = chat_usage(answer.metrics)
        return [end, {**self._head, "choices": [], "usage": None if usage is None else usage.model_dump()}]

    def _chunk(self, delta: dict[str, object], finish_reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "choices": [choice], **self._usage}


def chat_usage(metrics: Metrics) -> ChatUsage | None:
    """Return the tokens of a run; None where a provider did not count."""
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

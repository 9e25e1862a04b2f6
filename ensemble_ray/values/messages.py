"""Messages, tool calls and responses of models: plain dataclasses, which pickle cheaply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Union, cast

from ensemble_ray.text.answers import split_reasoning
from ensemble_ray.text.foreign_text import whole_json, whole_text
from ensemble_ray.values.attachments import Attachment

Role = Literal["system", "user", "assistant", "tool"]
#: Effect of a tool call (S-DUR-20): `none`: it reads; `idempotent`: the same key has an effect once; `once`: never repeat it.
Effect = Literal["none", "idempotent", "once"]
#: Treatment of an incomplete answer (S-ENG-37). `retry`: ask the model again, at most twice, then fail the task.
OnIncomplete = Literal["warn", "fail", "retry"]
JsonValue = Union[None, bool, int, float, str, Sequence["JsonValue"], Mapping[str, "JsonValue"]]  # noqa: UP007  recursive


_COUNTS = ("input_tokens", "output_tokens", "reasoning_tokens", "cached_tokens", "cache_write_tokens")


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one model call; -1 means unknown, 0 is known."""

    input_tokens: int = -1
    output_tokens: int = -1
    reasoning_tokens: int = -1  # part of the output
    cached_tokens: int = -1  # part of the input, read from the provider's cache
    cache_write_tokens: int = -1  # part of the input, stored in the provider's cache

    def __post_init__(self) -> None:
        for name in _COUNTS:
            count: object = getattr(self, name)
            if type(count) is not int:  # a model may count in another type of numbers
                object.__setattr__(self, name, -1 if count is None else int(cast("float", count)))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that a model requests. `arguments` is the raw JSON text of the model, unchecked."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """The description of a tool for a model; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The form of an answer as a JSON schema that an endpoint can enforce."""

    name: str  # letters, digits, `_` and `-`, at most 64
    schema: Mapping[str, object]
    strict: bool = False  # within the subset that endpoints enforce strictly


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFields:
    """Provider-specific members of an assistant message, as JSON text.

    They are sent back with the message, only to the endpoint and model that sent them.
    """

    origin: str
    message: str = "{}"  # an object
    tool_calls: tuple[str, ...] = ()  # an object per call; its member `function` belongs to `function`

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", whole_json(self.message))
        object.__setattr__(self, "tool_calls", tuple(whole_json(each) for each in self.tool_calls))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None
    provider_fields: ProviderFields | None = None
    attachments: Sequence[Attachment] = ()  # sent after the text


class Reasoning(str):
    """A streamed piece of a model's reasoning. A piece of the answer is a plain `str`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """A model's answer: text, tool calls, or both."""

    text: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    usage: TokenUsage | None = None
    #: as the provider reports it: `stop`, `tool_calls`, `length`, `content_filter`; None: unknown
    finish_reason: str | None = None
    reasoning: str | None = None  # before the answer, not part of `text`
    provider_fields: ProviderFields | None = None


STREAM_CUT = "stream_cut"  # finish reason of a stream without a reason and without a final mark (S-LLM-8)
_ORDINARY = frozenset({"stop", "tool_calls"})
#: Of complete answers, as providers report them.
_COMPLETE = _ORDINARY | {
    *("", "null", "none", "done", "end", "end_turn", "eos", "eos_token", "eos_found", "stop_sequence", "stop_token"),
    *("complete", "completed", "finished", "success", "function_call", "function_calls", "tool_call", "tool_use"),
}


def unusual_finish_reason(response: ChatResponse) -> str | None:
    """Return the finish reason if it is neither unknown nor ordinary (S-ENG-36)."""
    return None if response.finish_reason in _ORDINARY else response.finish_reason


def incomplete_reason(response: ChatResponse) -> str | None:
    """Return why an answer is incomplete: its finish reason, or `empty` (S-ENG-36)."""
    reason = (response.finish_reason or "").strip().lower()
    if reason.replace("-", "_") not in _COMPLETE:
        return reason
    return None if response.tool_calls or (response.text or "").strip() else "empty"


def whole_response(response: ChatResponse, *, keep_reasoning: bool = False) -> ChatResponse:
    """Return a response without halves of surrogate pairs; tagged reasoning leaves its text (S-LLM-1, S-LLM-5, S-SEC-56)."""
    text = None if response.text is None else whole_text(response.text)
    calls = tuple(
        [ToolCall(whole_text(c.id), whole_text(c.name), whole_json(c.arguments)) for c in response.tool_calls]
        if response.tool_calls
        else ()
    )
    reason = response.finish_reason
    reasoning = whole_text(response.reasoning) if response.reasoning else ""
    if text is not None and not keep_reasoning and "<" in text:
        thought, text = split_reasoning(text)
        text = text if text or thought is None or not calls else None
        reasoning = "\n\n".join([part for part in (reasoning, thought) if part])
    return ChatResponse(
        text,
        calls,
        response.usage,
        reason if reason is None or reason in _ORDINARY else whole_text(reason),
        reasoning or None,
        response.provider_fields,
    )

"""Values that cross a port: messages, tool calls and specs, usage.

Plain frozen dataclasses: they are built several times per model call, and must pickle cheaply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Union

from ensemble_ray.text.answers import split_reasoning
from ensemble_ray.text.foreign_text import whole_json, whole_text

Role = Literal["system", "user", "assistant", "tool"]
#: What a call does to the world (S-DUR-20): `none`: it only reads; `idempotent`: doing it again under the same key
#: changes nothing more; `once`: it must not be done twice.
Effect = Literal["none", "idempotent", "once"]
#: What becomes of an incomplete answer (S-ENG-37): `warn`: it is used, with a warning; `fail`: its task fails; `retry`:
#: the model is asked again, twice at most, then its task fails.
OnIncomplete = Literal["warn", "fail", "retry"]
JsonValue = Union[None, bool, int, float, str, Sequence["JsonValue"], Mapping[str, "JsonValue"]]  # noqa: UP007  recursive


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one model call; -1 means unknown, 0 is known."""

    input_tokens: int = -1
    output_tokens: int = -1
    #: part of `output_tokens` that the model spent on reasoning
    reasoning_tokens: int = -1

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "reasoning_tokens"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, -1)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool request of a model. `arguments` is the raw JSON text of the model, unchecked."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a model is told of one tool; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The form of an answer as a JSON schema that an endpoint can enforce."""

    #: letters, digits, `_` and `-`, at most 64
    name: str
    schema: Mapping[str, object]
    #: whether it keeps within the subset that endpoints enforce to the letter
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFields:
    """Members of an assistant message that only its provider knows, as JSON text.

    They go back with the message to the endpoint and model that sent them, and to no other.
    """

    #: endpoint and model that sent them
    origin: str
    #: an object with the members of the message
    message: str = "{}"
    #: an object for each tool call of the message; members of its `function` are in a member of that name
    tool_calls: tuple[str, ...] = ()

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
    #: of an assistant message: what else its provider sent with it, and expects back
    provider_fields: ProviderFields | None = None


class Reasoning(str):
    """A streamed piece of a model's reasoning. A piece of the answer is a plain `str`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """A model's answer: text, tool requests, or both."""

    text: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    usage: TokenUsage | None = None
    #: why the model stopped, in the provider's word: `stop`, `tool_calls`, `length`, `content_filter`; None: unknown
    finish_reason: str | None = None
    #: what the model thought before it answered, apart from `text`; None: nothing, or the endpoint does not send it
    reasoning: str | None = None
    #: what else the provider sent with the message, and expects back with it; None: nothing
    provider_fields: ProviderFields | None = None


#: Why a streamed answer ended where the provider sent neither a reason nor the mark of a stream's end (S-LLM-8).
STREAM_CUT = "stream_cut"
#: Good ends that are not worth a mention.
_ORDINARY = frozenset({"stop", "tool_calls"})
#: How an answer ends that is whole, in the words of the providers; every other end leaves it incomplete.
_WHOLE = _ORDINARY | {
    *("", "null", "none", "done", "end", "end_turn", "eos", "eos_token", "eos_found", "stop_sequence", "stop_token"),
    *("complete", "completed", "finished", "success", "function_call", "function_calls", "tool_call", "tool_use"),
}


def unusual_finish_reason(response: ChatResponse) -> str | None:
    """Return why the model stopped where that is worth telling: not where it is unknown or ordinary (S-ENG-36)."""
    return None if response.finish_reason in _ORDINARY else response.finish_reason


def incomplete_reason(response: ChatResponse) -> str | None:
    """Return why an answer is not the whole of what was asked for; None: it is whole (S-ENG-36).

    Either it did not come to a good end, or it is `empty`: no text and no tool calls.
    """
    reason = (response.finish_reason or "").strip().lower()
    if reason.replace("-", "_") not in _WHOLE:
        return reason
    return None if response.tool_calls or (response.text or "").strip() else "empty"


def whole_response(response: ChatResponse, *, keep_reasoning: bool = False) -> ChatResponse:
    """Return the answer as it is used: reasoning in tags apart from its text (S-LLM-1), no halves of surrogate pairs.

    Arguments, which are JSON, name no halves either (S-SEC-56).

    Args:
        response: What a model returned.
        keep_reasoning: Leave tags and reasoning in the text (S-LLM-5).
    """
    text = None if response.text is None else whole_text(response.text)
    calls = tuple(ToolCall(whole_text(c.id), whole_text(c.name), whole_json(c.arguments)) for c in response.tool_calls)
    reason, reasoning = response.finish_reason, whole_text(response.reasoning or "")
    if text is not None and not keep_reasoning:
        thought, text = split_reasoning(text)
        text = text if text or thought is None or not calls else None
        reasoning = "\n\n".join(part for part in (reasoning, thought) if part)
    return replace(
        response,
        text=text,
        tool_calls=calls,
        finish_reason=None if reason is None else whole_text(reason),
        reasoning=reasoning or None,
    )

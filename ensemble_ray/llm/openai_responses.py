"""`OpenAIResponsesModel`: a model behind any endpoint of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from msgspec.structs import replace

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.llm.protocol.request import RequestOptions
from ensemble_ray.llm.protocol.responses import RESPONSES
from ensemble_ray.llm.protocol.wire import ModelApi

_SAME_LIMIT = ("max_tokens", "max_completion_tokens")
#: Options of chat completions that are members of an option here.
_MEMBERS = {
    "reasoning_effort": ("reasoning", "effort"),
    "verbosity": ("text", "verbosity"),
    "response_format": ("text", "format"),
}
#: Options that this API does not have, although chat completions do.
_MISSING = frozenset({"frequency_penalty", "logit_bias", "n", "presence_penalty", "seed", "stop"})
_WHOLE = "each request has the whole conversation, so that it can be recorded and resumed"
_REFUSED = {
    "background": "a call waits for its answer",
    "conversation": _WHOLE,
    "include": "the library requests the reasoning that it sends back",
    "input": "it is set by the library",
    "previous_response_id": _WHOLE,
}
#: Choices of an agent's tools, in `tool_choice`.
_OWN_CHOICES = frozenset({"allowed_tools", "any", "auto", "function", "none", "required"})


class OpenAIResponsesModel(OpenAIChatModel):
    """A model behind any endpoint of the Responses API, hosted or your own.

    Arguments, errors and limits are those of `OpenAIChatModel`. The provider stores no conversation (`store=False`):
    reasoning comes encrypted, and is sent back to the model that sent it.

    Options have the names of that API: `reasoning={"effort": "low", "summary": "auto"}`, `text={"verbosity": "low"}`,
    `max_output_tokens`... `max_tokens`, `reasoning_effort`, `response_format` and `tool_choice` may have the form of
    chat completions. Built-in tools of the provider are refused, since their effects would be outside the record.

    Raises:
        ValidationError: a value is invalid.

    Examples:
        >>> OpenAIResponsesModel("gpt-5", api_key="sk-1", reasoning={"effort": "low"})
        OpenAIResponsesModel('gpt-5', reasoning={'effort': 'low'})
    """

    _NAME: ClassVar[str] = "OpenAIResponsesModel"
    _API: ClassVar[ModelApi] = RESPONSES
    _FORM_OPTION: ClassVar[str] = "text format"

    def _read_options(
        self, options: Mapping[str, object], extra_body: Mapping[str, object]
    ) -> tuple[RequestOptions, bool]:
        given = {"store": False, **_translate(options), **extra_body}
        _check(given)
        self._text = _mapping(given, "text")
        read = RequestOptions.of(self._model, given, self._NAME, form="text")
        return replace(read, api=RESPONSES), "format" in self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._model, self._keywords()))


def _rebuild(model: str, keywords: Mapping[str, Any]) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(model, **keywords)


def _translate(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options under the names and in the forms of this API."""
    given = dict(options)
    for name in sorted(_MISSING & given.keys()):
        raise ValidationError(
            f"OpenAIResponsesModel: '{name}' is no option of the Responses API. Leave it out, use 'openai:MODEL', or "
            "pass it in extra_body if this endpoint has it"
        )
    for name in _SAME_LIMIT:
        if name in given:
            _check_once("max_output_tokens" in given, name, "max_output_tokens")
            given["max_output_tokens"] = given.pop(name)
    for name, (option, member) in _MEMBERS.items():
        if name in given:
            members = _mapping(given, option)
            _check_once(member in members, name, f"{option}['{member}']")
            given[option] = {**members, member: _flat(given.pop(name))}
    if "tool_choice" in given:
        given["tool_choice"] = _flat(given["tool_choice"])
    return given


def _mapping(given: Mapping[str, object], option: str) -> Mapping[str, object]:
    value = given.get(option) or {}
    if not isinstance(value, Mapping):
        raise ValidationError(f"OpenAIResponsesModel {option} must be a mapping, got: {type(value).__name__}")
    return cast("Mapping[str, object]", value)


def _check_once(is_given_twice: bool, name: str, other: str) -> None:  # noqa: FBT001  one condition, one error
    if is_given_twice:
        raise ValidationError(f"OpenAIResponsesModel: {name} and {other} are the same option. Keep one of them")


def _flat(value: object) -> object:
    """Move the members below the type's name, as in `{"type": "function", "function": {...}}`, to the type."""
    if not isinstance(value, Mapping):
        return value
    data = dict(cast("Mapping[str, object]", value))
    inner = data.get(str(data.get("type")))
    if isinstance(inner, Mapping):
        del data[str(data["type"])]
        data |= cast("Mapping[str, object]", inner)
    if isinstance(data.get("tools"), list):  # those of `allowed_tools`
        data["tools"] = [_flat(tool) for tool in cast("Sequence[object]", data["tools"])]
    return data


def _check(given: Mapping[str, object]) -> None:
    for name in sorted(_REFUSED.keys() & given.keys()):
        raise ValidationError(f"OpenAIResponsesModel: '{name}' cannot be a request option: {_REFUSED[name]}")
    tools = given.get("tools")
    found = _types_of(tools if isinstance(tools, list | tuple) else [tools])
    found += [kind for kind in _types_of([given.get("tool_choice")]) if kind not in _OWN_CHOICES]
    built_in = [kind for kind in found if kind != "function"]
    if built_in:
        raise ValidationError(
            f"OpenAIResponsesModel: the built-in tool '{built_in[0]}' cannot be used: the provider would run it, outside "
            "of the record, the budgets and the reviews of a run. Give the agent its own tool: for the web, WebSearchTool"
        )


def _types_of(tools: Sequence[object]) -> list[str]:
    return [str(cast("Mapping[str, object]", tool).get("type")) for tool in tools if isinstance(tool, Mapping)]

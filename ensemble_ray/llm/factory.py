"""Resolves a user's `llm` to a chat model; it starts and calls none."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from weakref import WeakValueDictionary

from ensemble_ray.errors import ValidationError
from ensemble_ray.ports import ChatModel

KNOWN_FORMS = ("openai:MODEL", "openai-responses:MODEL", "local", "local:PATH.gguf")


def resolve_llm(value: object) -> ChatModel:
    """Return the chat model of a value of `llm` (S-CONV-19); `resolve_chain` also accepts lists.

    Raises:
        ValidationError: the prefix is unknown, or the value is not a chat model.
    """
    if not isinstance(value, str):
        if callable(getattr(value, "chat", None)) and not isinstance(value, type):
            return cast("ChatModel", value)
        raise ValidationError(
            f"llm must be a chat model or one of [{', '.join(KNOWN_FORMS)}], or a list of these, {_describe_wrong_value(value)}"
        )
    text = value.strip()
    prefix, colon, rest = text.partition(":")
    rest = rest.strip()
    if prefix == "openai" and rest:
        from ensemble_ray.llm.openai import OpenAIChatModel

        return _cached(f"openai:{rest}", lambda: OpenAIChatModel(rest))
    if prefix == "openai-responses" and rest:
        from ensemble_ray.llm.openai_responses import OpenAIResponsesModel

        return _cached(f"openai-responses:{rest}", lambda: OpenAIResponsesModel(rest))
    if prefix == "local" and (rest or not colon):
        from ensemble_ray.llm.local import LocalChatModel

        # A relative path depends on the working directory.
        return LocalChatModel(path=rest) if rest else _cached("local", LocalChatModel)
    is_model_name = ":" not in text and any(character.isdigit() or character in "-/" for character in text)
    guess = f" Did you mean 'openai:{text}'?" if is_model_name else ""
    raise ValidationError(f"Unknown llm '{value}'.{guess} Known: [{', '.join(KNOWN_FORMS)}]")


#: Models in use that were made from a string: users of a name share one model and its client, and agents with the same
#: name differ only in their texts (S-MR-142).
_named: WeakValueDictionary[str, ChatModel] = WeakValueDictionary()


def _cached(name: str, make: Callable[[], ChatModel]) -> ChatModel:
    model = _named.get(name)
    if model is None:
        model = _named[name] = make()
    return model


def _describe_wrong_value(value: object) -> str:
    if isinstance(value, type):
        return f"got: the class {value.__name__}. Make a model of it: {value.__name__}(...)"
    package = type(value).__module__.partition(".")[0]
    if package in {"builtins", "__main__"}:
        return f"got: {type(value).__name__} without a chat method"
    return (
        f"got: {type(value).__name__} of the package '{package}', which has no method chat(messages, tools). Write "
        "llm='openai:MODEL', or llm=OpenAIChatModel('MODEL', base_url=..., api_key=...) for any endpoint of that protocol"
    )

"""From what a user writes as `llm` to a chat model. Package: llm; a string or a model comes in, a model goes out.

Nothing is started or reached here: a model object is made, its endpoint is met at the first call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast
from weakref import WeakValueDictionary

from ensemble_ray.errors import ValidationError
from ensemble_ray.ports import ChatModel

#: What a string may look like.
KNOWN_FORMS = ("openai:MODEL", "local", "local:PATH.gguf")


def resolve_llm(value: object) -> ChatModel:
    """Return the chat model that a value of `llm` stands for (S-CONV-19).

    Args:
        value: A `ChatModel`, or a string: `"openai:MODEL"` for any endpoint of that protocol, `"local"` for the
            embedded model, `"local:PATH.gguf"` for another model file.

    Raises:
        ValidationError: the prefix is unknown, or the value is no chat model.
    """
    if not isinstance(value, str):
        if callable(getattr(value, "chat", None)) and not isinstance(value, type):
            return cast("ChatModel", value)
        raise ValidationError(f"llm must be a chat model or one of {_list_forms()}, {_describe(value)}")
    prefix, colon, rest = value.strip().partition(":")
    if prefix == "openai" and rest.strip():
        return _same(f"openai:{rest.strip()}", _openai)
    if prefix == "local" and not colon:
        return _same("local", _local)
    if prefix == "local" and rest.strip():
        return _local(value.strip())  # a path means what it means where the process stands now
    raise ValidationError(f"Unknown llm '{value}'.{_guess_model(value.strip())} Known: {_list_forms()}")


#: Models that were made from a string and are in use. They cannot be changed, so one does for all who name it, with
#: one client, and agents that name it are told apart by their texts alone (S-MR-142).
_named: WeakValueDictionary[str, ChatModel] = WeakValueDictionary()


def _same(name: str, make: Callable[[str], ChatModel]) -> ChatModel:
    model = _named.get(name)
    if model is None:
        model = _named[name] = make(name)
    return model


def _openai(name: str) -> ChatModel:
    from ensemble_ray.llm.openai import OpenAIChatModel

    return OpenAIChatModel(name.partition(":")[2])


def _local(name: str) -> ChatModel:
    from ensemble_ray.llm.local import LocalChatModel

    return LocalChatModel(path=name.partition(":")[2].strip() or None)


def _describe(value: object) -> str:
    """Return what was given in place of a model, and what to write (S-ERR-62)."""
    if isinstance(value, type):
        return f"got: the class {value.__name__}. Make a model of it: {value.__name__}(...)"
    package = type(value).__module__.partition(".")[0]
    if package in {"builtins", "__main__"}:
        return f"got: {type(value).__name__} without a chat method"
    return (
        f"got: {type(value).__name__} of the package '{package}', which has no method chat(messages, tools). Write "
        "llm='openai:MODEL', or llm=OpenAIChatModel('MODEL', base_url=..., api_key=...) for any endpoint of that protocol"
    )


def _guess_model(value: str) -> str:
    """Return what was probably meant by a string that is the name of a model alone; "" where nothing was."""
    is_model_name = ":" not in value and any(character.isdigit() or character in "-/" for character in value)
    return f" Did you mean 'openai:{value}'?" if is_model_name else ""


def _list_forms() -> str:
    return f"[{', '.join(KNOWN_FORMS)}]"

"""Models in a team file: a string, or a mapping with `model` and its options. Package: loader.

A key never stands in the file: `api_key_env` names the environment variable that holds it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import pydantic
from pydantic import Field, PlainValidator, ValidationInfo

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.factory import KNOWN_FORMS, resolve_llm
from ensemble_ray.loader.document import Entries, read_document
from ensemble_ray.loader.field_types import Flag, Free, FreeMapping, Number, Text, Whole, text_in
from ensemble_ray.loader.problems import Problems
from ensemble_ray.loader.reading import Reading, context_of, refuse, refuse_keys
from ensemble_ray.loader.references import find_attribute, is_reference, make_importable
from ensemble_ray.loader.section import FileSection, key, report

if TYPE_CHECKING:
    from ensemble_ray.ports import ChatModel

__all__ = ["Model", "ModelKeys", "load_model"]


class _Name(FileSection):
    model: Text = key("The model: a name at the endpoint, `local`, or `local:PATH.gguf`.", is_required=True)


class _Endpoint(FileSection):
    """What only a model behind an endpoint has."""

    base_url: Text = key("Where the protocol begins, often ending in /v1; default OPENAI_BASE_URL.")
    api_key_env: Text = key("Environment variable that holds the key; default OPENAI_API_KEY.")
    structured_outputs: Flag = key(
        "Whether the endpoint can hold typed answers to a JSON schema; left out: the first call finds out."
    )
    system_role: Text = key(
        "Role of system messages: system, developer, or user, which puts them in front of the first question; left out: "
        "the first refusal decides."
    )
    extra_query: FreeMapping = key("More of the URL's query, such as api-version. No keys here.")
    max_retries: Whole = key("How often the model itself repeats a failed call; the team's retry comes on top.")
    max_answer_bytes: Whole = key("Longest answer that is taken, unpacked; a stream may have four times as much.")
    max_answer_time: Number = key("Longest time of a whole streamed answer, seconds.")


class _Local(FileSection):
    """What only a model on this machine has."""

    context_tokens: Whole = key("Local models: context of all slots together.")
    slots: Whole = key("Local models: conversations answered at once.")
    threads: Whole = key("Local models: threads of the engine.")


class _Request(FileSection):
    """Options of every request; what an endpoint takes beyond them goes through `extra_body`."""

    timeout: Number = key("Longest wait for an answer, seconds.")
    temperature: Number = key("How freely it writes; 0 is the least.")
    top_p: Number = key("Share of probability that it draws from.")
    max_tokens: Whole = key("Longest answer, tokens.")
    max_completion_tokens: Whole = key("Longest answer, tokens, with the thinking of models that think.")
    seed: Whole = key("Makes answers repeatable where the endpoint can.")
    stop: Free = key("Text, or texts, at which the answer ends.")
    presence_penalty: Number = key("Above 0: new subjects are preferred.")
    frequency_penalty: Number = key("Above 0: repetition is avoided.")
    logit_bias: FreeMapping = key("Token id to bias.")
    reasoning_effort: Text = key("How long a model that thinks may think.")
    response_format: FreeMapping = key("Form of the answer, as the protocol has it.")
    tool_choice: Free = key("Which tool the model must or may call.")
    parallel_tool_calls: Flag = key("Whether it may ask for several tools at once.")
    service_tier: Text = key("Which tier of service answers.")
    user: Text = key("Whom the request is for.")
    extra_body: FreeMapping = key("Options of this endpoint that have no key of their own here.")
    extra_headers: FreeMapping = key("Headers sent along. No keys here: they belong in the environment.")


class ModelKeys(_Request, _Local, _Endpoint, _Name):
    """A model and its options."""

    called = "a model"
    misplaced: ClassVar = {"api_key": "a key does not belong in a file: name the variable with api_key_env"}


def _read(node: object, info: ValidationInfo) -> ChatModel:
    reading = context_of(info)
    if reading.llm is not None:
        return reading.llm
    if (text := text_in(node)) is not None:
        return resolve_llm(_resolve_path(reading, text))
    if isinstance(node, Entries):
        return _build(reading, ModelKeys.model_validate(node, context=reading).values())
    raise ValidationError(f"must be one of [{', '.join(KNOWN_FORMS)}], or a mapping with the key 'model'")


def load_model(given: object, *, needs_keys: bool = True) -> ChatModel:
    """Return the model that a configuration names.

    Args:
        given: `module:attribute`, a text as a team file's `llm`, or a mapping with `model` and its options.
        needs_keys: False: it will not be asked here, so its key may be missing.

    Raises:
        ValidationError: it names no model.
    """
    if isinstance(given, str) and is_reference(given) and given.partition(":")[0] not in {"openai", "local"}:
        make_importable(Path.cwd())
        return resolve_llm(find_attribute(given))
    problems = Problems("model")
    root = read_document(json.dumps({"llm": given}), problems)
    problems.check()
    reading = Reading(Path.cwd(), llm=None, needs_keys=needs_keys)
    try:
        return cast("ChatModel", _OneModel.model_validate(root, context=reading).llm)
    except pydantic.ValidationError as error:
        report(error, cast("Entries", root), problems)
        problems.check()
        raise


def _resolve_path(reading: Reading, text: str) -> str:
    """Return `local:PATH` with the path seen from the file's directory."""
    prefix, colon, path = text.partition(":")
    if prefix.strip() != "local" or not path.strip():
        return text
    return f"local{colon}{reading.resolve_path(path.strip())}"


def _build(reading: Reading, values: dict[str, Any]) -> ChatModel:
    name = str(values.pop("model")).strip()
    is_local = name == "local" or name.startswith("local:")
    kind = "models on this machine" if is_local else "models behind an endpoint"
    wrong = [each for each in values if each in (_Endpoint if is_local else _Local).model_fields]
    if wrong:
        raise refuse_keys({each: f"{kind} have no '{each}'" for each in wrong})
    return _build_local(reading, name, values) if is_local else _build_hosted(reading, name, values)


def _build_local(reading: Reading, name: str, values: dict[str, Any]) -> ChatModel:
    from ensemble_ray.llm.local import LocalChatModel  # only teams with such a model pay for it

    values.pop("extra_headers", None)
    values.update(values.pop("extra_body", {}))
    path = _resolve_path(reading, name).partition(":")[2] or None
    return LocalChatModel(path, **values)


def _build_hosted(reading: Reading, name: str, values: dict[str, Any]) -> ChatModel:
    from ensemble_ray.llm.openai import OpenAIChatModel  # only teams with such a model pay for it

    if (variable := values.pop("api_key_env", None)) is not None:
        try:
            values["api_key"] = reading.read_key(variable)
        except ValidationError as error:
            raise refuse(str(error), "api_key_env") from None
    return OpenAIChatModel(name.removeprefix("openai:"), **values)


_TEXT = "A model: `openai:MODEL` for any endpoint of that protocol, `local` for the embedded one, `local:PATH.gguf`."
_ModelText = Annotated[str, Field(pattern=r"^(openai:.+|local(:.+)?)$", description=_TEXT)]
#: A model.
Model = Annotated[object, PlainValidator(_read, json_schema_input_type=_ModelText | ModelKeys)]


class _OneModel(FileSection):
    called = "a model"
    llm: Model = key(is_required=True)

"""Models in a team file: a string, or a mapping with `model` and its options. Room: loader.

A key never stands in the file: `api_key_env` names the environment variable that holds it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.factory import KNOWN_FORMS, resolve_llm
from ensemble_ray.loader.document import Entries, Entry, Located, Scalar
from ensemble_ray.loader.kinds import BAD, FLAG, NUMBER, TEXT, WHOLE, Field, Kind, Reading, given, plain, read_fields
from ensemble_ray.values.messages import JsonValue

__all__ = ["LLM", "MODEL_FIELDS", "key_from_environment"]

_FREE = Kind(read=plain, schema={})
_FREE_MAPPING = Kind(
    read=lambda reading, node, where: (
        plain(reading, node, where) if isinstance(node, Entries) else reading.refuse(node, where, "must be a mapping")
    ),
    schema={"type": "object"},
)

_ENDPOINT = {
    "base_url": Field(kind=TEXT, doc="Where the protocol begins, often ending in /v1; default OPENAI_BASE_URL."),
    "api_key_env": Field(kind=TEXT, doc="Environment variable that holds the key; default OPENAI_API_KEY."),
    "structured_outputs": Field(
        kind=FLAG,
        doc="Whether the endpoint can hold typed answers to a JSON schema; left out: the first call finds out.",
    ),
    "max_retries": Field(
        kind=WHOLE, doc="How often the model itself repeats a failed call; the team's retry comes on top."
    ),
    "max_answer_bytes": Field(
        kind=WHOLE, doc="Longest answer that is taken, unpacked; a stream may have four times as much."
    ),
    "max_answer_time": Field(kind=NUMBER, doc="Longest time of a whole streamed answer, seconds."),
}
_LOCAL = {
    "context_tokens": Field(kind=WHOLE, doc="Local models: context of all slots together."),
    "slots": Field(kind=WHOLE, doc="Local models: conversations answered at once."),
    "threads": Field(kind=WHOLE, doc="Local models: threads of the engine."),
}
#: Options of every request; what an endpoint takes beyond them goes through `extra_body`.
_REQUEST = {
    "temperature": Field(kind=NUMBER, doc="How freely it writes; 0 is the least."),
    "top_p": Field(kind=NUMBER, doc="Share of probability that it draws from."),
    "max_tokens": Field(kind=WHOLE, doc="Longest answer, tokens."),
    "max_completion_tokens": Field(kind=WHOLE, doc="Longest answer, tokens, with the thinking of models that think."),
    "seed": Field(kind=WHOLE, doc="Makes answers repeatable where the endpoint can."),
    "stop": Field(kind=_FREE, doc="Text, or texts, at which the answer ends."),
    "presence_penalty": Field(kind=NUMBER, doc="Above 0: new subjects are preferred."),
    "frequency_penalty": Field(kind=NUMBER, doc="Above 0: repetition is avoided."),
    "logit_bias": Field(kind=_FREE_MAPPING, doc="Token id to bias."),
    "reasoning_effort": Field(kind=TEXT, doc="How long a model that thinks may think."),
    "response_format": Field(kind=_FREE_MAPPING, doc="Form of the answer, as the protocol has it."),
    "tool_choice": Field(kind=_FREE, doc="Which tool the model must or may call."),
    "parallel_tool_calls": Field(kind=FLAG, doc="Whether it may ask for several tools at once."),
    "service_tier": Field(kind=TEXT, doc="Which tier of service answers."),
    "user": Field(kind=TEXT, doc="Whom the request is for."),
    "extra_body": Field(kind=_FREE_MAPPING, doc="Options of this endpoint that have no key of their own here."),
    "extra_headers": Field(kind=_FREE_MAPPING, doc="Headers sent along. No keys here: they belong in the environment."),
}
_TIMEOUT = {"timeout": Field(kind=NUMBER, doc="Longest wait for an answer, seconds.")}
_MODEL = Field(kind=TEXT, is_required=True, doc="The model: a name at the endpoint, `local`, or `local:PATH.gguf`.")
#: Keys of a model's mapping.
MODEL_FIELDS: Mapping[str, Field] = {"model": _MODEL, **_ENDPOINT, **_LOCAL, **_TIMEOUT, **_REQUEST}


def key_from_environment(reading: Reading, node: Located, name: str, where: str) -> object:
    """The key that an environment variable holds; `BAD` where it is needed and not there."""
    key = os.environ.get(name, "").strip()
    if key:
        return key
    if not reading.needs_keys:
        return "not-set"
    return reading.refuse(node, where, f"the environment variable '{name}' is not set: export {name}=...")


def _read(reading: Reading, node: Located, where: str) -> object:
    if reading.llm is not None:
        return reading.llm
    try:
        if isinstance(node, Scalar) and isinstance(node.value, str):
            return resolve_llm(_located_path(reading, node.value))
        if isinstance(node, Entries):
            return _from_mapping(reading, node, where)
    except ValidationError as error:
        return reading.refuse(node, where, str(error))
    return reading.refuse(node, where, f"must be one of [{', '.join(KNOWN_FORMS)}], or a mapping with the key 'model'")


def _located_path(reading: Reading, text: str) -> str:
    """`local:PATH` with the path seen from the file's directory."""
    prefix, colon, path = text.partition(":")
    if prefix.strip() != "local" or not path.strip():
        return text
    return f"local{colon}{reading.located(path.strip())}"


def _from_mapping(reading: Reading, node: Entries, where: str) -> object:
    secret = node.entries.get("api_key")
    if secret is not None:
        reading.problems.add(
            secret.spot, f"{where}.api_key", "a key does not belong in a file: name the variable with api_key_env"
        )
        node = Entries(spot=node.spot, entries={k: entry for k, entry in node.entries.items() if k != "api_key"})
    values = read_fields(reading, node, MODEL_FIELDS, where, what="a model")
    if values is None:
        return BAD
    name = str(values.pop("model")).strip()
    is_local = name == "local" or name.startswith("local:")
    wrong = [key for key in values if key in (_ENDPOINT if is_local else _LOCAL)]
    for key in wrong:
        entry: Entry = node.entries[key]
        kind = "models on this machine" if is_local else "models behind an endpoint"
        reading.problems.add(entry.spot, f"{where}.{key}", f"{kind} have no '{key}'")
    if wrong:
        return BAD
    return _local(reading, name, values) if is_local else _hosted(reading, node, name, values, where)


def _local(reading: Reading, name: str, values: dict[str, Any]) -> object:
    from ensemble_ray.llm.local import LocalChatModel  # only teams with such a model pay for it

    values.pop("extra_headers", None)
    values.update(cast("dict[str, object]", values.pop("extra_body", {})))
    path = _located_path(reading, name).partition(":")[2] or None
    return LocalChatModel(path, **values)


def _hosted(reading: Reading, node: Entries, name: str, values: dict[str, Any], where: str) -> object:
    from ensemble_ray.llm.openai import OpenAIChatModel  # only teams with such a model pay for it

    variable = values.pop("api_key_env", None)
    if variable is not None:
        entry = node.entries["api_key_env"]
        key = key_from_environment(reading, entry.value, str(variable), f"{where}.api_key_env")
        if not given(key):
            return BAD
        values["api_key"] = key
    return OpenAIChatModel(name.removeprefix("openai:"), **values)


def _schema() -> Mapping[str, JsonValue]:
    text = "A model: `openai:MODEL` for any endpoint of that protocol, `local` for the embedded one, `local:PATH.gguf`."
    return {
        "anyOf": [
            {"type": "string", "pattern": r"^(openai:.+|local(:.+)?)$", "description": text},
            {"$ref": "#/definitions/model"},
        ]
    }


#: A model.
LLM = Kind(read=_read, schema=_schema())

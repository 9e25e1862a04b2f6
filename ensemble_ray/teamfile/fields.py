"""Fields of a team file with a special form, and prompts of items."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.definition.delivery import BatchDelivery
from ensemble_ray.definition.ensemble import HierarchicalConstraints
from ensemble_ray.definition.redactor import Redactor
from ensemble_ray.definition.run_options import RetryPolicy
from ensemble_ray.definition.task import ReflectionConfig, Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.execute.review.handlers import ReviewHandler
from ensemble_ray.llm.factory import KNOWN_FORMS, resolve_llm
from ensemble_ray.llm.fallback import REASONS, Fallback, When, resolve_chain
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.memory.lasting import LastingMemory
from ensemble_ray.memory.sqlite import SqliteMemory, SqliteReflectionStore
from ensemble_ray.memory.store import (
    REFLECTION_METHODS,
    STORE_METHODS,
    EnsembleMemory,
    InMemoryReflectionStore,
    MemoryStore,
)
from ensemble_ray.ports import ChatModel, ReflectionStore
from ensemble_ray.record.identity.definition import task_data
from ensemble_ray.teamfile.document import Entries, Items, Problems, list_known_names, read_document, suggestion
from ensemble_ray.teamfile.references import find_attribute, is_reference, make_importable
from ensemble_ray.teamfile.section import (
    KINDS,
    CallableName,
    FileSection,
    Flag,
    Free,
    FreeMapping,
    Number,
    PathText,
    Reading,
    ReferenceText,
    Text,
    Whole,
    context_of,
    has_methods,
    key,
    keys_of,
    mapping,
    object_of,
    object_with,
    one_of,
    plain,
    reference,
    refuse,
    refuse_all,
    report,
    require_text,
    text_in,
)
from ensemble_ray.teamfile.tools import Tool
from ensemble_ray.values.attachments import KINDS as ATTACHMENT_TYPES
from ensemble_ray.values.attachments import Attachment, attachment_of, attachments_in
from ensemble_ray.values.memory import MemoryScope
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.prices import GivenPrice, ModelPrice
from ensemble_ray.values.reviews import Review
from ensemble_ray.values.value import RateLimit

S = TypeVar("S", bound=FileSection)


class _Name(FileSection):
    model: Text = key("The model: a name at the endpoint, `local`, or `local:PATH.gguf`.", is_required=True)


class _Endpoint(FileSection):
    base_url: Text = key("URL of the endpoint, often ending in /v1; default OPENAI_BASE_URL.")
    api_key_env: Text = key("Environment variable that holds the key; default OPENAI_API_KEY.")
    structured_outputs: Flag = key(
        "Whether the endpoint can restrict typed answers to a JSON schema; without it the first call finds out."
    )
    system_role: Text = key(
        "Role of system messages: system, developer, or user, which puts them before the first question; without it the "
        "first refusal decides."
    )
    reads: list[Text] = key(
        "Kinds of attachments that the model reads: image, audio, file; without it the endpoint decides."
    )
    prompt_cache: Text = key(
        "Use of the provider's cache of prompts: breakpoints, key or off; without it as is safe at the endpoint."
    )
    extra_query: FreeMapping = key("Further parameters of the URL's query, such as api-version. No keys here.")
    max_retries: Whole = key("How often the model itself repeats a failed call, in addition to the team's retries.")
    max_answer_bytes: Whole = key("Longest accepted answer after decompression; a stream may have four times as much.")
    max_answer_time: Number = key("Longest time of a whole streamed answer, seconds.")


class _Local(FileSection):
    context_tokens: Whole = key("Local models: context of all slots together.")
    slots: Whole = key("Local models: concurrent conversations.")
    threads: Whole = key("Local models: threads of the engine.")


class _Request(FileSection):
    timeout: Number = key("Longest wait for an answer, seconds.")
    temperature: Number = key("Randomness of the answer; 0 is the least.")
    top_p: Number = key("Share of the probability mass that tokens are drawn from.")
    max_tokens: Whole = key("Longest answer, tokens.")
    max_completion_tokens: Whole = key("Longest answer, tokens, including the reasoning of reasoning models.")
    seed: Whole = key("Makes answers repeatable if the endpoint supports it.")
    stop: Free = key("Text, or texts, at which the answer ends.")
    presence_penalty: Number = key("Above 0: new subjects are preferred.")
    frequency_penalty: Number = key("Above 0: repetition is avoided.")
    logit_bias: FreeMapping = key("Token id to bias.")
    reasoning_effort: Text = key("How long a reasoning model may think.")
    response_format: FreeMapping = key("Form of the answer, as the protocol defines it.")
    tool_choice: Free = key("Which tool the model must or may call.")
    parallel_tool_calls: Flag = key("Whether it may request several tools in one answer.")
    service_tier: Text = key("Service tier that answers the request.")
    user: Text = key("User for whom the request is sent.")
    extra_body: FreeMapping = key("Options of this endpoint that have no key here.")
    extra_headers: FreeMapping = key("Further headers. No keys here: they belong in the environment.")


class ModelKeys(_Request, _Local, _Endpoint, _Name):
    called = "a model"
    misplaced: ClassVar = {"api_key": "a key does not belong in a file: name the variable with api_key_env"}


def _read(node: object, info: ValidationInfo) -> ChatModel:
    reading = context_of(info)
    if reading.llm is not None:
        return reading.llm
    if isinstance(node, Items):
        return resolve_chain(_MODELS.validate_python(node, context=reading))
    if isinstance(node, Entries) and "models" in node:
        return ChainKeys.model_validate(node, context=reading).build()
    return resolve_llm(_read_single(node, info))


def _read_single(node: object, info: ValidationInfo) -> ChatModel | str:
    """Return a model that is no chain; one of a name as it is, which then is its name in a chain, too."""
    reading = context_of(info)
    if (text := text_in(node)) is not None:
        resolved = _resolve_path(reading, text)
        model = resolve_llm(resolved)
        return text.strip() if resolved == text else model
    if isinstance(node, Entries):
        return _build(reading, ModelKeys.model_validate(node, context=reading).values())
    raise ValidationError(
        f"must be one of [{', '.join(KNOWN_FORMS)}], a mapping with the key 'model', or a list of these, which is a fallback chain"
    )


def load_model(given: object, *, needs_keys: bool = True) -> ChatModel:
    """Return the model that `module:attribute`, a text like a team file's `llm`, or a mapping with `model` names."""
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
    """Resolve the path in `local:PATH` against the directory of the team file."""
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
        raise refuse_all((f"{kind} have no '{each}'", (each,), "key") for each in wrong)
    if is_local:
        from ensemble_ray.llm.local import LocalChatModel

        values.pop("extra_headers", None)
        values.update(values.pop("extra_body", {}))
        return LocalChatModel(_resolve_path(reading, name).partition(":")[2] or None, **values)
    from ensemble_ray.llm.openai import OpenAIChatModel
    from ensemble_ray.llm.openai_responses import OpenAIResponsesModel

    if (variable := values.pop("api_key_env", None)) is not None:
        try:
            values["api_key"] = reading.read_key(variable)
        except ValidationError as error:
            raise refuse(str(error), "api_key_env") from None
    if name.startswith("openai-responses:"):
        return OpenAIResponsesModel(name.removeprefix("openai-responses:"), **values)
    return OpenAIChatModel(name.removeprefix("openai:"), **values)


_MODEL_TEXT = (
    "A model: `openai:MODEL` for any endpoint of that protocol, `openai-responses:MODEL` for one of the Responses API, "
    "`local` for the embedded one, `local:PATH.gguf`."
)
_ModelText = Annotated[str, Field(pattern=r"^(openai(-responses)?:.+|local(:.+)?)$", description=_MODEL_TEXT)]
_SingleModel = Annotated[object, PlainValidator(_read_single, json_schema_input_type=_ModelText | ModelKeys)]
_MODELS: TypeAdapter[list[Any]] = TypeAdapter(list[_SingleModel])


class WhenKeys(FileSection):
    called = "a rule of a chain"
    budget_above: Number = key("Share of the run's budget that is spent, from 0 to 1.")
    tokens_above: Whole = key("Estimated input tokens of the request.")
    run_time_above: Number = key("Time since the run was started or resumed, seconds.")
    use: Text = key("The first model that may be asked, as `models` names it; default: the last one.")

    def build(self) -> When:
        return When(**self.values())


class ChainKeys(FileSection):
    called = "a fallback chain"
    models: list[_SingleModel] = key(
        "The models in their order; the next one is asked if one cannot answer.", is_required=True
    )
    on: list[Annotated[str, one_of(REASONS, "failure")]] = key(
        "Failures after which the next model is asked; default: all."
    )
    when: list[Annotated[WhenKeys, AfterValidator(WhenKeys.build)]] = key("Rules that leave out the first models.")

    def build(self) -> Fallback:
        return Fallback(**self.values())


Model = Annotated[
    object,
    PlainValidator(_read, json_schema_input_type=_ModelText | ModelKeys | list[_ModelText | ModelKeys] | ChainKeys),
]


class _OneModel(FileSection):
    called = "a model"
    llm: Model = key(is_required=True)


_REVIEW_WORDS = ("required", "skip")
_HANDLERS = ("console", "auto_approve")


@keys_of(Review, without={"is_skip"})
class ReviewKeys(FileSection):
    called: ClassVar[str] = "a review"


def _read_review(node: object, info: ValidationInfo) -> Review:
    if isinstance(node, Entries):
        return cast("Review", ReviewKeys.model_validate(node, context=context_of(info)).build())
    match text_in(node):
        case "required":
            return Review.required()
        case "skip":
            return Review.skip()
        case None:
            raise ValidationError("must be `required`, `skip`, or a mapping with keys such as 'prompt'")
        case word:
            hint = suggestion(word, _REVIEW_WORDS)
            raise ValidationError(f"unknown word '{word}'.{hint} Known: [{', '.join(_REVIEW_WORDS)}]")


def _read_handler(node: object, info: ValidationInfo) -> object:
    match text_in(node):
        case "console":
            return ReviewHandler.console()
        case "auto_approve":
            return ReviewHandler.auto_approve()
        case str(word) if not is_reference(word):
            hint = suggestion(word, _HANDLERS)
            raise ValidationError(f"must be `console`, `auto_approve`, or module:attribute, got: '{word}'.{hint}")
        case _:
            return _HANDLER.validate_python(node, context=info.context)


_HANDLER: TypeAdapter[Any] = TypeAdapter(Annotated[object, object_with("review")])
ReviewName = Annotated[
    object, PlainValidator(_read_review, json_schema_input_type=Literal["required", "skip"] | ReviewKeys)
]
ReviewHandlerName = Annotated[
    object, PlainValidator(_read_handler, json_schema_input_type=Literal["console", "auto_approve"] | ReferenceText)
]


@keys_of(RateLimit)
class RateLimitKeys(FileSection):
    called = "a rate limit"
    requests: Whole = key(is_required=True)
    period: Number = key(is_required=True)


@keys_of(CostConfiguration)
class CostKeys(FileSection):
    called = "a cost configuration"
    currency: Text = key("Shown after amounts; default USD.")


@keys_of(ModelPrice, without={"source", "above", "batch"})
class _RateKeys(FileSection):
    called = "a price"


_Rates = Annotated[_RateKeys, AfterValidator(_RateKeys.build)]


@keys_of(ModelPrice, without={"source"})
class PriceKeys(FileSection):
    called = "a price"
    above: Annotated[dict[str, _Rates], mapping("must be a mapping of numbers of tokens to rates")] = key()
    batch: _Rates = key()


def _read_price(node: object, info: ValidationInfo) -> GivenPrice:
    if isinstance(node, Entries):
        return cast("ModelPrice", PriceKeys.model_validate(node, context=context_of(info)).build())
    name = text_in(node)
    if name is None:
        raise ValidationError("must be a mapping with keys such as 'input', or the name of a model, PROVIDER:MODEL")
    return name


Prices = Annotated[
    dict[str, Annotated[object, PlainValidator(_read_price, json_schema_input_type=str | PriceKeys)]],
    mapping("must be a mapping of models to prices"),
]


@keys_of(RetryPolicy)
class RetryKeys(FileSection):
    called = "a retry policy"


class _FinderKeys(FileSection):
    called = "a pattern"
    function: CallableName = key(
        "Returns the (start, end) of each value in a text, as module:function.", is_required=True
    )


def _read_pattern(node: object, info: ValidationInfo) -> object:
    if isinstance(node, Entries):
        return _FinderKeys.model_validate(node, context=context_of(info)).function
    return require_text(node)


@keys_of(Redactor)
class RedactorKeys(FileSection):
    called = "a redactor"
    patterns: list[Text] = key("The library's patterns: `email`, `phone`, `card`, `iban`, `key`; default: all of them.")
    custom: Annotated[
        dict[
            str, Annotated[object, PlainValidator(_read_pattern, json_schema_input_type=str | dict[str, ReferenceText])]
        ],
        mapping("must be a mapping of names to patterns"),
    ] = key("More patterns by name: a regular expression, or `function: module:function`.")
    tools: list[Text] = key("Names of the tools that receive values in a reversible run; default: all tools.")


RedactorField = Annotated[RedactorKeys, AfterValidator(RedactorKeys.build)]


@keys_of(HierarchicalConstraints)
class ConstraintKeys(FileSection):
    called = "the constraints"
    max_calls_per_worker: Annotated[dict[str, Whole], mapping("must be a mapping of roles to whole numbers")] = key()


Retry = Annotated[RetryKeys, AfterValidator(RetryKeys.build)]


@keys_of(BatchDelivery)
class DeliveryKeys(FileSection):
    called = "a delivery in batches"


def _read_delivery(node: object, info: ValidationInfo) -> object:
    if isinstance(node, Entries):
        return DeliveryKeys.model_validate(node, context=context_of(info)).build()
    if (word := text_in(node)) not in _DELIVERIES:
        hint = suggestion(word, _DELIVERIES) if word else ""
        raise ValidationError(f"must be `calls`, `batch`, or options of batches such as 'max_age'.{hint}")
    return word


_DELIVERIES = ("calls", "batch")
_TOOLS = "Tools that it may call: a built-in one by name, or module:attribute; parameters as `name: {...}`."
KINDS.update(
    {
        ChatModel: Model,
        tuple: Annotated[list[Tool], Field(description=_TOOLS)],
        BatchDelivery: Annotated[
            object,
            PlainValidator(_read_delivery, json_schema_input_type=Literal["calls", "batch"] | DeliveryKeys),
        ],
        RateLimit: Annotated[RateLimitKeys, AfterValidator(RateLimitKeys.build)],
        CostConfiguration: Annotated[CostKeys, AfterValidator(CostKeys.build)],
        Review: ReviewName,
        HierarchicalConstraints: Annotated[ConstraintKeys, AfterValidator(ConstraintKeys.build)],
    }
)

_URL_ADVICE = "name the variable that holds the URL with url_env, or leave the password to PGPASSWORD or ~/.pgpass"


class DatabaseKeys(FileSection):
    misplaced: ClassVar = {"dsn": "the key is 'url', or 'url_env' for a URL with a password"}
    url: Text = key("The database, `postgresql://HOST:PORT/DATABASE`; no password here.")
    url_env: Text = key("Environment variable that holds the URL, in place of `url`.")


def url_of(reading: Reading, section: DatabaseKeys) -> str:
    """Return the URL. One with a password must come from the environment."""
    values = section.values()
    if ("url" in values) == ("url_env" in values):
        raise ValidationError("must have one of the keys 'url' and 'url_env'")
    if (variable := values.get("url_env")) is not None:
        try:
            url = reading.read_key(variable)
        except ValidationError as error:
            raise refuse(str(error), "postgres", "url_env") from None
        return url if reading.needs_keys else f"postgresql:///{variable}"
    url = values["url"]
    parts = urlsplit(url)
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise refuse(f"a password does not belong in a file: {_URL_ADVICE}", "postgres", "url")
    return str(url)


_IN_MEMORY = "in_memory"


_MODEL = TypeAdapter[object](Annotated[object, object_of("a model of embeddings", has_methods("embed"))])
_ModelForm = Literal["local"] | Annotated[str, Field(pattern="^openai:.+$")] | ReferenceText
_EmbeddingModel = Annotated[
    object,
    PlainValidator(
        lambda node, info: (
            _MODEL.validate_python(node, context=info.context)
            if is_reference(name := require_text(node)) and not name.startswith("openai:")
            else resolve_embedding_model(name)
        ),
        json_schema_input_type=_ModelForm,
    ),
]
_EMBEDDINGS = "Finds entries by meaning: `local`, `openai:MODEL`, or module:attribute."


@keys_of(MemoryScope)
class _ScopeKeys(FileSection):
    called = "scope '{name}'"
    keep_entries_within: Number = key("How long it keeps an entry, s; default: forever.")


_SCOPE = TypeAdapter[object](Annotated[_ScopeKeys, AfterValidator(_ScopeKeys.build)])
_ScopeForm = str | _ScopeKeys
ScopeNames = Annotated[
    list[object],
    PlainValidator(
        lambda node, info: [
            _SCOPE.validate_python(each, context=info.context) if isinstance(each, Entries) else require_text(each)
            for each in (node if isinstance(node, Items) else [node])
        ],
        json_schema_input_type=_ScopeForm | list[_ScopeForm],
    ),
]


class _AttachmentKeys(FileSection):
    called = "the attachment"
    image: Text = key("Path of a picture, relative to this file, or its URL; a template.")
    audio: Text = key("Path of a sound, relative to this file, or its URL; a template.")
    file: Text = key("Path of another file, relative to this file, or its URL; a template.")
    name: Text = key("Its file name for the model; default: from the path or URL.")
    media_type: Text = key("Such as image/png; default: from its content.")
    allow_private_hosts: Flag = key("Whether the URL may lead to private addresses. Default: false.")


def _read_attachment(node: object, info: ValidationInfo) -> Attachment:
    reading = context_of(info)
    if not isinstance(node, Entries):
        return attachment_of(_place_of(reading, require_text(node)))
    values = _AttachmentKeys.model_validate(node, context=reading).values()
    kinds = [kind for kind in ATTACHMENT_TYPES if kind in values]
    if len(kinds) != 1:
        raise ValidationError("must have one of the keys 'image', 'audio' and 'file'")
    return ATTACHMENT_TYPES[kinds[0]](_place_of(reading, values.pop(kinds[0])), **values)


def _place_of(reading: Reading, source: str) -> str:
    return source if _SCHEME.match(source) else str(reading.resolve_path(source))


_SCHEME = re.compile(r"(https?://|data:)", re.IGNORECASE)
_AttachmentForm = str | _AttachmentKeys
Attachments = Annotated[
    list[Annotated[object, PlainValidator(_read_attachment, json_schema_input_type=_AttachmentForm)]],
    BeforeValidator(
        lambda node: node if isinstance(node, Items) else [node],
        json_schema_input_type=_AttachmentForm | list[_AttachmentForm],
    ),
]


class _SqliteKeys(FileSection):
    called = "the memory file"
    path: PathText = key("The file, relative to this file; created on first use.", is_required=True)
    embedding_model: _EmbeddingModel = key(_EMBEDDINGS)


class _PostgresKeys(DatabaseKeys):
    called = "the memory's database"
    embedding_model: _EmbeddingModel = key(_EMBEDDINGS)


class _StoreKeys(FileSection):
    called = "the memory store"
    sqlite: _SqliteKeys = key("Memory in one file.")
    postgres: _PostgresKeys = key("Memory in a PostgreSQL database.")


def _build_memory(reading: Reading, section: _StoreKeys) -> LastingMemory:
    found = section.values()
    if len(found) != 1:
        raise ValidationError("must have one of the keys 'sqlite' and 'postgres'")
    if "sqlite" in found:
        values = section.sqlite.values()
        return SqliteMemory(values["path"], embedding_model=values.get("embedding_model"))
    from ensemble_ray.memory.postgres import PostgresMemory

    values = section.postgres.values()
    return PostgresMemory(url_of(reading, section.postgres), embedding_model=values.get("embedding_model"))


def _read_store(
    what: str,
    *methods: str,
    section: type[S],
    build: Callable[[Reading, S], object],
    in_memory: Callable[[], object] | None = None,
) -> PlainValidator:
    named = TypeAdapter[object](Annotated[object, object_of(what, has_methods(*methods))])

    def read(node: object, info: ValidationInfo) -> object:
        word = text_in(node)
        if in_memory is not None and word == _IN_MEMORY:
            return in_memory()
        if word is not None and not is_reference(word):
            words = f"`{_IN_MEMORY}`, " if in_memory else ""
            sections = "{sqlite: {path: FILE}}, {postgres: {url: URL}}"
            raise ValidationError(f"must be {words}{sections}, or module:attribute, which names {what}")
        if not isinstance(node, Entries):
            return named.validate_python(node, context=info.context)
        return build(context_of(info), section.model_validate(node, context=info.context))

    form: Any = ReferenceText | section
    return PlainValidator(read, json_schema_input_type=Literal["in_memory"] | form if in_memory else form)


_READ_STORE = _read_store(
    "a memory store", *STORE_METHODS, section=_StoreKeys, build=_build_memory, in_memory=MemoryStore.in_memory
)
StoreName = Annotated[object, _READ_STORE]
_READ_LONG_TERM = _read_store(
    "a long-term memory",
    *("store", "retrieve"),
    section=_StoreKeys,
    build=lambda reading, section: _build_memory(reading, section).long_term,
)
_LongTerm = Annotated[object, _READ_LONG_TERM]
_READ_ENTITIES = _read_store(
    "an entity memory",
    *("put", "get", "get_all", "is_empty"),
    section=_StoreKeys,
    build=lambda reading, section: _build_memory(reading, section).entities,
)
_Entities = Annotated[object, _READ_ENTITIES]


@keys_of(EnsembleMemory)
class _MemoryKeys(FileSection):
    called = "the memory"
    short_term: Flag = key("Whether each task sees the earlier outputs of the same run.")
    long_term: _LongTerm = key(
        "Keeps outputs across runs: `sqlite: {path: ..., embedding_model: ...}`, `postgres: {url: ..., embedding_model: ...}`, "
        "or module:attribute."
    )
    entity_memory: _Entities = key(
        "Facts that each task sees: `sqlite: {path: ...}`, `postgres: {url: ...}`, or module:attribute."
    )
    long_term_max_results: Whole = key("How many entries of `long_term` a task sees; > 0.")
    extractor: Annotated[object, reference("a callable")] = key(
        "Returns the text of an output that `long_term` stores, as module:function."
    )


Memory = Annotated[_MemoryKeys, AfterValidator(_MemoryKeys.build)]


@keys_of(ReflectionConfig)
class _ReflectionKeys(FileSection):
    called: ClassVar[str] = "the reflection"
    strategy: CallableName = key("Reflects instead of a model, as module:function.")


class _FileKeys(FileSection):
    called: ClassVar[str] = "the file of reflections"
    path: PathText = key("The file, relative to this file; created on first use.", is_required=True)


class _DatabaseKeys(DatabaseKeys):
    called: ClassVar[str] = "the database of reflections"


class _ReflectionStoreKeys(FileSection):
    called: ClassVar[str] = "the reflection store"
    sqlite: _FileKeys = key("Reflections in one file, which may be the file of a memory.")
    postgres: _DatabaseKeys = key("Reflections in a PostgreSQL database, which may be the database of a memory.")


def _build_reflection_store(reading: Reading, section: _ReflectionStoreKeys) -> ReflectionStore:
    found = section.values()
    if len(found) != 1:
        raise ValidationError("must have one of the keys 'sqlite' and 'postgres'")
    if "sqlite" in found:
        return SqliteReflectionStore(section.sqlite.values()["path"])
    from ensemble_ray.memory.postgres import PostgresReflectionStore

    return PostgresReflectionStore(url_of(reading, section.postgres))


_SWITCH = TypeAdapter[bool](Annotated[bool, plain(bool, "true, false, or a mapping with keys such as 'model'")])
_READ_REFLECTION = PlainValidator(
    lambda node, info: (
        _ReflectionKeys.model_validate(node, context=info.context).build()
        if isinstance(node, Entries)
        else ReflectionConfig()
        if _SWITCH.validate_python(node)
        else None
    ),
    json_schema_input_type=bool | _ReflectionKeys,
)
ReflectionName = Annotated[object, _READ_REFLECTION]
_READ_REFLECTION_STORE = _read_store(
    "a store of reflections",
    *REFLECTION_METHODS,
    section=_ReflectionStoreKeys,
    build=_build_reflection_store,
    in_memory=InMemoryReflectionStore,
)
ReflectionStoreName = Annotated[object, _READ_REFLECTION_STORE]


_ITEM, _ITEMS = "item", "items"
_VARIABLE = re.compile(r"\{\{(?P<escaped>\w+)\}\}|\{(?P<name>\w+)\}")


def text_of_item(value: object) -> str:
    """Return a value as prompts show it: text unchanged, None as an empty text, a file by its name, others as JSON."""
    if isinstance(value, str | Attachment):
        return str(value)
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _fields_of(item: object) -> dict[str, object]:
    if isinstance(item, Attachment):
        return {_ITEM: item, "name": item.name, "media_type": item.media_type}
    fields = cast("Mapping[object, object]", item).items() if isinstance(item, Mapping) else ()
    return {_ITEM: item, **{str(name): value for name, value in fields}}


def _fill(text: str, values: Mapping[str, object]) -> str:

    def fill(found: re.Match[str]) -> str:
        escaped, name = found["escaped"], found["name"]
        if escaped is not None:
            return f"{{{escaped}}}"
        return text_of_item(values[name]) if name in values else found[0]

    return _VARIABLE.sub(fill, text) if "{" in text else text


@dataclass(frozen=True)
class _Prompt:
    task: Task  # its texts are templates
    inputs: frozenset[str] = frozenset()  # of the run, which are replaced later

    def declared(self) -> Mapping[str, object]:
        """Return the data for the digest of a definition (S-MR-173)."""
        return task_data(self.task)

    def _build(self, values: Mapping[str, object], *, attached: Sequence[Attachment] = (), **changes: Any) -> Task:
        templates = {name: getattr(self.task, name) for name in ("description", "expected_output")}
        texts = {name: _fill(template, values) for name, template in templates.items()}
        named = {found["name"] for template in templates.values() for found in _VARIABLE.finditer(template)}
        shown = [each for name, value in values.items() if name in named for each in attachments_in(value)]
        if attached or shown or self.task.attachments:
            own = [each.with_source(_fill(each.source, values)) for each in self.task.attachments]
            changes["attachments"] = list(dict.fromkeys([*own, *attached, *shown]))
        return self.task.replace(**{**texts, **changes})


@dataclass(frozen=True)
class ItemPrompt(_Prompt):
    """Makes the task of one item.

    Examples:
        >>> from ensemble_ray.definition.task import Task
        >>> prompt = ItemPrompt(Task.of("Summarise {title}: {item}"))
        >>> prompt({"title": "Tides"}).description
        'Summarise Tides: {"title": "Tides"}'
        >>> prompt.problem({"name": "Tides"})
        "it has no field 'title', which the prompt names. Known: [name, item]"
    """

    needed: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        texts = (self.task.description, self.task.expected_output)
        names = [found["name"] for text in texts for found in _VARIABLE.finditer(text) if found["name"] is not None]
        object.__setattr__(self, "needed", tuple(dict.fromkeys(names)))

    def __call__(self, item: object) -> Task:
        problem = self.problem(item)
        if problem is not None:
            raise ValidationError(f"The item '{text_of_item(item)[:80]}': {problem}")
        return self._build(_fields_of(item), attached=(item,) if isinstance(item, Attachment) else ())

    def problem(self, item: object) -> str | None:
        """Return the reason why no task can be made of an item, or None (S-MR-171)."""
        known = _fields_of(item)
        missing = [name for name in self.needed if name not in known and name not in self.inputs]
        if not missing:
            return None
        listed = ", ".join(f"'{name}'" for name in missing)
        what = "field" if len(missing) == 1 else "fields"
        if not isinstance(item, Mapping | Attachment):
            kind = type(item).__name__
            return f"it is a {kind} without fields, and the prompt names the {what} {listed}: write {{{_ITEM}}} for all of it"
        fields = [name for name in known if name != _ITEM]
        guess = suggestion(missing[0], fields) if len(missing) == 1 else ""
        return f"it has no {what} {listed}, which the prompt names.{guess} {list_known_names([*fields, _ITEM])}"


@dataclass(frozen=True)
class GroupPrompt(_Prompt):
    def __call__(self, chunk_tasks: Sequence[Task]) -> Task:
        return self._build({}, context=list(chunk_tasks))


@dataclass(frozen=True)
class AllItemsPrompt(_Prompt):
    """Makes the single task: items in place of `{items}`, or after the description (S-MR-172)."""

    def __call__(self, items: Sequence[object]) -> Task:
        listed = "\n".join(text_of_item(item) for item in items)
        task = self._build({_ITEMS: listed})
        if attached := attachments_in(list(items)):
            task = task.replace(attachments=[*task.attachments, *attached])
        if any(found["name"] == _ITEMS for found in _VARIABLE.finditer(self.task.description)):
            return task
        return task.replace(description=f"{task.description}\n\n{listed}")

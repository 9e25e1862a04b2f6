"""Models in a team file: a string, or a mapping with `model` and its options.

A key never stands in the file: `api_key_env` names the environment variable that holds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast
from urllib.parse import parse_qs, urlsplit

import pydantic
from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.definition.ensemble import HierarchicalConstraints
from ensemble_ray.definition.run_options import RetryPolicy
from ensemble_ray.definition.task import ReflectionConfig
from ensemble_ray.errors import ValidationError
from ensemble_ray.execute.review.handlers import ReviewHandler
from ensemble_ray.llm.factory import KNOWN_FORMS, resolve_llm
from ensemble_ray.memory.embedding_models import resolve_embedding_model
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
from ensemble_ray.teamfile.document import Entries, Items, Problems, Scalar, list_known_names, read_document, suggestion
from ensemble_ray.teamfile.references import find_attribute, is_reference, make_importable
from ensemble_ray.teamfile.section import (
    KINDS,
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
    has_method,
    key,
    keys_of,
    mapping,
    reference,
    refuse,
    refuse_keys,
    report,
    require_text,
    text_in,
)
from ensemble_ray.teamfile.tools import Tool
from ensemble_ray.teamfile.user_code import CallableName, object_with
from ensemble_ray.values.memory import MemoryScope
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.reviews import Review
from ensemble_ray.values.value import RateLimit

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task
    from ensemble_ray.memory.lasting import LastingMemory


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


_WORDS = ("required", "skip")
_HANDLERS = ("console", "auto_approve")


@keys_of(Review, without={"is_skip"})
class ReviewKeys(FileSection):
    """A gate."""

    called: ClassVar[str] = "a review"


def _read_review(node: object, info: ValidationInfo) -> Review:
    if isinstance(node, Entries):
        built: Review = ReviewKeys.model_validate(node, context=context_of(info)).build()
        return built
    match text_in(node):
        case "required":
            return Review.required()
        case "skip":
            return Review.skip()
        case None:
            raise ValidationError("must be `required`, `skip`, or a mapping with keys such as 'prompt'")
        case word:
            raise ValidationError(f"unknown word '{word}'.{suggestion(word, _WORDS)} Known: [{', '.join(_WORDS)}]")


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


#: `keys_of` from here, so that whoever gives a section its keys has the kinds of this module.


@keys_of(RateLimit)
class RateLimitKeys(FileSection):
    """So many requests in each period."""

    called = "a rate limit"
    requests: Whole = key(is_required=True)
    period: Number = key(is_required=True)


@keys_of(CostConfiguration)
class CostKeys(FileSection):
    """Money per token."""

    called = "a cost configuration"
    currency: Text = key("Shown behind amounts; USD unless told.")


@keys_of(RetryPolicy)
class RetryKeys(FileSection):
    """How patient a run is with model calls that fail by the provider's fault."""

    called = "a retry policy"


@keys_of(HierarchicalConstraints)
class ConstraintKeys(FileSection):
    """What the manager is held to, whatever its model says."""

    called = "the constraints"
    max_calls_per_worker: Annotated[dict[str, Whole], mapping("must be a mapping of roles to whole numbers")] = key()


Retry = Annotated[RetryKeys, AfterValidator(RetryKeys.build)]
_TOOLS = "Tools it may call: a built-in one by name, or module:attribute; parameters as `name: {...}`."
KINDS.update(
    {
        ChatModel: Model,
        tuple: Annotated[list[Tool], Field(description=_TOOLS)],
        RateLimit: Annotated[RateLimitKeys, AfterValidator(RateLimitKeys.build)],
        CostConfiguration: Annotated[CostKeys, AfterValidator(CostKeys.build)],
        Review: ReviewName,
        HierarchicalConstraints: Annotated[ConstraintKeys, AfterValidator(ConstraintKeys.build)],
    }
)


_URL_WAY = "name the variable that holds the URL with url_env, or leave the password to PGPASSWORD or ~/.pgpass"


class DatabaseKeys(FileSection):
    """A database; sections add what is theirs."""

    misplaced: ClassVar = {"dsn": "the key is 'url', or 'url_env' for a URL with a password"}
    url: Text = key("The database, `postgresql://HOST:PORT/DATABASE`; no password here.")
    url_env: Text = key("Environment variable that holds the URL, in place of `url`.")


def url_of(reading: Reading, section: DatabaseKeys) -> str:
    """Return the URL of a database; one with a password comes from the environment.

    Raises:
        ValidationError: there is none, or a password is in the file.
    """
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
        raise refuse(f"a password does not belong in a file: {_URL_WAY}", "postgres", "url")
    return str(url)


_IN_MEMORY = "in_memory"


def _object_with(what: str, *methods: str) -> PlainValidator:
    """Read an object, or a class that is made without arguments, which has all of these methods."""

    def has_all(found: object) -> bool:
        return all(has_method(name)(found) for name in methods)

    return reference(what, makes=True, accepts=has_all, is_intended=has_all)


def _read_model(node: object, info: ValidationInfo) -> object:
    name = require_text(node)
    if is_reference(name) and not name.startswith("openai:"):
        return _MODEL.validate_python(node, context=info.context)
    return resolve_embedding_model(name)


_MODEL = TypeAdapter[object](Annotated[object, _object_with("a model of embeddings", "embed")])
_ModelForm = Literal["local"] | Annotated[str, Field(pattern="^openai:.+$")] | ReferenceText


@keys_of(MemoryScope)
class _ScopeKeys(FileSection):
    """A part of the memory store that a task reads and writes."""

    called = "scope '{name}'"
    keep_entries_within: Number = key("How long it keeps an entry, s; default: for ever.")


def _read_scopes(node: object, info: ValidationInfo) -> list[object]:
    return [
        _SCOPE.validate_python(each, context=info.context) if isinstance(each, Entries) else require_text(each)
        for each in (node if isinstance(node, Items) else [node])
    ]


_SCOPE = TypeAdapter[object](Annotated[_ScopeKeys, AfterValidator(_ScopeKeys.build)])
_ScopeForm = str | _ScopeKeys
ScopeNames = Annotated[list[object], PlainValidator(_read_scopes, json_schema_input_type=_ScopeForm | list[_ScopeForm])]


class _SqliteKeys(FileSection):
    """Memory in one file."""

    called = "the memory file"
    path: PathText = key("The file, seen from this file; it is made when it is first used.", is_required=True)
    embedding_model: Annotated[object, PlainValidator(_read_model, json_schema_input_type=_ModelForm)] = key(
        "Finds entries by meaning: `local`, `openai:MODEL`, or module:attribute."
    )


class _PostgresKeys(DatabaseKeys):
    """Memory in a PostgreSQL database."""

    called = "the memory's database"
    embedding_model: Annotated[object, PlainValidator(_read_model, json_schema_input_type=_ModelForm)] = key(
        "Finds entries by meaning: `local`, `openai:MODEL`, or module:attribute."
    )


class _StoreKeys(FileSection):
    """A store that is made of a section."""

    called = "the memory store"
    sqlite: _SqliteKeys = key("Memory in one file.")
    postgres: _PostgresKeys = key("Memory in a PostgreSQL database.")


def _build_memory(reading: Reading, section: _StoreKeys) -> LastingMemory:
    """Return the memory of a section.

    Raises:
        ValidationError: it is none, or not one.
    """
    found = section.values()
    if len(found) != 1:
        raise ValidationError("must have one of the keys 'sqlite' and 'postgres'")
    if "sqlite" in found:
        values = section.sqlite.values()
        return SqliteMemory(values["path"], embedding_model=values.get("embedding_model"))
    from ensemble_ray.memory.postgres import PostgresMemory  # only teams with a database pay for it

    values = section.postgres.values()
    return PostgresMemory(url_of(reading, section.postgres), embedding_model=values.get("embedding_model"))


def _read_part(what: str, *methods: str, part: str = "", has_word: bool = False) -> PlainValidator:
    """Read one kind of memory: a word, a section, or an object of the user's by its name."""
    named = TypeAdapter[object](Annotated[object, _object_with(what, *methods)])

    def read(node: object, info: ValidationInfo) -> object:
        word = text_in(node)
        if has_word and word == _IN_MEMORY:
            return MemoryStore.in_memory()
        if word is not None and not is_reference(word):
            words = f"`{_IN_MEMORY}`, " if has_word else ""
            sections = "{sqlite: {path: FILE}}, {postgres: {url: URL}}"
            raise ValidationError(f"must be {words}{sections}, or module:attribute, which names {what}")
        if not isinstance(node, Entries):
            return named.validate_python(node, context=info.context)
        memory = _build_memory(context_of(info), _StoreKeys.model_validate(node, context=info.context))
        return getattr(memory, part) if part else memory

    form: Any = ReferenceText | _StoreKeys
    return PlainValidator(read, json_schema_input_type=Literal["in_memory"] | form if has_word else form)


StoreName = Annotated[object, _read_part("a memory store", *STORE_METHODS, has_word=True)]


@keys_of(EnsembleMemory)
class _MemoryKeys(FileSection):
    """Memory that all tasks use."""

    called = "the memory"
    short_term: Flag = key("Whether each task sees all that was done before it in the same run.")
    long_term: Annotated[object, _read_part("a long-term memory", "store", "retrieve", part="long_term")] = key(
        "Keeps outputs across runs: `sqlite: {path: ..., embedding_model: ...}`, `postgres: {url: ..., embedding_model: ...}`, "
        "or module:attribute."
    )
    entity_memory: Annotated[
        object, _read_part("an entity memory", "put", "get", "get_all", "is_empty", part="entities")
    ] = key("Facts that each task sees: `sqlite: {path: ...}`, `postgres: {url: ...}`, or module:attribute.")
    long_term_max_results: Whole = key("How many entries of `long_term` a task sees; > 0.")
    extractor: Annotated[object, reference("a callable")] = key(
        "Returns what `long_term` stores of an output, as module:function."
    )


Memory = Annotated[_MemoryKeys, AfterValidator(_MemoryKeys.build)]


@keys_of(ReflectionConfig)
class _ReflectionKeys(FileSection):
    """How the outputs of a task are reflected on."""

    called: ClassVar[str] = "the reflection"
    strategy: CallableName = key("Reflects in place of a model, as module:function.")


class _FileKeys(FileSection):
    """Reflections in one file."""

    called: ClassVar[str] = "the file of reflections"
    path: PathText = key("The file, seen from this file; it is made when it is first used.", is_required=True)


class _DatabaseKeys(DatabaseKeys):
    """Reflections in a PostgreSQL database."""

    called: ClassVar[str] = "the database of reflections"


class _ReflectionStoreKeys(FileSection):
    """A store that is made of a section."""

    called: ClassVar[str] = "the reflection store"
    sqlite: _FileKeys = key("Reflections in one file, which may be that of a memory.")
    postgres: _DatabaseKeys = key("Reflections in a PostgreSQL database, which may be that of a memory.")


def _read_reflection(node: object, info: ValidationInfo) -> ReflectionConfig | None:
    if isinstance(node, Entries):
        built: ReflectionConfig = _ReflectionKeys.model_validate(node, context=context_of(info)).build()
        return built
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return ReflectionConfig() if node.value else None
    raise ValidationError("must be true, false, or a mapping with keys such as 'model'")


def _read_store(node: object, info: ValidationInfo) -> object:
    word = text_in(node)
    if word == "in_memory":
        return InMemoryReflectionStore()
    if word is not None and not is_reference(word):
        raise ValidationError(
            "must be `in_memory`, {sqlite: {path: FILE}}, {postgres: {url: URL}}, or module:attribute, "
            "which names a store of reflections"
        )
    if isinstance(node, Entries):
        return _build_reflection(context_of(info), _ReflectionStoreKeys.model_validate(node, context=info.context))
    return _NAMED.validate_python(node, context=info.context)


def _build_reflection(reading: Reading, section: _ReflectionStoreKeys) -> ReflectionStore:
    """Return the store of a section.

    Raises:
        ValidationError: it is none, or not one.
    """
    found = section.values()
    if len(found) != 1:
        raise ValidationError("must have one of the keys 'sqlite' and 'postgres'")
    if "sqlite" in found:
        return SqliteReflectionStore(section.sqlite.values()["path"])
    from ensemble_ray.memory.postgres import PostgresReflectionStore  # only teams with a database pay

    return PostgresReflectionStore(url_of(reading, section.postgres))


def _is_store(found: object) -> bool:
    return all(has_method(name)(found) for name in REFLECTION_METHODS)


_NAMED = TypeAdapter[Any](
    Annotated[object, reference("a store of reflections", makes=True, accepts=_is_store, is_intended=_is_store)]
)
ReflectionName = Annotated[object, PlainValidator(_read_reflection, json_schema_input_type=bool | _ReflectionKeys)]
ReflectionStoreName = Annotated[
    object,
    PlainValidator(_read_store, json_schema_input_type=Literal["in_memory"] | ReferenceText | _ReflectionStoreKeys),
]


#: What stands for the whole item, and for all items.
_ITEM, _ITEMS = "item", "items"
_VARIABLE = re.compile(r"\{\{(?P<escaped>\w+)\}\}|\{(?P<name>\w+)\}")


def text_of_item(value: object) -> str:
    """Return a value as a prompt shows it: a text as it is, None as nothing, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _fields_of(item: object) -> dict[str, object]:
    """Return what texts can name of an item."""
    named = (
        {str(name): value for name, value in cast("Mapping[object, object]", item).items()} if _has_fields(item) else {}
    )
    return {_ITEM: item, **named}


def _has_fields(item: object) -> bool:
    """Return whether an item has fields."""
    return isinstance(item, Mapping)


def _fill(text: str, values: Mapping[str, object]) -> str:
    """Put these values into a text, each once; names without a value stay as they are."""

    def fill(found: re.Match[str]) -> str:
        escaped, name = found["escaped"], found["name"]
        if escaped is not None:
            return f"{{{escaped}}}"
        return text_of_item(values[name]) if name in values else found[0]

    return _VARIABLE.sub(fill, text) if "{" in text else text


@dataclass(frozen=True)
class _Prompt:
    """A task whose texts are templates."""

    task: Task
    #: names that the run's inputs give values to
    inputs: frozenset[str] = frozenset()

    def declared(self) -> Mapping[str, object]:
        """Return what it is made of, for the digest of a definition (S-MR-173)."""
        return task_data(self.task)

    def _build(self, values: Mapping[str, object], **changes: Any) -> Task:
        texts = {name: _fill(getattr(self.task, name), values) for name in ("description", "expected_output")}
        return self.task.replace(**{**texts, **changes})


@dataclass(frozen=True)
class ItemPrompt(_Prompt):
    """Makes the task of an item.

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
        """Find the names in its texts."""
        texts = (self.task.description, self.task.expected_output)
        names = [found["name"] for text in texts for found in _VARIABLE.finditer(text) if found["name"] is not None]
        object.__setattr__(self, "needed", tuple(dict.fromkeys(names)))  # a frozen class sets its fields so

    def __call__(self, item: object) -> Task:
        """Return the task.

        Raises:
            ValidationError: the item lacks a field that the texts name.
        """
        problem = self.problem(item)
        if problem is not None:
            raise ValidationError(f"The item '{text_of_item(item)[:80]}': {problem}")
        return self._build(_fields_of(item))

    def problem(self, item: object) -> str | None:
        """Say what is wrong with an item; None: nothing is (S-MR-171)."""
        known = _fields_of(item)
        missing = [name for name in self.needed if name not in known and name not in self.inputs]
        if not missing:
            return None
        listed = ", ".join(f"'{name}'" for name in missing)
        what = "field" if len(missing) == 1 else "fields"
        if not _has_fields(item):
            kind = type(item).__name__
            return f"it is a {kind} without fields, and the prompt names the {what} {listed}: write {{{_ITEM}}} for all of it"
        fields = [name for name in known if name != _ITEM]
        guess = suggestion(missing[0], fields) if len(missing) == 1 else ""
        return f"it has no {what} {listed}, which the prompt names.{guess} {list_known_names([*fields, _ITEM])}"


@dataclass(frozen=True)
class GroupPrompt(_Prompt):
    """Makes the task that brings a group together."""

    def __call__(self, chunk_tasks: Sequence[Task]) -> Task:
        """Return the task, with the group as its context."""
        return self._build({}, context=list(chunk_tasks))


@dataclass(frozen=True)
class AllItemsPrompt(_Prompt):
    """Makes the one task over all items, where they are few (S-MR-172)."""

    def __call__(self, items: Sequence[object]) -> Task:
        """Return the task, with the items where `{items}` stands, else behind the text."""
        listed = "\n".join(text_of_item(item) for item in items)
        task = self._build({_ITEMS: listed})
        if any(found["name"] == _ITEMS for found in _VARIABLE.finditer(self.task.description)):
            return task
        return task.replace(description=f"{task.description}\n\n{listed}")

"""Types and checks of fields that definitions share.

A field such as `Agent.llm` accepts a model or a string, and always reads as a model: type checkers see a descriptor
(`Accepts`), pydantic a validator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from datetime import timedelta
from enum import StrEnum
from os import PathLike, fspath
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, PrivateAttr, SkipValidation, Strict, model_validator

from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.ports import ChatModel
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolSpec
from ensemble_ray.values.reviews import ReviewPolicy, ReviewWait
from ensemble_ray.values.trace import CaptureMode
from ensemble_ray.values.value import Accepts, Duration, RateLimit, Value, to_tuple

LONGEST_CONTEXT = 20_000  # characters of an additional context: no context budget cuts it


class Workflow(StrEnum):
    """Order of the tasks of an ensemble."""

    SEQUENTIAL = "sequential"  # one at a time, in list order
    HIERARCHICAL = "hierarchical"  # a manager delegates tasks to workers
    PARALLEL = "parallel"  # each as soon as its context tasks are done


class ParallelErrorStrategy(StrEnum):
    """Effect of a failed task on the others of a parallel run."""

    FAIL_FAST = "fail_fast"  # no new task starts
    CONTINUE_ON_ERROR = "continue_on_error"  # only the tasks that depend on it are skipped


class Durability(StrEnum):
    """When a run's facts are committed."""

    EFFECTS = "effects"  # before the next step; a recorded step never runs again
    RUN = "run"  # within 200 ms; after a crash, later steps may run again
    OFF = "off"  # never: the run cannot be inspected later or resumed


class OnUnknown(StrEnum):
    """Handling of a tool call that began before a crash and has no recorded result."""

    TELL_MODEL = "tell_model"  # the model decides
    FAIL = "fail"  # the task fails
    ASK = "ask"  # a person decides at the terminal


E = TypeVar("E")
_Enum = TypeVar("_Enum", bound=StrEnum)

StrictInt = Annotated[int, Strict()]  # "3" and True cannot bypass a check of the range
#: Without lone surrogates, which cannot be sent or written (S-SEC-56).
StrictText = Annotated[str, Strict(), AfterValidator(whole_text)]
StrictAmount = Annotated[float, Strict()]  # integers are accepted too


def initially(value: object) -> Any:
    """Return a default, for fields that type checkers see as a descriptor."""
    return value


def checks_arguments(check: Any) -> Any:
    """Call a class method with the arguments of the constructor, which it may change, before pydantic."""

    def before(cls: Any, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        check.__func__(cls, arguments)
        return arguments

    validator: Any = classmethod(before)
    return model_validator(mode="before")(validator)


def nearest(value: str, known: Sequence[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known word, or an empty text."""
    import difflib  # needed only for mistakes

    close = difflib.get_close_matches(value.lower(), known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def to_member(enum_type: type[_Enum], field: str) -> Callable[[object], object]:
    """Return a converter of plain strings to that enum (S-CONV-6)."""
    known = [member.value for member in enum_type]

    def convert(value: object) -> object:
        if not isinstance(value, str) or isinstance(value, enum_type):
            return value
        if value in known:
            return enum_type(value)
        raise ValidationError(f"Unknown {field} '{value}'.{nearest(value, known)} Known: [{', '.join(known)}]")

    return convert


def _to_on_unknown(value: object) -> object:
    if isinstance(value, str) or callable(value):
        return to_member(OnUnknown, "on_unknown")(value)
    msg = f"Ensemble on_unknown must be a callable or one of [{', '.join(OnUnknown)}], got: {type(value).__name__}"
    raise ValidationError(msg)


if TYPE_CHECKING:
    CopiedMapping = Mapping
    #: a model, its name, or a list of both, which is a chain
    ModelValue = ChatModel | str | Sequence[ChatModel | str]
    ModelField = Accepts[ChatModel, ModelValue]
    ModelCatalogField = Accepts[Mapping[str, ChatModel], Mapping[str, ModelValue] | None]
    OptionalModelField = Accepts[ChatModel | None, ModelValue | None]
    ToolsField = Accepts[tuple[object, ...], object]
    WorkflowField = Accepts[Workflow | None, Workflow | str | None]
    ErrorStrategyField = Accepts[ParallelErrorStrategy | None, ParallelErrorStrategy | str | None]
    CaptureModeField = Accepts[CaptureMode | None, CaptureMode | str | None]
    DurabilityField = Accepts[Durability, Durability | str]
    ReviewPolicyField = Accepts[ReviewPolicy, ReviewPolicy | str]
    ReviewWaitField = Accepts[ReviewWait, ReviewWait | str]
    OptionalDurabilityField = Accepts[Durability | None, Durability | str | None]
    OptionalDurationField = Accepts[timedelta | None, timedelta | float | None]
    #: a word, or a function of an `UnknownEffect`
    OnUnknownField = Accepts[OnUnknown | Callable[[Any], object], OnUnknown | str | Callable[[Any], object]]
    #: of one kind of event
    Callbacks = Accepts[
        tuple[Callable[[E], object], ...], Callable[[E], object] | Sequence[Callable[[E], object]] | None
    ]
else:

    class CopiedMapping:
        """A copy; None is an empty mapping."""

        def __class_getitem__(cls, types: tuple[object, object]) -> object:
            fill = BeforeValidator(lambda value: {} if value is None else value)
            return Annotated[Mapping[types], fill, AfterValidator(dict)]

    class Callbacks:
        """Callables of any event."""

        def __class_getitem__(cls, event: object) -> object:
            return Annotated[tuple[Callable[..., object], ...], BeforeValidator(to_tuple)]

    # Definitions check these fields in the order of the specification.
    ModelField = Annotated[ChatModel, SkipValidation]
    ModelCatalogField = Annotated[Mapping[str, ChatModel], SkipValidation]
    OptionalModelField = Annotated[ChatModel | None, SkipValidation]
    ToolsField = Annotated[tuple, SkipValidation]
    WorkflowField = Annotated[Workflow | None, BeforeValidator(to_member(Workflow, "workflow"))]
    ErrorStrategyField = Annotated[
        ParallelErrorStrategy | None, BeforeValidator(to_member(ParallelErrorStrategy, "parallel_error_strategy"))
    ]
    CaptureModeField = Annotated[CaptureMode | None, BeforeValidator(to_member(CaptureMode, "capture_mode"))]
    DurabilityField = Annotated[Durability, BeforeValidator(to_member(Durability, "durability"))]
    ReviewPolicyField = Annotated[ReviewPolicy, BeforeValidator(to_member(ReviewPolicy, "review_policy"))]
    ReviewWaitField = Annotated[ReviewWait, BeforeValidator(to_member(ReviewWait, "review_wait"))]
    OptionalDurabilityField = Annotated[Durability | None, BeforeValidator(to_member(Durability, "durability"))]
    OptionalDurationField = Duration | None
    OnUnknownField = Annotated[OnUnknown | Callable[..., object], BeforeValidator(_to_on_unknown)]


class Identified(Value):
    """A frozen value with an id. It is equal to its unpickled copies and its rewritten forms."""

    _object_id: str = PrivateAttr(default_factory=new_object_id)

    @property
    def object_id(self) -> str:
        """The hidden id."""
        # Bypasses pydantic's attribute hook, which costs 1 us. A call of `cast` costs as much as the rest of this method.
        private: Any = self.__pydantic_private__
        object_id: str = private["_object_id"]
        return object_id

    def rewritten(self, **changes: object) -> Self:
        """Return this value with fields changed, not validated, and the same id. For the library only."""
        return self.model_copy(update=changes)

    def duplicated(self, **changes: object) -> Self:
        """Return this value with fields changed, not validated, and a new id. For the library only."""
        copy = self.model_copy(update=changes)
        copy._object_id = new_object_id()  # noqa: SLF001  a copy of this class
        return copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identified):
            return NotImplemented
        return self.object_id == other.object_id

    def __hash__(self) -> int:
        private: Any = self.__pydantic_private__
        return hash(private["_object_id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Source of a definition: a place that a loader understands, and the chosen options."""

    place: str = ""  # a YAML path or `module:attribute`; empty: a program made the definition
    #: `llm`, `workflow`, `directory`; others are arguments of the callable that made it
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    called: str = field(default="", compare=False)  # name for a place without a readable name

    @property
    def name(self) -> str:
        """Default name of the team: the stem of its file, or its attribute (S-DOM-84)."""
        if self.called:
            return self.called
        is_file = self.place.lower().endswith((".yaml", ".yml"))
        return PurePath(self.place).stem if is_file else self.place.rpartition(":")[2]


class TeamModel:
    """Placeholder for the model of the ensemble (S-DOM-72)."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Raise IllegalStateError: a run replaces this object by a model."""
        del messages, tools
        raise IllegalStateError("This agent uses its team's llm, which it has only in a run")

    def __repr__(self) -> str:
        return "team's llm"

    def __reduce__(self) -> str:
        return "TEAM_MODEL"  # one object per process


TEAM_MODEL = TeamModel()


# Checks, before those of pydantic and in the order of the specification (S-CONV-14). Pydantic refuses wrong types.


def check_additional_context(value: object, owner: str) -> None:
    """Refuse a blank or too long text for prompts."""
    if value is None:
        return
    check_text(value, f"{owner} additional_context must not be blank when set")
    if isinstance(value, str) and len(value) > LONGEST_CONTEXT:
        raise ValidationError(
            f"{owner} additional_context may have {LONGEST_CONTEXT:,} characters; this one has {len(value):,}"
        )


def check_text(value: object, message: str) -> None:
    """Refuse a text that is missing or blank."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValidationError(message)


def check_positive(value: object, message: str) -> None:
    """Refuse a number that is 0 or less."""
    if isinstance(value, int | float) and value <= 0:
        raise ValidationError(f"{message}, got: {value}")


def check_least(value: object, least: int, subject: str) -> None:
    """Refuse a number below the least one."""
    if isinstance(value, int | float) and value < least:
        raise ValidationError(f"{subject} must be >= {least}, got: {value}")


def check_exclusive(owner: str, means: str, others: Iterable[tuple[object, str, str]], *, why: str) -> None:
    """Refuse fields beside a handler or a runner: (whether it is set, its name in the message, its name)."""
    for is_set, what, name in others:
        if is_set:
            msg = f"{owner} cannot have both a {means} and {what}. {why}: leave out either {means} or {name}."
            raise ValidationError(msg)


def check_tools(value: object, *, subject: str) -> tuple[object, ...]:
    """Return tools as a tuple (S-DOM-5 to S-DOM-8, S-DOM-23). `subject` begins a message: `Tool` or `Task tool`."""
    entries = to_tuple(value)
    if not entries:
        return ()
    from ensemble_ray.tools.registry import check_tool_entry  # needed only with tools

    for index, entry in enumerate(entries):
        problem = check_tool_entry(entry, index, prefix=subject)
        if problem is not None:
            raise ValidationError(problem)
    return entries


# Models and their limits.


def resolve_model(value: object) -> ChatModel | None:
    """Return a model as it is, the model that a string names, or the chain of a list (S-CONV-19)."""
    # `isinstance` with a protocol costs more than all other checks of a definition together.
    if value is None or (callable(getattr(value, "chat", None)) and not isinstance(value, type)):
        return cast("ChatModel | None", value)
    from ensemble_ray.llm.fallback import resolve_chain  # needed only for strings and lists

    return resolve_chain(value)


def check_models(value: object, subject: str) -> dict[str, ChatModel]:
    """Return the models that runs can be switched to, by name (S-CTL-10)."""
    if not isinstance(value, Mapping | None):
        raise ValidationError(f"{subject} models must be given by their names, got: {type(value).__name__}")
    found: dict[str, ChatModel] = {}
    for name, given in cast("Mapping[object, object]", value or {}).items():
        model = resolve_model(given) if isinstance(name, str) and name.strip() else None
        if model is None:
            raise ValidationError(f"{subject} models: each has a name that is not blank, and is a model; got: {name!r}")
        found[str(name)] = model
    return found


def limit_model(model: ChatModel, limit: RateLimit | None) -> ChatModel:
    """Return the model under that limit; a model under an equal limit keeps its bucket."""
    if limit is None:
        return model
    from ensemble_ray.llm.limits.limiter import RateLimitedChatModel  # needed only with limits

    if isinstance(model, RateLimitedChatModel) and model.rate_limit == limit:
        return model
    return RateLimitedChatModel.of(model, limit)


def limit_own_model(arguments: Mapping[str, object]) -> ChatModel | None:
    """Return the model of a definition under its limit (S-RATE-30, S-RATE-31)."""
    model, limit = resolve_model(arguments.get("llm")), arguments.get("rate_limit")
    # pydantic refuses a limit of another type later
    if model is None or not isinstance(limit, RateLimit):
        return model
    return limit_model(model, limit)


def replace_limit(
    model: ChatModel | None, limit: RateLimit | None, changes: Mapping[str, object]
) -> Mapping[str, object]:
    """Return changes for `replace` in which a new limit replaces the old one."""
    if limit is None or model is None or "rate_limit" not in changes or "llm" in changes:
        return changes
    return {**changes, "llm": getattr(model, "delegate", model)}


# Templates. Names in braces are variables; in two pairs of braces they are text.

_IN_BRACES = re.compile(r"\{(\w+)\}")
_ESCAPED = re.compile(r"\{\{(\w+)\}\}")
_VARIABLE = re.compile(r"\{\{\w+\}\}|\{(\w+)\}")

_AROUND = 16  # so many characters around a name in braces identify its source
_ENOUGH = 4  # so many on one side suffice: user code may have cut the other side


def escape_template(text: str) -> str:
    """Return the template that resolves to exactly this text.

    Examples:
        >>> escape_template("{a} of {1, 2}")
        '{{a}} of {1, 2}'
    """
    return _IN_BRACES.sub(r"{{\1}}", text) if "{" in text else text


def unescape_template(template: str) -> str:
    """Return the text of `escape_template`.

    Examples:
        >>> unescape_template("{{a}} of {1, 2}")
        '{a} of {1, 2}'
    """
    return _ESCAPED.sub(r"{\1}", template) if "{" in template else template


def braced_texts(data: object) -> tuple[str, ...]:
    """Return the texts in a value, at any depth, that contain a name in braces.

    Examples:
        >>> braced_texts({"text": "say {a}!", "notes": ["none"]})
        ('say {a}!',)
    """
    return tuple(dict.fromkeys(text for text in _texts_of(data) if "{" in text and _IN_BRACES.search(text)))


def fill_inputs(text: str, inputs: Mapping[str, str], data: Collection[str]) -> str:
    """Fill in inputs in a text that user code made of a template and data; braces of the data stay (S-MR-203).

    Examples:
        >>> fill_inputs("Put into {language}: a {language} course", {"language": "Czech"}, ["a {language} course"])
        'Put into Czech: a {language} course'
    """
    if not inputs or "{" not in text:
        return text
    names = {found[1] for found in _VARIABLE.finditer(text)} & inputs.keys()
    is_data = _data_finder(text, names, data)
    return _VARIABLE.sub(lambda found: inputs[found[1]] if found[1] in names and not is_data(found) else found[0], text)


def escape_data(text: str, data: Collection[str]) -> str:
    """Escape the braces of the data in a text that user code made of a template and data (S-MR-203).

    Examples:
        >>> escape_data("Put into {language}: a {language} course", ["a {language} course"])
        'Put into {language}: a {{language}} course'
    """
    if not data or "{" not in text:
        return text
    is_data = _data_finder(text, {found[1] for found in _IN_BRACES.finditer(text)}, data)
    return _IN_BRACES.sub(lambda found: f"{{{found[0]}}}" if is_data(found) else found[0], text)


def _data_finder(text: str, names: Collection[str], data: Collection[str]) -> Callable[[re.Match[str]], bool]:
    """Return a predicate: is this name in braces data?"""
    places = _places_in(data, names) if names else frozenset()
    shapes = {(None if left is None else len(left), None if right is None else len(right)) for _, left, right in places}

    def is_data(found: re.Match[str]) -> bool:
        before, behind = _around(text, found)
        return any(
            (
                found[1],
                None if left is None else before[max(0, len(before) - left) :],
                None if right is None else behind[:right],
            )
            in places
            for left, right in shapes
        )

    return is_data


def _places_in(data: Iterable[str], names: Collection[str]) -> frozenset[tuple[str, str | None, str | None]]:
    """Return each name in braces with the characters around it; None: any."""
    places: set[tuple[str, str | None, str | None]] = set()
    for text in data:
        # As it is, or in Python's or JSON's form.
        for form in {text, repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}:
            for found in _IN_BRACES.finditer(form):
                if found[1] in names:
                    before, behind = _around(form, found)
                    places.add((found[1], before, behind))
                    if len(before) >= _ENOUGH:
                        places.add((found[1], before, None))
                    if len(behind) >= _ENOUGH:
                        places.add((found[1], None, behind))
    return frozenset(places)


def _around(text: str, found: re.Match[str]) -> tuple[str, str]:
    return text[max(0, found.start() - _AROUND) : found.start()], text[found.end() : found.end() + _AROUND]


def _texts_of(data: object) -> Iterator[str]:
    """Yield all texts that a value contains."""
    # With whether it is an attribute: attributes of attributes count only in dataclasses and models.
    waiting, seen = [(data, False)], set[int]()
    while waiting:
        value, is_attribute = waiting.pop()
        if isinstance(value, str):
            yield value
            continue
        if value is None or isinstance(value, int | float | type) or id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case bytes() | bytearray():
                yield value.decode("utf-8", "replace")
            case PathLike():
                yield str(fspath(cast("PathLike[str]", value)))
            case Mapping():
                pairs = cast("Mapping[object, object]", value).items()
                waiting += [(each, is_attribute) for pair in pairs for each in pair]
            case list() | tuple() | set() | frozenset():
                waiting += [(each, is_attribute) for each in cast("Collection[object]", value)]
            case _ if not is_attribute or is_dataclass(value) or isinstance(value, BaseModel):
                slots = (base.__dict__.get("__slots__", ()) for base in type(value).__mro__)
                names = (name for each in slots for name in ((each,) if isinstance(each, str) else each))
                own = (*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names))
                waiting += [(each, True) for each in own]
            case _:
                pass

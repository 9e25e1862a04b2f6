"""Kinds of fields that definitions share: what a user may write, and what is read back.

A field such as `Agent.llm` accepts more than it gives: a model or a string, always read as a model. Type checkers are
told so with a descriptor type (`Accepts`); pydantic is told with a validator. Both stand side by side here.
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

from pydantic import AfterValidator, BaseModel, BeforeValidator, PrivateAttr, SkipValidation, Strict

from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.ports import ChatModel
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolSpec
from ensemble_ray.values.reviews import ReviewPolicy, ReviewWait
from ensemble_ray.values.trace import CaptureMode
from ensemble_ray.values.value import Accepts, Duration, RateLimit, Value, to_tuple


class Workflow(StrEnum):
    """How the tasks of an ensemble follow each other."""

    #: one at a time, in list order
    SEQUENTIAL = "sequential"
    #: a manager hands tasks to workers
    HIERARCHICAL = "hierarchical"
    #: each as soon as its context tasks are done
    PARALLEL = "parallel"


class ParallelErrorStrategy(StrEnum):
    """What a failed task does to the others of a parallel run."""

    #: nothing new starts
    FAIL_FAST = "fail_fast"
    #: only what depends on it is skipped
    CONTINUE_ON_ERROR = "continue_on_error"


class Durability(StrEnum):
    """How safe a run's facts are before it goes on."""

    #: committed before the next step depends on them; nothing recorded is ever repeated
    EFFECTS = "effects"
    #: committed within 200 ms, and at the run's end; a crash may repeat what was not committed yet
    RUN = "run"
    #: nothing is written; the run cannot be looked at later, nor resumed
    OFF = "off"


class OnUnknown(StrEnum):
    """What becomes of a tool call that was begun before a crash and has no recorded result."""

    #: the model is told that the outcome is unknown, and decides
    TELL_MODEL = "tell_model"
    #: the task fails
    FAIL = "fail"
    #: a person is asked at the terminal
    ASK = "ask"


E = TypeVar("E")
_Enum = TypeVar("_Enum", bound=StrEnum)

#: Numbers as numbers: "3" and True are refused, so that a check of the range cannot be passed by.
StrictInt = Annotated[int, Strict()]
#: Without halves of surrogate pairs, which a team file can hold and nothing can be sent or written with (S-SEC-56).
StrictText = Annotated[str, Strict(), AfterValidator(whole_text)]
#: An amount of money; whole numbers are taken too.
StrictAmount = Annotated[float, Strict()]


# Checks. Each runs before pydantic's own, in the order that the specification lists (S-CONV-14).


def check_text(value: object, message: str) -> None:
    """Refuse a text that is missing, empty or blank; other types are left to pydantic."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValidationError(message)


def check_positive(value: object, message: str) -> None:
    """Refuse a number that is 0 or less; what is no number is left to pydantic."""
    if isinstance(value, int | float) and value <= 0:
        raise ValidationError(f"{message}, got: {value}")


def check_tools(value: object, *, subject: str) -> tuple[object, ...]:
    """Return the tools of an agent or a task as a tuple.

    Args:
        value: What the user gave.
        subject: How a message begins: `Tool` or `Task tool`.

    Raises:
        ValidationError: S-DOM-5 to S-DOM-8, S-DOM-23; the first bad entry is reported.
    """
    entries = to_tuple(value)
    if not entries:
        return ()
    from ensemble_ray.tools.registry import check_tool_entry  # only agents with tools pay for it

    for index, entry in enumerate(entries):
        problem = check_tool_entry(entry, index, prefix=subject)
        if problem is not None:
            raise ValidationError(problem)
    return entries


# Models and their limits.


def resolve_model(value: object) -> ChatModel | None:
    """Return the model that was meant: itself, or the one that a string names (S-CONV-19); None stays None.

    Raises:
        ValidationError: it is no model, or the string names no known kind of model.
    """
    # Not isinstance: checking a protocol at run time costs more than all other checks of a definition together.
    if value is None or (callable(getattr(value, "chat", None)) and not isinstance(value, type)):
        return cast("ChatModel | None", value)
    from ensemble_ray.llm.factory import resolve_llm  # models given as objects do not need it

    return resolve_llm(value)


def check_models(value: object, subject: str) -> dict[str, ChatModel]:
    """Return the models that the runs of an ensemble can be told to ask, by name (S-CTL-10).

    Raises:
        ValidationError: a name is none, or one of them is no model.
    """
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
    """Return the model held to that limit; one already held to an equal limit stays as it is, with its bucket."""
    if limit is None:
        return model
    from ensemble_ray.llm.rate_limited import RateLimitedChatModel  # few agents have limits

    if isinstance(model, RateLimitedChatModel) and model.rate_limit == limit:
        return model
    return RateLimitedChatModel.of(model, limit)


def limit_own_model(arguments: Mapping[str, object]) -> ChatModel | None:
    """Return a definition's model as it is kept: resolved, and under its own limit (S-RATE-30, S-RATE-31)."""
    model, limit = resolve_model(arguments.get("llm")), arguments.get("rate_limit")
    # A limit of another type is refused by pydantic a moment later.
    if model is None or not isinstance(limit, RateLimit):
        return model
    return limit_model(model, limit)


def replace_limit(
    model: ChatModel | None, limit: RateLimit | None, changes: Mapping[str, object]
) -> Mapping[str, object]:
    """Return changes for `replace` in which a new limit takes the place of the old one instead of standing above it."""
    if limit is None or model is None or "rate_limit" not in changes or "llm" in changes:
        return changes
    return {**changes, "llm": getattr(model, "delegate", model)}


# Fields that accept more than they give.


def nearest(value: str, known: Sequence[str]) -> str:
    """Return ` Did you mean 'x'?` for the known word nearest to a value; "" where none is near."""
    import difflib  # only mistakes pay for it

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


_to_on_unknown = to_member(OnUnknown, "on_unknown")


def _on_unknown_of(value: object) -> object:
    if isinstance(value, str) or callable(value):
        return _to_on_unknown(value)
    raise ValidationError(
        f"Ensemble on_unknown must be a callable or one of [{', '.join(OnUnknown)}], got: {type(value).__name__}"
    )


def initially(value: object) -> Any:
    """Return a default, for fields whose type is a descriptor to type checkers and a plain type at run time."""
    return value


if TYPE_CHECKING:
    ModelField = Accepts[ChatModel, ChatModel | str]
    ModelCatalogField = Accepts[Mapping[str, ChatModel], Mapping[str, ChatModel | str] | None]
    OptionalModelField = Accepts[ChatModel | None, ChatModel | str | None]
    ToolsField = Accepts[tuple[object, ...], object]
    WorkflowField = Accepts[Workflow | None, Workflow | str | None]
    ErrorStrategyField = Accepts[ParallelErrorStrategy | None, ParallelErrorStrategy | str | None]
    CaptureModeField = Accepts[CaptureMode | None, CaptureMode | str | None]
    DurabilityField = Accepts[Durability, Durability | str]
    ReviewPolicyField = Accepts[ReviewPolicy, ReviewPolicy | str]
    ReviewWaitField = Accepts[ReviewWait, ReviewWait | str]
    OptionalDurabilityField = Accepts[Durability | None, Durability | str | None]
    #: a `timedelta`, or seconds
    OptionalDurationField = Accepts[timedelta | None, timedelta | float | None]
    #: a word, or a callable that is asked with an `UnknownEffect`
    OnUnknownField = Accepts[OnUnknown | Callable[[Any], object], OnUnknown | str | Callable[[Any], object]]
    #: listeners to one kind of event: a callable or several
    Callbacks = Accepts[
        tuple[Callable[[E], object], ...], Callable[[E], object] | Sequence[Callable[[E], object]] | None
    ]
else:

    class Callbacks:
        """A tuple of callables, whichever event they take."""

        def __class_getitem__(cls, event: object) -> object:
            return Annotated[tuple[Callable[..., object], ...], BeforeValidator(to_tuple)]

    # Checked by the definition itself, in its place among the other checks.
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
    OnUnknownField = Annotated[OnUnknown | Callable[..., object], BeforeValidator(_on_unknown_of)]


class Identified(Value):
    """A frozen value that is equal to nothing but itself, its copies by pickling and its internal rewrites."""

    _object_id: str = PrivateAttr(default_factory=new_object_id)

    @property
    def object_id(self) -> str:
        """The hidden id."""
        # Read past pydantic's attribute hook: planning asks for it several times per task, and the hook costs 1 us.
        # Nor through `cast`, whose call costs as much as all the rest.
        private: Any = self.__pydantic_private__
        object_id: str = private["_object_id"]
        return object_id

    def rewritten(self, **changes: object) -> Self:
        """Return the same one with fields changed: it keeps its id, unvalidated; for the library's own use."""
        return self.model_copy(update=changes)

    def duplicated(self, **changes: object) -> Self:
        """Return another one with fields changed: it has an id of its own, unvalidated; for the library's own use."""
        copy = self.model_copy(update=changes)
        copy._object_id = new_object_id()  # noqa: SLF001  of the same class
        return copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identified):
            return NotImplemented
        return self.object_id == other.object_id

    def __hash__(self) -> int:
        return hash(self.object_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A place that a loader understands, and what was chosen in place of what stands there."""

    #: a YAML path or `module:attribute`; empty: it was made by a program, and only that has it
    place: str = ""
    #: options of the loader: `llm`, `workflow`, `directory`; all others are arguments of the callable that made it
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    #: what a team without a name is called whose place says nothing to people; empty: as its place says
    called: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """What a team without a name is called: the stem of its file, or its attribute; empty: a program made it (S-DOM-84)."""
        if self.called:
            return self.called
        is_file = self.place.lower().endswith((".yaml", ".yml"))
        return PurePath(self.place).stem if is_file else self.place.rpartition(":")[2]


class TeamModel:
    """Stands for the model of the ensemble that an agent runs in (S-DOM-72)."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Refuse to answer.

        Raises:
            IllegalStateError: always.
        """
        del messages, tools
        raise IllegalStateError("This agent uses its team's llm, which it has only in a run")

    def __repr__(self) -> str:
        return "team's llm"

    def __reduce__(self) -> str:
        return "TEAM_MODEL"  # there is one in each process


#: The only one.
TEAM_MODEL = TeamModel()


_IN_BRACES = re.compile(r"\{(\w+)\}")
_ESCAPED = re.compile(r"\{\{(\w+)\}\}")
_VARIABLE = re.compile(r"\{\{\w+\}\}|\{(\w+)\}")

#: How many characters before and behind a name in braces tell where it comes from.
_AROUND = 16
#: With so many on one side, those of the other side do not matter: user code may have cut the text there.
_ENOUGH = 4


def escape_template(text: str) -> str:
    """Return the template that resolves to that very text, whatever stands in its braces.

    Examples:
        >>> escape_template("{a} of {1, 2}")
        '{{a}} of {1, 2}'
    """
    return _IN_BRACES.sub(r"{{\1}}", text) if "{" in text else text


def unescape_template(template: str) -> str:
    """Return the text that `escape_template` was given.

    Examples:
        >>> unescape_template("{{a}} of {1, 2}")
        '{a} of {1, 2}'
    """
    return _ESCAPED.sub(r"{\1}", template) if "{" in template else template


def braced_texts(data: object) -> tuple[str, ...]:
    """Return the texts inside of data, such as an item with all that it contains, that have a name in braces.

    Examples:
        >>> braced_texts({"text": "say {a}!", "notes": ["none"]})
        ('say {a}!',)
    """
    return tuple(dict.fromkeys(text for text in _texts_of(data) if "{" in text and _IN_BRACES.search(text)))


def fill_inputs(text: str, inputs: Mapping[str, str], data: Collection[str]) -> str:
    """Put the values of inputs into a text that user code made; what its data has in braces stays (S-MR-203).

    Args:
        text: Made of a template and of data.
        inputs: By name. Other names in braces stay, and so do names in two pairs of braces.
        data: Texts of the data.

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
    """Return the template that user code made of a template and of data, with what its data has in braces as text (S-MR-203).

    Examples:
        >>> escape_data("Put into {language}: a {language} course", ["a {language} course"])
        'Put into {language}: a {{language}} course'
    """
    if not data or "{" not in text:
        return text
    is_data = _data_finder(text, {found[1] for found in _IN_BRACES.finditer(text)}, data)
    return _IN_BRACES.sub(lambda found: f"{{{found[0]}}}" if is_data(found) else found[0], text)


def _data_finder(text: str, names: Collection[str], data: Collection[str]) -> Callable[[re.Match[str]], bool]:
    """Return what tells whether a name in braces, found in the text, comes from data."""
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
    """Return where these names are in braces: each with the characters before and behind it; None: any."""
    places: set[tuple[str, str | None, str | None]] = set()
    for text in data:
        # As user code may show it: as it is, or inside of Python's or JSON's text of a value.
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
    """Yield all texts that a value contains, those inside of its attributes included."""
    #: with whether a value is an attribute: of those, only objects that are data themselves are looked into
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
                waiting += [(each, True) for each in _attributes_of(value)]
            case _:
                pass


def _attributes_of(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots))

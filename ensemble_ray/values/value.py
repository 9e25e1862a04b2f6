"""The base of all public frozen values, and the types of their fields."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeAlias, TypeVar, cast, get_type_hints

import pydantic
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from ensemble_ray.errors import ValidationError

_OUTPUT_TYPES = dict.fromkeys(
    ("output_pydantic", "output_json", "output_model", "output_schema", "response_model", "result_type"), "output_type"
)
_MODELS = dict.fromkeys(("model", "model_client", "llm_config", "chat_model", "language_model"), "llm")
_LIMITS = dict.fromkeys(("max_iter", "max_turns", "max_steps", "max_tool_iterations"), "max_iterations")
_ASKS_PEOPLE = dict.fromkeys(("human_input", "human_in_the_loop", "human_approval"), "review")
_TASK_TYPE = (
    "The task sets the type of the answer, Task(output_type=...), or the question, agent.run(..., output_type=...)"
)
_GUARDRAILS = "Tasks have guardrails: Task(input_guardrails=..., output_guardrails=...)"
_REQUEST_OPTION = (
    "It is an option of the model: OpenAIChatModel(model, {name}=...), or a key of the section 'llm' of a team file"
)
_WORKFLOW = "Tasks run in parallel in an ensemble with the workflow 'parallel'"

#: By class and foreign name: our field, or a sentence if there is none.
FOREIGN_NAMES: Mapping[str, Mapping[str, str]] = {
    "Agent": {
        **_MODELS,
        **_LIMITS,
        **dict.fromkeys(_OUTPUT_TYPES, _TASK_TYPE),
        "output_type": _TASK_TYPE,
        **dict.fromkeys(("output_guardrails", "input_guardrails", "guardrails"), _GUARDRAILS),
        **dict.fromkeys(("temperature", "top_p", "max_tokens", "seed"), _REQUEST_OPTION),
        **dict.fromkeys(("instructions", "instruction", "system_prompt", "system_message", "prompt"), "goal"),
        **dict.fromkeys(("backstory", "persona", "description"), "background"),
        **dict.fromkeys(("handoffs", "sub_agents", "managed_agents"), "allow_delegation"),
        **dict.fromkeys(("functions", "toolkits", "toolsets", "mcp_servers", "mcps"), "tools"),
        "name": "role",
        "max_rpm": "rate_limit",
    },
    "Task": {
        **_MODELS,
        **_LIMITS,
        **_OUTPUT_TYPES,
        **_ASKS_PEOPLE,
        **dict.fromkeys(("depends_on", "dependencies", "after", "needs", "prerequisites"), "context"),
        **dict.fromkeys(("instructions", "instruction", "prompt", "goal", "task", "input"), "description"),
        **dict.fromkeys(("guardrail", "guardrails"), "output_guardrails"),
        **dict.fromkeys(("guardrail_max_retries", "max_retries", "retries"), "max_output_retries"),
        **dict.fromkeys(("assignee", "worker"), "agent"),
        **dict.fromkeys(("function", "func", "fn", "action", "callable"), "handler"),
        **dict.fromkeys(("async_execution", "parallel"), _WORKFLOW),
        "id": "name",
        "callback": "The ensemble has on_task_complete",
    },
    "RunRules": {
        **_MODELS,
        **dict.fromkeys(("max_concurrency", "max_workers", "concurrency"), "max_parallel_tasks"),
        **dict.fromkeys(("callbacks", "hooks", "handlers"), "listeners"),
        **dict.fromkeys(("human_input", "human_in_the_loop"), "review_handler"),
        "max_rpm": "rate_limit",
        "checkpointer": "durability",
    },
    "RunListeners": dict.fromkeys(("task_callback", "callback"), "on_task_complete"),
    "Leadership": dict.fromkeys(("manager", "manager_agent", "supervisor"), "manager_llm"),
    "Work": {
        **dict.fromkeys(("process", "mode", "strategy"), "workflow"),
        **dict.fromkeys(("participants", "members", "team"), "agents"),
        **dict.fromkeys(("steps", "jobs"), "tasks"),
        **dict.fromkeys(("nodes", "states", "edges"), "graph"),
    },
    "MapDefinition": {
        **dict.fromkeys(("data", "over", "dataset", "source"), "items"),
        **dict.fromkeys(("map_fn", "map_function", "mapper", "function", "fn", "task"), "map_task"),
        "on_error": "on_item_error",
        "output": "results",
    },
    "MapReduceDefinition": {
        **dict.fromkeys(("reduce_fn", "reduce_function", "reducer"), "reduce_task"),
        **dict.fromkeys(("batch_size", "group_size"), "chunk_size"),
    },
    "Loop": {
        **_LIMITS,
        **dict.fromkeys(("max_rounds", "max_loops", "limit"), "max_iterations"),
        **dict.fromkeys(("condition", "stop_condition", "exit_condition", "termination_condition", "stop"), "until"),
        **dict.fromkeys(("tasks", "steps", "agents", "sub_agents", "task"), "body"),
        **dict.fromkeys(("depends_on", "dependencies", "after", "needs"), "context"),
    },
    "Phase": {
        **_ASKS_PEOPLE,
        **dict.fromkeys(("depends_on", "dependencies", "context", "needs"), "after"),
        **dict.fromkeys(("steps", "task", "body"), "tasks"),
        "process": "workflow",
    },
    "Graph": {
        **dict.fromkeys(("nodes", "tasks", "steps"), "states"),
        **dict.fromkeys(("entry_point", "start_state", "initial_state", "initial", "entry"), "start"),
        **dict.fromkeys(("recursion_limit", "max_iterations", "max_turns"), "max_steps"),
        "transitions": "edges",
    },
    "GraphEdge": {
        **dict.fromkeys(("source", "src", "from", "start"), "from_state"),
        **dict.fromkeys(("target", "dst", "to", "end"), "to_state"),
        **dict.fromkeys(("when", "guard", "predicate"), "condition"),
        "name": "label",
    },
    "GraphFork": {
        **dict.fromkeys(("source", "src", "from", "start"), "from_state"),
        **dict.fromkeys(("targets", "branches", "to"), "to_states"),
    },
    "GraphJoin": {
        **dict.fromkeys(("sources", "branches", "from"), "from_states"),
        **dict.fromkeys(("target", "dst", "to", "end"), "to_state"),
    },
}  # fmt: skip


def find_own_name(kind: type[object], name: str) -> str:
    """Return a hint about a field name of another framework, or ""."""
    for each in kind.__mro__:
        own = FOREIGN_NAMES.get(each.__name__, {}).get(name)
        if own is not None:
            return f"Here it is called '{own}'" if own.isidentifier() else own.format(name=name)
    return ""


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
AGE_PATTERN = r"[0-9]{1,12}\s*[smhdw]"  # more digits exceed any calendar
_AGE = re.compile(AGE_PATTERN)


def age_from(text: str) -> timedelta:
    """Parse an age: `7d`, `12h`, `30m`, `2w`, `90s`."""
    plain = text.strip().lower()
    if not _AGE.fullmatch(plain):
        raise ValidationError(
            f"'{text}' is no age: write 30d for days, 12h for hours, 2w for weeks, 30m for minutes, 90s for seconds"
        )
    try:
        return timedelta(seconds=int(plain[:-1]) * _SECONDS[plain[-1]])
    except OverflowError:
        raise ValidationError(f"'{text}' is too long an age") from None


def _as_duration(value: object) -> object:
    """S-CONV-8."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return timedelta(seconds=value)
        except OverflowError as error:  # a field's check may raise only `ValueError`
            raise ValueError(str(error)) from error
    return value


Duration = Annotated[timedelta, BeforeValidator(_as_duration)]  # accepts seconds

if TYPE_CHECKING:
    _Read = TypeVar("_Read")
    _Written = TypeVar("_Written")

    class Accepts(Generic[_Read, _Written]):
        def __get__(self, instance: object, owner: object) -> _Read: ...
        def __set__(self, instance: object, value: _Written) -> None: ...

    DurationField = Accepts[timedelta, timedelta | float]
else:

    class Accepts:
        def __class_getitem__(cls, types: object) -> type:
            return cls

    DurationField = Duration


#: In UTC; accepts any time zone, but no naive time (S-CONV-8).
Instant = Annotated[AwareDatetime, AfterValidator(lambda at: at if at.tzinfo is UTC else at.astimezone(UTC))]


_Item = TypeVar("_Item")


class LazySequence(Sequence[_Item]):
    """An immutable sequence with lazy items. Fields store it unchecked and without a copy."""

    __slots__ = ()


def to_tuple(value: object) -> tuple[object, ...]:
    """Return a list as a tuple (S-CONV-5). None becomes (), and a single value a tuple of one (S-DOM-100)."""
    if value is None:
        return ()
    if isinstance(value, list | tuple):
        return tuple(cast("Sequence[object]", value))
    is_many = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    return tuple(cast("Collection[object]", value)) if is_many else (value,)


_keep_lazy = pydantic.WrapValidator(
    lambda value, check: cast("object", value) if isinstance(value, LazySequence) else check(to_tuple(value))
)
_dump_lazy = pydantic.WrapSerializer(
    lambda value, dump: dump(tuple(value) if isinstance(value, LazySequence) else value)
)


FrozenSequence = Annotated[Sequence[_Item], _keep_lazy, _dump_lazy]  # a copy of a list, or () for None
if TYPE_CHECKING:
    #: as a user writes it: a list, or a single value
    OneOrMany: TypeAlias = Accepts[Sequence[_Item], _Item | Sequence[_Item] | None]
else:
    OneOrMany = FrozenSequence


#: Returns the datetime of a Unix time, s.
utc_of = partial(datetime.fromtimestamp, tz=UTC)


def utc_now() -> datetime:
    """For defaults of values, not for machines."""
    return datetime.now(UTC)


_EXAMPLES = {
    "Agent": 'Agent("Writer", goal="Write")',
    "EnsembleMemory": "EnsembleMemory(short_term=True)",
    "RateLimit": "RateLimit.per_minute(60)",
    "RetryPolicy": "RetryPolicy(max_attempts=3)",
    "Review": "Review.required()",
    "Task": 'Task("Do it")',
}


def explain(error: pydantic.ValidationError, what: str) -> ValidationError:
    """Return an error of pydantic as one of this library: one sentence per field (S-CONV-12)."""
    parts: list[str] = []
    for found in error.errors(include_url=False):
        context, kind = found.get("ctx", {}), found["type"]
        ours = context.get("error")
        if isinstance(ours, ValueError) and not isinstance(ours, pydantic.ValidationError):
            return ValidationError(str(ours))
        where = ".".join(str(part) for part in found["loc"])
        name = context.get("class" if kind == "is_instance_of" else "class_name", "") if kind != "callable_type" else ""
        article = "an" if name[:1] in "AEIOU" else "a"
        example = f", such as {_EXAMPLES[name]}" if name in _EXAMPLES else ""
        if kind == "extra_forbidden":
            parts.append(f"unknown field '{where}'")
        elif where and (name or kind == "callable_type"):
            wanted = f"{article} {name}{example}" if name else "callable, such as a function"
            parts.append(f"'{where}' must be {wanted}, got: {type(found['input']).__name__}")
        else:
            parts.append(f"'{where}': {found['msg']}" if where else found["msg"])
    return ValidationError(f"{what}: {'; '.join(parts)}")


def _unknown_names(kind: type[BaseModel], names: Iterable[str]) -> ValidationError | None:
    known = {info.alias or name for name, info in kind.model_fields.items()}
    unknown = [name for name in names if name not in known]
    if not unknown:
        return None
    import difflib  # only errors need it

    parts: list[str] = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1)
        hint = find_own_name(kind, name) or (f"Did you mean '{near[0]}'?" if near else "")
        parts.append(f"unknown field '{name}'" + (f". {hint}" if hint else ""))
    return ValidationError(f"{kind.__name__}: {'; '.join(parts)}")


_SHOWN_FIELDS = 12


def _name_arguments(kind: type[BaseModel], args: Sequence[object], data: Mapping[str, object]) -> dict[str, object]:
    fields = [info.alias or name for name, info in kind.model_fields.items()]
    places = [name for name, info in kind.model_fields.items() if info.kw_only is False]
    if len(args) > len(places):
        shown = ", ".join(fields[:_SHOWN_FIELDS]) + (", ..." if len(fields) > _SHOWN_FIELDS else "")
        taken = f"only {', '.join(places)} without a name" if places else "keyword arguments only"
        extra = reprlib.repr(args[len(places)])
        raise TypeError(f"{kind.__name__} takes {taken}, and got {extra} without a name. Fields: {shown}")
    named = dict(zip(places, args, strict=False))
    for name in named:
        if name in data:
            raise TypeError(f"{kind.__name__} got {name} twice: by position and by name")
    return named


class _Signature:
    """The fields of a class, positional ones first."""

    def __get__(self, _instance: object, kind: type[BaseModel]) -> inspect.Signature:
        declared = list(inspect.signature(kind.__init__).parameters.values())[1:]
        kinds = {each.kind for each in declared}
        own = {each.name: each for each in declared if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}}
        parameters = list(own.values())
        hints = _hints(kind)
        for name, info in kind.model_fields.items():
            if (shown := info.alias or name) in own:
                continue
            has_place = info.kw_only is False and inspect.Parameter.VAR_POSITIONAL in kinds
            parameters.append(
                inspect.Parameter(
                    shown,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD if has_place else inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty
                    if info.is_required()
                    else info.get_default(call_default_factory=True),
                    annotation=hints[name],
                )
            )
        return inspect.Signature(sorted(parameters, key=lambda each: (each.kind, each.default is not each.empty)))


def _hints(kind: type[BaseModel]) -> dict[str, object]:
    def fields() -> None: ...

    fields.__annotations__ = {name: info.annotation for name, info in kind.model_fields.items()}
    try:
        return get_type_hints(fields)
    except NameError:  # a type is defined later, or only for type checkers
        return dict(fields.__annotations__)


_SIGNATURE: Any = _Signature()  # pydantic declares another type


class Value(BaseModel):
    """A frozen value without unknown fields."""

    # A process imports many classes that it never instantiates.
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    __signature__ = _SIGNATURE

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        cls.__signature__ = _SIGNATURE  # instead of pydantic's, which shows `*args`

    def __init__(self, *args: object, **data: object) -> None:
        """Validate and store the fields, which the docstring of the class describes.

        Raises:
            TypeError: A positional argument has no field.
            ValidationError: A name is unknown, or a value is invalid.
        """
        kind = type(self)
        if args:
            data = {**_name_arguments(kind, args, data), **data}
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _unknown_names(kind, data) or error from None
        except pydantic.ValidationError as error:
            raise _unknown_names(kind, data) or explain(error, kind.__name__) from None

    def replace(self, **changes: object) -> Self:
        """Return a copy with changed fields, validated like a new value.

        Raises:
            ValidationError: A field is unknown or its value is invalid.
        """
        fields = {info.alias or name: getattr(self, name) for name, info in type(self).model_fields.items()}
        return type(self)(**{**fields, **changes})

    @classmethod
    def unchecked(cls, **fields: object) -> Self:
        """Return a value of fields that are in their stored form, without validation. For the library only.

        Every task makes several values of its results, and validation would take most of that time.
        """
        place = (cls, *fields)
        form = _forms.get(place)
        if form is None:
            form = _forms[place] = ({name: info.default for name, info in cls.model_fields.items()}, set(fields))
        value = cls.__new__(cls)
        members, declared = form
        _set(value, "__dict__", {**members, **fields})
        _set(value, "__pydantic_fields_set__", declared)  # shared: pydantic changes only copies of it
        _set(value, "__pydantic_extra__", None)
        _set(value, "__pydantic_private__", None)
        return value


_set = object.__setattr__
#: (class, names of the given fields) -> defaults of all fields in their order, and the set of the names
_forms: dict[tuple[object, ...], tuple[dict[str, object], set[str]]] = {}


def _check_requests(value: object) -> object:
    # A missing argument counts as None (S-CONV-13).
    if value is None or (isinstance(value, int | float) and value <= 0):
        raise ValueError(f"RateLimit requests must be > 0, got: {value}")
    return value


def _require_period(value: object) -> object:
    if value is None:
        raise ValueError("RateLimit period must not be None")
    return value


def _check_period(value: timedelta) -> timedelta:
    if value <= timedelta():
        raise ValueError(f"RateLimit period must be positive, got: {value}")
    return value


if TYPE_CHECKING:
    _Period: TypeAlias = DurationField
else:
    # The last one runs first, so None is checked before the duration.
    _Period = Annotated[Duration, AfterValidator(_check_period), BeforeValidator(_require_period)]


class RateLimit(Value):
    """A number of requests per period. Limits with equal fields are equal.

    Attributes:
        requests: Most requests per period; also the largest burst after an idle time.
        period: Length of the period; a number means seconds.
    """

    requests: Annotated[int, BeforeValidator(_check_requests)] = Field(default=None, validate_default=True)
    period: _Period = Field(default=None, validate_default=True)

    @classmethod
    def of(cls, requests: int, period: timedelta | float) -> RateLimit:
        """Return a limit of requests per period.

        Raises:
            ValidationError: A number is missing, zero or negative.
        """
        return cls(requests=requests, period=timedelta(seconds=period) if isinstance(period, int | float) else period)

    @classmethod
    def per_minute(cls, requests: int) -> RateLimit:
        """Return a limit of requests per minute."""
        return cls.of(requests, timedelta(minutes=1))

    @classmethod
    def per_second(cls, requests: int) -> RateLimit:
        """Return a limit of requests per second."""
        return cls.of(requests, timedelta(seconds=1))

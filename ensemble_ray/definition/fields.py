"""Kinds of fields that definitions share: what a user may write, and what is read back. Package: definition.

A field such as `Agent.llm` accepts more than it gives: a model or a string, always read as a model. Type checkers are
told so with a descriptor type (`Accepts`); pydantic is told with a validator. Both stand side by side here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, SkipValidation, Strict

from ensemble_ray.definition.durability import Durability, OnUnknown
from ensemble_ray.definition.workflow import ParallelErrorStrategy, Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.ports import ChatModel
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.rate_limit import RateLimit
from ensemble_ray.values.reviews import ReviewPolicy, ReviewWait
from ensemble_ray.values.trace import CaptureMode
from ensemble_ray.values.value import Accepts, Duration, OneOrMany, to_tuple

__all__ = [
    "Accepts",
    "Callbacks",
    "CaptureModeField",
    "DurabilityField",
    "ErrorStrategyField",
    "ModelCatalogField",
    "ModelField",
    "OnUnknownField",
    "OneOrMany",
    "OptionalDurabilityField",
    "OptionalDurationField",
    "OptionalModelField",
    "ReviewPolicyField",
    "ReviewWaitField",
    "StrictAmount",
    "StrictInt",
    "StrictText",
    "ToolsField",
    "WorkflowField",
    "check_models",
    "check_positive",
    "check_text",
    "check_tools",
    "initially",
    "limit_model",
    "limit_own_model",
    "nearest",
    "replace_limit",
    "resolve_model",
    "to_member",
    "to_tuple",
]

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

"""Options of one run, which override the rules of its ensemble."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from pydantic import BeforeValidator, Field, model_validator

from ensemble_ray.definition import fields
from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.text.foreign_text import whole_data, whole_text
from ensemble_ray.values.value import DurationField, Value

if TYPE_CHECKING:
    from ensemble_ray.definition.fields import Durability

MOST_TAGS = 64  # tags of one run
LONGEST_WORD = 256  # characters of a tag's name and of its value
_ARGUMENTS = ("inputs", "runtime", "run_id", "options", "output_type", "history")  # for the error about an unknown name
_LONGEST_S = timedelta(days=365).total_seconds()


class RunOptions(Value):
    """Settings of one run in place of its ensemble's: `run(max_tokens=100_000)`, or `run(options=RunOptions(...))`.

    None means the ensemble's value. A resumed run keeps its options, except for options that are set again.

    Attributes:
        context_budget: Most tokens that a request of a task may have, for tasks without their own budget.
        max_tool_output_length: Characters of a tool's output that the model sees; negative: all.
        tool_log_truncate_length: Characters of tool input and output in log lines; -1: all.
        max_parallel_tasks: Tasks that may run at the same time.
        durability: When facts are committed: `"effects"`, `"run"` or `"off"`.
        max_tokens: Tokens of input and output together that the run may use; > 0.
        max_cost: Money that the run may spend, in USD or the currency of `cost_configuration`; > 0.
        tags: Labels of the caller, by name, to find the run later: at most 64, of up to 256 characters each. They are recorded
            and shown in lists of runs, and have no other effect.
        user: For whom the run is, such as a customer or a caller, up to 256 characters. It is recorded, and shown like a tag
            of this name. User code reads it as `context.user`.
        deps: Value for the user's code, which reads it as `context.deps`, or `provide(function)`. It is never recorded, and
            no model sees it.
    """

    context_budget: fields.StrictInt | None = None
    max_tool_output_length: fields.StrictInt | None = None
    tool_log_truncate_length: fields.StrictInt | None = None
    max_parallel_tasks: fields.StrictInt | None = None
    durability: fields.OptionalDurabilityField = fields.initially(None)
    max_tokens: fields.StrictInt | None = None
    max_cost: fields.StrictAmount | None = None
    tags: Annotated[Mapping[str, str] | None, BeforeValidator(whole_data)] = None
    user: Annotated[fields.StrictText | None, BeforeValidator(whole_data)] = None
    deps: Any = Field(default=None, repr=False, exclude=True)

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        fields.check_positive(arguments.get("context_budget"), "RunOptions context_budget must be > 0 when set")
        fields.check_positive(arguments.get("max_parallel_tasks"), "RunOptions max_parallel_tasks must be > 0 when set")
        check_budget(arguments, "RunOptions")
        check_tags(arguments.get("tags"), "RunOptions")
        user = arguments.get("user")
        if isinstance(user, str) and not 0 < len(user) <= LONGEST_WORD:
            raise ValidationError(f"RunOptions user must have 1 to {LONGEST_WORD} characters, got: {len(user)}")


class RunFields(TypedDict, total=False):
    """The fields of `RunOptions` as arguments of `run` and its variants (S-DOM-94)."""

    context_budget: int | None
    max_tool_output_length: int | None
    tool_log_truncate_length: int | None
    max_parallel_tasks: int | None
    durability: Durability | str | None
    max_tokens: int | None
    max_cost: float | None
    tags: Mapping[str, str] | None
    user: str | None
    deps: object


class RetryPolicy(Value):
    """Retries of model calls that fail because of the provider.

    Attributes:
        max_attempts: Most requests for one answer; 1: no retries.
        first_delay: Wait before the second attempt; each further wait is twice as long. Seconds or a `timedelta`, as all waits.
        max_delay: The longest wait, unless the provider requests a longer one.
        max_wait: Limit of all waits for one answer, including waits for an endpoint that fails for all callers.

    Raises:
        ValidationError: a value is out of range.

    Examples:
        >>> RetryPolicy(max_attempts=3, max_wait=20).max_wait
        datetime.timedelta(seconds=20)
    """

    max_attempts: fields.StrictInt = 5
    first_delay: DurationField = fields.initially(timedelta(seconds=0.5))
    max_delay: DurationField = fields.initially(timedelta(seconds=30))
    max_wait: DurationField = fields.initially(timedelta(seconds=120))

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        fields.check_least(arguments.get("max_attempts"), 1, "RetryPolicy max_attempts")
        for name in ("first_delay", "max_delay", "max_wait"):
            value = arguments.get(name)
            seconds = value.total_seconds() if isinstance(value, timedelta) else value
            if isinstance(seconds, int | float) and not 0 <= seconds <= _LONGEST_S:  # `not` refuses NaN too
                raise ValidationError(f"RetryPolicy {name} must be between 0 s and 365 days, got: {value}")

    @model_validator(mode="after")
    def _check_order(self) -> RetryPolicy:
        if self.max_delay < self.first_delay:
            msg = f"RetryPolicy max_delay ({self.max_delay}) must not be below first_delay ({self.first_delay})"
            raise ValidationError(msg)
        return self


def check_budget(arguments: Mapping[str, object], owner: str) -> None:
    """Check `max_tokens` and `max_cost` (S-BUD-1). `owner` begins a message."""
    fields.check_positive(arguments.get("max_tokens"), f"{owner} max_tokens must be > 0 when set")
    cost = arguments.get("max_cost")
    fields.check_positive(cost, f"{owner} max_cost must be > 0 when set")
    if isinstance(cost, float) and not math.isfinite(cost):
        raise ValidationError(f"{owner} max_cost must be a finite amount, got: {cost}")


def check_tags(tags: object, owner: str) -> None:
    """Refuse tags that are too many or too long (S-DUR-140)."""
    if not isinstance(tags, Mapping):
        return
    given = cast("Mapping[object, object]", tags)
    if len(given) > MOST_TAGS:
        raise ValidationError(f"{owner} tags must be at most {MOST_TAGS}, got: {len(given)}")
    for name, value in given.items():
        if isinstance(name, str) and not 0 < len(name) <= LONGEST_WORD:
            msg = f"{owner} tags: a name must have 1 to {LONGEST_WORD} characters, got {len(name)}: '{brief(name)}'"
            raise ValidationError(msg)
        if isinstance(value, str) and len(value) > LONGEST_WORD:
            raise ValidationError(
                f"{owner} tags: the value of '{brief(str(name))}' must have at most {LONGEST_WORD} characters, got: {len(value)}"
            )


def tags_in(options: Mapping[str, object] | None) -> dict[str, str]:
    """Return the valid tags in a run's recorded options. Its user is the tag `user` (S-CTX-60)."""
    recorded, user = (options or {}).get("tags"), (options or {}).get("user")
    named = {"user": whole_text(user)} if isinstance(user, str) and 0 < len(user) <= LONGEST_WORD else {}
    if not isinstance(recorded, Mapping):
        return named
    found = {
        whole_text(name): whole_text(value)
        for name, value in cast("Mapping[object, object]", recorded).items()
        if isinstance(name, str) and isinstance(value, str) and 0 < len(name) <= LONGEST_WORD >= len(value)
    }
    return {**dict(list(found.items())[:MOST_TAGS]), **named}


def has_tag(tags: Mapping[str, str], wanted: str, *, separator: str) -> bool:
    """Return whether a run has a tag: a name, or a name and a value with the separator between them."""
    return any(wanted in {name, f"{name}{separator}{value}"} for name, value in tags.items())


def check_options(value: object) -> None:
    """Refuse options of another class."""
    if value is not None and not isinstance(value, RunOptions):
        names = cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {"max_tokens": ...}
        advice = f"Write options=RunOptions({', '.join(f'{name}=...' for name in names)})"
        raise ValidationError(f"options must be RunOptions, got: {type(value).__name__}. {advice}")


def merge_options(options: RunOptions | None, fields: RunFields) -> RunOptions | None:
    """Return the options of a run; arguments by name replace fields of `options`.

    Raises:
        TypeError: a name is no argument of a run.
    """
    check_options(options)
    if not fields:
        return options
    unknown = next((name for name in fields if name not in RunOptions.model_fields), None)
    if unknown is not None:
        from difflib import get_close_matches  # needed only for mistakes

        near = get_close_matches(unknown, (*RunOptions.model_fields, *_ARGUMENTS), n=1)
        advice = f"Did you mean '{near[0]}'?" if near else f"Inputs are a mapping: run({{'{unknown}': ...}})"
        raise TypeError(f"unexpected keyword argument '{unknown}' of a run. {advice}")
    return (RunOptions() if options is None else options).replace(**fields)

"""What one run does differently from its ensemble. Package: definition. Values only: `run_rules` says what they override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from pydantic import BeforeValidator, model_validator

from ensemble_ray.definition.budget import check_budget
from ensemble_ray.definition.fields import (
    OptionalDurabilityField,
    StrictAmount,
    StrictInt,
    check_positive,
    initially,
)
from ensemble_ray.definition.run_tags import check_tags
from ensemble_ray.errors import ValidationError
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from ensemble_ray.definition.durability import Durability

__all__ = ["RunFields", "RunOptions", "check_options", "merge_options"]


class RunOptions(Value):
    """What one run does differently from its ensemble: `run(max_tokens=100_000)`, or `run(options=RunOptions(...))`.

    None keeps the ensemble's value. A run that is resumed keeps its options, but for those that are given anew.

    Attributes:
        context_budget: Most tokens that a request of a task may have, where the task does not say.
        max_tool_output_length: Characters of a tool's output that the model sees; negative: all.
        tool_log_truncate_length: Characters of tool input and output in log lines; -1: all.
        max_parallel_tasks: Tasks that may run at the same time.
        durability: How safe facts are before the run goes on: `"effects"`, `"run"` or `"off"`.
        max_tokens: Tokens of input and output together that the run may spend; > 0.
        max_cost: Money that the run may spend, in the currency of `cost_configuration`; > 0.
        tags: Words of the caller's own about the run, by name, to find it again: at most 64, of up to 256 characters each. They are
            recorded, lists of runs show them, and they change nothing.
    """

    context_budget: StrictInt | None = None
    max_tool_output_length: StrictInt | None = None
    tool_log_truncate_length: StrictInt | None = None
    max_parallel_tasks: StrictInt | None = None
    durability: OptionalDurabilityField = initially(None)
    max_tokens: StrictInt | None = None
    max_cost: StrictAmount | None = None
    tags: Annotated[Mapping[str, str] | None, BeforeValidator(whole_data)] = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            arguments = cast("Mapping[str, object]", data)
            check_positive(arguments.get("context_budget"), "RunOptions context_budget must be > 0 when set")
            check_positive(arguments.get("max_parallel_tasks"), "RunOptions max_parallel_tasks must be > 0 when set")
            check_budget(arguments, "RunOptions")
            check_tags(arguments.get("tags"), "RunOptions")
        return data


class RunFields(TypedDict, total=False):
    """The fields of `RunOptions` as arguments of `run` and its other forms (S-DOM-94)."""

    context_budget: int | None
    max_tool_output_length: int | None
    tool_log_truncate_length: int | None
    max_parallel_tasks: int | None
    durability: Durability | str | None
    max_tokens: int | None
    max_cost: float | None
    tags: Mapping[str, str] | None


#: Arguments that `run` and its other forms have besides the fields, for the error about another name.
_ARGUMENTS = ("inputs", "runtime", "run_id", "options", "output_type", "history")


def check_options(value: object) -> None:
    """Refuse options of another class.

    Raises:
        ValidationError: they are; the message says what to write.
    """
    if value is not None and not isinstance(value, RunOptions):
        names = cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {"max_tokens": ...}
        advice = f"Write options=RunOptions({', '.join(f'{name}=...' for name in names)})"
        raise ValidationError(f"options must be RunOptions, got: {type(value).__name__}. {advice}")


def merge_options(options: RunOptions | None, fields: RunFields) -> RunOptions | None:
    """Return the options of a run; fields that are given by name win.

    Raises:
        TypeError: a name is no argument of a run.
        ValidationError: a value is refused.
    """
    check_options(options)
    if not fields:
        return options
    unknown = next((name for name in fields if name not in RunOptions.model_fields), None)
    if unknown is not None:
        from difflib import get_close_matches  # only mistakes pay for it

        near = get_close_matches(unknown, (*RunOptions.model_fields, *_ARGUMENTS), n=1)
        advice = f"Did you mean '{near[0]}'?" if near else f"Inputs are a mapping: run({{'{unknown}': ...}})"
        raise TypeError(f"unexpected keyword argument '{unknown}' of a run. {advice}")
    return (RunOptions() if options is None else options).replace(**fields)

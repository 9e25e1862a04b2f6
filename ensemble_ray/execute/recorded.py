"""What the record of a task gives back: its output with its types, its error, when it began. Room: execute. Pure.

In: facts as a journal gives them. Out: the values that they were made of.
Never: an import of a class that a record names; types come from today's definition.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import pydantic

from ensemble_ray.errors import RecordError
from ensemble_ray.errors_data import error_from
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import TaskOutput

__all__ = ["as_mapping", "began_at", "failure_of", "typed_data", "typed_output"]

_log = logging.getLogger(__name__)


def as_mapping(value: object) -> Mapping[str, object]:
    """The value if it is a mapping, else an empty one: readers of broken records go on without it."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def began_at(fact: Fact) -> float:
    """When what a fact tells of began, Unix time, s."""
    begun = fact.data.get("started_at")
    return float(begun) if isinstance(begun, int | float) else fact.at


def failure_of(fact: Fact, output_type: type[Any] | None = None) -> BaseException:
    """The error that a `task_failed` fact tells of."""
    data = as_mapping(fact.data.get("error"))
    told = {"type": fact.data.get("error_type"), "text": fact.data.get("message")}
    return error_from(data or told, output_type=output_type)


def typed_data(data: object, output_type: type[Any]) -> object:
    """Recorded JSON data as the type that it was recorded of.

    Raises:
        ValueError: it does not fit that type (any more).
    """
    # By its JSON text: strict types accept there what they refuse as Python data, dates and enums for example.
    return pydantic.TypeAdapter(output_type).validate_json(pydantic.TypeAdapter(object).dump_json(data))


def typed_output(data: Mapping[str, object], output_type: type[Any] | None) -> TaskOutput:
    """A recorded output; its parsed output of that type, or JSON data where there is none.

    Raises:
        RecordError: it does not fit.
    """
    given = {**data, "output_type": output_type}
    of = str(given.get("task_description", ""))
    if output_type is not None and given.get("parsed_output") is not None:
        try:
            given["parsed_output"] = typed_data(given["parsed_output"], output_type)
        except ValueError as error:
            msg = f"The recorded output of task '{of}' is no {output_type.__qualname__} any more: {error}"
            raise RecordError(msg) from error
    try:
        return TaskOutput(**cast("dict[str, Any]", given))
    except ValueError as error:
        msg = f"The record is damaged: output of task '{of}': {error}"
        raise RecordError(msg) from error

"""Recorded outputs as values again. Room: record. Pure but for a warning.

In: an output as a record keeps it, and the type that the task declares now. Out: a `TaskOutput`.
Never: an import of a class that the record names; the type comes from the definition of whoever asks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import pydantic

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.structured import parse_output
from ensemble_ray.outputs import TaskOutput
from ensemble_ray.values import Value

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["typed_output"]

_log = logging.getLogger(__name__)


def typed_output(data: Mapping[str, object], output_type: type[Any] | None = None) -> TaskOutput:
    """A recorded output, its parsed output of the given type.

    What does not fit the type any more is parsed from the raw text; where that fails too, it stays JSON data and a WARN
    line says so.

    Args:
        data: The output as JSON data.
        output_type: What the task declares; None: the parsed output stays JSON data.

    Raises:
        RecordError: it is no output.
    """
    given: dict[str, object] = {**data, "output_type": output_type}
    if output_type is not None and given.get("parsed_output") is not None:
        given["parsed_output"] = parsed = _parsed(given, output_type)
        if isinstance(given.get("trace"), Mapping):
            given["trace"] = {**cast("Mapping[str, object]", given["trace"]), "parsed_output": parsed}
    kind = cast("type[Value]", TaskOutput)  # the data is anything until it is validated
    try:
        return cast("TaskOutput", kind(**given))
    except ValueError as error:
        msg = f"The record is damaged: output of task '{str(data.get('task_description'))[:80]}': {error}"
        raise RecordError(msg) from error


def _parsed(given: Mapping[str, object], output_type: type[Any]) -> object:
    data = given["parsed_output"]
    try:
        # By its JSON text: strict types accept there what they refuse as Python data, dates and enums for example.
        return _adapter(cast("Hashable", output_type)).validate_json(_any().dump_json(data))
    except (pydantic.ValidationError, pydantic.errors.PydanticUserError, ValueError) as error:
        read = parse_output(str(given.get("raw") or ""), output_type)
        if read.is_success:
            return read.value
        _log.warning(
            "The recorded output of task '%s' is no %s any more and stays data: %s",
            str(given.get("task_description"))[:80], getattr(output_type, "__qualname__", output_type), error,
        )  # fmt: skip
        return data


@lru_cache(maxsize=256)
def _adapter(kind: type[object]) -> pydantic.TypeAdapter[object]:
    """Building one costs a hundred parses."""
    return pydantic.TypeAdapter(kind)


@lru_cache(maxsize=1)
def _any() -> pydantic.TypeAdapter[object]:
    return pydantic.TypeAdapter(object)

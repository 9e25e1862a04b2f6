"""Errors as JSON-able data for records, and back (S-DUR-39).

No class is imported because a record names it: unknown errors become stand-ins. Task outputs and traces are omitted.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from types import UnionType
from typing import cast

import pydantic

from ensemble_ray import errors
from ensemble_ray.errors.texts import cause_chain, message_of
from ensemble_ray.errors.travel import notes_of, pack_provider_error, plain_fields, rebuild, stand_in
from ensemble_ray.errors.travel import unpack_provider_error as unpack_provider
from ensemble_ray.values.trace import PhaseStatus, jsonable
from ensemble_ray.values.value import RateLimit

_MAX_CHAIN = 32
_OMITTED_FIELDS = frozenset({"completed_task_outputs", "output_type", "trace", "__notes__"})
_WITH_OUTPUTS = (
    errors.TaskExecutionError,
    errors.ParallelExecutionError,
    errors.ConstraintViolationError,
    errors.MaxLoopIterationsExceededError,
    errors.GraphNoEdgeMatchedError,
    errors.MaxGraphStepsExceededError,
)
_OURS: Mapping[str, type[BaseException]] = {
    name: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, BaseException)
}
_BUILTIN: Mapping[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ExceptionGroup)
}


def error_data(error: BaseException) -> dict[str, object]:
    """Return an error and its causes as JSON-able data."""
    data: dict[str, object] | None = None
    for each in reversed([error, *cause_chain(error)][:_MAX_CHAIN]):
        data = {**_link(each), "cause": data}
    return cast("dict[str, object]", data)


def error_from(data: Mapping[str, object], *, output_type: type[object] | UnionType | None = None) -> BaseException:
    """Return a recorded error with its causes. Damaged data produces a stand-in."""
    links: list[Mapping[str, object]] = []
    at: object = data
    while isinstance(at, Mapping) and len(links) < _MAX_CHAIN:
        links.append(cast("Mapping[str, object]", at))
        at = links[-1].get("cause")
    cause: BaseException | None = None
    for link in reversed(links):
        error = _error(link, output_type)
        notes = link.get("notes")
        for note in cast("list[object]", notes) if isinstance(notes, list) else ():
            if isinstance(note, str):
                error.add_note(note)
        error.__cause__ = cause
        cause = error
    return cast("BaseException", cause)


def _link(error: BaseException) -> dict[str, object]:
    kind = type(error)
    described: dict[str, object] = {"type": kind.__name__, "text": message_of(error)}
    if notes := notes_of(error):
        described["notes"] = list(notes)
    if _OURS.get(kind.__name__) is kind:
        fields = {name: _field(value) for name, value in vars(error).items() if name not in _OMITTED_FIELDS}
        return {**described, "args": jsonable(list(error.args)), "fields": fields}
    if (provider := pack_provider_error(error)) is not None:
        return {**described, "provider": provider}
    if _BUILTIN.get(kind.__name__) is kind and all(isinstance(each, str | int | float) for each in error.args):
        return {**described, "args": list(error.args)}
    plain = plain_fields(error)
    return {**described, "fields": plain} if plain else described


def _field(value: object) -> object:
    match value:
        case timedelta():
            return value.total_seconds()
        case RateLimit():
            return {"requests": value.requests, "period_s": value.period.total_seconds()}
        case Mapping():
            items = cast("Mapping[object, object]", value)
            return {str(key): _field(each) for key, each in items.items()}
        case BaseException():
            return error_data(value)
        case _:
            return jsonable(value)


def _error(link: Mapping[str, object], output_type: type[object] | UnionType | None) -> BaseException:
    name, text = str(link.get("type") or "Exception"), str(link.get("text") or "")
    kind, args, fields = _OURS.get(name), link.get("args"), link.get("fields")
    if kind is None or not isinstance(args, Sequence) or not isinstance(fields, Mapping):
        return _foreign(name, text, link)
    try:
        recorded = cast("Mapping[str, object]", fields)
        state = {field: _value(field, value, output_type) for field, value in recorded.items()}
    except (KeyError, TypeError, ValueError):
        return stand_in(name, text)
    omitted: dict[str, object] = {}
    if issubclass(kind, _WITH_OUTPUTS):
        omitted["completed_task_outputs"] = ()
    if issubclass(kind, errors.OutputParsingError):
        omitted["output_type"] = output_type
    return rebuild(kind, tuple(cast("Sequence[object]", args)), {**omitted, **state})


def _foreign(name: str, text: str, link: Mapping[str, object]) -> BaseException:
    """Return an error of another package: a listed class, else a stand-in."""
    provider, args, fields = link.get("provider"), link.get("args"), link.get("fields")
    if isinstance(provider, Mapping):
        found = unpack_provider(cast("Mapping[str, object]", provider))
        if found is not None:
            return found
    if isinstance(args, list) and name in _BUILTIN:
        try:
            error = _BUILTIN[name](*cast("list[object]", args))
        except (TypeError, ValueError):  # its constructor requires more
            return stand_in(name, text)
        if message_of(error) == text:
            return error
    plain = cast("Mapping[str, object]", fields) if isinstance(fields, Mapping) and name not in _OURS else {}
    return stand_in(name, text, plain)


def _value(field: str, value: object, output_type: type[object] | UnionType | None) -> object:
    match field:
        case "rate_limit":
            limit = cast("Mapping[str, object]", value)
            return RateLimit.model_validate({"requests": limit["requests"], "period": limit["period_s"]})
        case "decided_at":
            return pydantic.TypeAdapter(datetime | None).validate_python(value)
        case "wait_timeout":
            return pydantic.TypeAdapter(timedelta).validate_python(value)
        case "failed_task_causes":
            causes = cast("Mapping[str, Mapping[str, object]]", value)
            return {key: error_from(each, output_type=output_type) for key, each in causes.items()}
        case "phase_statuses":
            return {name: PhaseStatus(status) for name, status in cast("Mapping[str, str]", value).items()}
        case _:
            return tuple(cast("list[object]", value)) if isinstance(value, list) else value

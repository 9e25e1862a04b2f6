"""Errors as data of the record, and back (S-DUR-39). Pure.

In: any exception. Out: JSON-able data: class, text, fields, notes, chain of causes; and the error again.
Never: an import of a class that a record names. Classes of `errors`, built-in ones and the listed ones of
`provider_errors` come back as themselves, every other class as a stand-in of its name and text. Task outputs and traces
are left out: the record has them, and a run puts its own back.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import UnionType
from typing import cast

import pydantic

from ensemble_ray import errors
from ensemble_ray.errors.texts import message_of
from ensemble_ray.errors.travel import (
    notes_of,
    pack_provider_error,
    plain_fields,
    rebuild,
    stand_in,
    unpack_provider_error,
)
from ensemble_ray.values.trace import PhaseStatus, jsonable
from ensemble_ray.values.value import RateLimit

#: Longest chain of causes that is kept.
_MAX_CHAIN = 32
#: Fields that are no data of the record.
_LEFT_OUT = frozenset({"completed_task_outputs", "output_type", "trace", "__notes__"})
#: Errors that carry what was completed.
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
#: Built-in errors that a text, or what else JSON has, makes again.
_BUILTIN: Mapping[str, type[Exception]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ExceptionGroup)
}


def error_data(error: BaseException) -> dict[str, object]:
    """Return an error and its causes as JSON-able data."""
    data: dict[str, object] | None = None
    for each in reversed(list(_chain(error))):
        data = {**_link(each), "cause": data}
    return cast("dict[str, object]", data)


def error_from(data: Mapping[str, object], *, output_type: type[object] | UnionType | None = None) -> BaseException:
    """Return the error that was recorded, with its causes; what is damaged in its data comes back as a stand-in.

    Args:
        data: What `error_data` gave, also after a way through JSON.
        output_type: The task's, for errors that tell it: types are no data.
    """
    links: list[Mapping[str, object]] = []
    at: object = data
    while isinstance(at, Mapping) and len(links) < _MAX_CHAIN:
        links.append(cast("Mapping[str, object]", at))
        at = links[-1].get("cause")
    cause: BaseException | None = None
    for link in reversed(links):
        error = _error(link, output_type)
        for note in _notes(link):
            error.add_note(note)
        error.__cause__ = cause
        cause = error
    return cast("BaseException", cause)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Return the error and its causes, each once."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(at))
        yield at
        at = at.__cause__


def _link(error: BaseException) -> dict[str, object]:
    kind = type(error)
    described: dict[str, object] = {"type": kind.__name__, "text": message_of(error)}
    if notes := notes_of(error):
        described["notes"] = list(notes)
    if _OURS.get(kind.__name__) is kind:
        fields = {name: _field(value) for name, value in vars(error).items() if name not in _LEFT_OUT}
        return {**described, "args": jsonable(list(error.args)), "fields": fields}
    if (provider := pack_provider_error(error)) is not None:
        return {**described, "provider": provider}
    if _BUILTIN.get(kind.__name__) is kind and all(isinstance(each, str | int | float) for each in error.args):
        return {**described, "args": list(error.args)}
    plain = plain_fields(error)
    return {**described, "fields": plain} if plain else described


def _notes(link: Mapping[str, object]) -> list[str]:
    notes = link.get("notes")
    return [each for each in cast("list[object]", notes) if isinstance(each, str)] if isinstance(notes, list) else []


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
    left_out: dict[str, object] = {}
    if issubclass(kind, _WITH_OUTPUTS):
        left_out["completed_task_outputs"] = ()
    if issubclass(kind, errors.OutputParsingError):
        left_out["output_type"] = output_type
    return rebuild(kind, tuple(cast("Sequence[object]", args)), {**left_out, **state})


def _foreign(name: str, text: str, link: Mapping[str, object]) -> BaseException:
    """Return an error of a class that is none of ours: itself where its class is listed, else a stand-in."""
    provider, args, fields = link.get("provider"), link.get("args"), link.get("fields")
    if isinstance(provider, Mapping):
        found = unpack_provider_error(cast("Mapping[str, object]", provider))
        if found is not None:
            return found
    if isinstance(args, list) and name in _BUILTIN:
        try:
            error = _BUILTIN[name](*cast("list[object]", args))
        except (TypeError, ValueError):  # its constructor wants more
            return stand_in(name, text)
        if message_of(error) == text:
            return error
    plain = cast("Mapping[str, object]", fields) if isinstance(fields, Mapping) and name not in _OURS else {}
    return stand_in(name, text, plain)


def _value(field: str, value: object, output_type: type[object] | UnionType | None) -> object:
    """Return a field's value again: only a few are of types that JSON has not."""
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

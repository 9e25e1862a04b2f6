"""Which data facts of each kind have. Package: execute. Pure.

In: a fact as it was read. Out: nothing, or what is wrong with it. All readers of stored facts ask here, so that whoever
uses the data may rely on the types of known fields. Fields that are missing are wrong only where a recorded effect is
used in place of doing it again (`check_usable`); kinds and fields that are not known are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast, get_args

from ensemble_ray.errors import RecordError
from ensemble_ray.values.messages import Effect, Fact
from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = ["check_shape", "check_usable"]

#: Instants from about the year 70 to 9500, and durations of up to 300 years, s: what `datetime` can hold, with room.
_FIRST_S, _LAST_S, _LONGEST_S = -6e10, 2.4e11, 1e10

#: Says what a value must be, if it is not.
_Check = Callable[[object], str | None]


def _of(what: str, *kinds: type) -> _Check:
    def check(value: object) -> str | None:
        is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        return None if is_right else what

    return check


def _optional(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _within(what: str, least: float, most: float) -> _Check:
    def check(value: object) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and least <= cast("float", value) <= most else what

    return check


def _list_of(each: _Check) -> _Check:
    def check(value: object) -> str | None:
        if not isinstance(value, list | tuple):
            return "a list"
        wrong = (told for one in cast("list[object]", value) if (told := each(one)) is not None)
        found = next(wrong, None)
        return None if found is None else f"a list of which each is {found}"

    return check


def _object(**fields: _Check) -> _Check:
    """An object with at least these fields."""

    def check(value: object) -> str | None:
        if not isinstance(value, Mapping):
            return "an object"
        data = cast("Mapping[str, object]", value)
        for name, field in fields.items():
            if (told := field(data.get(name))) is not None:
                return f"an object whose {name} is {told}"
        return None

    return check


def _one_of(*values: str) -> _Check:
    return lambda value: None if value in values else f"one of {', '.join(values)}"


_TEXT, _NUMBER, _FLAG = _of("a text", str), _of("a whole number", int), _of("true or false", bool)
_DATA, _AT = _of("an object", Mapping), _within("an instant", _FIRST_S, _LAST_S)
_LONG = _within("a duration", -_LONGEST_S, _LONGEST_S)
_BUDGET = _object(max_tokens=_optional(_NUMBER), max_cost=_optional(_NUMBER))
_FORKED = _object(run=_TEXT, task=_TEXT)
#: Of the fact itself.
_ITSELF: Mapping[str, _Check] = {"kind": _TEXT, "name": _TEXT, "at": _AT, "epoch": _NUMBER}
_SHAPES: Mapping[str, Mapping[str, _Check]] = {
    "plan": {
        **dict.fromkeys(("plan", "inputs", "definition", "items"), _DATA),
        **dict.fromkeys(("options", "overrides"), _optional(_DATA)),
        **dict.fromkeys(("ensemble_id", "workflow", "digest", "capture_mode"), _TEXT),
        **dict.fromkeys(("origin", "runtime"), _optional(_TEXT)),
        "agents": _list_of(_DATA),
        "started_at": _AT,
        "budget": _optional(_BUDGET),
        "forked_from": _optional(_FORKED),
    },
    "resume": {"options": _optional(_DATA), "budget": _optional(_BUDGET), "is_restart": _FLAG},
    "stimulus": {
        "type": _TEXT,
        **dict.fromkeys(("total_tokens", "tool_call_count"), _NUMBER),
        "at": _AT,
        "duration_s": _LONG,
        "delegated_roles": _list_of(_TEXT),
    },
    "model": {
        # Of users' own models: what they give is recorded as it is.
        **dict.fromkeys(("input_tokens", "output_tokens"), _of("a number", int, float)),
        "tool_calls": _list_of(_DATA),
        "text": _optional(_TEXT),
        "retries": _NUMBER,
        "started_at": _AT,
        "latency_s": _LONG,
        "attempts_failed": _list_of(_TEXT),
        "estimated_tokens": _list_of(_NUMBER),
        "request_digest": _TEXT,
    },
    "tool_intent": {
        "tool_name": _TEXT,
        "effect": _one_of(*get_args(Effect)),
    },
    "tool_result": {"outcome": _TEXT, "text": _TEXT, "started_at": _AT, "duration_s": _LONG},
    "delegation": {
        "request": _DATA,
        **dict.fromkeys(("worker", "charged"), _optional(_TEXT)),
        "refusal": _optional(_DATA),
        "is_error": _FLAG,
        "started_at": _AT,
    },
    "decision": {"answer": _TEXT},
    "output": {"output": _DATA},
    "task_failed": {
        **dict.fromkeys(("error_type", "message"), _TEXT),
        "stack_trace": _optional(_TEXT),
        "error": _optional(_DATA),
        "trace": _optional(_DATA),
        "attempts": _NUMBER,
    },
    "task_exited": {"reason": _TEXT},
    "items": {"first": _NUMBER, "indices": _list_of(_NUMBER), "digests": _list_of(_TEXT)},
    "group": {"level": _NUMBER, "number": _NUMBER, "inputs": _list_of(_TEXT), "is_final": _FLAG},
    "agents": {"agents": _list_of(_DATA)},
    "end": {
        "state": _one_of(*RunState),
        "exit_reason": _one_of(*ExitReason),
        "errors": _list_of(_DATA),
        "trace_id": _optional(_TEXT),
    },
    "loss": {"last": _NUMBER, "gap": _NUMBER, "reason": _TEXT},
}
#: What must be there of an effect that is not done again.
_USED: Mapping[str, tuple[str, ...]] = {
    "model": ("text", "tool_calls", "input_tokens", "output_tokens", "started_at", "latency_s"),
    "tool_result": ("outcome", "text", "structured_output", "started_at", "duration_s"),
    "delegation": ("request", "worker"),
    "decision": ("answer",),
    "output": ("output",),
}


def check_shape(fact: Fact) -> None:
    """Refuse a fact whose known fields are not what they are in every record.

    Raises:
        ValueError: says which field, and what it should be.
    """
    for name, check in _ITSELF.items():
        if (told := check(getattr(fact, name))) is not None:
            raise ValueError(f"its {name} is not {told}")
    shape = _SHAPES.get(fact.kind)
    if shape is None:
        return
    for name, value in fact.data.items():
        if name in shape and (told := shape[name](value)) is not None:
            raise ValueError(f"its {name} is not {told}")


def check_usable(fact: Fact) -> Fact:
    """Return a recorded effect that is to be used in place of doing it again.

    Raises:
        RecordError: something of it is missing.
    """
    missing = [name for name in _USED.get(fact.kind, ()) if name not in fact.data]
    if fact.kind == "model" and not missing:
        calls = cast("list[Mapping[str, object]]", fact.data["tool_calls"])
        missing = [f"tool_calls.{name}" for name in ("id", "name", "arguments") if any(name not in c for c in calls)]
    if missing:
        raise RecordError(
            f"The record is damaged: fact {fact.seq} of run '{fact.run}' ({fact.kind} '{fact.name}') has no {', '.join(missing)}"
        )
    return fact

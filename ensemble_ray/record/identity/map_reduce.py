"""Build the facts that a dynamic run records about its definition, items and groups, and the keys of its tasks. Pure.

Items are never recorded: they may be any values, and a resumed run pulls them again.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import cast

import pydantic

from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.identity.definition import digest_of, identity_of, model_data
from ensemble_ray.values.trace import jsonable

DIRECT = "direct"  # Key of the short-circuit's only task, and of the final reduce (S-MR-160).
FINAL = "final-reduce"
DIGEST_DIGITS = 16  # Hexadecimal digits of an item's hash: short, as there may be millions.
_CALLABLES = (
    "map_task",
    "map_agent",
    "reduce_task",
    "reduce_agent",
    "direct_task",
    "direct_agent",
    "token_estimator",
    "input_estimator",
)
#: Fields that decide the groups and the handling of failures; limits of speed do not.
_RULES = (
    "chunk_size",
    "target_token_budget",
    "context_window_size",
    "budget_ratio",
    "max_reduce_levels",
    "mode",
    "ordered",
    "on_item_error",
    "parallel_error_strategy",
)
_TASK_KEY = re.compile(r"(?:map-(?P<index>\d+)|reduce-(?P<level>\d+)-(?P<number>\d+))")
_ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]+")


# Kinds of tasks.


def is_direct(instance: str) -> bool:
    return instance.startswith(f"{DIRECT}#")


def is_of_items(instance: str) -> bool:
    return instance.startswith("map-") or is_direct(instance)


# The first fact.


def map_reduce_run_data(
    definition: object, *, workflow: str, inputs: Mapping[str, object], items: Mapping[str, object]
) -> PlanRecorded:
    """Return the first fact of a dynamic run (S-DUR-36); `items` describes the source for people."""
    rules = {name: jsonable(value) for name in _RULES if (value := getattr(definition, name, None)) is not None}
    described: dict[str, object] = {}
    for name in _CALLABLES:
        factory = getattr(definition, name, None)
        if factory is not None and factory is not str:
            declared = getattr(factory, "declared", None)  # of a factory that is built from data (S-MR-173)
            data = cast("Mapping[str, object]", declared()) if callable(declared) else {}
            described[name] = {**identity_of(factory), **data}
    if (model := getattr(definition, "llm", None)) is not None:
        described["llm"] = model_data(model)
    if (budget := getattr(definition, "context_budget", None)) is not None:
        described["context_budget"] = budget
    if (length := getattr(definition, "max_tool_output_length", -1)) >= 0:
        described["max_tool_output_length"] = length
    if (policy := getattr(definition, "on_incomplete", "warn")) != "warn":
        described["on_incomplete"] = policy
    plan: dict[str, object] = {"workflow": workflow, **rules}
    return PlanRecorded(
        plan=plan,
        definition=described,
        workflow=workflow,
        inputs=dict(inputs),
        items=dict(items),
        digest=digest_of({"plan": {**plan, "inputs": dict(inputs)}, "definition": described}),
    )


# Work and its keys (S-MR-160).


def map_key(index: int) -> str:
    return f"map-{index}"


def reduce_key(level: int, number: int) -> str:
    return f"reduce-{level}-{number}"


def position_of(key: str) -> tuple[int, int] | None:
    """Return level and number of a map (level 0, index of its item) or reduce; None for any other key."""
    found = _TASK_KEY.fullmatch(key)
    if found is None:
        return None
    if found["index"] is not None:
        return 0, int(found["index"])
    return int(found["level"]), int(found["number"])


# Items.


class _Unnameable(Exception):  # noqa: N818  no error: the item cannot be compared
    """A value has no text that is equal in other processes."""


def item_digest(item: object) -> str:
    """Return a hash that is equal in all processes; empty if the item cannot be compared (S-MR-162).

    It is of the JSON text. Values that JSON cannot represent are replaced by their `repr`, unless that has an address.
    """
    try:
        try:
            text = _json_of(item)
        except TypeError:  # keys that JSON cannot represent or sort
            text = _json_of(_with_named_keys(item))
    except (_Unnameable, TypeError, ValueError, RecursionError):
        return ""
    return sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def _json_of(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_to_named)


def _with_named_keys(value: object) -> object:
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return sorted(
            ([_text_of(key), _with_named_keys(each)] for key, each in entries), key=lambda entry: str(entry[0])
        )
    if isinstance(value, list | tuple):
        return [_with_named_keys(each) for each in cast("Sequence[object]", value)]
    return value


def _to_named(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(_text_of(each) for each in cast("Iterable[object]", value))
    if isinstance(value, pydantic.BaseModel):
        return {"": type(value).__qualname__, **value.__dict__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"": type(value).__qualname__, **fields}
    return _text_of(value)


def _text_of(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # user code: an item without a text cannot be compared
        raise _Unnameable from error
    if _ADDRESS.search(text):
        raise _Unnameable
    return text.encode("utf-8", "backslashreplace").decode()

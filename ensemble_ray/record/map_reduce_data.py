"""What a fed run records besides what its tasks do: its definition, its items, its groups. Room: record. Pure.

In: the definition of a run whose tasks are made while it runs, its items, the groups that they come together in. Out:
data of the facts `plan`, `items` and `group`, and names of the work.
Never: an item itself, which may be anything and is pulled again; a hash of one that is another in the next process.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

import pydantic

from ensemble_ray.errors import RecordError
from ensemble_ray.record.callable_identity import identity_of
from ensemble_ray.record.definition_data import model_data
from ensemble_ray.record.digest import digest_of
from ensemble_ray.values.ids import RUN, instance_of
from ensemble_ray.values.messages import Fact
from ensemble_ray.values.trace import AgentSummary, jsonable

__all__ = [
    "AGENTS_KIND",
    "DIGEST_DIGITS",
    "DIRECT",
    "FINAL",
    "agents_fact",
    "agents_in",
    "fed_run_data",
    "group_fact",
    "is_direct",
    "is_fed",
    "is_of_items",
    "item_digest",
    "items_fact",
    "map_key",
    "reduce_key",
    "work_of",
]

#: Key of the short-circuit's only task, and of the last reduce (S-MR-160).
DIRECT = "direct"
FINAL = "final-reduce"
#: Kind of the facts that tell who took part.
AGENTS_KIND = "agents"
#: Hexadecimal digits of an item's hash: enough to tell whether it changed, no more, as there may be millions.
DIGEST_DIGITS = 16
#: The user's code that decides what is done.
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
#: What decides which outputs come together, and what becomes of failures. Limits of speed decide nothing.
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
_WORK = re.compile(r"(?:map-(?P<index>\d+)|reduce-(?P<level>\d+)-(?P<number>\d+))")
#: In a `repr`: where in the memory of this process something lies.
_ADDRESS = re.compile(r"\bat 0x[0-9A-Fa-f]+")


# Names of tasks.


def is_direct(instance: str) -> bool:
    """Whether a task is that of all items at once."""
    return instance.startswith(f"{DIRECT}#")


def is_of_items(instance: str) -> bool:
    """Whether a task is that of an item, or of all of them, and no reduce."""
    return instance.startswith("map-") or is_direct(instance)


# The first fact.


def fed_run_data(
    definition: object, *, workflow: str, inputs: Mapping[str, object], items: Mapping[str, object]
) -> dict[str, object]:
    """What a fed run's first fact tells of what will run, as `run_data` does of planned runs (S-DUR-36).

    Args:
        definition: The ensemble; what it has of the fields of map-reduce ensembles is told.
        workflow: `map_reduce_static`, `map_reduce_adaptive` or `map`.
        inputs: Of this run.
        items: What the source is, for people. Whether it is the same one is seen by its items (S-MR-162).
    """
    rules = {name: jsonable(value) for name in _RULES if (value := getattr(definition, name, None)) is not None}
    told: dict[str, object] = {
        name: _factory_data(value)
        for name in _CALLABLES
        if (value := getattr(definition, name, None)) is not None and value is not str
    }
    if (model := getattr(definition, "llm", None)) is not None:
        told["llm"] = model_data(model)
    if (length := getattr(definition, "max_tool_output_length", -1)) >= 0:
        told["max_tool_output_length"] = length
    if (policy := getattr(definition, "on_incomplete", "warn")) != "warn":
        told["on_incomplete"] = policy
    plan: dict[str, object] = {"workflow": workflow, **rules}
    return {
        "plan": plan,
        "definition": told,
        "workflow": workflow,
        "inputs": dict(inputs),
        "items": dict(items),
        "digest": digest_of({"plan": {**plan, "inputs": dict(inputs)}, "definition": told}),
    }


def _factory_data(factory: object) -> dict[str, object]:
    """Which code a factory is; of one that is made of data, as those of team files are, also the data (S-MR-173)."""
    declared = getattr(factory, "declared", None)
    data: dict[str, object] = identity_of(factory)
    return {**data, **cast("Mapping[str, object]", declared())} if callable(declared) else data


def is_fed(header: Mapping[str, object]) -> bool:
    """Whether the data of a first fact is that of a fed run."""
    return "items" in header


# Work and its keys (S-MR-160).


def map_key(index: int) -> str:
    """Key of the map of an item."""
    return f"map-{index}"


def reduce_key(level: int, number: int) -> str:
    """Key of a reduce, the final one excepted."""
    return f"reduce-{level}-{number}"


def work_of(key: str) -> tuple[int, int] | None:
    """Level and number of a map (level 0, and the index of its item) or reduce; None for any other key."""
    found = _WORK.fullmatch(key)
    if found is None:
        return None
    if found["index"] is not None:
        return 0, int(found["index"])
    return int(found["level"]), int(found["number"])


# Groups and items.


def group_fact(run_id: str, at: float, *, key: str, level: int, number: int, inputs: Sequence[str]) -> Fact:
    """That these outputs come together; on record before the reduce starts (S-MR-161).

    Args:
        run_id: The run's id.
        at: Unix time, s.
        key: Key of the reduce.
        level: Its level; of the final one too.
        number: Its number on that level.
        inputs: Keys of what it reduces, in the order in which its factory gets them.
    """
    data = {"level": level, "number": number, "inputs": list(inputs), "is_final": key == FINAL}
    return Fact(run=run_id, kind="group", name=instance_of(key), at=at, data=data)


def items_fact(
    run_id: str, at: float, *, indices: Sequence[int], digests: Sequence[str], are_all: bool = False
) -> Fact:
    """That these items were pulled, in this order; on record before their maps start (S-MR-162).

    Args:
        run_id: The run's id.
        at: Unix time, s.
        indices: Their indices, those of their keys.
        digests: What `item_digest` gives of each.
        are_all: Whether the source had no more than those so far.
    """
    first = indices[0] if indices else 0
    is_row = all(index == place for place, index in enumerate(indices, start=first))
    where: dict[str, object] = {"first": first} if is_row else {"indices": list(indices)}
    end = {"are_all": True} if are_all else {}
    return Fact(run=run_id, kind="items", name=RUN, at=at, data={**where, "digests": list(digests), **end})


# Who took part.


def agents_fact(run_id: str, at: float, agents: Sequence[AgentSummary]) -> Fact:
    """That these agents are about to take part for the first time."""
    told = [agent.model_dump(mode="json") for agent in agents]
    return Fact(run=run_id, kind=AGENTS_KIND, name=RUN, at=at, data={"agents": told})


def agents_in(data: Mapping[str, object]) -> list[AgentSummary]:
    """What the data of such a fact tells.

    Raises:
        RecordError: it is none.
    """
    try:
        return [AgentSummary(**cast("dict[str, Any]", each)) for each in cast("Sequence[object]", data["agents"])]
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"The record is damaged: {dict(data)} tells of no agents") from error


class _Unnameable(Exception):  # noqa: N818  no error: an item that is not compared
    """Something has no text that is the same in another process."""


def item_digest(item: object) -> str:
    """A hash by which another process sees whether an item is the same; empty for one that is not compared (S-MR-162).

    Of its JSON text, with the `repr` of what JSON cannot carry, unless that names an address.
    """
    try:
        try:
            text = _json_of(item)
        except TypeError:  # keys that JSON cannot carry, or that have no order
            text = _json_of(_with_named_keys(item))
    except (_Unnameable, TypeError, ValueError, RecursionError):  # what holds itself, for example
        return ""
    return sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]


def _json_of(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_named)


def _with_named_keys(value: object) -> object:
    """The same with lists in place of mappings."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return sorted(
            ([_text_of(key), _with_named_keys(each)] for key, each in entries), key=lambda entry: str(entry[0])
        )
    if isinstance(value, list | tuple):
        return [_with_named_keys(each) for each in cast("Sequence[object]", value)]
    return value


def _named(value: object) -> object:
    """Something that JSON cannot carry, as data that it can."""
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
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
    except Exception as error:  # the user's own code: what cannot be named is not compared
        raise _Unnameable from error
    if _ADDRESS.search(text):
        raise _Unnameable
    return text.encode("utf-8", "backslashreplace").decode()

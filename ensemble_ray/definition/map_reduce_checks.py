"""What a map-reduce may be given, in the order of the specification (S-MR-10 to S-MR-23, S-MR-110, S-MR-150).

Package: definition. Pure. In: fields as they were given, by name. Out: nothing, or the first mistake. What is of a wrong
type where a number belongs is left to pydantic, which comes after.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Union, cast, get_args, get_origin

from ensemble_ray.definition.fields import check_positive
from ensemble_ray.errors import ValidationError

__all__ = [
    "check_items",
    "check_outcomes",
    "check_processes",
    "check_reduction",
    "check_side",
    "takes_agent_first",
    "warn_of_old_order",
]

_Arguments = Mapping[str, object]

#: Of each side: what its task factory is called with, without and with an agent factory.
_ARGUMENTS = {"map": ("item", "item, agent"), "reduce": ("chunk_tasks", "chunk_tasks, agent")}
#: How factories of the old order call what comes second now.
_GROUP_NAMES = frozenset({"group", "chunk", "chunk_tasks", "tasks", "items", "outputs"})
#: An annotation that could not be resolved.
_AGENT = re.compile(r"([\w.]*Optional\[)?[\w.]*Agent\]?")
#: From the warning to the line that makes the map-reduce: this module, and the constructor.
_CALLER_LEVEL = 3
_POLICIES = ("fail", "skip", "collect")
_MODES = ("levels", "pipelined")


def check_items(arguments: _Arguments) -> None:
    """Refuse nothing, and a collection that can be seen to be empty (S-MR-10)."""
    items = arguments.get("items")
    if items is None or (isinstance(items, Sequence | AbstractSet | Mapping) and not items):
        raise ValidationError("items must not be None or empty")


def check_side(arguments: _Arguments, side: str) -> None:
    """Refuse a side without its task factory (S-MR-11, S-MR-12), and factories that cannot be called."""
    task, agent = f"{side}_task", f"{side}_agent"
    plain, with_agent = _ARGUMENTS[side]
    if arguments.get(task) is None:
        raise ValidationError(
            f"{task} must be set. Give a callable({plain}) -> Task, or together with {agent} a "
            f"callable({with_agent}) -> Task"
        )
    for name in (task, agent):
        _check_callable(arguments, name)


def check_reduction(arguments: _Arguments) -> None:
    """Refuse what the parts of a reduction have to do with each other (S-MR-12 to S-MR-23, S-MR-110)."""
    check_side(arguments, "reduce")
    is_adaptive = _check_budget(arguments)
    _check_grouping(arguments, is_adaptive=is_adaptive)
    for name in ("direct_task", "direct_agent", "token_estimator", "input_estimator"):
        _check_callable(arguments, name)
    mode = arguments.get("mode", "levels")
    if mode not in _MODES:
        raise ValidationError(f"mode must be 'levels' or 'pipelined', got: {mode}")
    if arguments.get("ordered") is True and mode != "pipelined":
        raise ValidationError(
            "ordered needs mode='pipelined': level by level, groups follow the order of the items anyway"
        )


def check_outcomes(arguments: _Arguments) -> None:
    """Refuse what no failed item can be dealt with by (S-MR-150), and files of outcomes that cannot be written so."""
    policy = arguments.get("on_item_error")
    if policy is not None and policy not in _POLICIES:
        raise ValidationError(f"on_item_error must be 'fail', 'skip' or 'collect', got: {policy}")
    for name, endings in (("dead_letters", (".jsonl",)), ("results", (".jsonl", ".parquet"))):
        path = arguments.get(name)
        if isinstance(path, str | Path) and Path(path).suffix.lower() not in endings:
            raise ValidationError(f"{name} must be the path of a {' or '.join(endings)} file, got: '{path}'")
    _check_columns(arguments)


def _check_columns(arguments: _Arguments) -> None:
    """Refuse what names no columns of a file (S-MR-216, S-MR-218)."""
    for name in ("columns", "key"):
        if arguments.get(name) is not None and arguments.get("results") is None:
            raise ValidationError(f"{name} says what the rows of results have: give results, the path of a file, too")
    columns, key = arguments.get("columns"), arguments.get("key")
    names = [columns] if isinstance(columns, str) else columns
    if key is not None and (not isinstance(key, str) or not key.strip()):
        raise ValidationError(f"key must be the name of a field, got: {key!r}")
    if key == "index":  # a resumed run finds by it which items have their rows
        msg = "key must not be 'index': rows have the position of the item there. Choose columns=['item.index'] in its place"
        raise ValidationError(msg)
    if names is None:
        return
    if not isinstance(names, list | tuple) or not names:
        raise ValidationError(f"columns must be a list of names, got: {columns!r}")
    for each in cast("Sequence[object]", names):
        if not isinstance(each, str) or not each.strip():
            raise ValidationError(f"columns must be a list of names, got: {each!r}")


def check_processes(arguments: _Arguments) -> None:
    """Refuse numbers of processes and of tasks in one that no agent could have."""
    for name in ("replicas", "max_concurrency"):
        check_positive(arguments.get(name), f"{name} must be > 0 when set")


def warn_of_old_order(arguments: _Arguments) -> None:
    """Warn of factories that take the agent first, for a constructor (S-MR-227); not for a copy that the library makes."""
    caller = sys._getframe(_CALLER_LEVEL - 1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if str(caller.f_globals.get("__name__")).startswith("ensemble_ray."):
        return
    for side, many in (("reduce", "chunk_tasks"), ("direct", "items")):
        factory = arguments.get(f"{side}_task")
        if arguments.get(f"{side}_agent") is not None and takes_agent_first(factory):
            warnings.warn(
                f"{side}_task takes (agent, {many}), which is deprecated: write it as callable({many}, agent), as map_task",
                DeprecationWarning,
                stacklevel=_CALLER_LEVEL,
            )


def takes_agent_first(factory: object) -> bool:
    """Return whether a factory of two arguments has the old order: by its annotations, else by its names (S-MR-227)."""
    if (signature := _signature_of(cast("Callable[..., object]", factory))) is None:
        return False
    places = [
        each
        for each in signature.parameters.values()
        if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}
    ]
    if len(places) < 2:  # noqa: PLR2004  as map_task has
        return False
    first, second = places[:2]
    if _is_agent(first.annotation) or _is_agent(second.annotation):
        return _is_agent(first.annotation)
    is_first, is_second = (f"_{each.name}".endswith("_agent") for each in (first, second))
    return not is_second and (is_first or second.name in _GROUP_NAMES - {first.name})


def _signature_of(factory: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature with annotations as values; as texts where a name is imported for type checkers alone."""
    for is_resolved in (True, False):
        with suppress(NameError, AttributeError, SyntaxError, TypeError, ValueError):
            return inspect.signature(factory, eval_str=is_resolved)
    return None  # it is not callable, or shows no signature


def _is_agent(annotation: object) -> bool:
    """Return whether that is the type of an agent, or a union with it."""
    if get_origin(annotation) in {Union, UnionType}:
        return any(map(_is_agent, get_args(annotation)))
    text = getattr(annotation, "__forward_arg__", annotation)
    if isinstance(text, str):
        return any(map(_AGENT.fullmatch, re.sub("['\" ]", "", text).split("|")))
    return str(getattr(annotation, "__name__", "")).endswith("Agent")


def _check_budget(arguments: _Arguments) -> bool:
    """S-MR-13 to S-MR-17; whether there is a budget."""
    window, ratio = _number(arguments, "context_window_size"), _number(arguments, "budget_ratio")
    has_window, has_ratio = (arguments.get(name) is not None for name in ("context_window_size", "budget_ratio"))
    if has_window and not has_ratio:
        raise ValidationError(
            "budget_ratio must be set when context_window_size is specified. "
            "It is the share of the window that a group may fill, such as 0.5"
        )
    if ratio is not None and not 0.0 < ratio <= 1.0:
        raise ValidationError(f"budget_ratio must be in range (0.0, 1.0], got: {ratio}")
    if has_ratio and not has_window:
        raise ValidationError(
            "context_window_size must be set when budget_ratio is specified. "
            "It is the number of tokens that the reducing model can read"
        )
    if window is not None and ratio is not None and (derived := int(window * ratio)) <= 0:
        raise ValidationError(
            "target_token_budget derived from context_window_size * budget_ratio must be > 0, "
            f"got: {window} * {ratio} = {derived}"
        )
    target = _number(arguments, "target_token_budget")
    if target is not None and target <= 0:
        raise ValidationError(f"target_token_budget must be > 0, got: {target}")
    return has_window or arguments.get("target_token_budget") is not None


def _check_grouping(arguments: _Arguments, *, is_adaptive: bool) -> None:
    """S-MR-18 to S-MR-23."""
    if arguments.get("chunk_size") is not None and is_adaptive:
        raise ValidationError(
            "chunk_size and target_token_budget (also as context_window_size with budget_ratio) are mutually exclusive: "
            "groups have a fixed size, or fit a budget"
        )
    if arguments.get("target_token_budget") is not None and arguments.get("context_window_size") is not None:
        raise ValidationError(
            "target_token_budget and context_window_size with budget_ratio are mutually exclusive: both give the budget"
        )
    levels, chunk = _number(arguments, "max_reduce_levels"), _number(arguments, "chunk_size")
    if is_adaptive and levels is not None and levels < 1:
        raise ValidationError(f"max_reduce_levels must be >= 1, got: {levels}")
    has_direct = arguments.get("direct_task") is not None
    if arguments.get("direct_agent") is not None and not has_direct:
        raise ValidationError(
            "direct_agent requires direct_task: give a callable(items, agent) -> Task, which is called with that agent"
        )
    if has_direct and not is_adaptive:
        raise ValidationError(
            "direct_agent/direct_task are not supported in static (chunk_size) mode. "
            "They need a budget to compare the input with: set target_token_budget, or leave them out"
        )
    if not is_adaptive and chunk is not None and chunk < 2:  # noqa: PLR2004  S-MR-23: groups of one would never end
        raise ValidationError(f"chunk_size must be >= 2, got: {chunk}")


def _number(arguments: _Arguments, name: str) -> int | float | None:
    value = arguments.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _check_callable(arguments: _Arguments, name: str) -> None:
    value = arguments.get(name)
    if value is not None and not callable(value):
        raise ValidationError(f"{name} must be callable, got: {type(value).__name__}")

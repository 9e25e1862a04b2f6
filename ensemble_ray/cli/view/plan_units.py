"""The part of `plan` about loops, phases and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.view.terminal import count_noun, screen_line

if TYPE_CHECKING:
    from ensemble_ray.plan.planner import Planned

_NAMES = 120
_INDENT = "  "
_ON_CAP = {"throw": ", fails at the cap", "return_with_flag": ", flagged at the cap", "return_last": ""}


def units_data(planned: Planned) -> list[dict[str, Any]]:
    """Return the units of a plan as JSON data, with the names of their predicates and conditions."""
    from ensemble_ray.definition.graph import (
        Graph,  # the help does not need them
        GraphEdge,
    )
    from ensemble_ray.definition.loop import Loop

    found: list[dict[str, Any]] = []
    for unit in planned.plan.units:
        data: dict[str, Any] = asdict(unit)
        declared = planned.units[unit.key]
        if isinstance(declared, Loop):
            data["until"] = None if declared.until is None else _name_of(declared.until)
        if isinstance(declared, Graph):
            for entry, edge in zip(data["edges"], declared.edges, strict=True):
                if isinstance(edge, GraphEdge):
                    entry["condition"] = None if edge.condition is None else _name_of(edge.condition)
        found.append(data)
    return found


def shape_of(data: Mapping[str, Any]) -> str:
    """Return one word for the order of tasks: phases, a graph, or the workflow."""
    kinds = {unit["unit"] for unit in data["units"]}
    return "graph" if "graph" in kinds else "phases" if "phase" in kinds else str(data["workflow"])


def _name_of(predicate: object) -> str:
    """Return the name of a predicate; for a built-in one, its condition."""
    from ensemble_ray.definition.loop import Until
    from ensemble_ray.execute.callables import callable_name

    if not isinstance(predicate, Until):
        return callable_name(predicate)
    if predicate.condition is not None:
        return f"parsed output: {callable_name(predicate.condition)}"
    if predicate.kind == "unchanged":
        return "output unchanged"
    return f"text contains '{predicate.text}'"


def unit_lines(
    key: str, units: Mapping[str, Mapping[str, Any]], lines_of_task: Callable[[str], list[str]], width: int
) -> list[str]:
    """Return a unit and its members as text.

    Args:
        key: Key of the unit.
        units: All units, by key.
        lines_of_task: Returns the lines of a task.
        width: Width of the column of keys.
    """
    unit = units[key]
    match unit["unit"]:
        case "loop":
            head, inside = _loop(unit), unit["body"]
        case "phase":
            review = [unit["review"]] if unit["review"] else []
            head, inside = _phase(unit), [*unit["members"], *review]
        case _:
            head, inside = _graph(unit), [state["member"] for state in unit["states"]]
    lines = [f"  {key:<{width}}  {screen_line(head, _NAMES)}"]
    for member in inside:
        is_unit = member in units
        found = unit_lines(member, units, lines_of_task, width) if is_unit else lines_of_task(member)
        lines += [f"{_INDENT}{line}" for line in found]
    if unit["unit"] == "graph":
        lines += [f"    {screen_line(line, _NAMES)}" for line in _edges(unit)]
    return lines


def _loop(unit: Mapping[str, Any]) -> str:
    until = f", until {unit['until']}" if unit["until"] else ""
    tokens = "" if unit["max_tokens"] is None else f", at most {count_noun(unit['max_tokens'], 'token')}"
    waits = f" <- {', '.join(unit['context'])}" if unit["context"] else ""
    cap = f"at most {count_noun(unit['max_iterations'], 'iteration')}"
    return f"{cap}{tokens}{until}{_ON_CAP[unit['on_max_iterations']]}{waits}"


def _phase(unit: Mapping[str, Any]) -> str:
    after = f", after {', '.join(unit['after'])}" if unit["after"] else ""
    retries = "1 retry" if unit["max_retries"] == 1 else f"{unit['max_retries']} retries"
    review = f", reviewed by {unit['review']} (at most {retries})" if unit["review"] else ""
    return f"{unit['workflow']}{after}{review}"


def _graph(unit: Mapping[str, Any]) -> str:
    steps = count_noun(unit["max_steps"], "step")
    return f"begins at {unit['start']}, at most {steps}{_ON_CAP[unit['on_max_steps']]}"


def _edges(unit: Mapping[str, Any]) -> Iterator[str]:
    for edge in unit["edges"]:
        match edge["entry"]:
            case "edge":
                reasons = [each for each in (edge["label"], edge["condition"] and f"if {edge['condition']}") if each]
                why = f" ({', '.join(reasons)})" if reasons else ""
                yield f"{edge['from_state']} -> {_target(edge['to_state'])}{why}"
            case "fork":
                yield f"{edge['from_state']} -> {', '.join(edge['to_states'])} (side by side)"
            case _:
                needed = "all of them" if edge["count"] is None else f"the first {edge['count']}"
                yield f"{', '.join(edge['from_states'])} -> {_target(edge['to_state'])} (after {needed})"


def _target(state: str) -> str:
    return "END" if state == "__END__" else state

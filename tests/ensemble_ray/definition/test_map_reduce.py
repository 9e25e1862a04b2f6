"""What a map-reduce may be given: the table of checks, their order, and what follows from the fields."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Agent, Task, ValidationError
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.definition.run_rules import RunListeners
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()


def map_task(item: object) -> Task:
    """A task-first factory."""
    return Task.of(f"map {item}")


def reduce_task(chunk: list[Task]) -> Task:
    """A task-first factory."""
    return Task(description="reduce", expected_output="e", context=chunk)


def make_agent(*_: object) -> Agent:
    """An agent factory of any side."""
    return Agent(role="Worker", goal="Work", llm=MODEL)


def made(**fields: Any) -> MapReduceDefinition:
    """A definition that can run, with fields changed; `...` leaves one out."""
    given: dict[str, Any] = {"items": [1, 2], "map_task": map_task, "reduce_task": reduce_task, **fields}
    return MapReduceDefinition(**{name: value for name, value in given.items() if value is not ...})


#: Each mistake and the text that it is refused with, in the order in which they are looked for.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"items": None}, "items must not be None or empty"),
    ({"map_task": None}, "map_task must be set."),
    ({"reduce_task": None}, "reduce_task must be set."),
    ({"context_window_size": 100}, "budget_ratio must be set when context_window_size is specified."),
    ({"context_window_size": 100, "budget_ratio": 1.5}, "budget_ratio must be in range (0.0, 1.0], got: 1.5"),
    ({"budget_ratio": 0.5}, "context_window_size must be set when budget_ratio is specified."),
    (
        {"context_window_size": 1, "budget_ratio": 0.5},
        "target_token_budget derived from context_window_size * budget_ratio must be > 0, got: 1 * 0.5 = 0",
    ),
    ({"target_token_budget": 0}, "target_token_budget must be > 0, got: 0"),
    ({"chunk_size": 2, "target_token_budget": 10}, "chunk_size and target_token_budget"),
    (
        {"target_token_budget": 10, "context_window_size": 100, "budget_ratio": 0.5},
        "target_token_budget and context_window_size with budget_ratio are mutually exclusive",
    ),
    ({"target_token_budget": 10, "max_reduce_levels": 0}, "max_reduce_levels must be >= 1, got: 0"),
    ({"target_token_budget": 10, "direct_agent": make_agent}, "direct_agent requires direct_task"),
    ({"direct_task": reduce_task}, "direct_agent/direct_task are not supported in static (chunk_size) mode."),
    ({"chunk_size": 1}, "chunk_size must be >= 2, got: 1"),
    ({"mode": "eager"}, "mode must be 'levels' or 'pipelined', got: eager"),
    ({"ordered": True}, "ordered needs mode='pipelined'"),
    ({"on_item_error": "retry"}, "on_item_error must be 'fail', 'skip' or 'collect', got: retry"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED)
def test_definition_is_refused_with_the_exact_text_when_a_check_fails(fields: dict[str, Any], text: str) -> None:
    """S-MR-10 to S-MR-23, S-MR-110, S-MR-150: each text, or how it starts."""
    with pytest.raises(ValidationError) as refused:
        made(**fields)
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize("position", range(len(REFUSED) - 1))
def test_first_mistake_of_the_table_is_told_when_there_are_several(position: int) -> None:
    """S-MR-10 to S-MR-23, S-MR-110, S-MR-150: the order of the checks."""
    fields, text = REFUSED[position]
    # Of those that follow, whatever leaves this one as it is.
    later = {name: value for other, _ in reversed(REFUSED[position + 1 :]) for name, value in other.items()}
    beside = {name: value for name, value in later.items() if name not in _TOGETHER or name in fields}
    with pytest.raises(ValidationError) as refused:
        made(**{**beside, **fields})
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"reduce_task": None, "context_window_size": 9}, "reduce_task must be set."),
        ({"context_window_size": 1, "budget_ratio": 0.5, "target_token_budget": 0}, "target_token_budget derived from"),
        ({"target_token_budget": 0, "chunk_size": 1}, "target_token_budget must be > 0"),
        ({"target_token_budget": 9, "max_reduce_levels": 0, "direct_agent": make_agent}, "max_reduce_levels must be"),
        ({"direct_agent": make_agent}, "direct_agent requires direct_task"),
        ({"direct_task": reduce_task, "chunk_size": 1}, "direct_agent/direct_task are not supported"),
        ({"chunk_size": 1, "mode": "eager"}, "chunk_size must be >= 2"),
    ],
)
def test_earlier_check_wins_when_two_of_the_budget_fail(fields: dict[str, Any], text: str) -> None:
    """S-MR-12, S-MR-16, S-MR-17, S-MR-20 to S-MR-23: their order."""
    with pytest.raises(ValidationError) as refused:
        made(**fields)
    assert str(refused.value).startswith(text)


#: Fields whose presence decides what others mean.
_TOGETHER = {"context_window_size", "budget_ratio", "target_token_budget", "chunk_size", "direct_task", "direct_agent"}


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, float("nan")])
def test_ratio_is_refused_before_its_missing_window_when_it_is_out_of_range(ratio: float) -> None:
    """S-MR-15: also for 0 and negatives, and before S-MR-14."""
    with pytest.raises(ValidationError) as refused:
        made(budget_ratio=ratio)
    assert str(refused.value) == f"budget_ratio must be in range (0.0, 1.0], got: {ratio}"


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_size": 5, "target_token_budget": 100},
        {"chunk_size": 5, "context_window_size": 100, "budget_ratio": 0.5},
        {"chunk_size": 5, "context_window_size": 100, "budget_ratio": 0.5, "target_token_budget": 5},
    ],
)
def test_size_and_budget_are_mutually_exclusive(fields: dict[str, Any]) -> None:
    """S-MR-18: with either kind of budget, and before S-MR-19."""
    with pytest.raises(ValidationError, match=r"^chunk_size and target_token_budget.*mutually exclusive"):
        made(**fields)


@pytest.mark.parametrize("side", ["map", "reduce"])
def test_side_is_refused_when_it_has_an_agent_factory_only(side: str) -> None:
    """S-MR-11, S-MR-12: an agent factory without a task factory likewise."""
    with pytest.raises(ValidationError) as refused:
        made(**{f"{side}_task": ..., f"{side}_agent": make_agent})
    assert str(refused.value).startswith(f"{side}_task must be set.")


@pytest.mark.parametrize("field", ["map_task", "map_agent", "reduce_task", "reduce_agent", "token_estimator"])
def test_factory_is_refused_when_it_cannot_be_called(field: str) -> None:
    """S-MR-11, S-MR-12: what is given for a factory is one."""
    with pytest.raises(ValidationError, match=f"^{field} must be callable, got: str$"):
        made(**{field: "text"})


@pytest.mark.parametrize("items", [[], (), {}, set[int](), range(0), ""])
def test_items_are_refused_when_they_are_seen_to_be_empty(items: object) -> None:
    """S-MR-10."""
    with pytest.raises(ValidationError, match=r"^items must not be None or empty$"):
        made(items=items)


def test_items_are_refused_when_they_are_a_text_or_no_file(tmp_path: Path) -> None:
    """S-MR-120: both at construction."""
    with pytest.raises(ValidationError, match=r"^items is the text 'reports': pass a list of items"):
        made(items="reports")
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(ValidationError, match=r"missing\.jsonl"):
        made(items=missing)


def test_nothing_is_called_or_pulled_when_a_definition_is_made() -> None:
    """S-SET-21: factories and sources are asked on demand."""

    def items() -> Iterator[int]:
        raise AssertionError("pulled")
        yield 1

    def never(*_: object) -> Task:
        raise AssertionError("called")

    assert not made(items=items(), map_task=never, reduce_task=never).has_list


@pytest.mark.parametrize(
    ("fields", "budget", "capacity"),
    [
        ({}, None, 5),
        ({"chunk_size": 3}, None, 3),
        ({"target_token_budget": 100}, 100, 100),
        ({"context_window_size": 8192, "budget_ratio": 0.7}, 5734, 5734),
        ({"context_window_size": 100, "budget_ratio": 1.0}, 100, 100),
    ],
)
def test_mode_follows_from_the_budget(fields: dict[str, Any], budget: int | None, capacity: int) -> None:
    """S-MR-1, S-MR-3: adaptive with a budget, which is int(window * ratio); else groups of 5."""
    definition = made(**fields)
    assert (definition.budget, definition.is_adaptive) == (budget, budget is not None)
    assert definition.capacity == capacity


def test_estimator_of_the_input_needs_no_companion() -> None:
    """S-MR-25: it may stand alone; `str` is what is used without one."""
    assert made(input_estimator=repr).input_estimator is repr
    assert made().input_estimator is str
    assert made(input_estimator=None).input_estimator is str


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        ({}, "fail"),
        ({"parallel_error_strategy": "continue_on_error"}, "collect"),
        ({"parallel_error_strategy": "continue_on_error", "on_item_error": "fail"}, "fail"),
        ({"on_item_error": "skip"}, "skip"),
    ],
)
def test_policy_for_items_is_the_strategy_when_none_is_given(fields: dict[str, Any], policy: str) -> None:
    """S-MR-150."""
    assert made(**fields).item_policy == policy


@pytest.mark.parametrize("fields", [{}, {"items": range(4), "chunk_size": 2}, {"replicas": 2}])
def test_tasks_are_planned_when_it_is_static_over_a_list(fields: dict[str, Any]) -> None:
    """S-MR-6."""
    assert made(**fields).is_planned


@pytest.mark.parametrize(
    "fields",
    [
        {"items": iter([1])},
        {"items": {1, 2}},
        {"target_token_budget": 10},
        {"mode": "pipelined"},
        {"on_item_error": "collect"},
        {"results": "out.parquet"},
        {"dead_letters": "dead.jsonl"},
    ],
)
def test_tasks_are_not_planned_when_they_depend_on_what_happens(fields: dict[str, Any]) -> None:
    """S-MR-6, S-SET-37: such runs are fed."""
    assert not made(**fields).is_planned


@pytest.mark.parametrize("field", ["replicas", "max_concurrency", "max_parallel_tasks", "max_tokens", "max_cost"])
def test_bound_is_refused_when_nothing_would_fit(field: str) -> None:
    """S-MR-140, S-MR-141, S-BUD-1: bounds are positive; the message names whose they are."""
    with pytest.raises(ValidationError, match=f"{field} must be > 0 when set, got: 0"):
        made(**{field: 0})


def test_file_of_outcomes_is_refused_when_its_ending_says_nothing() -> None:
    """S-MR-130, S-MR-151: results are .jsonl or .parquet, dead letters .jsonl."""
    with pytest.raises(
        ValidationError, match=r"^results must be the path of a \.jsonl or \.parquet file, got: 'o\.csv'$"
    ):
        made(results="o.csv")
    with pytest.raises(ValidationError, match=r"^dead_letters must be the path of a \.jsonl file, got: 'd\.parquet'$"):
        made(dead_letters=Path("d.parquet"))
    assert made(results="o.jsonl").results == Path("o.jsonl")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"columns": ["id"]}, "columns says what the rows of results have: give results, the path of a file, too"),
        ({"key": "id"}, "key says what the rows of results have: give results, the path of a file, too"),
        ({"columns": [], "results": "o.jsonl"}, "columns must be a list of names, got: []"),
        ({"columns": ["id", " "], "results": "o.jsonl"}, "columns must be a list of names, got: ' '"),
        ({"columns": {"id": 1}, "results": "o.jsonl"}, "columns must be a list of names, got: {'id': 1}"),
        ({"key": "", "results": "o.jsonl"}, "key must be the name of a field, got: ''"),
        ({"key": 5, "results": "o.jsonl"}, "key must be the name of a field, got: 5"),
        (
            {"key": "index", "results": "o.jsonl"},
            "key must not be 'index': rows have the position of the item there. Choose columns=['item.index'] in its place",
        ),
    ],
)
def test_columns_that_no_file_can_have_are_refused(fields: dict[str, Any], told: str) -> None:
    """S-MR-216, S-MR-218."""
    with pytest.raises(ValidationError) as refused:
        made(**fields)
    assert str(refused.value) == told


def test_columns_are_names() -> None:
    """S-MR-216: one of them without a list."""
    assert made(results="o.jsonl", columns="id").columns == ("id",)
    assert made(results="o.jsonl", columns=["id", "label"], key="id").columns == ("id", "label")
    assert made(results="o.jsonl").columns is None


def test_map_alone_takes_no_field_of_the_reduction() -> None:
    """S-MR-11, S-MR-150: the checks of the map side hold; fields of the other side are unknown."""
    with pytest.raises(ValidationError, match=r"^map_task must be set\."):
        MapDefinition(items=[1], map_task=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValidationError, match="unknown field 'chunk_size'"):
        MapDefinition(items=[1], map_task=map_task, chunk_size=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    assert MapDefinition(items=[1], map_task=map_task).shown_workflow == "map"


def test_list_may_change_after_it_was_given() -> None:
    """S-CONV-5."""
    items = [1, 2]
    definition = made(items=items)
    items.append(3)
    assert definition.items == (1, 2)
    assert list(definition.item_source.items) == [1, 2]


def test_rules_are_those_of_an_ensemble() -> None:
    """The pass-through fields of the table: the same fields, by the same class, read back the same way."""
    seen: list[object] = []
    definition = made(verbose=True, capture_mode="full", on_task_start=seen.append, inputs={"a": 1}, llm=MODEL)
    assert isinstance(definition, RunListeners)
    assert definition.callbacks == {"on_task_start": (seen.append,)}
    assert (definition.verbose, definition.inputs, definition.llm) == (True, {"a": 1}, MODEL)

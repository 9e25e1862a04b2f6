"""What an editor and a type checker see of map-reduce: factories written as functions or lambdas, on either side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import assert_type

import pytest

from ensemble_ray import (
    Agent,
    EnsembleOutput,
    Event,
    ItemResult,
    ItemStream,
    MapEnsemble,
    MapReduceEnsemble,
    MapReduceLevelSummary,
    MapReduceRun,
    Run,
    Task,
)
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel(otherwise="done")


def agent_of(report: str) -> Agent:
    """An agent factory of the map side."""
    return Agent(role=f"Reader of {report}", goal="Read", llm=MODEL)


def task_of(report: str, agent: Agent) -> Task:
    """A factory that is given an agent."""
    return Task(description=f"Read {report}", expected_output="Text", agent=agent)


def joined(group: Sequence[Task]) -> Task:
    """A factory without an agent."""
    return Task(description="Join", expected_output="Text", context=group)


async def slowly(group: list[Task]) -> Task:
    """An async factory."""
    return joined(group)


def test_factories_are_functions_or_lambdas() -> None:
    """S-MR-2: both ways to call them, on each side."""
    functions = MapReduceEnsemble(items=["a", "b"], map_agent=agent_of, map_task=task_of, reduce_task=joined)
    lambdas = MapReduceEnsemble(
        items=[1, 2],
        map_task=lambda item: Task.of(f"Count {item}"),
        reduce_agent=lambda: Agent(role="Reducer", goal="Reduce", llm=MODEL),
        reduce_task=lambda group, agent: Task(description="Join", expected_output="e", agent=agent, context=group),
        direct_task=lambda items: Task.of(f"All {len(items)}"),
        target_token_budget=100,
        token_estimator=len,
        input_estimator=lambda item: f"{item}",
        llm="openai:m",
        mode="pipelined",
        ordered=True,
    )
    later = MapReduceEnsemble(items=iter(["a"]), map_task=lambda item: Task.of(f"{item}"), reduce_task=slowly)
    short = MapReduceEnsemble(
        items=["a"],
        map_task=lambda item: Task.of(f"{item}"),
        reduce_task=lambda group: Task(description="Join", expected_output="Text", context=group),
        direct_task=lambda items: Task.of(", ".join(items)),
        target_token_budget=100,
    )
    assert not short.is_planned
    assert_type(functions.node_types, Mapping[Task, str])
    assert_type(lambdas.budget, int | None)
    assert [each.is_planned for each in (functions, lambdas, later)] == [True, False, False]


def of_group(agent: Agent, group: Sequence[Task]) -> Task:
    """A factory of the old order."""
    return Task(description="Join", expected_output="Text", agent=agent, context=group)


def of_items(agent: Agent, items: list[str]) -> Task:
    """Another one."""
    return task_of(", ".join(items), agent)


def test_factories_of_the_old_order_are_no_type_errors() -> None:
    """S-MR-227: they are deprecated, and work."""
    with pytest.warns(DeprecationWarning, match="_task takes \\(agent, "):
        made = MapReduceEnsemble(
            items=["a"],
            map_task=Task.of,
            reduce_agent=lambda: agent_of("all"),
            reduce_task=of_group,
            direct_agent=lambda: agent_of("all"),
            direct_task=of_items,
            target_token_budget=100,
        )
    assert made.run(runtime="inline").raw == "done"


def test_outputs_have_types() -> None:
    """S-MR-93, S-MR-131: level summaries of a trace, and what a stream gives."""
    made = MapReduceEnsemble(items=["a"], map_agent=agent_of, map_task=task_of, reduce_task=joined, llm=MODEL)
    output = made.run(runtime="inline")
    assert_type(output, EnsembleOutput)
    assert output.trace is not None
    assert_type(output.trace.map_reduce_levels, tuple[MapReduceLevelSummary, ...])
    assert_type(made.stream(), AsyncIterator[Event | ItemResult | EnsembleOutput])
    assert output.raw == "done"


def test_map_takes_any_source() -> None:
    """S-MR-120: iterables, and files as texts or paths; results and dead letters as either."""

    def numbers() -> Iterator[int]:
        yield 1

    words = MapEnsemble(items=numbers(), map_task=lambda item: Task.of(f"{item}"), results="out.jsonl", llm=MODEL)
    assert_type(words.results, Path | None)
    assert_type(words.stream(), AsyncIterator[ItemResult | EnsembleOutput])
    assert words.results == Path("out.jsonl")


def test_handles_say_what_they_give() -> None:
    """S-MR-131: a run whose tasks are made on the way has results of items; that of a tree made at once has none."""
    words = MapEnsemble(items=["a", "b"], map_task=lambda item: Task.of(f"{item}"), llm=MODEL)
    begun = words.start(runtime="inline")
    assert_type(begun, MapReduceRun)
    assert_type(begun.items(), ItemStream)
    assert sorted(result.index for result in begun.items()) == [0, 1]
    tree = MapReduceEnsemble(items=["a"], map_agent=agent_of, map_task=task_of, reduce_task=joined, llm=MODEL)
    planned = tree.start(runtime="inline")
    assert_type(planned, Run | MapReduceRun)
    assert isinstance(planned, Run)
    assert planned.result().raw == "done"

"""Factories are called with what their side wants, and what they give is checked."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Optional, cast

import pytest

from ensemble_ray import Agent, MapReduceEnsemble, Task, ValidationError
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.plan.map_reduce_factories import (
    make_direct_in_run,
    make_map,
    make_maps_in_run,
    make_reduce,
    make_reduce_in_run,
)
from ensemble_ray.testing import ScriptedModel

MODEL = ScriptedModel()
_Worker = Optional["Agent"]


def agent_of(role: str) -> Agent:
    """An agent of that role."""
    return Agent(role=role, goal="g", llm=MODEL)


def giving(value: object) -> Callable[..., Any]:
    """A factory that gives always that."""
    return lambda *_: value


def mapped(item: object) -> Task:
    """The task of an item."""
    return Task.of(f"map {item}")


def reduced(chunk: list[Task]) -> Task:
    """The task over a group."""
    return Task(description="reduce", expected_output="e", context=chunk)


def made(**fields: Any) -> MapReduceDefinition:
    """An adaptive definition with fields changed."""
    given: dict[str, Any] = {
        "items": ["a"],
        "map_task": mapped,
        "reduce_task": reduced,
        "target_token_budget": 10,
        **fields,
    }
    return MapReduceDefinition(**given)


def test_task_gets_the_agent_of_its_factory_when_it_names_none() -> None:
    """S-MR-2: agent-first on the map side: callable(item, agent)."""
    maker = agent_of("Mapper")

    def task_of(item: object, agent: Agent) -> Task:
        return Task.of(f"{agent.role} {item}")

    definition = made(map_agent=giving(maker), map_task=task_of)
    task, agent = make_map(definition, "x")
    assert (task.description, task.agent, agent) == ("Mapper x", maker, maker)


def test_task_keeps_the_agent_that_it_names() -> None:
    """S-MR-2: the task has the last word."""
    named = agent_of("Named")
    definition = made(
        map_agent=giving(agent_of("Made")),
        map_task=giving(Task(description="d", expected_output="e", agent=named)),
    )
    assert make_map(definition, "x")[1] is named


def test_handler_task_stays_without_an_agent() -> None:
    """S-DET-3: a handler does its task without a model."""
    definition = made(
        map_agent=giving(agent_of("Made")),
        map_task=giving(Task(description="d", expected_output="e", handler=giving("done"))),
    )
    task, agent = make_map(definition, "x")
    assert (task.agent, agent) == (None, None)


async def test_reduce_and_direct_factories_get_the_agent_second() -> None:
    """S-MR-2, S-MR-81, S-MR-226: callable(chunk_tasks, agent) and callable(items, agent)."""
    seen: list[object] = []

    def joined(chunk: list[Task], agent: Agent) -> Task:
        seen.append((agent.role, [task.description for task in chunk]))
        return Task(description="r", expected_output="e", context=chunk)

    def direct(items: list[object], agent: Agent) -> Task:
        seen.append((agent.role, list(items)))
        return Task.of("all")

    definition = made(
        reduce_agent=lambda: agent_of("Reducer"),
        reduce_task=joined,
        direct_agent=lambda: agent_of("Director"),
        direct_task=direct,
    )
    make_reduce(definition, [Task.of("one"), Task.of("two")])
    await make_direct_in_run(definition, [1, 2])
    assert seen == [("Reducer", ["one", "two"]), ("Director", [1, 2])]


def _old_annotated(one: Agent, other: list[Task]) -> Task:
    return Task("r", context=other, agent=one)


def _new_annotated(agent: list[Task], group: Agent) -> Task:
    return Task("r", context=agent, agent=group)


def _old_resolved(w: Agent | None, x: list[Task]) -> Task:
    return _old_annotated(cast("Agent", w), x)


def _old_optional(w: Optional[Agent], x: list[Task]) -> Task:  # noqa: UP045
    return _old_annotated(cast("Agent", w), x)


def _old_quoted(w: "Agent", x: "Unseen") -> Task:  # type: ignore[name-defined]  # noqa: F821, UP037  # pyright: ignore[reportUndefinedVariable]
    return _old_annotated(w, x)


def _old_unresolved(w: Optional[Agent], x: Unseen) -> Task:  # type: ignore[name-defined]  # noqa: F821, UP045  # pyright: ignore[reportUndefinedVariable]
    return _old_annotated(cast("Agent", w), x)


def _old_alias(w: _Worker, x: list[Task]) -> Task:
    return _old_annotated(cast("Agent", w), x)


def _new_optional(w: list[Task], x: Agent | None) -> Task:
    return _new_annotated(w, cast("Agent", x))


def _new_list(agents: list[Agent], w: object) -> Task:
    return _new_annotated(cast("list[Task]", agents), cast("Agent", w))


_FACTORIES: list[tuple[Callable[[Any, Any], Task], bool]] = [
    (_old_annotated, True),
    (_old_resolved, True),
    (_old_optional, True),
    (_old_quoted, True),
    (_old_unresolved, True),
    (_old_alias, True),
    (partial(_old_resolved), True),
    (_new_optional, False),
    (_new_list, False),
    (lambda agent_outputs, w: Task("r", context=agent_outputs, agent=w), False),
    (lambda the_agents, w: Task("r", context=the_agents, agent=w), False),
    (lambda agent, chunk: Task("r", context=chunk, agent=agent), True),
    (lambda the_agent, many: Task("r", context=many, agent=the_agent), True),
    (lambda worker, group: Task("r", context=group, agent=worker), True),
    (_new_annotated, False),
    (lambda group, agent: Task("r", context=group, agent=agent), False),
    (lambda tasks, worker: Task("r", context=tasks, agent=worker), False),
    (lambda a, b: Task("r", context=a, agent=b), False),
]


@pytest.mark.parametrize(("factory", "is_old"), _FACTORIES)
def test_factory_of_the_old_order_is_recognised_and_deprecated(factory: Any, *, is_old: bool) -> None:
    """S-MR-227: by an annotation, else by a name; the warning is told of the line that makes the map-reduce."""
    chunk = [Task("one"), Task("two")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        definition = MapReduceEnsemble(
            items=iter("ab"), map_task=Task, reduce_task=factory, reduce_agent=lambda: agent_of("R")
        )
        task, agent = make_reduce(definition.replace(name="copy"), chunk)
    assert (list(task.context), agent and agent.role) == (chunk, "R")
    told = "reduce_task takes (agent, chunk_tasks), which is deprecated: write it as callable(chunk_tasks, agent), as map_task"
    assert [(str(each.message), each.filename) for each in caught] == ([(told, __file__)] if is_old else [])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"map_task": giving(None)}, "map_task must return a Task, got: None"),
        ({"map_task": giving("text")}, "map_task must return a Task, got: str"),
        (
            {"map_agent": giving("me"), "map_task": giving(Task.of("d"))},
            "map_agent must return an Agent, got: str",
        ),
    ],
)
def test_result_is_refused_when_it_is_of_another_kind(fields: dict[str, Any], text: str) -> None:
    """S-SET-38, S-MR-106: what a factory returns is checked as it is made."""
    with pytest.raises(ValidationError) as refused:
        make_map(made(**fields), "x")
    assert str(refused.value) == text


async def test_reduce_is_refused_when_its_context_lacks_a_part_of_the_group() -> None:
    """S-MR-24: when the level is built."""
    definition = made(reduce_task=giving(Task.of("Join all")))
    with pytest.raises(ValidationError, match=r"^Reduce task 'Join all' lacks 1 of the 1 tasks"):
        await make_reduce_in_run(definition, [Task.of("one")])


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("y"), StopIteration("z")])
def test_exception_of_a_factory_goes_on_unchanged(error: Exception) -> None:
    """S-MR-106."""

    def fails(_: object) -> Task:
        raise error

    with pytest.raises(type(error)) as raised:
        make_map(made(map_task=fails), "x")
    assert raised.value is error


async def test_factories_run_in_threads_of_ours_and_may_be_async_in_a_run() -> None:
    """S-MR-143: one call at a time, in order; an awaitable is awaited."""
    seen: list[tuple[object, bool]] = []

    def maker(item: object) -> Agent:
        seen.append((item, threading.current_thread() is threading.main_thread()))
        return agent_of(f"Agent {item}")

    async def task_of(item: object, agent: Agent) -> Task:
        await asyncio.sleep(0)
        seen.append((agent.role, False))
        return Task.of(f"map {item}")

    found = await make_maps_in_run(made(map_agent=maker, map_task=task_of), [1, 2])
    assert [(task.description, agent and agent.role) for task, agent in found] == [
        ("map 1", "Agent 1"),
        ("map 2", "Agent 2"),
    ]
    assert seen == [(1, False), ("Agent 1", False), (2, False), ("Agent 2", False)]


async def test_short_circuit_is_made_in_a_run() -> None:
    """S-MR-81: one task from the direct factory with all items."""
    task, agent = await make_direct_in_run(made(direct_task=mapped), (1, 2))
    assert (task.description, agent) == ("map [1, 2]", None)


def test_async_factory_is_refused_where_nothing_can_be_awaited() -> None:
    """S-MR-6: over a list in static mode factories are called at construction."""

    async def task_of(item: object) -> Task:
        return Task.of(f"map {item}")

    with pytest.raises(ValidationError, match=r"^map_task is async.*plain function"):
        make_map(made(map_task=task_of), "x")


def test_agents_get_the_processes_and_places_of_the_definition() -> None:
    """S-MR-141: overridden for every agent that factories make; it is the same agent."""
    maker = agent_of("Mapper")
    definition = MapDefinition(
        items=[1],
        map_task=giving(Task(description="d", expected_output="e", agent=maker)),
        replicas=3,
        max_concurrency=7,
    )
    task, agent = make_map(definition, 1)
    assert agent is task.agent
    assert agent is not None
    assert (agent, agent.replicas, agent.max_concurrency) == (maker, 3, 7)

"""What a record tells is what listeners heard: the same things of the same tasks, whatever a team is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    Ensemble,
    EnsembleError,
    EnsembleListener,
    Event,
    Graph,
    GraphEdge,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    Loop,
    LoopIterationCompletedEvent,
    Phase,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskHandlerContext,
    TaskStartEvent,
    ToolCallEvent,
    Until,
)
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.testing import ScriptedModel
from tests.builders import task
from tests.ensemble_ray.record.following.test_golden import follow
from tests.golden import teams


class Heard(EnsembleListener):
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Event] = []


def _keep(self: Heard, event: Event) -> None:
    self.events.append(event)


for method in EVENT_TYPES:
    if not method.startswith("on_ensemble"):
        setattr(Heard, method, _keep)


def of_listener(event: Event) -> tuple[object, ...] | None:  # noqa: C901  a table
    """What must be the same of an event."""
    what: tuple[object, ...]
    match event:
        case TaskStartEvent():
            return (
                "task_started",
                event.instance,
                event.task_index,
                event.total_tasks,
                event.agent_role,
                event.task_description,
            )
        case TaskCompleteEvent(task_output=output):
            figures = (output.metrics.total_tokens, output.tool_call_count)
            return ("task_completed", event.instance, event.task_index, event.agent_role, *figures)
        case TaskFailedEvent():
            return ("task_failed", event.instance, event.task_index, event.agent_role)
        case ToolCallEvent():
            what = (event.tool_name, event.tool_arguments, event.tool_result, event.outcome)
            return ("tool_called", event.instance, event.agent_role, *what)
        case LlmIterationCompletedEvent():
            what = (event.iteration_index, event.response_text, event.input_tokens, event.output_tokens)
            return ("llm_iteration_completed", event.instance, event.agent_role, event.task_description, *what)
        case DelegationStartedEvent():
            return (
                "delegation_started",
                event.delegation_id,
                event.delegating_agent_role,
                event.worker_role,
                event.task_description,
            )
        case DelegationCompletedEvent():
            return ("delegation_completed", event.delegation_id, event.delegating_agent_role, event.worker_role)
        case DelegationFailedEvent():
            return ("delegation_failed", event.delegation_id, event.delegating_agent_role, event.worker_role)
        case LoopIterationCompletedEvent():
            outputs = tuple((name, output.raw) for name, output in event.iteration_outputs.items())
            return ("loop_iteration_completed", event.loop_name, event.iteration_number, event.max_iterations, outputs)
        case GraphStateCompletedEvent():
            what = (event.step_number, event.max_steps, event.output.raw, event.next_state)
            return ("graph_state_completed", event.graph_name, event.state_name, *what)
        case _:
            return None


_FIELDS = {
    "task_started": ("instance", "task_index", "total_tasks", "agent_role", "task_description"),
    "task_completed": ("instance", "task_index", "agent_role", "token_count", "tool_call_count"),
    "task_failed": ("instance", "task_index", "agent_role"),
    "tool_called": ("instance", "agent_role", "tool_name", "tool_arguments", "tool_result", "outcome"),
    "llm_iteration_completed": (
        *("instance", "agent_role", "task_description", "iteration_index", "response_text"),
        *("input_tokens", "output_tokens"),
    ),
    "delegation_started": ("delegation_id", "delegating_agent_role", "worker_role", "task_description"),
    "delegation_completed": ("delegation_id", "delegating_agent_role", "worker_role"),
    "delegation_failed": ("delegation_id", "delegating_agent_role", "worker_role"),
    "loop_iteration_completed": ("loop_name", "iteration_number", "max_iterations", "iteration_outputs"),
    "graph_state_completed": (*("graph_name", "state_name", "step_number", "max_steps", "output", "next_state"),),
}


def of_message(kind: str, data: Any) -> tuple[object, ...]:
    """The same of a message."""
    values = [data[name] for name in _FIELDS[kind]]
    return (kind, *(tuple(each.items()) if isinstance(each, dict) else each for each in values))


def say(context: TaskHandlerContext) -> str:
    """Return a text that tells passes apart."""
    return f"{context.description}."


def looped() -> Ensemble:
    """A loop of two tasks, three times."""
    loop = Loop(name="refine", body=[task("one", handler=say), task("two", handler=say)], max_iterations=3)
    return Ensemble(tasks=[task("before", handler=say)], loops=[loop])


def walked() -> Ensemble:
    """A graph with a loop among its states, inside of nothing."""
    ask, end = task("ask", handler=say), task("end", handler=say)
    loop = Loop(name="again", body=[task("inner", handler=say)], max_iterations=5, until=Until.text_contains("inner"))
    edges = [
        GraphEdge(from_state="ask", to_state="again"),
        GraphEdge(from_state="again", to_state="end"),
        GraphEdge(from_state="end", to_state=Graph.END),
    ]
    return Ensemble(graph=Graph(name="walk", start="ask", states={"ask": ask, "again": loop, "end": end}, edges=edges))


def phased() -> Ensemble:
    """Two phases, one after the other, with a loop in the second."""
    loop = Loop(name="polish", body=[task("rub", handler=say)], max_iterations=2)
    first = Phase(name="first", tasks=[task("a", handler=say), task("b", handler=say)], workflow="parallel")
    return Ensemble(phases=[first, Phase(name="second", tasks=[task("c", handler=say)], loops=[loop], after=[first])])


def broken() -> Ensemble:
    """A task that fails beside others."""
    good, bad = task("good", handler=say), task("bad", llm=ScriptedModel(ValueError("no")))
    return Ensemble(tasks=[good, bad, task("after", handler=say, context=[bad])], workflow="parallel")


_TEAMS: list[Callable[[], Ensemble]] = [
    *(teams.sequential, teams.parallel, teams.hierarchical, teams.nested, teams.checked, teams.structured),
    *(teams.tools, teams.early_exit, teams.streaming, teams.synthesized, looped, walked, phased, broken),
]


@pytest.mark.parametrize("make", _TEAMS, ids=lambda make: make.__name__)
async def test_the_record_tells_what_listeners_heard(
    make: Callable[[], Ensemble], home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SRV-31, S-SRV-37."""
    monkeypatch.chdir(tmp_path)  # some of the teams write their traces
    heard = Heard()
    team = make().replace(listeners=[heard])
    inputs = {"topic": "tides"} if make is teams.sequential else {}
    run = team.start(inputs, runtime="inline", run_id="run")
    try:
        await run.aresult()
    except EnsembleError:
        assert make is broken
    told = await follow(Path(home), "run")
    messages = Counter(of_message(each.type, each.data) for each in told if each.type in _FIELDS)
    events = Counter(filter(None, map(of_listener, heard.events)))
    assert (messages - events, events - messages) == (Counter(), Counter())

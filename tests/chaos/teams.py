"""Teams that are killed; `ensemble-ray resume` finds each by its origin, such as `tests.chaos.teams:chain`.

What a tool does is a line of JSON in a file that the model names, so that a line stands there for each time it was
really done. Every tool is slow for a moment around its line: kills shall fall between doing and recording.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task, tool
from ensemble_ray.execute.handler import TaskHandlerContext
from ensemble_ray.tools import current_tool_context

__all__ = ["chain", "chain_with_tools", "dag", "dag_with_tools"]

#: How long a tool takes before and after its line, s.
_MOMENT_S = 0.01
#: Which task of the graph needs which: three diamonds one after the other, and a tail.
_GRAPH: dict[str, Sequence[str]] = {
    "a": (),
    "b1": ("a",),
    "b2": ("a",),
    "b3": ("a",),
    "c1": ("b1", "b2"),
    "c2": ("b2", "b3"),
    "d": ("c1", "c2"),
    "e1": ("d",),
    "e2": ("d",),
    "e3": ("d",),
    "f": ("e1", "e2", "e3"),
    "g": ("f", "a"),
}


def _done(name: str, path: str, text: str) -> None:
    """Leave a line, in one write."""
    line = {"tool": name, "key": current_tool_context().idempotency_key, "text": text, "pid": os.getpid()}
    time.sleep(_MOMENT_S)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)
    time.sleep(_MOMENT_S)


@tool(effect="once")
def append_line(path: str, text: str) -> str:
    """Append a line; doing it twice would show."""
    _done("append_line", path, text)
    return f"appended {text}"


@tool(effect="idempotent")
def put(path: str, text: str) -> str:
    """Put a text in place; doing it again changes nothing."""
    _done("put", path, text)
    return f"put {text}"


@tool(effect="none")
def look_up(path: str, text: str) -> str:
    """Only look."""
    _done("look_up", path, text)
    return f"found {text}"


def join(context: TaskHandlerContext) -> str:
    """What the tasks before gave, in order."""
    time.sleep(_MOMENT_S)
    return " + ".join(output.raw for output in context.context_outputs)


def _model() -> OpenAIChatModel:
    # The address goes with the agent: processes of a cluster that was there have another environment.
    return OpenAIChatModel("chaos", base_url=os.environ.get("OPENAI_BASE_URL"), api_key="sk-of-chaos")


def _agent(role: str, *, has_tools: bool, isolation: str = "shared") -> Agent:
    tools = [append_line, put, look_up] if has_tools else []
    return Agent(role=role, goal="Answer", llm=_model(), tools=tools, isolation=isolation)  # type: ignore[arg-type]


def _task(name: str, agent: Agent | None, context: Sequence[Task], **more: object) -> Task:
    return Task(
        name=name,
        description=f"Step {name} of {{topic}}",
        expected_output="A word",
        agent=agent,
        context=context,
        **more,  # type: ignore[arg-type]
    )


def _chain(*, has_tools: bool) -> Ensemble:
    agent = _agent("Walker", has_tools=has_tools)
    tasks: list[Task] = []
    for number in range(8):
        tasks.append(_task(f"s{number}", agent, tasks[-1:]))
    return Ensemble(tasks=tasks, workflow="sequential")


def _dag(*, has_tools: bool) -> Ensemble:
    agents = [_agent(f"Worker {n}", has_tools=has_tools, isolation="process") for n in range(3)]
    tasks: dict[str, Task] = {}
    for number, (name, needed) in enumerate(_GRAPH.items()):
        context = [tasks[each] for each in needed]
        if has_tools and name == "d":
            tasks[name] = _task(name, None, context, handler=join, effect="idempotent")
        else:
            tasks[name] = _task(name, agents[number % 3], context)
    return Ensemble(tasks=list(tasks.values()), workflow="parallel")


def chain() -> Ensemble:
    """Eight tasks, one after the other, by one agent."""
    return _chain(has_tools=False)


def chain_with_tools() -> Ensemble:
    """The same, each task with calls of all three kinds of tools."""
    return _chain(has_tools=True)


def dag() -> Ensemble:
    """Twelve tasks in diamonds, by three agents with a process each."""
    return _dag(has_tools=False)


def dag_with_tools() -> Ensemble:
    """The same with tools, and one task without a model."""
    return _dag(has_tools=True)

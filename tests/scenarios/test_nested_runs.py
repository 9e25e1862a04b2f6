"""Runs inside runs: a handler or a tool that runs a team of its own, in whatever process it lives."""

from __future__ import annotations

import pytest

from ensemble_ray import ChatResponse, Ensemble, Runtime, TaskHandlerContext, tool
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S


class Plain:
    """A model that travels."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return ChatResponse(text="inner")


def inner(which: str) -> Ensemble:
    """A team inside a team."""
    return Ensemble(tasks=[task(f"inner {which}", agent(Plain()))])


def blocking(_context: TaskHandlerContext) -> str:
    """Run a team and wait."""
    return inner("blocking").run(runtime="inline").raw


async def awaiting(_context: TaskHandlerContext) -> str:
    """Run a team and await it."""
    return (await inner("awaiting").arun(runtime="inline")).raw


@tool
def ask_team(question: str) -> str:
    """Ask another team."""
    return inner(question).run(runtime="inline").raw


@pytest.mark.parametrize("handler", [blocking, awaiting])
def test_handler_may_run_a_team(runtime: Runtime, handler: object) -> None:
    """S-CONV-15, S-CONV-16, S-CONV-37: sync or async, no deadlock."""
    run = Ensemble(tasks=[task("go", handler=handler)]).start(runtime=runtime)
    assert run.result(timeout_s=PATIENCE_S).raw == "inner"


def test_tool_may_run_a_team(runtime: Runtime) -> None:
    """S-CONV-15, S-CONV-37: several at the same time."""
    model = ScriptedModel([call("ask_team", '{"question": "x"}', number=n) for n in range(3)], "done")
    run = Ensemble(tasks=[task("go", agent(model, tools=[ask_team]))]).start(runtime=runtime)
    assert run.result(timeout_s=PATIENCE_S).raw == "done"
    assert [message.content for message in model.calls[1].messages if message.role == "tool"] == ["inner"] * 3


def test_team_on_ray_may_run_another_on_ray(ray_runtime: Runtime) -> None:
    """S-CONV-36, S-CONV-37: from inside an agent's process, on the cluster it lives on."""

    def on_ray(_context: TaskHandlerContext) -> str:
        return inner("on ray").run(runtime="ray").raw

    run = Ensemble(tasks=[task("go", handler=on_ray)]).start(runtime=ray_runtime)
    assert run.result(timeout_s=PATIENCE_S).raw == "inner"

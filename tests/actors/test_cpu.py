"""CPU-heavy tools of a team on the cluster; how single calls behave is in the contract of `CpuPool`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ensemble_ray import Ensemble, tool
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray import Runtime


@tool
def light() -> str:
    """Tell the agent's process."""
    return str(os.getpid())


@tool(cpu=True)
def heavy(text: str) -> str:
    """Tell its process and what it got."""
    return f"{text} {os.getpid()}"


@tool(cpu=True)
def broken() -> str:
    """End its process."""
    os._exit(3)


def test_heavy_tool_runs_in_a_process_of_its_own_when_the_team_is_on_ray(ray_runtime: Runtime) -> None:
    """S-SET-35, S-ERR-19: neither here nor in the agent's process; its crash is text for the model, not a failure."""
    answers: list[str] = []

    def note(next_call: object) -> Callable[[ScriptedCall], object]:
        def entry(asked: ScriptedCall) -> object:
            answers.append(asked.text)
            return next_call

        return entry

    model = ScriptedModel(
        call("light"), note(call("heavy", '{"text": "a"}')), note(call("broken")), note(call("light")), note("done")
    )
    team = Ensemble(tasks=[task("t", agent(model, tools=[light, heavy, broken]))])
    assert team.run(runtime=ray_runtime).raw == "done"
    own, elsewhere, crash, own_again = answers
    text, process = elsewhere.split()
    assert text == "a"
    assert process not in {own, str(os.getpid())}
    assert "ended unexpectedly" in crash
    assert own_again == own

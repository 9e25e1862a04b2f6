"""Processes that tests kill: agents' with a tool that tells its process and stays, shared actors'; what to wait for."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

from ensemble_ray import Agent, Run, tool
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call
from tests.scenarios.teams import Marks, until


@tool(timeout=None, effect="none")
def stay(path: str) -> str:
    """Tell this process's id and stay until the file says that all is over."""
    marks = Marks(Path(path))
    marks.add(os.getpid())
    marks.wait("over")
    return "stayed"


def marks_of(marks: Marks) -> str:
    """The arguments of a tool that leaves marks."""
    return f'{{"path": "{marks.path}"}}'


def staying(marks: Marks, role: str = "Writer", **fields: object) -> tuple[ScriptedModel, Agent]:
    """An agent that is at work in a process of its own until `over`, and its model."""
    model = ScriptedModel(call("stay", marks_of(marks)), "survived")
    return model, agent(model, role, tools=[stay], isolation="process", **fields)


def kill_first(marks: Marks) -> None:
    """End the process that the first mark names."""
    pid = int(until(lambda: marks.lines, "the process's id")[0])
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)


def process_of(name: str) -> int:
    """The process of the shared actor of that name in this process's cluster; returns when there is one."""
    import ray

    def alive() -> list[int]:
        known = cast("dict[str, dict[str, Any]]", cast("Any", ray)._private.state.actors())
        return [each["Pid"] for each in known.values() if (each["Name"], each["State"]) == (name, "ALIVE")]

    (pid,) = until(alive, f"the process of {name}")
    return pid


def kill_actor(name: str) -> None:
    """End the process of a shared actor and return when it is gone; Ray starts another."""
    pid = process_of(name)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of {name}")


def until_recorded(home: str, run: Run) -> None:
    """Wait until the record knows of the call that is under way, and so of the answer that asked for it."""
    facts = RunDirectory(Path(home), run.id).facts
    until(lambda: [fact for fact in facts() if fact.kind == "tool_intent"], "the record of the call")

"""RunSession on a real cluster: which dispatch of a task a report must be of, and what is handed out again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from ensemble_ray import Agent, ChatMessage, ChatResponse, Node, Plan, RunState, Task
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.packing import dump
from ensemble_ray.actors.link.packing import unpack_output
from ensemble_ray.actors.link.wire import AgentTemplate, Submission, WireResult
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.execute.orders import RunContext, TaskResult
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.values.ids import REDISPATCH_STEP
from tests.actors.sessions import Owner
from tests.builders import call
from tests.scenarios.dying import marks_of, stay
from tests.scenarios.teams import PATIENCE_S, Marks, until

RUN = "session"


class Staying:
    """A model that asks for the tool that stays, and repeats what it gave."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def chat(self, messages: Sequence[ChatMessage], tools: object = ()) -> ChatResponse:
        del tools
        if messages[-1].role == "tool":
            return ChatResponse(text=messages[-1].content or "")
        return ChatResponse(tool_calls=(call("stay", marks_of(self._marks)),))


def submission_of(marks: Marks, address: StoreAddress) -> Submission:
    """A run of one task, whose agent stays in its tool."""
    node = Node(key="a", index=1, description="Do a", expected_output="text", agent_role="W", agent_key="w")
    staying = Agent(role="W", goal="stay", llm=Staying(marks), tools=[stay])
    return Submission(
        run_id=RUN,
        plan=Plan(workflow="sequential", nodes=(node,)),
        context=RunContext(run_id=RUN, workflow="sequential", total_tasks=1),
        header=PlanRecorded(),
        templates=(AgentTemplate(key="w", body=dump(staying, "Agent 'W'"), category="k"),),
        tasks={"a": dump(Task(description="Do a", expected_output="text"), "Task 'a'")},
        store=address,
    )


def late(epoch: int) -> WireResult:
    """What a process that lost the task would still report."""
    return TaskResult(key="a", status="completed", at=1.0, epoch=epoch, instance="a#0", output=b"late")


async def test_only_the_newest_dispatch_of_a_task_is_heard(ray_cluster: str, tmp_path: Path) -> None:
    """S-DUR-31, S-DUR-16, S-PAR-12: the task of a dead process is handed out under a higher epoch, and told once."""
    del ray_cluster
    spawn.scheduler(SchedulerActor)  # agents know whom to report to
    marks, address = Marks(tmp_path / "marks"), StoreAddress(home=str(tmp_path))
    owned = await store_at(address).begin(RUN)
    owner = Owner(submission_of(marks, address), ProcessPool(), max_own=1)
    owner.session.open()
    owner.start()
    (first,) = await asyncio.to_thread(until, lambda: marks.lines, "the first process")
    os.kill(int(first), signal.SIGKILL)
    await asyncio.to_thread(until, lambda: len(marks.lines) == 2, "the second process")
    await owner.session.report([late(0)])
    assert owner.reports.empty()
    marks.add("over")
    report = await asyncio.wait_for(owner.reports.get(), PATIENCE_S)
    assert (report.key, report.status, report.epoch) == ("a", "completed", REDISPATCH_STEP)
    assert report.output is not None
    assert unpack_output(report.output).raw == "stayed"
    await owner.session.report([late(0), late(REDISPATCH_STEP), report])
    assert owner.reports.empty()
    await owner.session.close(keep=None)
    await owned.close(RunState.COMPLETED)
    facts = await store_at(address).facts(RUN)
    assert {fact.epoch for fact in facts if fact.kind == "output"} == {REDISPATCH_STEP}
    assert len(set(marks.lines)) == 3

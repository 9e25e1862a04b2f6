"""What people tell a run while it goes on: on both runtimes, after a resume, in a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Ensemble, IllegalStateError, InlineRuntime, MapReduceEnsemble, Runtime, Task, aresume
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.scenarios.teams import PATIENCE_S, Forever, Marks, wait_for

TOLD = "## Active Directives\n- Write in French\n\n## Task"


def team(marks: Marks) -> Ensemble:
    """A task that waits until it may end, and one that answers with its prompt."""

    def wait(_context: object) -> str:
        marks.add("begun")
        marks.wait("go")
        return "done"

    first = task("first", handler=wait)
    second = task("second", agent(ScriptedModel(otherwise=lambda call: call.text)), context=[first])
    return Ensemble(tasks=[first, second])


def test_a_task_that_starts_later_is_told(runtime: Runtime, tmp_path: Path) -> None:
    """S-CTL-4, S-CTL-5, S-CTL-7: and a run that is over takes none."""
    marks = Marks(tmp_path / "marks")
    run = team(marks).start(runtime=runtime)
    marks.wait("begun")
    run.inject("Write in French", ttl=3600)
    marks.add("go")
    assert TOLD in run.result(timeout_s=PATIENCE_S).raw
    with pytest.raises(IllegalStateError, match="does not go on"):
        run.inject("Too late")


async def test_a_run_that_is_resumed_has_it(tmp_path: Path) -> None:
    """S-CTL-6: a directive is a fact of the run."""

    def written(*answers: object) -> Ensemble:
        first = task("first", agent(ScriptedModel(*answers)))  # type: ignore[arg-type]  entries of a script
        return Ensemble(tasks=[first, task("second", agent(ScriptedModel(otherwise=lambda call: call.text)))])

    forever, home = Forever(), InlineRuntime(home=tmp_path)
    run = written(forever).start(runtime=home, run_id="run")
    wait_for(forever.asked)
    await run.ainject("Write in French")
    await run.acancel()
    await run.aresult()
    assert TOLD in (await aresume("run", written("done"), runtime=home)).raw


def test_tasks_that_are_made_while_their_run_goes_on_are_told(tmp_path: Path) -> None:
    """S-CTL-5: the reduce of a map-reduce, and not the map that had begun."""
    marks = Marks(tmp_path / "marks")
    prompts: list[str] = []

    def answer(asked: object) -> str:
        prompts.append(str(getattr(asked, "text", "")))
        if len(prompts) == 1:
            marks.add("begun")
            marks.wait("go")
        return "read"

    run = MapReduceEnsemble(
        items=["salt"],
        map_task=lambda item: Task(description=f"Read {item}", expected_output="A text"),
        reduce_task=lambda group: Task(description="Join", expected_output="A text", context=group),
        mode="pipelined",
        llm=ScriptedModel(otherwise=answer),
    ).start(runtime="inline")
    marks.wait("begun")
    run.inject("Write in French")
    marks.add("go")
    run.result(timeout_s=PATIENCE_S)
    assert [TOLD in each for each in prompts] == [False, True]

"""Ids of runs that were used before, and what the record gives back."""

from __future__ import annotations

import threading

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    Ensemble,
    EnsembleError,
    ExitReason,
    RunExistsError,
    Runtime,
    TaskExecutionError,
    ValidationError,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, task
from tests.scenarios.teams import PATIENCE_S, Watcher, wait_for


class City(BaseModel):
    """A typed answer."""

    name: str


def test_finished_run_is_answered_from_its_record(runtime: Runtime) -> None:
    """S-SET-39: same definition and inputs; no model is asked, outputs are found by task."""
    model = ScriptedModel(answer('{"name": "Bern"}', 3, 2), "text")
    writer = agent(model)
    first = task("name a city in {where}", writer, output_type=City)
    ensemble = Ensemble(tasks=[first, task("write", writer, context=[first])])
    earlier = ensemble.run({"where": "CH"}, runtime=runtime, run_id="known")
    again = ensemble.run({"where": "CH"}, runtime=runtime, run_id="known")
    assert len(model.calls) == 2
    assert (again.raw, again.run_id, again.exit_reason) == ("text", "known", ExitReason.COMPLETED)
    assert [each.raw for each in again.task_outputs] == [each.raw for each in earlier.task_outputs]
    found = again.get_output(first)
    assert found is not None
    assert found.get_parsed_output(City) == City(name="Bern")
    assert again.metrics == earlier.metrics
    assert again.trace is not None
    assert earlier.trace is not None
    assert [each.model_dump() for each in again.trace.task_traces] == [
        each.model_dump() for each in earlier.trace.task_traces
    ]


@pytest.mark.parametrize("change", ["inputs", "definition"])
def test_id_of_another_run_is_refused(inline_runtime: Runtime, change: str) -> None:
    """S-SET-39: what differs is named."""
    writer = agent(ScriptedModel(otherwise="x"))
    Ensemble(tasks=[task("write {x}", writer)]).run({"x": "a"}, runtime=inline_runtime, run_id="known")
    other = Ensemble(tasks=[task("write {x}" if change == "inputs" else "read {x}", writer)])
    with pytest.raises(ValidationError, match="was of another definition or other inputs"):
        other.run({"x": "b" if change == "inputs" else "a"}, runtime=inline_runtime, run_id="known")


def test_id_of_a_running_run_is_refused(runtime: Runtime) -> None:
    """S-SET-39: RunExistsError, an EnsembleError; the running one is not disturbed."""
    asked, go_on = threading.Event(), threading.Event()

    def reply(_asked: ScriptedCall) -> str:
        asked.set()
        wait_for(go_on)
        return "x"

    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel(reply)))])
    run = ensemble.start(runtime=runtime, run_id="busy")
    wait_for(asked)
    with pytest.raises(RunExistsError) as caught:
        ensemble.run(runtime=runtime, run_id="busy")
    assert isinstance(caught.value, EnsembleError)
    go_on.set()
    assert run.result().raw == "x"


def test_id_of_a_cancelled_run_names_resume(inline_runtime: Runtime) -> None:
    """S-SET-39."""
    asked, never = threading.Event(), threading.Event()

    def reply(_asked: ScriptedCall) -> str:
        asked.set()
        never.wait(2 * PATIENCE_S)
        return "never"

    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel(reply, "x")))])
    run = ensemble.start(runtime=inline_runtime, run_id="stopped")
    wait_for(asked)
    run.cancel()
    run.result()
    never.set()
    with pytest.raises(EnsembleError, match="resume"):
        ensemble.run(runtime=inline_runtime, run_id="stopped")


def test_id_of_a_failed_run_is_refused(inline_runtime: Runtime) -> None:
    """S-SET-39: it is told what to do."""
    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel(ValueError("no"), "x")))])
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime=inline_runtime, run_id="failed")
    with pytest.raises(ValidationError, match="choose another run_id"):
        ensemble.run(runtime=inline_runtime, run_id="failed")


def test_refused_definition_uses_up_no_id(inline_runtime: Runtime) -> None:
    """S-ENG-1, S-SET-39: nothing was begun."""
    writer = agent(ScriptedModel("x"))
    with pytest.raises(EnsembleError):
        Ensemble(tasks=[task("{missing}", writer)]).run(runtime=inline_runtime, run_id="free")
    assert Ensemble(tasks=[task("go", writer)]).run(runtime=inline_runtime, run_id="free").raw == "x"


@pytest.mark.parametrize("run_id", ["", "../up", "a/b", "x" * 200])
def test_id_that_cannot_name_a_record_is_refused(inline_runtime: Runtime, run_id: str) -> None:
    """S-SET-39: before anything is asked of a model."""
    model = ScriptedModel("x")
    if not run_id:
        assert Ensemble(tasks=[task("go", agent(model))]).run(runtime=inline_runtime, run_id=run_id).run_id
        return
    with pytest.raises(ValidationError):
        Ensemble(tasks=[task("go", agent(model))]).run(runtime=inline_runtime, run_id=run_id)
    assert model.calls == ()


def test_answer_from_the_record_sends_no_task_events(inline_runtime: Runtime) -> None:
    """S-SET-39, S-EVT-10: a task that did not run has no events."""
    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel("x")))])
    ensemble.run(runtime=inline_runtime, run_id="known")
    watcher = Watcher()
    ensemble.replace(listeners=[watcher]).run(runtime=inline_runtime, run_id="known")
    assert watcher.lines == []

"""Fed runs that go on, in this process and in another one: what is recorded is not asked, made or grouped again."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentSynthesizer,
    ChatResponse,
    ExecutionTrace,
    ExitReason,
    RunExistsError,
    RunOptions,
    RunState,
    Task,
    TaskExecutionError,
    TaskStartEvent,
    TokenUsage,
    ValidationError,
    aresume,
    resume,
)
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.record.sqlite.losses import COUNT
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.scenarios.mapping import (
    Calls,
    Held,
    asked_of,
    counts,
    failing,
    map_task,
    mapping,
    model,
    raising,
    raws,
    reduce_task,
    team,
    trace_of,
)
from tests.scenarios.teams import PATIENCE_S, Watcher, recorded_state, task_of, until

WHOLE = ["0", "1", "2", "3", "4", "5", "(0+1+2)", "(3+4+5)", "((0+1+2)+(3+4+5))"]


# In one process.


@pytest.mark.parametrize(("held", "done"), [("map 5 ", 5), ("reduce 0+1+2 ", 7), ("reduce 3+4+5 ", 7), ("reduce (", 8)])
def test_run_goes_on_where_it_was_cut(held: str, done: int, home: str) -> None:
    """S-MR-161, S-DUR-35: the output is that of a run that was never cut; nothing recorded is asked or made again."""
    cut = Held(held)
    made, reduced = Calls(map_task), Calls(reduce_task)
    ensemble = team(6, llm=cut.llm, map_task=made, reduce_task=reduced)
    cut.cut(ensemble, "cut", done)
    maps, reduces = len(made), len(reduced)
    watcher = Watcher()
    output = resume("cut", ensemble.replace(listeners=[watcher]), runtime="inline")
    assert raws(output) == WHOLE
    assert counts(output) == [6, 2, 1]
    assert len(cut.asked_since) == 9 - done == len(watcher.of(TaskStartEvent))
    assert (len(made) - maps, len(reduced) - reduces) == (max(0, 6 - done), 9 - max(6, done))
    assert output.metrics.total_output_tokens == 90
    assert (output.exit_reason, recorded_state(home, "cut")) == (ExitReason.COMPLETED, RunState.COMPLETED)


def test_trace_is_whole_when_a_run_went_on() -> None:
    """S-MR-92, S-MR-93: agents, traces and levels of before and after."""
    cut = Held("reduce 3")
    ensemble = team(6, llm=cut.llm)
    cut.cut(ensemble, "traced", 7)
    trace = trace_of(resume("traced", ensemble, runtime="inline"))
    assert [(each.node_type, each.map_reduce_level) for each in trace.task_traces] == [("map", 0)] * 6 + [
        ("reduce", 1), ("reduce", 1), ("final-reduce", 2),
    ]  # fmt: skip
    assert sorted(agent.goal for agent in trace.agents) == sorted(each.task_description for each in trace.task_traces)
    assert trace.ensemble_id == "traced"
    assert ExecutionTrace.model_validate_json(trace.to_json()) == trace


def test_groups_of_the_record_are_kept() -> None:
    """S-MR-161: pipelined groups follow completion, and a run that goes on completes in another order."""
    cut = Held("reduce", "map 5 ")
    ensemble = team(6, llm=cut.llm, mode="pipelined")
    cut.cut(ensemble, "grouped", 5)
    facts = RunDirectory(Path(os.environ["ENSEMBLE_RAY_HOME"]), "grouped").facts()
    groups = [cast("list[str]", fact.data.to_data()["inputs"]) for fact in facts if fact.kind == "group"]
    output = resume("grouped", ensemble, runtime="inline")
    reduced = [each.task_description for each in output.task_outputs if each.task_description.startswith("reduce")]
    for group in groups:
        assert f"reduce {'+'.join(key.removeprefix('map-') for key in group)}" in reduced


async def test_dynamic_run_goes_on_from_async_code() -> None:
    """S-MR-161, S-DUR-35: the same contract; an iterator is given anew."""
    cut = Held("map 5 ")
    cut.cut(mapping(iter(range(8)), llm=cut.llm, max_parallel_tasks=2), "async", 5)
    output = await aresume("async", mapping(iter(range(8)), llm=cut.llm), runtime="inline")
    assert raws(output) == [f"{number}" for number in range(8)]
    assert Counter(asked_of(cut.llm)).most_common(1)[0][1] == 2  # the one that hung


def test_changed_items_are_refused() -> None:
    """S-MR-162: before any model call; the run can go on with those that it had."""
    cut = Held("reduce 3")
    ensemble = team(6, llm=cut.llm)
    cut.cut(ensemble, "changed", 7)
    for items, told in (
        ([0, 1, 9, 3, 4, 5], "items changed: item 2 is not what it was"),
        ([0, 1, 2], "items changed: the run recorded 6 items, the source has 3"),
        (range(8), "items changed: the run recorded 6 items, the source has more"),
    ):
        with pytest.raises(ValidationError, match=told):
            resume("changed", ensemble.replace(items=items), runtime="inline")
    assert not cut.asked_since
    assert raws(resume("changed", ensemble, runtime="inline")) == WHOLE


def test_source_that_had_not_ended_may_have_more() -> None:
    """S-MR-162: then nobody knows how many there are."""
    cut = Held("map 1 ")
    cut.cut(mapping(iter(range(4)), llm=cut.llm, max_parallel_tasks=1), "grown", 1)
    output = resume("grown", mapping(iter(range(6)), llm=cut.llm), runtime="inline")
    assert raws(output) == [f"{number}" for number in range(6)]


def test_items_that_have_no_name_are_not_compared() -> None:
    """S-MR-162: another object of the same kind is taken for the same item."""
    cut = Held("map 5 ")
    ensemble = team(6, items=[object() for _ in range(6)], map_task=_numbered(), llm=cut.llm)
    cut.cut(ensemble, "nameless", 5)
    again = ensemble.replace(items=[object() for _ in range(6)], map_task=_numbered(5))
    assert raws(resume("nameless", again, runtime="inline", allow_changes=True)) == WHOLE


def _numbered(first: int = 0) -> Callable[[object], Task]:
    numbers = iter(range(first, 6))
    return lambda _: map_task(next(numbers))


def test_failed_map_is_not_tried_again_in_a_run_that_was_interrupted() -> None:
    """S-MR-163, S-MR-150: it is still left out, and still told of."""
    cut = Held("reduce 4")
    failed: list[str] = []

    def entry(asked: ScriptedCall) -> object:
        if task_of(asked) == "map 3":
            failed.append("map 3")
            return ValueError("no")
        return cut.answer(asked)

    ensemble = team(6, llm=ScriptedModel(otherwise=entry), on_item_error="collect")
    cut.cut(ensemble, "left-out", 6)
    output = resume("left-out", ensemble, runtime="inline")
    assert failed == ["map 3"]
    assert raws(output)[5:] == ["(0+1+2)", "(4+5)", "((0+1+2)+(4+5))"]
    assert [(each.index, each.item, each.attempts) for each in output.failed_items] == [(3, 3, 1)]
    assert [error.error_type for error in trace_of(output).errors] == ["AgentExecutionError"]


def test_recorded_failure_ends_a_run_that_its_process_did_not_end(home: str) -> None:
    """S-MR-163, S-MR-100: the failure is recorded, the end of the run is not: it fails as it would have."""
    llm = failing("map 3 ")
    ensemble = team(6, llm=llm)
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime="inline", run_id="ended")
    _forget_end(Path(home), "ended")
    before = len(llm.calls)
    with pytest.raises(TaskExecutionError, match="Task 'map 3' failed: "):
        resume("ended", ensemble, runtime="inline")
    assert "map 3" not in asked_of(llm)[before:]


def _forget_end(home: Path, run_id: str) -> None:
    """As if the process had died before it wrote the run's end."""
    (path,) = [each for each in (home / "runs" / run_id).rglob("*") if each.suffix in {".db", ".sqlite", ".sqlite3"}]
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM facts WHERE kind = 'end'")
    path.with_name(COUNT).unlink()  # it notes that there was one


def test_failed_run_tries_its_failed_map_again() -> None:
    """S-MR-163: unlike other failed runs; as another execution."""
    llm = failing("map 3 ")
    ensemble = team(6, llm=llm, max_parallel_tasks=1)
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime="inline", run_id="failed")
    well = model()
    watcher = Watcher()
    output = resume("failed", ensemble.replace(llm=well, listeners=[watcher]), runtime="inline")
    assert raws(output) == WHOLE
    assert asked_of(well)[0] == "map 3"
    assert len(well.calls) == 6
    assert watcher.of(TaskStartEvent)[0].instance == "map-3#1"


def test_factory_that_failed_is_called_again() -> None:
    """S-MR-106, S-MR-163: a run that user code ended can go on."""
    llm = model()
    with pytest.raises(ZeroDivisionError):
        team(6, llm=llm, reduce_task=raising(ZeroDivisionError())).run(runtime="inline", run_id="made")
    output = resume("made", team(6, llm=llm), runtime="inline", allow_changes=True)
    assert raws(output) == WHOLE
    assert len(llm.calls) == 9


def test_finished_run_gives_its_recorded_output() -> None:
    """S-SET-39, S-MR-161: resumed or run again under its id; nothing is asked, made or exported."""
    exported: list[object] = []

    class Exporter:
        def export(self, trace: object) -> None:
            exported.append(trace)

    llm, made = model(), Calls(map_task)
    ensemble = team(6, llm=llm, map_task=made, trace_exporter=Exporter())
    first = ensemble.run(runtime="inline", run_id="done")
    for again in (resume("done", ensemble, runtime="inline"), ensemble.run(runtime="inline", run_id="done")):
        assert raws(again) == WHOLE
        assert again.metrics == first.metrics
        assert (again.exit_reason, again.total_duration) == (first.exit_reason, first.total_duration)
        assert trace_of(again).task_traces == trace_of(first).task_traces
        assert trace_of(again).agents == trace_of(first).agents
        assert trace_of(again).map_reduce_levels == trace_of(first).map_reduce_levels
    assert (len(llm.calls), len(made), len(exported)) == (9, 6, 1)


def test_finished_run_answers_for_its_own_items_only() -> None:
    """S-SET-39, S-MR-162: neither other items nor another definition get its answer."""
    team(6).run(runtime="inline", run_id="mine")
    with pytest.raises(ValidationError, match="items changed: item 0"):
        team(items=list("abcdef")).run(runtime="inline", run_id="mine")
    with pytest.raises(ValidationError, match="has more"):
        team(7).run(runtime="inline", run_id="mine")
    with pytest.raises(ValidationError, match="max_reduce_levels"):
        team(6, max_reduce_levels=3).run(runtime="inline", run_id="mine")


def test_finished_run_tells_of_its_items_again() -> None:
    """S-MR-131, S-MR-150: results and failed items, as the first time."""
    ensemble = mapping(range(4), llm=failing("map 2 "), on_item_error="collect")
    first = ensemble.run(runtime="inline", run_id="items")
    run = ensemble.start(runtime="inline", run_id="items")
    assert sorted(each.index for each in run.items()) == [0, 1, 2, 3]
    assert run.result(PATIENCE_S).failed_items == first.failed_items


def test_finished_run_tells_of_its_broken_lines_again(tmp_path: Path) -> None:
    """S-MR-125, S-MR-150, S-SET-39: no task failed for them, and they are failed items all the same."""
    path = tmp_path / "items.jsonl"
    path.write_text("1\nno JSON\n3\n")
    ensemble = mapping(path, on_item_error="collect")
    first = ensemble.run(runtime="inline", run_id="lines")

    again = resume("lines", ensemble, runtime="inline")

    assert [failed.index for failed in again.failed_items] == [1]
    assert again.failed_items == first.failed_items


@pytest.mark.parametrize(("run_id", "told"), [("failed", "has failed.*resume"), ("cut", "was cancelled.*resume")])
def test_run_that_is_not_finished_is_not_begun_again(run_id: str, told: str) -> None:
    """S-SET-39: the error names what can be done."""
    ensemble = team(6, llm=failing("map 3 "))
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime="inline", run_id="failed")
    cut = Held("map 5 ")
    cut.cut(team(6, llm=cut.llm), "cut", 5)
    with pytest.raises(ValidationError, match=told):
        ensemble.run(runtime="inline", run_id=run_id)


def test_run_that_is_running_is_refused() -> None:
    """S-SET-39, S-DUR-15."""
    cut = Held("map 5 ")
    ensemble = team(6, llm=cut.llm)
    run = ensemble.start(runtime="inline", run_id="busy")
    until(lambda: run.state is RunState.RUNNING and cut.llm.calls, "its first call")
    with pytest.raises(RunExistsError):
        ensemble.run(runtime="inline", run_id="busy")
    with pytest.raises(RunExistsError):
        resume("busy", ensemble, runtime="inline")
    run.cancel()
    run.result(PATIENCE_S)
    cut.let_go()


class Fruit(BaseModel):
    """A typed answer."""

    name: str


def test_typed_outputs_have_their_types_again() -> None:
    """S-MR-161, S-OUT: of the program's classes, without a call of the factory."""
    llm = ScriptedModel(otherwise='{"name": "fig"}')
    typed = mapping(
        range(3), llm=llm, map_task=lambda n: Task(description=f"map {n}", expected_output="e", output_type=Fruit)
    )
    typed.run(runtime="inline", run_id="typed")
    assert [each.parsed_output for each in resume("typed", typed, runtime="inline").task_outputs] == [
        Fruit(name="fig")
    ] * 3
    assert len(llm.calls) == 3


def test_made_agents_are_not_asked_for_again() -> None:
    """S-SET-46, S-MR-161: a synthesizer's calls are recorded effects of the run."""

    def entry(asked: ScriptedCall) -> object:
        if len(asked.messages) > 1:
            return cut.answer(asked)
        return '{"role": "Maker", "goal": "make", "backstory": "made"}'

    cut = Held("map 2 ")
    llm = ScriptedModel(otherwise=entry)
    ensemble = mapping(range(3), llm=llm, agent_synthesizer=AgentSynthesizer.llm_based())
    cut.cut(ensemble, "maker", 2)
    before = len(llm.calls)
    assert before == 6
    output = resume("maker", ensemble, runtime="inline")
    assert [each.agent_role for each in output.task_outputs] == ["Maker"] * 3
    assert [task_of(each) for each in llm.calls[before:]] == ["map 2"]  # and nobody made an agent


def test_spent_budget_ends_a_dynamic_run_which_goes_on_with_a_larger_one(home: str) -> None:
    """S-BUD-4, S-BUD-6, S-BUD-11: what was recorded counts as spent, and is not asked again."""

    async def entry(asked: ScriptedCall) -> ChatResponse:
        return ChatResponse(task_of(asked), usage=TokenUsage(90, 10))

    llm = ScriptedModel(otherwise=entry)
    ensemble = mapping(range(20), llm=llm, max_tokens=1000, max_parallel_tasks=1)
    output = ensemble.run(runtime="inline", run_id="spent")
    assert (output.exit_reason, recorded_state(home, "spent")) == (
        ExitReason.BUDGET_EXHAUSTED,
        RunState.BUDGET_EXHAUSTED,
    )
    done = len(llm.calls)
    assert 0 < done <= 10
    assert (len(output.task_outputs), output.metrics.total_tokens) == (done, 100 * done)
    with pytest.raises(ValidationError, match="spent its budget"):
        resume("spent", ensemble, runtime="inline")
    output = resume("spent", ensemble, options=RunOptions(max_tokens=1500), runtime="inline")
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert done < len(llm.calls) <= 15
    output = resume("spent", ensemble, options=RunOptions(max_tokens=9000), runtime="inline")
    assert (len(output.task_outputs), len(llm.calls)) == (20, 20)


def test_results_have_one_row_per_item_after_a_resume(tmp_path: Path) -> None:
    """S-MR-130: the file says which are there."""
    path = tmp_path / "results.jsonl"
    cut = Held("map 5 ")
    ensemble = team(6, llm=cut.llm, results=path)
    cut.cut(ensemble, "rows", 5)
    resume("rows", ensemble, runtime="inline")
    assert sorted(json.loads(line)["index"] for line in path.read_text().splitlines()) == list(range(6))

"""Static map-reduce over a list: an ordinary parallel run whose output tells of levels."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    Agent,
    ChatResponse,
    Ensemble,
    EnsembleOutput,
    Event,
    ExecutionTrace,
    InlineRuntime,
    Loop,
    MapReduceEnsemble,
    ParallelExecutionError,
    RunOptions,
    Task,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskStartEvent,
    TokenUsage,
    ValidationError,
    Workflow,
)
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_output, fold_trace
from ensemble_ray.testing import ScriptedCall, ScriptedModel


def answered(call: ScriptedCall) -> ChatResponse:
    """The first line of the task as the answer; the provider counts what it is told to."""
    line = next(line for line in call.text.splitlines() if line.startswith(("map ", "reduce ")))
    return ChatResponse(f"[{line}]", usage=TokenUsage(input_tokens=3, output_tokens=2))


def failing(*items: int) -> ScriptedModel:
    """A model that fails for those items."""

    def answer(call: ScriptedCall) -> object:
        if any(f"map {item}" in call.text.splitlines() for item in items):
            return RuntimeError("no")
        return answered(call)

    return ScriptedModel(otherwise=answer)


def map_task(item: object) -> Task:
    """The task of an item."""
    return Task.of(f"map {item}")


class Reducer:
    """Makes reduce tasks and numbers them."""

    def __init__(self) -> None:
        self.groups: list[Sequence[Task]] = []

    def __call__(self, chunk: list[Task]) -> Task:
        """The next reduce task."""
        self.groups.append(chunk)
        return Task(description=f"reduce {len(self.groups)}", expected_output="e", context=chunk)


def team(count: int = 7, **fields: Any) -> MapReduceEnsemble:
    """A static map-reduce in groups of 3."""
    given: dict[str, Any] = {
        "items": range(count),
        "map_task": map_task,
        "reduce_task": Reducer(),
        "chunk_size": 3,
        "llm": ScriptedModel(otherwise=answered),
        **fields,
    }
    return MapReduceEnsemble(**given)


def trace_of(output: EnsembleOutput) -> ExecutionTrace:
    """The trace, which every run has."""
    assert output.trace is not None
    return output.trace


DESCRIPTIONS = [*(f"map {item}" for item in range(7)), "reduce 1", "reduce 2", "reduce 3", "reduce 4"]


def test_output_holds_all_levels_in_their_order() -> None:
    """S-MR-37, S-MR-90, S-SET-20: item order at level 0, group order above, whichever was done first."""

    async def answer(call: ScriptedCall) -> ChatResponse:
        response = answered(call)
        number = int((response.text or "").strip("[]").split()[1])
        for _ in range(30 - 3 * number):  # later items are done first
            await asyncio.sleep(0)
        return response

    output = team(llm=ScriptedModel(otherwise=answer)).run(runtime="inline")
    assert [each.task_description for each in output.task_outputs] == DESCRIPTIONS
    assert output.raw == "[reduce 4]" == output.task_outputs[-1].raw
    assert [trace.task_description for trace in trace_of(output).task_traces] == DESCRIPTIONS


def test_trace_tells_of_levels() -> None:
    """S-MR-38, S-MR-92, S-MR-93: workflow, summaries, and the place of every task; one id, agents of all levels."""
    trace = trace_of(team().run(runtime="inline", run_id="levels"))
    assert (trace.workflow, trace.ensemble_id, len(trace.agents)) == ("map_reduce_static", "levels", 11)
    assert [(each.level, each.task_count, each.workflow) for each in trace.map_reduce_levels] == [
        (0, 7, "parallel"),
        (1, 3, "parallel"),
        (2, 1, "parallel"),
    ]
    places = [(each.node_type, each.map_reduce_level) for each in trace.task_traces]
    assert places == [("map", 0)] * 7 + [("reduce", 1)] * 3 + [("final-reduce", 2)]
    for summary in trace.map_reduce_levels:
        within = [each for each in trace.task_traces if each.map_reduce_level == summary.level]
        assert summary.duration == max(t.completed_at for t in within) - min(t.started_at for t in within)
    assert ExecutionTrace.model_validate_json(trace.to_json()) == trace


def test_metrics_are_those_of_all_levels() -> None:
    """S-MR-90, S-MR-91: summed; one unknown makes the total unknown."""
    output = team().run(runtime="inline")
    assert (output.metrics.total_input_tokens, output.metrics.total_output_tokens) == (33, 22)
    assert output.total_tool_calls == 0

    def uncounted(call: ScriptedCall) -> object:
        return "plain text" if "map 3" in call.text else answered(call)

    output = team(llm=ScriptedModel(otherwise=uncounted)).run(runtime="inline")
    assert output.metrics.total_input_tokens == -1


def test_each_task_is_given_the_outputs_of_its_group() -> None:
    """S-MR-30, S-MR-32: a reduce is told of its own group, in order, and of nothing else."""
    model = ScriptedModel(otherwise=answered)
    team(llm=model).run(runtime="inline")
    asked = next(call.text for call in model.calls if "reduce 2" in call.text.splitlines())
    assert [item for item in range(7) if f"[map {item}]" in asked] == [3, 4, 5]


def test_ensemble_is_given_without_running_anything() -> None:
    """S-MR-35, S-MR-36: a parallel ensemble of the same tasks, whose types and levels are told by identity."""
    model = ScriptedModel()
    made = team(llm=model, verbose=True, inputs={"a": 1})
    ensemble = made.to_ensemble()
    assert isinstance(ensemble, Ensemble)
    assert (ensemble.workflow, ensemble.verbose, ensemble.inputs) == (Workflow.PARALLEL, True, {"a": 1})
    assert [task.description for task in ensemble.tasks] == DESCRIPTIONS
    assert Counter(made.node_types[task] for task in ensemble.tasks) == {"map": 7, "reduce": 3, "final-reduce": 1}
    assert [made.map_reduce_levels[task] for task in ensemble.tasks] == [0] * 7 + [1] * 3 + [2]
    assert Task.of("map 0") not in made.node_types
    assert model.calls == ()


def test_ensemble_is_refused_when_tasks_are_made_while_it_runs() -> None:
    """S-MR-40: the text, pointing to the trace; no factory was called."""
    made = team(chunk_size=None, target_token_budget=100)
    with pytest.raises(NotImplementedError, match=r"^to_ensemble\(\) is not supported in adaptive mode\..*trace"):
        made.to_ensemble()
    assert (made.is_adaptive, dict(made.node_types), dict(made.map_reduce_levels)) == (True, {}, {})
    with pytest.raises(NotImplementedError, match=r"^to_ensemble\(\) is not supported where tasks are made"):
        team(items=iter([1])).to_ensemble()


def test_factories_are_called_once_when_it_runs_twice() -> None:
    """S-MR-6: at construction, for all runs of the instance."""
    reducer = Reducer()
    made = team(reduce_task=reducer)
    assert len(reducer.groups) == 4
    first, second = made.run(runtime="inline"), made.run(runtime="inline")
    assert len(reducer.groups) == 4
    assert first.raw == second.raw
    assert first.run_id != second.run_id


def test_exception_of_a_factory_leaves_the_constructor_unchanged() -> None:
    """S-MR-106: also one that checks of fields would have taken for their own."""
    error = ValueError("mine")

    def fails(_: object) -> Task:
        raise error

    with pytest.raises(ValueError, match="mine") as raised:
        team(map_task=fails)
    assert raised.value is error


def test_inputs_of_the_run_win() -> None:
    """S-MR-5: per key, over the configured ones; and the other arguments of a run are taken."""

    def templated(item: object) -> Task:
        return Task.of(f"map {item} {{tone}} {{place}}")

    made = team(1, map_task=templated, inputs={"tone": "dry", "place": "here"})
    output = made.run({"tone": "warm"}, runtime="inline", run_id="given", options=RunOptions(max_parallel_tasks=1))
    assert output.task_outputs[0].task_description == "map 0 warm here"
    assert (output.run_id, trace_of(output).inputs) == ("given", {"tone": "warm", "place": "here"})


def test_exporter_is_called_once_with_the_whole_trace() -> None:
    """S-MR-94."""
    exported: list[ExecutionTrace] = []
    output = team(trace_exporter=exported.append).run(runtime="inline")
    assert exported == [output.trace]


def test_listeners_see_every_level() -> None:
    """S-MR-95: `task_index` counts within the level."""
    started: list[TaskStartEvent] = []
    names: list[str] = []

    def begun(_run: str, workflow: str, _tasks: int) -> None:
        names.append(workflow)

    team(on_task_start=started.append, on_ensemble_started=begun).run(runtime="inline")
    assert sorted((event.task_description, event.task_index) for event in started) == sorted(
        zip(DESCRIPTIONS, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 1], strict=True)
    )
    assert names == ["map_reduce_static"]


def test_no_reduce_runs_when_a_map_fails_fast() -> None:
    """S-MR-100, S-MR-92: `TaskExecutionError`; its trace is annotated as any other."""
    model = failing(2, 4, 6)  # one of each group: a group without might be done, and reduced, before the failure comes
    with pytest.raises(TaskExecutionError) as failed:
        team(llm=model).run(runtime="inline")
    assert not any("reduce" in call.text for call in model.calls)
    assert failed.value.trace is not None
    assert failed.value.trace.workflow == "map_reduce_static"
    assert {(each.node_type, each.map_reduce_level) for each in failed.value.trace.task_traces} == {("map", 0)}
    assert [each.level for each in failed.value.trace.map_reduce_levels] == [0]


def test_everything_above_a_failed_map_is_skipped_when_others_go_on() -> None:
    """S-MR-103, S-MR-105: `ParallelExecutionError` with completed outputs and causes; the failed map's trace is there."""
    with pytest.raises(ParallelExecutionError) as failed:
        team(llm=failing(4), parallel_error_strategy="continue_on_error").run(runtime="inline")
    error = failed.value
    assert list(error.failed_task_causes) == ["map 4"]
    done = {output.task_description for output in error.completed_task_outputs}
    assert done == {*(f"map {item}" for item in (0, 1, 2, 3, 5, 6)), "reduce 1", "reduce 3"}
    assert error.trace is not None
    traced = [(each.task_description, each.map_reduce_level) for each in error.trace.task_traces]
    assert traced == [*((f"map {item}", 0) for item in range(7)), ("reduce 1", 1), ("reduce 3", 1)]
    assert [(each.level, each.task_count) for each in error.trace.map_reduce_levels] == [(0, 7), (1, 2)]


async def test_record_tells_the_same_as_the_run(tmp_path: Path) -> None:
    """S-MR-165, S-SET-39: the folded trace and output are the live ones; the same id again gives the recorded output."""
    runtime, made = InlineRuntime(home=tmp_path), team()
    output = await made.arun(runtime=runtime, run_id="recorded")
    facts = await SqliteStore(tmp_path).facts("recorded")
    assert fold_trace(facts) == output.trace
    assert fold_output(facts).task_outputs == output.task_outputs
    again = await made.arun(runtime=runtime, run_id="recorded")
    assert again.trace == output.trace
    last = made.to_ensemble().tasks[-1]
    assert again.get_output(last) == output.get_output(last) == output.task_outputs[-1]
    with pytest.raises(ValidationError, match="another definition"):
        await team(6).arun(runtime=runtime, run_id="recorded")


async def test_handle_and_stream_are_those_of_an_ensemble() -> None:
    """S-SET-4: start and stream take what Ensemble's take."""
    begun = team().start(runtime="inline", run_id="begun")
    assert (await begun.aresult()).run_id == begun.id == "begun"
    heard: list[object] = [each async for each in team().stream(runtime="inline")]
    assert isinstance(heard[-1], EnsembleOutput)
    assert all(isinstance(each, Event) for each in heard[:-1])
    assert sum(isinstance(each, TaskCompleteEvent) for each in heard) == 11


def test_agents_get_the_places_of_the_definition() -> None:
    """S-MR-141: overridden for the agents that factories made."""
    agent = Agent(role="Mapper", goal="g", llm=ScriptedModel(otherwise=answered))

    def named(item: object) -> Task:
        return Task(description=f"map {item}", expected_output="e", agent=agent)

    tasks = team(map_task=named, replicas=2, max_concurrency=4).to_ensemble().tasks
    found = [task.agent for task in tasks if task.agent is not None]
    assert len(found) == 7
    assert {(each, each.replicas, each.max_concurrency) for each in found} == {(agent, 2, 4)}


def test_short_form_maps_and_reduces_in_one_call() -> None:
    """S-MR-4: the tasks' texts, and groups of 5; braces of items are text."""
    model = ScriptedModel(otherwise=lambda call: f"answer {call.number}")
    items = ["plain", "{name}", "{{x}}", "{", 5, None]
    output = MapReduceEnsemble.of(model, items, "Sum up", "Join", runtime="inline")
    described = [each.task_description for each in output.task_outputs]
    assert described == [*(f"Sum up: {item}" for item in items), "Join", "Join", "Join"]
    assert "Join" in model.calls[-1].text
    assert "answer" in model.calls[-1].text


BRACED = ["const f = {topic}", "print({topic})", '{"a": {b}}', "{{topic}} and {{b}}"]
FORMS: dict[str, dict[str, Any]] = {
    "planned": {"items": BRACED},
    "of an iterator": {"items": iter(BRACED)},
    "collected": {"items": BRACED, "on_item_error": "collect"},
    "pipelined": {"items": BRACED, "mode": "pipelined"},
    "ordered": {"items": tuple(BRACED), "mode": "pipelined", "ordered": True},
    "adaptive": {"items": BRACED, "target_token_budget": 10},
    "direct": {
        "items": BRACED,
        "target_token_budget": 1000,
        "direct_task": lambda items: Task.of("On {topic}:\n" + "\n".join(items)),
    },
    "of rows": {
        "items": [{"text": text} for text in BRACED],
        "map_task": lambda row: Task.of(f"On {{topic}}:\n{row['text']}"),
    },
    "in a loop": {
        "items": iter(BRACED),
        "map_task": lambda item: Loop(name="l", body=[Task.of(f"On {{topic}}:\n{item}")], max_iterations=1),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_items_and_answers_keep_their_braces_in_every_form(form: str) -> None:
    """S-MR-203: whatever the reduce makes of the descriptions of its group; inputs are filled in beside them, and only once."""

    def join(group: Sequence[Task]) -> Task:
        shown = "\n".join(task.description for task in group)
        return Task(description=f"Join on {{topic}}: {shown}", expected_output="A line", context=group)

    model = ScriptedModel(otherwise="the answer has {topic} too")
    fields: dict[str, Any] = {
        "map_task": lambda item: Task.of(f"On {{topic}}:\n{item}"),
        "reduce_task": join,
        "llm": model,
    }
    made = MapReduceEnsemble(**{**fields, **FORMS[form]}, inputs={"topic": "<{b}>", "b": "SECRET"})
    described = [output.task_description for output in made.run(runtime="inline").task_outputs]
    maps = described[:1] if form == "direct" else described[: len(BRACED)]
    texts = {text for each in maps for text in each.partition("On <{b}>:\n")[2].split("\n")}
    assert texts == set(BRACED)
    for reduce in described[len(maps) :]:
        assert reduce.startswith("Join on <{b}>: ")
        assert "SECRET" not in reduce
        assert all(text in reduce for text in BRACED) or "the answer has {topic} too" in reduce
    assert not any("SECRET" in call.text for call in model.calls)


def numbers() -> Iterator[int]:
    """No list."""
    yield 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, None, "", ""), "model must not be None"),
        ((ScriptedModel(), None, "", ""), "items must not be None"),
        ((ScriptedModel(), [], "", ""), "items must not be empty"),
        ((ScriptedModel(), numbers(), " ", ""), "map_description must not be blank"),
        ((ScriptedModel(), [1], None, ""), "map_description must not be blank"),
        ((ScriptedModel(), [1], "Sum up", " "), "reduce_description must not be blank"),
    ],
)
def test_short_form_is_refused_when_something_is_missing(arguments: tuple[Any, Any, Any, Any], text: str) -> None:
    """S-MR-4: the errors, in their order."""
    with pytest.raises(ValidationError) as refused:
        MapReduceEnsemble.of(*arguments, runtime="inline")
    assert str(refused.value) == text

"""Adaptive map-reduce from end to end: levels, tokens, packing, the short-circuit, one output over all of it."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import (
    Agent,
    ChatResponse,
    ExecutionTrace,
    MapReduceEnsemble,
    Task,
    TaskCompleteEvent,
    TaskStartEvent,
    TokenUsage,
    ValidationError,
    tool,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import call
from tests.scenarios.mapping import (
    Calls,
    answer,
    answered,
    asked_of,
    counts,
    map_task,
    model,
    raws,
    reduce_task,
    team,
    trace_of,
)
from tests.scenarios.teams import Watcher, prompt_of, task_of


def weighing(*weights: int, text: str = "") -> ScriptedModel:
    """A model whose map answers have these tokens; those of reduces have ten."""

    async def entry(asked: ScriptedCall) -> ChatResponse:
        kind, _, rest = task_of(asked).partition(" ")
        if kind != "map":
            return answer(asked)
        return ChatResponse(text or rest, usage=TokenUsage(3, weights[int(rest)]))

    return ScriptedModel(otherwise=entry)


# Levels.


def test_reduces_level_by_level_until_it_fits() -> None:
    """S-MR-41, S-MR-43, S-MR-90, S-MR-93: 6 maps, 2 groups, the final one; `raw` is the final reduce's."""
    output = team(6).run(runtime="inline")
    assert raws(output) == ["0", "1", "2", "3", "4", "5", "(0+1+2)", "(3+4+5)", "((0+1+2)+(3+4+5))"]
    assert counts(output) == [6, 2, 1]
    assert output.raw == "((0+1+2)+(3+4+5))"
    assert [each.workflow for each in trace_of(output).map_reduce_levels] == ["parallel"] * 3


@pytest.mark.parametrize(("count", "expected"), [(1, [1, 1]), (3, [3, 1]), (4, [4, 2, 1]), (10, [10, 4, 2, 1])])
def test_one_final_reduce_when_outputs_fit(count: int, expected: list[int]) -> None:
    """S-MR-42, S-MR-43, S-MR-50: a sum that is exactly the budget fits."""
    assert counts(team(count).run(runtime="inline")) == expected


def test_groups_are_packed_first_fit_decreasing() -> None:
    """S-MR-49, S-MR-61, S-MR-70: bins in the order of packing, by the tokens that the provider counted."""
    output = team(5, llm=weighing(40, 30, 30, 50, 20), target_token_budget=100).run(runtime="inline")
    assert raws(output)[5:] == ["(3+0)", "(1+2+4)", "((3+0)+(1+2+4))"]


def test_order_is_that_of_items_when_later_ones_are_done_first() -> None:
    """S-MR-49: never that of completion."""
    held = ScriptedModel(otherwise=answered)
    output = team(6, llm=held, max_parallel_tasks=1).run(runtime="inline")
    assert raws(output) == raws(team(6).run(runtime="inline"))


def test_cap_of_levels_ends_reducing_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-43, S-MR-44, S-MR-45: the final reduce still runs; the warning names cap, sum and budget."""
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        output = team(9, llm=weighing(*[30] * 9), target_token_budget=30, max_reduce_levels=1).run(runtime="inline")
    assert counts(output) == [9, 9, 1]
    (told,) = [each.getMessage() for each in caplog.records if "max_reduce_levels" in each.getMessage()]
    assert all(part in told for part in ("max_reduce_levels 1 is reached", "90 tokens", "budget of 30"))


def test_output_above_the_budget_has_a_group_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-46, S-MR-71: it goes through the levels; role, tokens and budget are told."""
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        output = team(3, llm=weighing(150, 50, 50), target_token_budget=100).run(runtime="inline")
    assert raws(output)[3:] == ["(0)", "(1+2)", "((0)+(1+2))"]
    (told,) = [each.getMessage() for each in caplog.records if "150" in each.getMessage()]
    assert "'Agent' (map-0) has 150 tokens, more than the budget of 100" in told


def test_budget_is_a_share_of_the_window() -> None:
    """S-MR-3, S-MR-43: int(window * ratio)."""
    assert counts(team(6, context_window_size=61, budget_ratio=0.5).run(runtime="inline")) == [6, 2, 1]


def test_adaptive_tree_is_not_known_before() -> None:
    """S-MR-40: it says so, and where it is found afterwards."""
    with pytest.raises(NotImplementedError, match=r"^to_ensemble\(\) is not supported in adaptive mode\..*trace"):
        team().to_ensemble()


# Stand-ins.


def test_stand_ins_show_what_was_said_and_cost_nothing() -> None:
    """S-MR-47, S-MR-115, S-MR-95: no call, no event, no output, no trace, no agent of them."""
    seen: list[str] = []

    def reducing(chunk: list[Task]) -> Task:
        seen.extend(each.description for each in chunk)
        return reduce_task(chunk)

    llm, watcher = model(), Watcher()
    output = team(4, reduce_task=reducing, llm=llm, listeners=[watcher]).run(runtime="inline")
    assert seen == ["0", "1", "2", "3", "(0+1+2)", "(3)"]
    assert len(llm.calls) == 7 == len(output.task_outputs) == len(trace_of(output).task_traces)
    assert len(trace_of(output).agents) == 7
    assert (len(watcher.of(TaskStartEvent)), len(watcher.of(TaskCompleteEvent))) == (7, 7)


def test_reduce_prompt_names_who_did_what() -> None:
    """S-MR-48: role and description of the task that produced an output."""
    llm = ScriptedModel(otherwise=answered)
    mapper = Agent(role="Reader", goal="read", llm=llm)
    team(2, map_agent=lambda _: mapper, map_task=lambda item, _: map_task(item), llm=llm).run(runtime="inline")
    (reduced,) = [prompt_of(each) for each in llm.calls if task_of(each).startswith("reduce")]
    assert "Reader" in reduced
    assert "map 1" in reduced
    assert "(empty)" not in reduced


def test_empty_answer_is_reduced_as_it_is() -> None:
    """S-MR-47: nobody makes a text of it."""
    llm = ScriptedModel(otherwise=lambda asked: answer(asked) if "reduce" in task_of(asked) else ChatResponse(" "))
    output = team(2, llm=llm, token_estimator=len).run(runtime="inline")
    assert [each.raw.strip() for each in output.task_outputs[:2]] == ["", ""]


def test_reduce_that_lacks_a_part_of_its_group_is_refused() -> None:
    """S-MR-24, S-MR-106: when the level is built; the reduce task is named."""
    short = team(4, reduce_task=lambda chunk: reduce_task(chunk).replace(context=chunk[1:]))
    with pytest.raises(ValidationError, match=r"Reduce task 'reduce 0\+1\+2' lacks 1 of the 3 tasks"):
        short.run(runtime="inline")


def test_context_that_is_nobodys_is_refused() -> None:
    """S-MR-30, S-MR-106: a map has no context, a reduce that of its group; nothing is left out in silence."""
    other = Task.of("other")
    with pytest.raises(ValidationError, match="'map 0' has the context task 'other'"):
        team(map_task=lambda item: map_task(item).replace(context=[other])).run(runtime="inline")
    with pytest.raises(ValidationError, match="has the context task 'other', which is none of its group"):
        team(reduce_task=lambda chunk: reduce_task(chunk).replace(context=[*chunk, other])).run(runtime="inline")


def test_reduce_gets_its_context_in_the_order_that_it_asks_for() -> None:
    """S-MR-47: the order of `context`."""
    llm = model()
    team(3, reduce_task=lambda chunk: reduce_task(chunk).replace(context=chunk[::-1]), llm=llm).run(runtime="inline")
    told = prompt_of(llm.calls[-1])
    assert told.index("map 2") < told.index("map 1") < told.index("map 0")


def test_texts_that_factories_made_keep_their_braces() -> None:
    """S-MR-117, S-MR-203: inputs are filled in, what an item or an answer says in braces is text."""
    llm = ScriptedModel(otherwise=lambda asked: f"said {{topic}} {{other}} of {task_of(asked)}")
    team(
        2,
        items=["{a}", "{topic} in full"],
        map_task=lambda item: Task.of(f"map {item} about {{topic}} {{{{x}}}}"),
        reduce_task=lambda chunk: Task(description="reduce {unknown}", expected_output="e", context=chunk),
        llm=llm,
    ).run({"topic": "tea"}, runtime="inline")
    assert asked_of(llm)[:2] == ["map {a} about tea {{x}}", "map {topic} in full about tea {{x}}"]
    assert asked_of(llm)[2] == "reduce {unknown}"
    assert "said {topic} {other} of map {a}" in prompt_of(llm.calls[2])


# Tokens.


@pytest.mark.parametrize(
    ("usage", "estimator", "expected"),
    [
        (TokenUsage(1, 0), lambda _: 99, [4, 1]),
        (TokenUsage(1, 20), lambda _: 0, [4, 4, 4, 1]),
        (None, lambda _: 20, [4, 4, 4, 1]),
        (None, lambda _: 5, [4, 1]),
        (None, lambda _: None, [4, 2, 1]),
        (None, None, [4, 2, 1]),
    ],
)
def test_tokens_are_counted_estimated_or_guessed(usage: TokenUsage | None, estimator: Any, expected: list[int]) -> None:
    """S-MR-60, S-MR-61: the provider's count, also 0; the estimator; a quarter of the length."""
    llm = ScriptedModel(otherwise=ChatResponse("x" * 40, usage=usage))
    output = team(4, llm=llm, token_estimator=estimator, max_reduce_levels=2).run(runtime="inline")
    assert counts(output) == expected


def test_guess_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-60: once per run, not per output."""
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        team(4, llm=ScriptedModel(otherwise="x" * 40)).run(runtime="inline")
    assert sum("from its length" in each.getMessage() for each in caplog.records) == 1


def test_estimator_is_asked_beside_the_loop_one_call_at_a_time() -> None:
    """S-MR-60, S-MR-143: in a thread of ours."""
    estimator = Calls(lambda _: 10)
    output = team(6, llm=ScriptedModel(otherwise="text"), token_estimator=estimator).run(runtime="inline")
    assert counts(output) == [6, 2, 1]
    assert len(estimator) == 8  # nobody asks about the last one's
    assert not any("loop" in name for name in estimator.threads)


# One output.


def test_metrics_sum_up_unless_one_is_unknown() -> None:
    """S-MR-91: over all levels; one unknown makes the total unknown."""
    output = team(6).run(runtime="inline")
    assert (output.metrics.total_input_tokens, output.metrics.total_output_tokens) == (27, 90)
    unknown = ScriptedModel(
        otherwise=lambda asked: (
            ChatResponse("x", usage=TokenUsage(-1, 3)) if task_of(asked) == "map 3" else answer(asked)
        )
    )
    metrics = team(6, llm=unknown).run(runtime="inline").metrics
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (-1, 83)


def test_trace_is_one_over_all_levels() -> None:
    """S-MR-92, S-MR-38, S-MR-93: one id, earliest start, latest end, every trace in its place, agents of all levels."""
    trace = trace_of(team(6).run(run_id="levels", runtime="inline"))
    assert (trace.workflow, trace.ensemble_id) == ("map_reduce_adaptive", "levels")
    assert trace.started_at == min(each.started_at for each in trace.task_traces)
    assert trace.completed_at == max(each.completed_at for each in trace.task_traces)
    assert trace.total_duration == trace.completed_at - trace.started_at
    places = [(each.node_type, each.map_reduce_level) for each in trace.task_traces]
    assert places == [("map", 0)] * 6 + [("reduce", 1)] * 2 + [("final-reduce", 2)]
    assert len(trace.agents) == 9
    for summary in trace.map_reduce_levels:
        within = [each for each in trace.task_traces if each.map_reduce_level == summary.level]
        span = max(each.completed_at for each in within) - min(each.started_at for each in within)
        assert summary.duration == span >= timedelta()


def test_trace_goes_through_json() -> None:
    """S-MR-92, S-MR-132: the same from its JSON text."""
    trace = trace_of(team(6).run(runtime="inline"))
    assert ExecutionTrace.model_validate_json(trace.to_json()) == trace


def test_trace_is_exported_once() -> None:
    """S-MR-94: the aggregated one."""
    exported: list[ExecutionTrace] = []

    class Exporter:
        def export(self, trace: ExecutionTrace) -> None:
            exported.append(trace)

    output = team(6, trace_exporter=Exporter()).run(runtime="inline")
    assert exported == [output.trace]


def test_agents_are_told_once_each() -> None:
    """S-MR-92: by who they are, not by how many tasks they did."""
    llm = model()
    mapper, reducer = (Agent(role=role, goal="g", llm=llm) for role in ("Mapper", "Reducer"))
    ensemble = team(
        6,
        map_agent=lambda _: mapper,
        map_task=lambda item, _: map_task(item),
        reduce_agent=lambda: reducer,
        reduce_task=lambda chunk, _: reduce_task(chunk),
        llm=None,
    )
    assert [each.role for each in trace_of(ensemble.run(runtime="inline")).agents] == ["Mapper", "Reducer"]


def test_tool_calls_are_summed_up() -> None:
    """S-MR-90: over all levels."""

    def look(word: str) -> str:
        """Look a word up."""
        return word

    async def entry(asked: ScriptedCall) -> object:
        is_first = asked.messages[-1].role != "tool"
        return call("look", '{"word": "tea"}') if is_first else answer(asked)

    llm = ScriptedModel(otherwise=entry)
    reader = Agent(role="Reader", goal="g", llm=llm, tools=[tool(look)])
    ensemble = team(
        3,
        map_agent=lambda _: reader,
        map_task=lambda item, _: map_task(item),
        llm=llm,
        reduce_agent=lambda: reader,
        reduce_task=lambda chunk, _: reduce_task(chunk),
    )
    output = ensemble.run(runtime="inline")
    assert (output.total_tool_calls, raws(output)) == (4, ["0", "1", "2", "(0+1+2)"])


def test_events_count_within_their_level() -> None:
    """S-MR-95: `task_index` of every level from 1; how many there are where that is known."""
    watcher = Watcher()
    team(6, listeners=[watcher]).run(runtime="inline")
    told = sorted(
        (each.task_description[:6].strip(), each.task_index, each.total_tasks) for each in watcher.of(TaskStartEvent)
    )
    assert [each for each in told if each[0].startswith("map")] == [(f"map {n}", n + 1, 6) for n in range(6)]
    assert [each[1:] for each in told if each[0] == "reduce"] == [(1, 0), (1, 1), (2, 0)]
    assert str(watcher.heard[0][1]).endswith(", 'map_reduce_adaptive', 6)")


def test_factories_are_called_anew_in_each_run() -> None:
    """S-MR-6, S-MR-5: also in two runs at the same time; run inputs win."""
    factory = Calls(map_task)
    ensemble = team(6, map_task=factory, inputs={"a": "1", "b": "1"})
    runs = [ensemble.start({"b": number}, runtime="inline") for number in (2, 3)]
    outputs = [run.result() for run in runs]
    assert len(factory) == 12
    assert raws(outputs[0]) == raws(outputs[1])
    assert [trace_of(each).inputs for each in outputs] == [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]


def test_of_builds_and_runs() -> None:
    """S-MR-4, S-MR-32: groups of five."""
    llm = ScriptedModel(otherwise=answered)
    output = MapReduceEnsemble.of(llm, (n for n in range(6)), "map", "reduce", runtime="inline")
    assert [task.task_description for task in output.task_outputs][:1] == ["map: 0"]
    assert counts(output) == [6, 2, 1]

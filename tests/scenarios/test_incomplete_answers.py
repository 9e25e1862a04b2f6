"""Answers that were cut off or are empty: what a run makes of them, request by request."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    EnsembleOutput,
    InlineRuntime,
    LlmIterationCompletedEvent,
    MapEnsemble,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    RetryPolicy,
    RunOptions,
    Runtime,
    TaskExecutionError,
    TokenUsage,
    resume,
    tool,
)
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.testing import ModelServer, Reply
from tests.builders import agent, call, task

Servers = Callable[..., ModelServer]

CUT = Reply(text="half an ans", finish_reason="length")
FILTERED = Reply(text="We", finish_reason="content_filter")
EMPTY = Reply(text=None)
WARNING = (
    "Task 'go': Agent 'Writer': the model's answer was cut off (finish_reason 'length'). Raise max_tokens of its model, "
    "or ask for a shorter answer. It is used as it is."
)


def model_at(server: ModelServer, **options: object) -> OpenAIChatModel:
    """The model behind a server."""
    return OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test", **options)  # type: ignore[arg-type]  options


def ran(server: ModelServer, runtime: Runtime, **fields: object) -> EnsembleOutput:
    """The output of a team of one task."""
    return Ensemble(tasks=[task("go", agent(model_at(server)), name="go")], **fields).run(runtime=runtime)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reply", "reason", "raw"),
    [(CUT, "length", CUT.text), (FILTERED, "content_filter", FILTERED.text), (EMPTY, None, "")],
    ids=["length", "content_filter", "null"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_an_incomplete_answer_is_counted_when_nothing_is_said(
    runtime: Runtime, model_server: Servers, reply: Reply, reason: str | None, raw: str, *, stream: bool
) -> None:
    """S-ENG-36, S-ENG-37, S-MET-18: used as it is; output, trace and event tell of it; one request."""
    server = model_server([reply])
    told: list[LlmIterationCompletedEvent] = []
    output = ran(server, runtime, stream=stream, on_llm_iteration_completed=told.append)
    assert output.raw == raw
    assert output.metrics.total_incomplete_answers == 1
    assert output.task_outputs[0].metrics.incomplete_answers == 1
    assert output.trace is not None
    (interaction,) = output.trace.task_traces[0].llm_interactions
    assert interaction.finish_reason == reason
    assert ("[cut off: " if reason else "[empty]") in render_tree(output.trace)
    assert [event.finish_reason for event in told] == [reply.shown_finish_reason]
    assert len(server.requests) == 1


def test_a_whole_answer_is_told_as_ever(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-ENG-36: nothing is counted, and an ordinary reason stands in no trace."""
    output = ran(model_server(["fine"]), inline_runtime, on_incomplete="fail")
    assert output.metrics.total_incomplete_answers == 0
    assert output.trace is not None
    assert output.trace.task_traces[0].llm_interactions[0].finish_reason is None
    assert "finish_reason" not in output.trace.to_json()


@pytest.mark.parametrize("reply", [CUT, FILTERED, EMPTY], ids=["length", "content_filter", "null"])
def test_the_task_fails_when_the_policy_is_to_fail(runtime: Runtime, model_server: Servers, reply: Reply) -> None:
    """S-ENG-37: the message says what was cut and what to do; one request; the trace has the answer."""
    server = model_server([reply])
    with pytest.raises(TaskExecutionError) as failed:
        ran(server, runtime, on_incomplete="fail")
    cause = failed.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert "'Writer'" in str(cause)
    assert "max_tokens" in str(cause) or "Reword the task" in str(cause)
    assert ("is empty" if reply is EMPTY else reply.shown_finish_reason) in str(failed.value)
    assert len(server.requests) == 1
    assert failed.value.trace is not None
    (interaction,) = failed.value.trace.task_traces[0].llm_interactions
    assert interaction.response_text == reply.text


def test_the_agents_word_wins_when_the_ensemble_says_another(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-ENG-37."""
    server = model_server([CUT])
    careless = agent(model_at(server), on_incomplete="warn")
    assert Ensemble(tasks=[task("go", careless)], on_incomplete="fail").run(runtime=inline_runtime).raw == CUT.text


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_the_model_is_asked_again_when_the_policy_is_to_retry(
    inline_runtime: Runtime, model_server: Servers, *, stream: bool
) -> None:
    """S-ENG-38: the same conversation, under keys of their own, and not streamed again; all tokens count."""
    server = model_server([CUT, EMPTY, "whole"])
    output = ran(server, inline_runtime, on_incomplete="retry", stream=stream)
    assert output.raw == "whole"
    first, *others = server.requests
    assert [each.messages for each in others] == [first.messages] * 2
    assert len({each.key for each in server.requests}) == 3
    assert [each.stream for each in server.requests] == [stream, False, False]
    metrics = output.task_outputs[0].metrics
    assert (metrics.retry_count, metrics.incomplete_answers, metrics.llm_call_count) == (2, 0, 1)
    assert (metrics.input_tokens, metrics.output_tokens) == (30, 15)


def test_the_task_fails_when_the_last_retry_is_incomplete_too(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-ENG-38: three requests at most, then as `fail`."""
    server = model_server(CUT)
    with pytest.raises(TaskExecutionError, match="length"):
        ran(server, inline_runtime, on_incomplete="retry")
    assert len(server.requests) == 3


def test_it_is_a_failed_item_when_it_is_one_of_a_map(inline_runtime: Runtime, model_server: Servers) -> None:
    """S-ENG-37: the other items go on."""
    server = model_server(lambda request: CUT if "two" in request.text else "fine")
    writer = agent(model_at(server), on_incomplete="fail")
    output = MapEnsemble(
        items=["one", "two", "three"],
        map_task=lambda item: task(f"Do {item}", writer),
        on_item_error="collect",
    ).run(runtime=inline_runtime)
    assert [failure.index for failure in output.failed_items] == [1]
    assert "length" in output.failed_items[0].message


def test_equal_warnings_of_a_map_are_one_line_and_a_count(
    runtime: Runtime, model_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """S-MR-206: the items' lines differ in numbers alone; the documented text stays."""
    writer = agent(model_at(model_server(CUT)))
    items = MapEnsemble(items=[*range(9)], map_task=lambda item: task(f"Do {item}", writer))
    items.run(runtime=runtime)
    first, count = [record for record in caplog.records if "was cut off" in record.getMessage()]
    assert "8 more like: " in count.getMessage()
    assert "Task 'map-" in first.getMessage()
    assert first.getMessage() in count.getMessage()
    assert (first.name, first.levelno) == (count.name, count.levelno)


@tool
def look(what: str) -> str:
    """Look something up.

    Args:
        what: It.
    """
    return f"seen {what}"


def test_broken_arguments_run_no_tool_when_the_policy_is_to_retry(
    inline_runtime: Runtime, model_server: Servers
) -> None:
    """S-ENG-36, S-ENG-38: a request for tools that was cut off is incomplete too."""
    broken = Reply(tool_calls=[call("look", '{"what": "th')], finish_reason="length")
    server = model_server([broken, call("look", '{"what": "the sea"}'), "done"])
    team = Ensemble(tasks=[task("go", agent(model_at(server), tools=[look]))], on_incomplete="retry")
    output = team.run(runtime=inline_runtime)
    assert (output.raw, output.total_tool_calls) == ("done", 1)
    assert server.requests[2].messages[-1]["content"] == "seen the sea"


class Word(BaseModel):
    """A typed answer."""

    word: str


def test_a_typed_answer_is_not_corrected_when_the_policy_is_to_fail(
    inline_runtime: Runtime, model_server: Servers
) -> None:
    """S-ENG-37: neither the first answer nor a correction of it may be cut off."""
    for script, requests in (([Reply(text='{"word": "a', finish_reason="length")], 1), (["no JSON", CUT], 2)):
        server = model_server(script)
        typed = task("go", agent(model_at(server)), output_type=Word)
        with pytest.raises(TaskExecutionError, match="length"):
            Ensemble(tasks=[typed], on_incomplete="fail").run(runtime=inline_runtime)
        assert len(server.requests) == requests


def test_one_warning_is_logged_when_a_task_has_several_incomplete_answers(
    model_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """S-ENG-37: task, agent, reason and advice; of an empty answer its own line tells (S-ENG-34)."""
    cut_call = Reply(tool_calls=[call("look", '{"what": "it"}')], finish_reason="length")
    server = model_server([cut_call, CUT, EMPTY])
    model = RateLimitedChatModel.of(model_at(server), RateLimit.per_second(1000))
    team = Ensemble(
        tasks=[task("go", agent(model, tools=[look]), name="go"), task("on", agent(model), name="on")],
    )
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        output = team.run(runtime=InlineRuntime())
    assert [each.metrics.incomplete_answers for each in output.task_outputs] == [2, 1]
    assert [record.getMessage() for record in caplog.records] == [
        WARNING,
        "Agent 'Writer' returned empty response for task 'on'",
    ]


def test_the_budget_pays_for_retries(model_server: Servers) -> None:
    """S-ENG-38, S-BUD-2: the second request does not fit; nothing is sent beyond the budget."""
    server = model_server(Reply(text="half", finish_reason="length", usage=TokenUsage(600, 300)))
    output = ran(server, InlineRuntime(), on_incomplete="retry", max_tokens=1000)
    assert output.exit_reason.value != "completed"
    assert len(server.requests) < 3


@pytest.mark.parametrize("policy", ["warn", "fail"])
def test_a_recorded_answer_is_judged_again_when_the_run_goes_on(model_server: Servers, policy: str) -> None:
    """S-ENG-39: the recorded answer is not asked for again; the policy of today is applied to it."""
    runtime = InlineRuntime()
    first = Reply(tool_calls=[call("look", '{"what": "it"}')], finish_reason="length", usage=TokenUsage(600, 500))
    server = model_server([first, "done"])

    def team(on_incomplete: str) -> Ensemble:
        working = agent(model_at(server), tools=[look])
        return Ensemble(tasks=[task("go", working, name="go")], on_incomplete=on_incomplete, max_tokens=1000)  # type: ignore[arg-type]

    stopped = team("warn").run(runtime=runtime)
    assert (len(server.requests), stopped.exit_reason.value) == (1, "budget_exhausted")
    again = {"options": RunOptions(max_tokens=100_000), "allow_changes": policy != "warn"}
    if policy == "fail":
        with pytest.raises(TaskExecutionError, match="length"):
            resume(stopped.run_id, team(policy), runtime=runtime, **again)  # type: ignore[arg-type]
        assert len(server.requests) == 1
        return
    output = resume(stopped.run_id, team(policy), runtime=runtime, **again)  # type: ignore[arg-type]
    assert (output.raw, output.metrics.total_incomplete_answers, len(server.requests)) == ("done", 1, 2)
    assert output.trace is not None
    assert [each.finish_reason for each in output.trace.task_traces[0].llm_interactions] == ["length", None]


def test_a_cut_stream_is_incomplete_when_it_is_judged(
    inline_runtime: Runtime, model_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """S-LLM-8, S-ENG-37, S-ENG-38: used with a warning, failed, or asked for again and not streamed."""
    cut = Reply(text="Never mix bleach with", is_ended=False)
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        output = ran(model_server([cut]), inline_runtime, stream=True)
    assert (output.raw, output.metrics.total_incomplete_answers) == (cut.text, 1)
    assert "stream=False" in caplog.text
    with pytest.raises(TaskExecutionError, match="stream_cut"):
        ran(model_server([cut]), inline_runtime, stream=True, on_incomplete="fail")
    server = model_server([cut, "whole"])
    assert ran(server, inline_runtime, stream=True, on_incomplete="retry").raw == "whole"
    assert [each.stream for each in server.requests] == [True, False]


def test_an_unknown_end_is_told_when_the_answer_is_used(
    inline_runtime: Runtime, model_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """S-ENG-36, S-ENG-37: the advice does not guess at its cause."""
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        output = ran(model_server([Reply(text="half", finish_reason="of_a_new_kind")]), inline_runtime)
    assert output.metrics.total_incomplete_answers == 1
    assert "finish_reason 'of_a_new_kind'" in caplog.text
    assert "max_tokens" not in caplog.text


def test_a_failed_generation_is_asked_for_again_when_the_provider_fails(
    inline_runtime: Runtime, model_server: Servers
) -> None:
    """S-LLM-7, S-DUR-61: by the retry policy of the run, and not as an incomplete answer."""
    server = model_server([Reply(text="The first of", finish_reason="error"), "whole"])
    output = ran(server, inline_runtime, retry=RetryPolicy(first_delay=0.001, max_delay=0.002))
    metrics = output.task_outputs[0].metrics
    assert (output.raw, metrics.retry_count, metrics.incomplete_answers) == ("whole", 1, 0)

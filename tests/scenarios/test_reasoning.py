"""Reasoning of models: what a run makes of it, streamed or not, and where it is shown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    ChatMessage,
    ChatResponse,
    Ensemble,
    EnsembleOutput,
    LlmIterationCompletedEvent,
    OpenAIChatModel,
    Reasoning,
    RunOptions,
    Runtime,
    TaskAnswer,
    TaskExecutionError,
    TokenEvent,
    TokenUsage,
    ToolSpec,
    resume,
    tool,
)
from ensemble_ray.events.telemetry.spans import chat_content
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.testing import ModelServer, Reply, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import Watcher

Servers = Callable[..., ModelServer]

USAGE = TokenUsage(10, 5, 3)
IN_TAGS = Reply(text="<think>\nPerhaps 41?\n</think>\n\n42", usage=USAGE)
CUT = Reply(text=IN_TAGS.text, fragments=list(IN_TAGS.text or ""), usage=USAGE)
IN_MEMBER = Reply(text="42", reasoning="Perhaps 41?", usage=USAGE)
IN_OTHER = Reply(text="42", members={"reasoning": "Perhaps 41?"}, usage=USAGE)


@tool
def look() -> str:
    """Look."""
    return "seen"


def model_at(server: ModelServer) -> OpenAIChatModel:
    """The model behind a server."""
    return OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test")


def reasoning_in(output: EnsembleOutput, place: int = 0) -> list[str | None]:
    """The reasoning of a task, model call by model call."""
    return [each.reasoning for each in output.trace.task_traces[place].llm_interactions]


def said(watcher: Watcher, *, is_reasoning: bool) -> str:
    """What was streamed, of reasoning or of the answer."""
    return "".join(each.token for each in watcher.of(TokenEvent) if each.is_reasoning is is_reasoning)


@pytest.mark.parametrize("reply", [IN_TAGS, CUT, IN_MEMBER, IN_OTHER], ids=["tags", "cut", "member", "other"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_reasoning_is_apart_from_the_answer(
    inline_runtime: Runtime, model_server: Servers, reply: Reply, *, stream: bool
) -> None:
    """S-LLM-1 to S-LLM-4, S-LLM-6: not in `raw`, not in the next task's request; in the trace, event, and metrics."""
    server = model_server([reply, "So it is."])
    writer, watcher = agent(model_at(server), stream=stream), Watcher()
    first = task("count", writer, name="count")
    team = Ensemble(tasks=[first, task("tell", writer, name="tell", context=[first])], listeners=[watcher])
    output = team.run(runtime=inline_runtime)
    assert output[first].raw == "42"
    assert reasoning_in(output) == ["Perhaps 41?"]
    assert "Perhaps" not in str(server.requests[1].messages)
    assert [each.reasoning for each in watcher.of(LlmIterationCompletedEvent)] == ["Perhaps 41?", None]
    assert [each.metrics.reasoning_tokens for each in output.task_outputs] == [3, 0]
    assert (output.metrics.total_reasoning_tokens, output.metrics.total_output_tokens) == (3, 10)
    shown = render_tree(output.trace)
    assert "reasoning: Perhaps 41?" in shown
    assert "10 + 5 tokens, 3 of them reasoning" in shown
    traced = chat_content(output.trace.task_traces[0], 0)
    assert '"parts": [{"type": "reasoning", "content": "Perhaps 41?"}, {"type": "text"' in "".join(traced.values())
    if stream:
        assert said(watcher, is_reasoning=True).strip() == "Perhaps 41?"
        assert said(watcher, is_reasoning=False) == "42So it is."


def test_reasoning_reaches_trace_and_listeners(runtime: Runtime) -> None:
    """S-LLM-2, S-LLM-4: on the way between processes, too; of answers with tool calls as of others."""
    look_first = ChatResponse(tool_calls=(call("look"),), reasoning="I have to look.", usage=USAGE)
    model, watcher = ScriptedModel(look_first, IN_TAGS), Watcher()
    team = Ensemble(tasks=[task("go", agent(model, tools=[look], stream=True))], listeners=[watcher])
    output = team.run(runtime=runtime)
    assert (output.raw, reasoning_in(output)) == ("42", ["I have to look.", "Perhaps 41?"])
    assert said(watcher, is_reasoning=True).split() == ["I", "have", "to", "look.", "Perhaps", "41?"]
    assert said(watcher, is_reasoning=False) == "42"
    assert output.metrics.total_reasoning_tokens == 6
    assert "Perhaps" not in model.calls[1].text


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_the_text_stays_as_it_came_when_the_agent_keeps_it(inline_runtime: Runtime, *, stream: bool) -> None:
    """S-LLM-5: tags stay, members stay apart; nothing is marked in the stream but these."""
    text, watcher = str(IN_TAGS.text), Watcher()
    model = ScriptedModel(ChatResponse(text=text, reasoning="First."))
    worker = agent(model, stream=stream, keep_reasoning=True)
    output = Ensemble(tasks=[task("go", worker)], listeners=[watcher]).run(runtime=inline_runtime)
    assert (output.raw, reasoning_in(output)) == (text, ["First."])
    assert said(watcher, is_reasoning=False) == (text if stream else "")


class Thinker:
    """A runner that leaves its model's reasoning in its text."""

    effect = "none"

    def run(self, request: object) -> TaskAnswer:
        """Answer."""
        del request
        return TaskAnswer(text=str(IN_TAGS.text))


@pytest.mark.parametrize(("keeps", "raw"), [(False, "42"), (True, IN_TAGS.text)])
def test_answers_of_runners_are_read_alike(inline_runtime: Runtime, *, keeps: bool, raw: str) -> None:
    """S-LLM-3, S-LLM-5."""
    worker = Agent(role="Writer", goal="Write", runner=Thinker(), keep_reasoning=keeps)
    output = Ensemble(tasks=[task("go", worker)]).run(runtime=inline_runtime)
    assert (output.raw, reasoning_in(output)) == (raw, [None if keeps else "Perhaps 41?"])


class OfAUser:
    """A model of a user's own, which streams its reasoning."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer."""
        raise NotImplementedError

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Think, then answer."""
        for piece in (Reasoning("Perhaps "), Reasoning("41?"), "4", "2"):
            yield piece


def test_a_model_of_the_users_own_streams_reasoning(inline_runtime: Runtime) -> None:
    """S-LLM-3: also where no whole answer ends the stream."""
    watcher = Watcher()
    team = Ensemble(tasks=[task("go", agent(OfAUser(), stream=True))], listeners=[watcher])
    output = team.run(runtime=inline_runtime)
    assert (output.raw, reasoning_in(output)) == ("42", ["Perhaps 41?"])
    assert [(each.token, each.is_reasoning) for each in watcher.of(TokenEvent)] == [
        *(("Perhaps ", True), ("41?", True)),
        *(("4", False), ("2", False)),
    ]


def test_an_answer_that_is_all_reasoning_is_empty(inline_runtime: Runtime) -> None:
    """S-LLM-1, S-ENG-36: the model stopped before it answered."""
    worker = agent(ScriptedModel("<think>It is a long way"), on_incomplete="fail")
    with pytest.raises(TaskExecutionError) as failed:
        Ensemble(tasks=[task("go", worker)]).run(runtime=inline_runtime)
    assert isinstance(failed.value.__cause__, AgentExecutionError)
    assert "is empty" in str(failed.value)


def test_recorded_reasoning_is_there_when_the_run_is_resumed(inline_runtime: Runtime) -> None:
    """S-LLM-4: the recorded answer is used, and asked for no second time; so is its reasoning."""
    model = ScriptedModel(ChatResponse(text=IN_TAGS.text, usage=TokenUsage(600, 500, 3)), "So it is.")
    worker = agent(model)
    first = task("count", worker, name="count")
    team = Ensemble(tasks=[first, task("tell", worker, name="tell", context=[first])], max_tokens=1000)
    stopped = team.run(runtime=inline_runtime, run_id="thinking")
    assert (stopped.exit_reason.value, reasoning_in(stopped)) == ("budget_exhausted", ["Perhaps 41?"])
    output = resume("thinking", team, runtime=inline_runtime, options=RunOptions(max_tokens=100_000))
    assert ([each.raw for each in output.task_outputs], len(model.calls)) == (["42", "So it is."], 2)
    assert (reasoning_in(output), output.metrics.total_reasoning_tokens) == (["Perhaps 41?"], 3)
    assert "Perhaps" not in model.calls[1].text

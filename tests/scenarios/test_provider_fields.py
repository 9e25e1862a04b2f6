"""Members of messages that only the provider knows: what the next request of a tool loop sends back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    Ensemble,
    OpenAIChatModel,
    OpenAIResponsesModel,
    RunOptions,
    Runtime,
    TokenUsage,
    resume,
    tool,
)
from ensemble_ray.testing import ModelServer, Reply
from tests.builders import agent, call, task

Servers = Callable[..., ModelServer]

SIGNED = {"reasoning_content": "I have to look", "extra_content": {"google": {"thought_signature": "s"}}}


@tool
def look(what: str) -> str:
    """Look something up.

    Args:
        what: It.
    """
    return f"seen {what}"


def looking(
    server: ModelServer, model: str = "m", api: type[OpenAIChatModel] = OpenAIChatModel, **fields: object
) -> Ensemble:
    """A team of one task with a tool."""
    llm = api(model, base_url=server.base_url, api_key="sk-of-a-test")
    return Ensemble(tasks=[task("go", agent(llm, tools=[look]), name="go")], **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_tool_loop_sends_back_what_its_provider_sent(
    inline_runtime: Runtime, model_server: Servers, *, stream: bool
) -> None:
    """S-LLM-9, S-LLM-10: on each later request, with null for an empty text and an id of its own for each call."""
    ask = Reply(text="", tool_calls=[call("look", '{"what": "it"}')], members=SIGNED)
    server = model_server([ask, ask, "done"])
    assert looking(server, stream=stream).run(runtime=inline_runtime).raw == "done"
    asked = [cast("Any", each) for each in server.requests[2].messages if each["role"] == "assistant"]
    assert [{name: each[name] for name in (*SIGNED, "content")} for each in asked] == [{**SIGNED, "content": None}] * 2
    results = [each["tool_call_id"] for each in server.requests[2].messages if each["role"] == "tool"]
    assert results == [each["tool_calls"][0]["id"] for each in asked]
    assert len(set(results)) == 2


@pytest.mark.parametrize("model", ["m", "another"])
def test_a_resumed_run_sends_back_what_is_recorded(runtime: Runtime, model_server: Servers, model: str) -> None:
    """S-LLM-9: to the model that sent it, and to no other."""
    first = Reply(tool_calls=[call("look", '{"what": "it"}')], usage=TokenUsage(600, 500), members=SIGNED)
    server = model_server([first, "done"])
    stopped = looking(server, max_tokens=1000).run(runtime=runtime)
    assert stopped.run_id is not None
    assert (len(server.requests), stopped.exit_reason.value) == (1, "budget_exhausted")
    team, options = looking(server, model, max_tokens=1000), RunOptions(max_tokens=100_000)
    output = resume(stopped.run_id, team, runtime=runtime, options=options, allow_changes=model != "m")
    assert output.raw == "done"
    sent = server.requests[1].messages[2]
    assert {name: sent.get(name) for name in SIGNED} == (SIGNED if model == "m" else dict.fromkeys(SIGNED))


def items_of(server: ModelServer, place: int) -> list[tuple[object, ...]]:
    """What identifies the items of a request after its two messages."""
    items = cast("list[dict[str, object]]", server.requests[place].body["input"])[2:]
    return [(each.get("type"), each.get("id"), each.get("encrypted_content")) for each in items]


THINKING = Reply(reasoning="I look", text="One moment", tool_calls=[call("look", '{"what": "it"}')])
KEPT = [("reasoning", "rs_0", "encrypted-0"), ("message", "msg_0", None), ("function_call", "fc_0_0", None)]
RESULT = ("function_call_output", None, None)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_reasoning_items_stay_in_a_tool_loop(runtime: Runtime, model_server: Servers, *, stream: bool) -> None:
    """S-RSP-4: before the call to which they belong, on each later request; the output is as without them."""
    server = model_server([THINKING, THINKING, Reply(reasoning="Enough", text="done")])
    output = looking(server, api=OpenAIResponsesModel, stream=stream).run(runtime=runtime)
    assert (output.raw, output.metrics.total_tool_calls) == ("done", 2)
    interactions = output.trace.task_traces[0].llm_interactions
    assert [each.reasoning for each in interactions] == ["I look", "I look", "Enough"]
    first, second = items_of(server, 2)[:4], items_of(server, 2)[4:]
    assert first == [*KEPT, RESULT] == items_of(server, 1)
    assert [each[1] for each in second] == ["rs_1", "msg_1", "fc_1_0", None]


@pytest.mark.parametrize("model", ["m", "another"])
def test_a_resumed_run_sends_recorded_reasoning_items(runtime: Runtime, model_server: Servers, model: str) -> None:
    """S-RSP-4: also from another process, and to no other model."""
    first = replace(THINKING, usage=TokenUsage(600, 500))
    server = model_server([first, "done"])
    stopped = looking(server, api=OpenAIResponsesModel, max_tokens=1000).run(runtime=runtime)
    assert stopped.run_id is not None
    assert (len(server.requests), stopped.exit_reason.value) == (1, "budget_exhausted")
    team = looking(server, model, OpenAIResponsesModel, max_tokens=1000)
    options = RunOptions(max_tokens=100_000)
    output = resume(stopped.run_id, team, runtime=runtime, options=options, allow_changes=model != "m")
    assert output.raw == "done"
    plain = [(None, None, None), ("function_call", None, None)]
    assert items_of(server, 1) == [*(KEPT if model == "m" else plain), RESULT]

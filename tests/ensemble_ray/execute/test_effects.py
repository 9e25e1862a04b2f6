"""What a task did, as its trace."""

import pytest

from ensemble_ray import (
    CapturedMessage,
    CaptureMode,
    ChatMessage,
    ChatResponse,
    MemoryOperationCounts,
    TaskMetrics,
    TaskTrace,
    TokenUsage,
    ToolCall,
)
from ensemble_ray.execute.effects import ModelEffect, TaskEffects, ToolEffect, capture_messages


def _effects(mode: CaptureMode) -> TaskEffects:
    call = ToolCall(id="1", name="search", arguments='{"q": "Ray"}')
    messages = (
        ChatMessage(role="system", content="s"),
        ChatMessage(role="user", content="u"),
        ChatMessage(role="assistant", tool_calls=(call,)),
        ChatMessage(role="tool", content="3 hits", tool_call_id="1", name="search"),
    )
    tool = ToolEffect(call=call, outcome="error", text="Error: broken", started_at=1.0, duration_s=0.25)
    return TaskEffects(
        task_description="Find",
        expected_output="Hits",
        agent_role="Searcher",
        started_at=0.1,
        capture_mode=mode,
        models=[
            ModelEffect(
                started_at=0.2,
                latency_s=0.3,
                response=ChatResponse(text="thinking", tool_calls=(call,), usage=TokenUsage(10, 2)),
                is_final=False,
                tools=[tool],
                messages=() if mode is CaptureMode.OFF else capture_messages(messages),
            ),
            ModelEffect(started_at=1.5, latency_s=0.1, response=ChatResponse(text="Found"), is_final=True),
        ],
    )


def _task_of(mode: CaptureMode) -> TaskTrace:
    effects = _effects(mode)
    return effects.trace(completed_at=2.0, final_output="Found", parsed_output=None, metrics=effects.metrics(None))


def test_durations_are_the_differences_of_their_instants() -> None:
    """S-TRC-3: at every level, although times are floats."""
    task = _task_of(CaptureMode.OFF)
    assert task.duration == task.completed_at - task.started_at
    for interaction in task.llm_interactions:
        assert interaction.latency == interaction.completed_at - interaction.started_at
        for call in interaction.tool_calls:
            assert call.duration == call.completed_at - call.started_at


def test_interactions_are_numbered_and_text_is_kept_for_answers_only() -> None:
    """S-TRC-20, S-TRC-21, S-TRC-22: one per model call, without gaps; unknown tokens are -1."""
    first, last = _task_of(CaptureMode.OFF).llm_interactions
    assert (first.iteration_index, last.iteration_index) == (0, 1)
    assert (first.response_type, last.response_type) == ("tool_calls", "final_answer")
    assert (first.response_text, last.response_text) == (None, "Found")
    assert (first.input_tokens, last.input_tokens) == (10, -1)


def test_tool_error_shows_the_text_given_to_the_model() -> None:
    """S-TRC-32, S-TRC-31."""
    call = _task_of(CaptureMode.OFF).llm_interactions[0].tool_calls[0]
    assert (call.outcome, call.result, call.arguments) == ("error", "Error: broken", '{"q": "Ray"}')


def test_handler_task_has_neither_prompts_nor_interactions() -> None:
    """S-TRC-13, S-TRC-12: and an empty final output when it gave none."""
    effects = TaskEffects(
        task_description="Count", expected_output="", agent_role="(deterministic)", started_at=0, is_handler=True
    )
    trace = effects.trace(completed_at=1, final_output="", parsed_output=None, metrics=effects.metrics(None))
    assert (trace.prompts, trace.llm_interactions, trace.final_output) == (None, (), "")


@pytest.mark.parametrize(
    ("mode", "parsed"), [(CaptureMode.OFF, None), (CaptureMode.STANDARD, None), (CaptureMode.FULL, {"q": "Ray"})]
)
def test_parsed_input_is_captured_in_full_mode_only(mode: CaptureMode, parsed: object) -> None:
    """S-CAP-14, S-CAP-10: off shows no messages either."""
    task = _task_of(mode)
    assert task.llm_interactions[0].tool_calls[0].parsed_input == parsed
    assert bool(task.llm_interactions[0].messages) is (mode is not CaptureMode.OFF)
    assert task.metrics.memory_operations == MemoryOperationCounts.ZERO


@pytest.mark.parametrize("arguments", ["[1]", "no json", "", '"text"'])
def test_parsed_input_is_none_when_the_arguments_are_no_object(arguments: str) -> None:
    """S-CAP-14."""
    effects = _effects(CaptureMode.FULL)
    effects.models[0].tools[0].call = ToolCall(id="1", name="search", arguments=arguments)
    task = effects.trace(completed_at=2, final_output="", parsed_output=None, metrics=TaskMetrics.EMPTY)
    assert task.llm_interactions[0].tool_calls[0].parsed_input is None


def test_captured_messages_have_their_form() -> None:
    """S-CAP-12, S-SET-13: no content where tools were only asked for; the tool's name on its messages only."""
    _, user, assistant, tool = _task_of(CaptureMode.STANDARD).llm_interactions[0].messages
    assert user == CapturedMessage(role="user", content="u")
    assert (assistant.content, assistant.tool_name) == (None, None)
    assert assistant.tool_calls == ({"id": "1", "name": "search", "arguments": '{"q": "Ray"}'},)
    assert (tool.content, tool.tool_name, tool.tool_calls) == ("3 hits", "search", ())


def test_captured_messages_stay_when_the_live_list_changes() -> None:
    """S-CAP-13: they are copies."""
    live = [ChatMessage(role="user", content="u")]
    kept = capture_messages(live)
    live.append(ChatMessage(role="assistant", content="a"))
    assert kept == (CapturedMessage(role="user", content="u"),)


@pytest.mark.parametrize(
    ("instance", "metadata"),
    [
        ("write#0", {}),
        ("write#0/0/call-1/delegate#0", {}),
        ("loop:refine#2/write#0", {"instance": "loop:refine#2/write#0"}),
        ("graph:triage#3/loop:refine#1/write#0", {"instance": "graph:triage#3/loop:refine#1/write#0"}),
        ("loop:refine#2/write#0/0/call-1/delegate#0", {}),
    ],
)
def test_trace_of_a_task_inside_a_unit_says_which_execution_it_was(instance: str, metadata: dict[str, str]) -> None:
    """S-TRC-14: and no other task's does."""
    effects = TaskEffects(
        task_description="Write", expected_output="", agent_role="Writer", started_at=0, instance=instance
    )
    trace = effects.trace(completed_at=1, final_output="", parsed_output=None, metrics=effects.metrics(None))
    assert trace.metadata == metadata
